"""What a program takes, measured against what its plan says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

import jax
import jax.numpy as jnp

from sbp.options import bytes_of
from sbp.passes.face import Plan
from sbp.passes.look import files, pipeline_page
from sbp.passes.look.page import figures_table, heading, picture, short
from sbp.passes.look.pipeline_text import NUMBERS, columns
from sbp.passes.look.timeline import chrome_trace, timeline_svg
from sbp.passes.look.web_page import PageTable, plan_page
from sbp.passes.pipeline.choose import ScheduleTask, found_schedule, split_seconds, task_of
from sbp.passes.schedule.actions import SENDS, Kind, Schedule
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import Timeline, apart
from sbp.passes.schedule.times import Times
from sbp.runtime.pipeline.machine import Machine, Record
from sbp.runtime.pipeline.program import BuiltPipeline
from sbp.units import bytes_text, seconds_text
from sbp.untyped import Leaf, PyTree, block_until_ready

STEPS = 3
"""Steps of each kind that are measured, after one that is not."""


class Runs(Protocol):
    """What a program has been compiled to."""

    @property
    def plan(self) -> Plan:
        """Its plan."""

    @property
    def donate(self) -> tuple[int, ...]:
        """Positions of the leaves that are gone after a call."""

    def run(self, leaves: Sequence[Leaf]) -> PyTree:
        """Runs one step."""


@dataclass(frozen=True, slots=True)
class ActionTime:
    """One kind of action of one stage; seconds are those of one micro-batch.

    Arguments:
      kind: "F", "B", "I" or "W"; "SF" and "SB" for what it sends.
      estimated: as the plan has it; None for what it does not tell apart.
      alone: measured, with nothing else running; the median.
      together: measured while the other placements worked; None for what is sent.
    """

    kind: Kind
    stage: int
    estimated: float | None
    alone: float
    together: float | None


@dataclass(frozen=True, repr=False)
class Profile:
    """What a program took, and what its plan says; `print` shows it, `repr` is one line.

    Arguments:
      plan: of the program.
      step_seconds: a whole step as calls run it, the median.
      timeline: the loop over micro-batches as measured, every action waited for, each placement driven by a
        thread; None without micro-batches.
      simulated: the same, as the plan estimates it.
      replayed: the schedule simulated with the times that were measured.
      live: per placement, the most micro-batches of its stages that were held at once.
      live_bytes: per placement, the most bytes that a device held for micro-batches.
      actions: the times of every kind of action and stage.
      times: those measured, as schedules are searched for.
      driver_seconds: what the driver itself takes per action, without waiting.
    """

    plan: Plan
    step_seconds: float
    timeline: Timeline | None = None
    simulated: Timeline | None = None
    replayed: Timeline | None = None
    live: tuple[int, ...] = ()
    live_bytes: tuple[int, ...] = ()
    actions: tuple[ActionTime, ...] = ()
    times: Times | None = None
    driver_seconds: float | None = None
    task: ScheduleTask | None = field(default=None, repr=False, compare=False)

    def best(self, memory_limit: float | str | None = None) -> Schedule:
        """The fastest schedule found for the measured times, to be given to `PipelineOptions(schedule=...)`.

        Arguments:
          memory_limit: per device, in bytes or as a text such as "80GB"; None for all that it has.

        Raises:
          ArgumentError: for a program without stages and micro-batches, or without a backward pass.
          MemoryLimitError: if nothing fits.
        """
        if self.task is None or self.times is None or not self.task.trains:
            raise files.problem(
                f"a profile of {self.plan.name!r}",
                "one of a training with stages and micro-batches",
                "a schedule orders the forwards and backwards of micro-batches",
                "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1) and sbp.on(...)",
                "Profile.best",
            )
        limit_bytes = bytes_of(memory_limit, "Profile.best(memory_limit=...)")
        return found_schedule(self.task.search(limit_bytes, self.times))

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """All there are, to be drawn one above the other."""
        found = (self.simulated, self.replayed, self.timeline)
        return tuple(t for t in found if t is not None)

    def figures(self) -> list[tuple[str, str]]:
        """What was measured, each with its name."""
        out = [
            (
                "measured",
                f"{seconds_text(self.step_seconds)} per step; "
                f"estimated {seconds_text(self.plan.step_seconds)}",
            )
        ]
        if self.timeline is not None and self.simulated is not None and self.replayed is not None:
            parts = (
                ("estimated", self.simulated),
                ("with measured times", self.replayed),
                ("measured", self.timeline),
            )
            out += [
                (
                    "loop",
                    "; ".join(
                        f"{name} {seconds_text(float(t.makespan))}, bubble {t.bubble_fraction:.1%}"
                        for name, t in parts
                    ),
                ),
                (
                    "apart",
                    f"actions start and end within {apart(self.timeline, self.replayed):.1%} of the loop "
                    f"of when they are simulated with measured times",
                ),
                (
                    "held",
                    "; ".join(
                        f"{n} micro-batches, {bytes_text(b)} (placement {i})"
                        for i, (n, b) in enumerate(zip(self.live, self.live_bytes, strict=True))
                    ),
                ),
                ("driver", f"{1e6 * (self.driver_seconds or 0.0):.0f} us per action, not waiting"),
            ]
        return out

    def rows(self) -> list[tuple[str, ...]]:
        """The table of actions, with its headings."""
        out: list[tuple[str, ...]] = [("action", "stage", "estimated", "alone", "together")]
        for a in self.actions:
            seconds = (a.estimated, a.alone, a.together)
            out.append((str(a.kind), str(a.stage), *("" if s is None else seconds_text(s) for s in seconds)))
        return out

    def __repr__(self) -> str:
        return f"<Profile of {self.plan.name} on {self.plan.placement}: measured {self.figures()[0][1]}>"

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.figures())
        lines = [f"{self.plan.name} on {self.plan.placement}"]
        lines += [f"{name:<{width}}  {text}" for name, text in self.figures()]
        return "\n".join([*lines, *([""] + columns(self.rows()) if self.actions else [])])

    def _repr_html_(self) -> str:
        drawn = [picture(timeline_svg(self.timelines, self.plan.name))] if self.timelines else []
        table = [figures_table(self.rows(), NUMBERS)] if self.actions else []
        return short([heading(self.plan.name, f"on {self.plan.placement}", self.figures()), *drawn, *table])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it; the suffix chooses the form: .html, or .svg or .trace.json of the timelines.

        Raises:
          ArgumentError: for another suffix; without micro-batches there are no timelines.
        """
        suffix = files.check_suffix(path, WRITERS if self.timelines else {".html": _page})
        files.write(path, WRITERS[suffix](self))


