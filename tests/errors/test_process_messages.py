"""Every message about several processes and about checkpoints that needs no second process, word for word."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import KINDS, ArgumentError, CheckpointError, Problem, ProcessError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.execute import host_input_check
from sbp.runtime.processes import addressable, process_group
from sbp.runtime.processes import messages as said_of_calls
from sbp.runtime.program import program
from sbp.runtime.storage import libraries
from sbp.runtime.storage.messages import not_installed
from sbp.runtime.training import metrics
from tests.errors.messages import Messages, check_message

EIGHT = sbp.placement("cpu", shape=(8,))
PAD = "as many batches of the same shapes in every process: the last one of an epoch padded or dropped in all"
LONG = ("step", "w: float32[8]", "batch: float32[16, 64]")
SHORT = ("step", "w: float32[8]", "batch: float32[13, 64]")
NAMED = sbp.compile(lambda x: x * 2, EIGHT)


def raised(problem: Problem) -> None:
    raise KINDS[problem.kind](problem)


MESSAGES: Messages = {
    "how arguments lie before anything was planned": (
        lambda: NAMED.abstract_args,
        ArgumentError,
        "<Program <lambda> on cpu(x=8)>.abstract_args",
        "a program that has not been planned",
        "a program that was planned, placed or called",
        "the signatures of arguments depend on their shapes",
        "program.plan(...) with shapes first, then program.abstract_args",
    ),
    "no step is kept": (
        lambda: Checkpoints("run", keep=0),
        ArgumentError,
        "Checkpoints(keep=...)",
        "0",
        "1 or more",
        "the last step must stay",
        "keep=3",
    ),
    "a plan that process 0 did not find": (
        lambda: raised(process_group._refused("step", "too large")),
        ProcessError,
        "step, planned by process 0 for all processes",
        "too large",
        "a plan",
        "process 0 plans, so that all processes run the same program, and it found none",
        "what the error of process 0 says",
    ),
    "a process that waits for one that runs something else": (
        lambda: raised(
            said_of_calls.gone_on(
                1, ("process 0 to plan f", "x: float32[9, 4]"), 0, ("f", "x: float32[8, 4]")
            )
        ),
        ProcessError,
        "process 1, waiting for process 0 to plan f, x: float32[9, 4]",
        "process 0 has gone on with f, x: float32[8, 4]",
        "the same calls of the same programs in every process, in one order",
        "process 1 has yet to compile this with the others, and process 0 runs another program",
        PAD,
    ),
    "a call of another shape": (
        lambda: raised(said_of_calls.another_call(7, 1, SHORT, 0, LONG, before=False)),
        ProcessError,
        "call 7 of process 1, step(batch: float32[13, 64])",
        "step(batch: float32[16, 64]) in process 0",
        "the same calls of the same programs in every process, in one order",
        "their collectives wait for each other for ever, or add up unrelated values",
        PAD,
    ),
    "a call of another program with the same words": (
        lambda: raised(said_of_calls.another_call(7, 1, LONG, 0, LONG, before=False)),
        ProcessError,
        "call 7 of process 1, step(w: float32[8], batch: float32[16, 64])",
        "step(w: float32[8], batch: float32[16, 64]) with other constants or code in process 0",
        "the same calls of the same programs in every process, in one order",
        "their collectives wait for each other for ever, or add up unrelated values",
        PAD,
    ),
    "calls that differed long ago": (
        lambda: raised(said_of_calls.another_call(700, 1, LONG, 0, LONG, before=True)),
        ProcessError,
        "call 700 of process 1, step(w: float32[8], batch: float32[16, 64])",
        "other calls before it in process 0",
        "the same calls of the same programs in every process, in one order",
        "their collectives wait for each other for ever, or add up unrelated values",
        PAD,
    ),
    "a call more than a process that has ended": (
        lambda: raised(said_of_calls.no_such_call(8, 0, LONG, 1, 7)),
        ProcessError,
        "call 8 of process 0, step(w: float32[8], batch: float32[16, 64])",
        "process 1 has come to its end after 7 calls",
        "the same calls of the same programs in every process, in one order",
        "its collectives wait for the other process for ever",
        PAD,
    ),
    "host arrays that differ": (
        lambda: raised(host_input_check._not_alike("step", "batch[0]", 0, 3)),
        ArgumentError,
        "step: batch[0]",
        "other values in process 3 than in process 0",
        "the whole argument, the same in every process",
        "each process puts its part of the whole on its own devices: parts of several would be mixed",
        "own_rows= in Program.place or own_rows=True in sbp.fit if each process has its own rows; "
        "otherwise one seed and one order of the data for all",
    ),
    "rows of a number": (
        lambda: raised(addressable._no_rows("argument 2['n']", np.zeros((), np.float32))),
        ArgumentError,
        "argument 2['n']",
        "float32[], of which this process is to have its own rows",
        "arrays of at least one dim",
        "rows are dim 0",
        "a number that is the same in all processes as an argument of its own",
    ),
    "no orbax": (
        lambda: raised(not_installed()),
        CheckpointError,
        "sbp.save",
        "no orbax.checkpoint",
        "the package orbax-checkpoint",
        "it writes and reads the arrays of checkpoints",
        "pip install 'sbp-jax[checkpoint]'",
    ),
    "metrics in a form that nobody writes": (
        lambda: metrics.sinks(Path("run/log.json")),
        ArgumentError,
        "sbp.fit(..., log=...)",
        "run/log.json",
        "a .csv file, a folder for TensorBoard, or a function",
        "how metrics are written is told by the name",
        "log='run/log.csv'",
    ),
    "no TensorBoard": (
        lambda: raised(metrics._no_tensorboard(Path("run"))),
        ArgumentError,
        "sbp.fit(..., log='run'), a folder for TensorBoard",
        "no tensorboardX",
        "the package tensorboardX",
        "it writes the files that TensorBoard reads",
        "pip install 'sbp-jax[tensorboard]', or a .csv file",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    call, *rest = MESSAGES[name]
    check_message(call, *rest)


def test_a_profile_is_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "process_group", lambda: object())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check_message(
        lambda: NAMED.profile(jnp.ones(8)),
        ProcessError,
        "<Program <lambda> on cpu(x=8)>.profile(...)",
        "2 processes",
        "one process",
        "each process would see its own devices only",
        "the same program in one process, on as many devices of a smaller placement",
    )


def test_orbax_is_missed_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    libraries.orbax.cache_clear()
    with pytest.raises(CheckpointError, match=r"pip install 'sbp-jax\[checkpoint\]'"):
        sbp.save(tmp_path, {"w": np.ones(2)}, step=1)
    libraries.orbax.cache_clear()


def test_tensorboard_is_missed_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ArgumentError, match=r"pip install 'sbp-jax\[tensorboard\]'"):
        metrics.sinks(tmp_path / "board")
