"""Measures a program, and compares the times with its plan."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import jax
import jax.numpy as jnp

from sbp.compat.untyped import Leaf, PyTree, block_until_ready
from sbp.passes.face import Plan
from sbp.passes.pipeline.schedule_choice import ScheduleTask, split_seconds, task_of
from sbp.passes.render.timeline import as_estimate
from sbp.passes.schedule.actions import SENDS, Kind, Schedule
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import Timeline
from sbp.passes.schedule.times import Times
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.pipeline.pipeline_executor import PipelineExecutor
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.pipeline.step_record import Record
from sbp.runtime.profile.pipeline_breakdown import places_measured
from sbp.runtime.profile.profile import ActionTime, Profile
from sbp.runtime.profile.step_breakdown import BreakdownError, measure_step

STEPS = 3
"""Steps of each kind that are measured, after one that is not."""


class Runs(Protocol):
    """A compiled program that can be run."""

    @property
    def plan(self) -> Plan:
        """Its plan."""

    @property
    def donate(self) -> tuple[int, ...]:
        """Positions of the leaves that a call donates."""

    def run(self, leaves: Sequence[Leaf]) -> PyTree:
        """Runs one step."""


def measure(built: Runs, leaves: Sequence[Leaf]) -> Profile:
    """Runs some steps on copies of donated arguments, and measures them."""

    def fresh() -> list[Leaf]:
        taken = set(built.donate)
        copied = [jnp.copy(x) if i in taken and isinstance(x, jax.Array) else x for i, x in enumerate(leaves)]
        block_until_ready(copied)
        return copied

    while isinstance(built, CompiledPipeline) and built.drivers.threads is None:
        built.run(fresh())
    seconds = [_seconds(built.run, fresh()) for _ in range(STEPS + 1)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_cpu = built.plan.placement.platform == "cpu"
    profile = Profile(built.plan, median(seconds[1:]), cores=cores if on_cpu else None)
    if isinstance(built, CompiledPipeline) and built.schedule is not None:
        profile = _Measuring(built, built.schedule, fresh).profile(profile)
    try:
        if isinstance(built, CompiledPipeline):
            return replace(profile, places=places_measured(built, fresh))
        return (
            replace(profile, step=measure_step(built, fresh))
            if isinstance(built, CompiledProgram)
            else profile
        )
    except BreakdownError as e:
        return replace(profile, no_breakdown_reason=str(e))


def _seconds(run: Callable[[Sequence[Leaf]], PyTree], leaves: Sequence[Leaf]) -> float:
    """The time of a step, until its results are there."""
    began = time.perf_counter()
    block_until_ready(run(leaves))
    return time.perf_counter() - began


@dataclass(frozen=True)
class _Measuring:
    built: CompiledPipeline
    schedule: Schedule
    fresh: Callable[[], list[Leaf]]

    @property
    def executor(self) -> PipelineExecutor:
        return self.built.executor

    def profile(self, whole: Profile) -> Profile:
        """The profile, with the loop over micro-batches."""
        plan, task = self.built.plan, task_of(self.built.stages)
        alone = [self.record_step(False) for _ in range(STEPS + 1)][1:]
        together = [self.record_step(True) for _ in range(STEPS + 1)][1:]
        best = min(
            (r.timeline(f"{self.schedule.name}, measured") for r in together), key=lambda t: t.makespan
        )
        actions = tuple(_compared(task, alone, together))
        times = measured_times(task, actions)
        replayed = simulate(self.schedule, times, task.edges)
        return replace(
            whole,
            timeline=_from_zero(best),
            simulated_timeline=None if plan.timeline is None else as_estimate(plan.timeline),
            replayed_timeline=replace(
                replayed, name=f"{self.schedule.name}, simulated with the times measured alone"
            ),
            live=tuple(alone[0].live),
            live_bytes=tuple(alone[0].live_bytes),
            actions=actions,
            times=times,
            driver_seconds=median(self.driver() for _ in range(STEPS)),
            task=task,
        )

    def record_step(self, threads: bool) -> Record:
        """One step in which every action is waited for: one by one, or with a thread per placement."""
        record = self.executor.new_record()
        block_until_ready(self.executor.run(self.built.arguments(self.fresh()), threads, record))
        return record

    def driver(self) -> float:
        """The time that the driver needs to issue an action, without waiting."""
        stores = self.executor.begin(self.built.arguments(self.fresh()))
        block_until_ready([x for store in stores for x in store.arrays.values() if not x.is_deleted()])
        began = time.thread_time()
        self.executor.run_with_driver(stores, None)
        spent = time.thread_time() - began
        block_until_ready(self.executor.end(stores))
        return spent / len(self.executor.order)


def _from_zero(timeline: Timeline) -> Timeline:
    """The same timeline, starting at zero."""
    start = timeline.start
    rows = (
        tuple(replace(s, start=s.start - start, end=s.end - start) for s in row) for row in timeline.spans
    )
    return Timeline(timeline.name, tuple(rows))


def _compared(
    task: ScheduleTask, alone: Sequence[Record], together: Sequence[Record]
) -> Iterator[ActionTime]:
    """Every kind of action of every stage, computation first."""
    one, all_ = _by_action(alone), _by_action(together)
    for key in sorted(one, key=lambda k: (k[0] in SENDS, k[1], list(Kind).index(k[0]))):
        kind, stage = key
        estimated = (_sent if kind in SENDS else _estimated)(task.figures.times, kind, stage)
        both = median(all_[key]) if key in all_ else None
        yield ActionTime(kind, stage, estimated, median(one[key]), both)


def _by_action(records: Sequence[Record]) -> dict[tuple[Kind, int], list[float]]:
    """The seconds of all micro-batches, by kind and stage."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for record in records:
        for span in (s for row in record.spans for s in row):
            found.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
    return found


def _estimated(times: Times, kind: Kind, stage: int) -> float:
    parts = {
        Kind.F: (times.forward,),
        Kind.I: (times.input_gradient,),
        Kind.W: (times.weight_gradient,),
        Kind.B: (times.input_gradient, times.weight_gradient),
    }
    return sum(part[stage] for part in parts[kind])


def _sent(times: Times, kind: Kind, stage: int) -> float | None:
    """The seconds until all receivers have the results of a stage; transfers of an action count together."""
    ahead = kind is Kind.SEND_F
    ways = [times.on_the_way(s, t) for s, t in times.transfers if s == stage and (s < t) == ahead]
    return max(ways, default=None)


def measured_times(task: ScheduleTask, actions: Sequence[ActionTime]) -> Times:
    """The times of all actions as measured alone; a whole backward pass is split as the plan estimates.

    The transfers of a stage are measured together; each receiver has its array after that time.
    """
    known = {(a.kind, a.stage): a.alone_seconds for a in actions}
    estimated = task.figures.times
    forward, inputs, weights = list[float](), list[float](), list[float]()
    for s in range(len(task.rank_of)):
        halves = estimated.input_gradient[s], estimated.weight_gradient[s]
        i, w = split_seconds(known.get((Kind.B, s), 0.0), halves)
        forward.append(known.get((Kind.F, s), 0.0))
        inputs.append(known.get((Kind.I, s), i))
        weights.append(known.get((Kind.W, s), w))
    transfers = {
        (s, t): known.get((Kind.SEND_F if s < t else Kind.SEND_B, s), estimated.on_the_way(s, t))
        for s, t in estimated.transfers
    }
    return Times(tuple(forward), tuple(inputs), tuple(weights), transfers=transfers)


__all__ = ["ActionTime", "Profile", "measure"]
