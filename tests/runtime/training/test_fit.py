"""`sbp.fit`: the same curve as a plain loop, also in pieces, also after an end that was asked for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import sbp
from sbp import S
from sbp.errors import CheckpointError, NonFiniteError
from sbp.runtime.call import donation
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.execute import compiled_program
from sbp.runtime.storage import libraries
from tests.runtime.processes import cases

OPTIMIZER = optax.adam(1e-2)


@pytest.fixture(scope="module")
def program() -> Any:
    step = cases.step_of(cases.mlp, OPTIMIZER)
    return sbp.compile(step, sbp.placement("cpu", shape=(8,)), in_sbp=(sbp.AUTO, sbp.AUTO, [S(0)]))


def start() -> Any:
    params = cases.weights()
    return params, OPTIMIZER.init(params)


@pytest.fixture(scope="module")
def curve(program: Any) -> list[float]:
    state, losses = start(), []
    for i in range(6):
        *state, loss = program(*state, cases.batch_of(i))
        losses.append(float(loss))
    return losses


def losses_of(done: sbp.training.FitResult) -> list[float]:
    return [row["loss"] for row in done.history]


def test_the_curve_is_that_of_a_plain_loop(program: Any, curve: list[float], tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.csv"
    done = sbp.fit(program, start(), cases.batch_of, steps=6, log=log)
    assert losses_of(done) == curve and done.is_done and done.step == 6
    written = [line.split(",") for line in log.read_text().splitlines()]
    assert written[0] == ["step", "metric", "value"]
    assert [float(x) for _, _, x in written[1:]] == curve


@pytest.mark.parametrize("in_a_row", [False, True])
def test_it_goes_on_where_it_was(in_a_row: bool, program: Any, curve: list[float], tmp_path: Path) -> None:
    batches = [cases.batch_of(i) for i in range(6)] if in_a_row else cases.batch_of
    first = sbp.fit(program, start(), batches, steps=3, checkpoint=tmp_path, save_every=2)
    assert Checkpoints(tmp_path).steps == [2, 3]
    then = sbp.fit(program, start(), batches, steps=6, checkpoint=Checkpoints(tmp_path))
    assert losses_of(first) + losses_of(then) == curve
    again = sbp.fit(program, start(), batches, steps=6, checkpoint=tmp_path)
    assert again.history == [] and again.is_done


def test_it_ends_when_it_is_asked_to(program: Any, curve: list[float], tmp_path: Path) -> None:
    def batches(i: int) -> Any:
        if i == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return cases.batch_of(i)

    before = signal.getsignal(signal.SIGTERM)
    done = sbp.fit(program, start(), batches, steps=6, checkpoint=tmp_path)
    assert not done.is_done and Checkpoints(tmp_path).steps == [done.step] == [3]
    assert signal.getsignal(signal.SIGTERM) is before
    then = sbp.fit(program, start(), cases.batch_of, steps=6, checkpoint=tmp_path)
    assert losses_of(done) + losses_of(then) == curve


def test_it_evaluates(program: Any) -> None:
    def size(state: Any) -> dict[str, float]:
        return {"norm": float(np.linalg.norm(state[0]["up"]))}

    done = sbp.fit(program, start(), cases.batch_of, steps=5, evaluate=size, evaluate_every=2)
    assert [row["step"] for row in done.history if "evaluate/norm" in row] == [2, 4, 5]


def test_nan_ends_it(tmp_path: Path) -> None:
    def step(w: Any, x: Any) -> Any:
        return w + 1, {"loss": jax.numpy.log(2 - w.sum()), "norm": w.sum()}

    program = sbp.compile(step, sbp.placement("cpu", shape=(1,)))
    with pytest.raises(NonFiniteError, match=r"step 3 of sbp.fit\n  got    loss is -inf"):
        sbp.fit(
            program, (np.zeros(1, np.float32),), lambda i: 0.0, steps=9, checkpoint=tmp_path, save_every=1
        )
    assert Checkpoints(tmp_path).steps == [1, 2]


def never(i: int) -> Any:
    raise AssertionError("a batch was asked for")


def test_what_cannot_be_saved_is_said_before_the_first_step(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing library, or a file in the way: not after the thousand steps to the first checkpoint."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        sbp.fit(program, start(), never, steps=4, checkpoint=tmp_path / "file" / "below")
    libraries.orbax.cache_clear()
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(CheckpointError, match=r"no orbax\.checkpoint"):
        sbp.fit(program, start(), never, steps=4, checkpoint=tmp_path / "run")


def test_batches_may_come_to_an_end(program: Any, curve: list[float], tmp_path: Path) -> None:
    """That is the end: it is saved, and nobody has asked for it."""
    batches = [cases.batch_of(i) for i in range(2)]
    done = sbp.fit(program, start(), batches, steps=6, checkpoint=tmp_path)
    assert losses_of(done) == curve[:2] and done.is_done and done.step == 2
    assert Checkpoints(tmp_path).steps == [2]
    again = sbp.fit(program, start(), batches, steps=6, checkpoint=tmp_path)
    assert again.is_done and again.history == [] and again.step == 2
    np.testing.assert_array_equal(again.state[0]["up"], done.state[0]["up"])


def test_of_a_generator_the_first_batches_are_skipped(
    program: Any, curve: list[float], tmp_path: Path
) -> None:
    """Each batch is taken once: there is no second look at one to plan with."""
    for steps in (2, 4):
        batches = (cases.batch_of(i) for i in range(6))
        done = sbp.fit(program, start(), batches, steps=steps, checkpoint=tmp_path)
        assert losses_of(done) == curve[steps - 2 : steps]


class Numbered:
    """A feed that notes what is asked of it."""

    def __init__(self, wrong: int = 99) -> None:
        self.said: list[str] = []
        self.wrong = wrong

    @contextmanager
    def batches_from(self, step: int) -> Iterator[Iterator[Any]]:
        self.said.append(f"from {step}")
        try:
            yield (cases.batch_of(i) for i in range(step, self.wrong))
        finally:
            self.said.append("left")


def test_a_feed_is_told_where_to_begin_and_when_to_end(
    program: Any, curve: list[float], tmp_path: Path
) -> None:
    for begin, steps in ((0, 2), (2, 5)):
        feed = Numbered()
        done = sbp.fit(program, start(), feed, steps=steps, checkpoint=tmp_path)
        assert losses_of(done) == curve[begin:steps]
        assert feed.said == [f"from {begin}", "left"]


def test_a_feed_is_left_where_training_fails(program: Any) -> None:
    feed = Numbered()

    def raises(row: Any) -> None:
        raise ValueError(f"step {row['step']}")

    with pytest.raises(ValueError, match="step 1"):
        sbp.fit(program, start(), feed, steps=6, log=raises)
    assert feed.said == ["from 0", "left"]


def test_what_lies_right_is_not_copied(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of state and batches that are placed already the step gets the very arrays."""
    *state, batch = program.place(*start(), cases.batch_of(0))
    moved: list[int] = []
    monkeypatch.setattr(compiled_program, "moved_to", lambda xs, _: moved.append(len(xs)))
    sbp.fit(program, tuple(state), lambda i: batch, steps=3)
    assert moved == []


