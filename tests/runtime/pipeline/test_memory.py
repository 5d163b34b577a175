"""What a pipeline keeps while it runs: as the schedule says, and not longer."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.passes.schedule.memory import peaks, units
from sbp.passes.schedule.orders import make
from sbp.runtime.pipeline.pipeline_executor import PipelineExecutor
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.pipeline.stage_executor import OUTSIDE, BufferStore, StageExecutor
from sbp.runtime.pipeline.stage_programs import Runnable
from sbp.runtime.pipeline.step_record import Record
from tests.runtime.pipeline.programs import dense_case
from tests.runtime.pipeline.running import leaves_of


def machines(microbatches: int) -> tuple[CompiledPipeline, list[Any]]:
    """A program of two stages, and the leaves of a call."""
    case = dense_case((0, 1), 2, microbatches, ("1f1b",))
    built = sbp.compile(case.step, case.whole)._prepare(case.args, {})[1]
    assert isinstance(built, CompiledPipeline)
    return built, leaves_of(case, case.args[0])


def measured(
    executor: PipelineExecutor, built: CompiledPipeline, leaves: list[Any], threads: bool = False
) -> Record:
    record = executor.new_record()
    jax.block_until_ready(executor.run(built.arguments(leaves), threads, record))
    return record


@pytest.mark.full
def test_one_forward_one_backward_holds_as_much_however_many_there_are() -> None:
    found = {}
    for m in (4, 8):
        built, leaves = machines(m)
        for name in ("1f1b", "gpipe"):
            executor = replace(built.executor, schedule=make(name, (0, 1), m))
            record = measured(executor, built, leaves)
            assert executor.schedule is not None
            assert tuple(record.live) == peaks(executor.schedule, units(2))
            found[name, m] = record
    assert found["1f1b", 4].live == found["1f1b", 8].live == [2, 1]
    assert found["1f1b", 4].live_bytes == found["1f1b", 8].live_bytes
    for rank, few in enumerate(found["gpipe", 4].live_bytes):
        assert found["gpipe", 8].live_bytes[rank] == pytest.approx(2 * few, rel=0.01)
        assert found["1f1b", 8].live_bytes[rank] < few


def test_nothing_of_a_micro_batch_is_left_after_the_loop() -> None:
    built, leaves = machines(4)
    executor = built.executor
    stores = executor.begin(built.arguments(leaves))
    executor.run_with_driver(stores, None)
    assert [store.microbatch_arrays for store in stores] == [[], []]
    assert all(at == OUTSIDE for store in stores for _, at in store.arrays)


def test_a_stage_that_fails_stops_the_others() -> None:
    """Threads that wait for it are woken up, and the first failure is what the caller sees."""
    built, leaves = machines(4)

    def fail(*args: Any) -> Any:
        raise ValueError("this stage is broken")

    broken = built.executor.executors[1]
    runnables = {part: replace(r, run=fail) for part, r in broken.runnables.items()}
    executors = built.executor.executors[0], replace(broken, runnables=runnables)
    executor = replace(built.executor, executors=executors)
    for threads in (True, False):
        with pytest.raises(ValueError, match="this stage is broken"):
            executor.run(built.arguments(leaves), threads=threads)


def hoard_on_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been read by all is left on its shelf."""
    take = BufferStore.take

    def forgetful(self: BufferStore, wanted: Any, blocking: bool) -> list[Any]:
        return take(self, [(key, 0) for key, _ in wanted], blocking)

    monkeypatch.setattr(BufferStore, "take", forgetful)


def hoard_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shelves are emptied, but something else still has what was on them."""
    run, kept = StageExecutor.run, list[Any]()

    def leaky(self: StageExecutor, store: BufferStore, piece: Any, microbatch: int, given: Any) -> Any:
        made = run(self, store, piece, microbatch, given)
        kept.extend((given, made))
        return made

    monkeypatch.setattr(StageExecutor, "run", leaky)


@pytest.mark.some(1)
@pytest.mark.parametrize("hoard", [hoard_on_shelves, hoard_elsewhere])
@pytest.mark.parametrize("threads", [False, True])
def test_a_machine_that_frees_nothing_is_seen(
    hoard: Any, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is counted is held, not what the schedule says should be."""
    built, leaves = machines(4)
    executor = built.executor
    assert executor.schedule is not None and executor.schedule.name == "1f1b"
    # Memory that a piece may write its results into is free, whoever still has the array.
    executors = [
        replace(s, runnables={part: without_donation(r) for part, r in s.runnables.items()})
        for s in executor.executors
    ]
    executor = replace(executor, executors=tuple(executors))
    assert measured(executor, built, leaves, threads).live == [2, 1]
    hoard(monkeypatch)
    assert measured(executor, built, leaves, threads).live == [4, 4]


def without_donation(one: Runnable) -> Runnable:
    """A piece that writes into none of what it reads."""
    return replace(one, run=lambda index, *given: one.run(index, *map(jnp.copy, given)))