def _page(profile: Profile) -> str:
    actions = [PageTable("Actions", profile.rows(), NUMBERS)] if profile.actions else []
    return plan_page(profile.plan, profile.figures(), actions, profile.timelines)


WRITERS: Mapping[str, Callable[[Profile], str]] = {
    ".html": _page,
    ".svg": lambda p: timeline_svg(p.timelines, f"{p.plan.name}: estimated and measured"),
    ".trace.json": lambda p: chrome_trace(p.timelines),
}


def measure(built: Runs, leaves: Sequence[Leaf]) -> Profile:
    """Runs some steps on copies of what a call donates, and measures them."""

    def fresh() -> list[Leaf]:
        taken = set(built.donate)
        copied = [jnp.copy(x) if i in taken and isinstance(x, jax.Array) else x for i, x in enumerate(leaves)]
        block_until_ready(copied)
        return copied

    while isinstance(built, BuiltPipeline) and built.drivers.threads is None:
        built.run(fresh())
    seconds = [_seconds(built.run, fresh()) for _ in range(STEPS + 1)]
    profile = Profile(built.plan, median(seconds[1:]))
    if isinstance(built, BuiltPipeline) and built.schedule is not None:
        return _Measuring(built, built.schedule, fresh).profile(profile)
    return profile


def _seconds(run: Callable[[Sequence[Leaf]], PyTree], leaves: Sequence[Leaf]) -> float:
    """The time of a step and of its results."""
    began = time.perf_counter()
    block_until_ready(run(leaves))
    return time.perf_counter() - began


@dataclass(frozen=True)
class _Measuring:
    built: BuiltPipeline
    schedule: Schedule
    fresh: Callable[[], list[Leaf]]

    @property
    def machine(self) -> Machine:
        return self.built.machine

    def profile(self, whole: Profile) -> Profile:
        """The profile with the loop over micro-batches."""
        plan, task = self.built.plan, task_of(self.built.stages)
        alone = [self.recorded(False) for _ in range(STEPS + 1)][1:]
        together = [self.recorded(True) for _ in range(STEPS + 1)][1:]
        best = min(
            (r.timeline(f"{self.schedule.name}, measured") for r in together), key=lambda t: t.makespan
        )
        actions = tuple(_compared(task, alone, together))
        times = measured_times(task, actions)
        replayed = simulate(self.schedule, times, task.edges)
        return replace(
            whole,
            timeline=_from_zero(best),
            simulated=pipeline_page.estimated(plan),
            replayed=replace(replayed, name=f"{self.schedule.name}, simulated with the times measured alone"),
            live=tuple(alone[0].live),
            live_bytes=tuple(alone[0].live_bytes),
            actions=actions,
            times=times,
            driver_seconds=median(self.driver() for _ in range(STEPS)),
            task=task,
        )

    def recorded(self, threads: bool) -> Record:
        """One step, every action waited for: one by one, or with a thread for each placement."""
        record = self.machine.new_record()
        block_until_ready(self.machine.run(self.built.arguments(self.fresh()), threads, record))
        return record

    def driver(self) -> float:
        """What it costs to issue an action. Time of the thread, so waiting is not in it."""
        shelves = self.machine.begin(self.built.arguments(self.fresh()))
        block_until_ready([x for shelf in shelves for x in shelf.arrays.values() if not x.is_deleted()])
        began = time.thread_time()
        self.machine.driven(shelves, None)
        spent = time.thread_time() - began
        block_until_ready(self.machine.end(shelves))
        return spent / len(self.machine.order)


def _from_zero(timeline: Timeline) -> Timeline:
    """The same, by a clock that begins with it."""
    start = timeline.start
    rows = (
        tuple(replace(s, start=s.start - start, end=s.end - start) for s in row) for row in timeline.spans
    )
    return Timeline(timeline.name, tuple(rows))


def _compared(
    task: ScheduleTask, alone: Sequence[Record], together: Sequence[Record]
) -> Iterator[ActionTime]:
    """Every kind of action and stage, computing ones first."""
    one, all_ = _by_action(alone), _by_action(together)
    for key in sorted(one, key=lambda k: (k[0] in SENDS, k[1], list(Kind).index(k[0]))):
        kind, stage = key
        estimated = None if kind in SENDS else _estimated(task.figures.times, kind, stage)
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


def measured_times(task: ScheduleTask, actions: Sequence[ActionTime]) -> Times:
    """Times of all actions as measured alone; of a whole backward the estimated part is the inputs' gradient.

    What a stage sends is measured as one; each stage that it goes to has it after that time.
    """
    known = {(a.kind, a.stage): a.alone for a in actions}
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