def test_the_next_batch_is_placed_without_a_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is like the arguments before is not looked at again: an address is there when the step has run."""
    step, line = cases.step_of(cases.mlp, OPTIMIZER), sbp.placement("cpu", shape=(8,))
    donating = sbp.compile(step, line, in_sbp=(sbp.AUTO, sbp.AUTO, [S(0)]), donate_argnums=(0, 1))
    looked, counts = list[str](), list[int]()
    check, buffers = donating._check, donation.buffers
    monkeypatch.setattr(donating, "_check", lambda *call: looked.append("checked") or check(*call))
    monkeypatch.setattr(donation, "buffers", lambda x: looked.append("address") or buffers(x))
    sbp.fit(donating, start(), cases.batch_of, steps=6, log=lambda row: counts.append(len(looked)))
    assert {*looked} == {"checked", "address"}
    assert counts[2:] == [counts[2]] * 4


def test_a_function_is_given_the_metrics_of_each_step(program: Any, curve: list[float]) -> None:
    rows: list[Any] = []
    done = sbp.fit(program, start(), cases.batch_of, steps=2, log=[rows.append])
    assert rows == done.history == [{"step": i + 1, "loss": x} for i, x in enumerate(curve[:2])]


def test_a_step_may_take_more_than_a_batch() -> None:
    """A key, say, beside the batch: both come from the number of the step."""

    def step(w: Any, batch: Any, key: Any) -> Any:
        return w + batch.sum(), jax.random.uniform(key)

    program = sbp.compile(step, sbp.placement("cpu", shape=(1,)))

    def batches(i: int) -> Any:
        return np.ones(2, np.float32), jax.random.key(i)

    done = sbp.fit(program, (np.zeros((), np.float32),), batches, steps=3)
    assert float(done.state[0]) == 6
    assert losses_of(done) == [float(jax.random.uniform(jax.random.key(i))) for i in range(3)]


def test_a_log_has_each_step_once(program: Any, curve: list[float], tmp_path: Path) -> None:
    """A run that is killed has noted steps behind its last checkpoint, the last one maybe in part."""
    log = tmp_path / "log.csv"
    sbp.fit(program, start(), cases.batch_of, steps=4, checkpoint=tmp_path / "run", save_every=2, log=log)
    log.write_text(log.read_text() + "5,loss,1.0\n6,lo")
    sbp.fit(program, start(), cases.batch_of, steps=6, checkpoint=tmp_path / "run", log=log)
    rows = [line.split(",") for line in log.read_text().splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [float(row[2]) for row in rows] == curve


def test_metrics_for_tensorboard(program: Any, curve: list[float], tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    logs = [tmp_path / "board", tmp_path / "log.csv"]
    sbp.fit(program, start(), cases.batch_of, steps=2, log=logs)
    (file,) = (tmp_path / "board").iterdir()
    assert scalars(file) == [("loss", i + 1, pytest.approx(x)) for i, x in enumerate(curve[:2])]
    assert (tmp_path / "log.csv").exists()


def scalars(file: Path) -> list[tuple[str, int, float]]:
    """What a file for TensorBoard has: records, each with its length before it and checksums around it."""
    from tensorboardX.proto.event_pb2 import Event

    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
        data = data[16 + size :]
    return found


def test_a_run_that_goes_on_frees_its_first_state(tmp_path: Path) -> None:
    """What the step donates, where it lies as the step wants it; the rest is the caller's."""
    step = cases.step_of(cases.mlp, OPTIMIZER)
    line = sbp.placement("cpu", shape=(8,))
    donating = sbp.compile(step, line, in_sbp=([sbp.B], [sbp.B], [S(0)]), donate_argnums=0)
    first = sbp.fit(donating, start(), cases.batch_of, steps=1, checkpoint=tmp_path)
    held = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), start(), tuple(first.state))
    done = sbp.fit(donating, held, cases.batch_of, steps=2, checkpoint=tmp_path)
    assert [all(x.is_deleted() for x in jax.tree.leaves(part)) for part in held] == [True, False]
    assert done.start_step == 1 and not any(x.is_deleted() for x in jax.tree.leaves(done.state))
