"""What is said of the order of calls, by one process that plays several."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from sbp.runtime.execute.program_check import needs_all
from sbp.runtime.processes import call_order
from sbp.runtime.processes.calls import Calls
from sbp.runtime.processes.flight_recorder import RECENT, SharedProgram, history_of, recorded_calls
from sbp.runtime.processes.launch import call_difference
from sbp.runtime.processes.straggler_log import StragglerLog

STEP = SharedProgram("0" * 15 + "1", ("step", "batch: float32[16, 64]"))
LAST = SharedProgram("0" * 15 + "2", ("step", "batch: float32[13, 64]"))
EVALUATE = SharedProgram("0" * 15 + "3", ("evaluate", "batch: float32[16, 64]"))


@dataclass
class Dict:
    """A board of one process."""

    words: dict[str, bytes] = field(default_factory=dict)

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        if key in self.words and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.words[key] = value

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        return self.key_value_try_get_bytes(key)

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key not in self.words:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.words[key]


def called(*programs: SharedProgram) -> Calls:
    calls = Calls()
    for p in programs:
        calls.begins(p)
    return calls


def heard(kv_store: Dict, *others: Calls) -> str:
    """What process 1 says when it looks, and when the runtime has raised."""
    first, mine = others
    call_order.publish_and_compare(kv_store, 0, first)
    found = call_order.publish_and_compare(kv_store, 1, mine)
    error = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllReduce failed")
    again = call_order.explain_error(error, kv_store, 1, 2, mine)
    assert str(found) == str(again)
    return str(found).splitlines()[0] if found else ""


def test_who_calls_another_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first = called(STEP, LAST, STEP)
    assert heard(Dict(), first, called(STEP, STEP)) == "call 2 of process 1, step(batch: float32[16, 64])"
    kv_store, more = Dict(), called(*[STEP] * 500, LAST)
    problem = heard(kv_store, more, called(*[STEP] * 500, EVALUATE, STEP))
    assert problem == "call 501 of process 1, evaluate(batch: float32[16, 64])"
    assert "step(batch: float32[13, 64]) in process 0" in str(
        call_order.publish_and_compare(kv_store, 1, called(*[STEP] * 501))
    )


def test_who_is_slow_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_order, "ANSWER_SECONDS", 0.3)
    assert heard(Dict(), called(STEP, LAST, STEP), called(STEP)) == ""
    assert heard(Dict(), called(*[STEP] * RECENT * 3), called(STEP)) == ""  # nothing that both remember
    assert heard(Dict(), called(), called(STEP)) == ""


def test_other_errors_are_let_alone() -> None:
    kv_store = Dict()
    call_order.publish_and_compare(kv_store, 0, called(LAST))
    assert call_order.explain_error(ValueError("other"), kv_store, 1, 2, called(STEP)) is None
    assert (
        call_order.explain_error(jax.errors.JaxRuntimeError("gloo"), kv_store, 1, 2, called(STEP)) is not None
    )


def test_process_0_hears_of_all_when_it_asks() -> None:
    kv_store = Dict()
    called(STEP).say(kv_store, 1)
    called(LAST).say(kv_store, 2)
    found = call_order.explain_error(jax.errors.JaxRuntimeError("gloo"), kv_store, 0, 3, called(STEP))
    assert "step(batch: float32[13, 64]) in process 2" in str(found)


def test_what_was_forgotten_is_no_other_call() -> None:
    """The first of the calls that both remember is the same; those before it were not."""
    kv_store, later = Dict(), [STEP] * (RECENT + 1)
    call_order.publish_and_compare(kv_store, 0, called(LAST, *later))
    assert "other calls before it in process 0" in str(
        call_order.publish_and_compare(kv_store, 1, called(EVALUATE, *later))
    )


def test_who_ends_without_a_call_that_others_make_is_named() -> None:
    kv_store = Dict()
    assert call_order.at_the_end(kv_store, 1, called(STEP)) is None
    assert call_order.publish_and_compare(kv_store, 0, called(STEP)) is None
    found = str(call_order.publish_and_compare(kv_store, 0, called(STEP, STEP)))
    assert found.startswith("call 2 of process 0") and "process 1 has come to its end after 1 calls" in found


def test_at_the_end_all_have_made_the_same_calls() -> None:
    kv_store = Dict()
    assert call_order.at_the_end(kv_store, 1, called(STEP, LAST)) is None
    assert call_order.at_the_end(kv_store, 0, called(STEP, LAST)) is None
    assert "process 2 has come to its end after 1 calls" in str(
        call_order.at_the_end(kv_store, 2, called(STEP))
    )
    assert "call 2 of process 3" in str(call_order.at_the_end(kv_store, 3, called(STEP, EVALUATE)))


def test_a_launcher_reads_what_is_left(tmp_path: Path) -> None:
    assert call_difference(tmp_path, 2) is None
    for i, programs in enumerate([(STEP, LAST), (STEP,), (STEP, EVALUATE)]):
        calls = Calls()
        calls.keep_in(tmp_path, i)
        for p in programs:
            calls.begins(p)
    assert recorded_calls(tmp_path, 2)[0] == history_of(calls.ring) and calls.history.count == 2
    assert call_difference(tmp_path, 2) is None
    problem = call_difference(tmp_path, 3)
    assert problem is not None and problem.where == "call 2 of process 0, step(batch: float32[13, 64])"
    assert problem.got == "evaluate(batch: float32[16, 64]) in process 2"
    (tmp_path / "words2").write_text('{"half')
    problem = call_difference(tmp_path, 3)
    assert problem is not None and problem.got == "another program in process 2"


def mesh(*processes: list[int]) -> Any:
    """Axes "data" and "model" over devices of some processes."""
    devices = [[SimpleNamespace(process_index=p) for p in row] for row in processes]
    return SimpleNamespace(devices=np.array(devices), axis_names=("data", "model"))


BYTES = np.arange(8, dtype=np.int64).tobytes().hex().upper()


@pytest.mark.parametrize(
    ("text", "within", "across"),
    [
        ('axes = [#stablehlo.axis_ref<name = "data">]', True, True),
        ('axes = [#stablehlo.axis_ref<name = "model">]', False, True),
        ("replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>", False, True),
        ("source_target_pairs = dense<[[1, 2]]> : tensor<1x2xi64>", True, True),
        ("replica_groups = dense<0> : tensor<1x1xi64>", False, False),
        (f'replica_groups = dense<"0x{BYTES[:64]}"> : tensor<1x4xi64>', True, True),
        ("stablehlo.add", False, False),
    ],
)
def test_programs_that_no_other_process_takes_part_in_may_be_called_alone(
    text: str, within: bool, across: bool
) -> None:
    assert needs_all(text, mesh([0, 0], [1, 1]), 2) == within
    assert needs_all(text, mesh([0, 1], [2, 3]), 4) == across
    assert not needs_all(text, mesh([0, 0], [1, 1]), 3)  # a process has no devices there


def test_who_is_late_is_named_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Process 0 of three looks: process 1 has begun as much, 2 has not; and it is 2 that looks at 0."""
    kv_store, mine = Dict(), called(STEP, LAST)
    waiting = StragglerLog(mine, 0, 3, since=0.0)
    for index, calls in enumerate((mine, called(STEP, LAST), called(STEP))):
        calls.say(kv_store, index)
    for now in (1.0, 59.0, 62.0, 70.0, 125.0):
        waiting.look(kv_store, now)
    late = "process 0 has begun call 2, step(batch: float32[13, 64]), {} s ago; process 2 has begun 1"
    assert caplog.messages == [late.format(61), late.format(124)]
    caplog.clear()
    mine.begins(STEP)  # it goes on, and begins to count anew
    for now in (130.0, 185.0):
        waiting.look(kv_store, now)
    assert not caplog.messages
    behind = StragglerLog(called(STEP), 2, 3, since=0.0)
    for now in (1.0, 100.0):
        behind.look(kv_store, now)
    assert not caplog.messages
