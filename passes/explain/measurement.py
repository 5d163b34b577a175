"""A measured or simulated step beside its plan: by collective, by op, and the rest.

These are data. `runtime/profile` measures, and the simulator of compiled programs fills them too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sbp.passes.explain.plan import Collective, PlanData

MADE_BY_XLA = "made by XLA"
"""The line of kernels that are of no op of the plan."""
BOXING = "boxing"
"""The phase of what moves do on a device itself: slices, copies, what packs and unpacks."""


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """The times of one collective of a plan: per step, the mean of all devices.

    Arguments:
      name: of its row, as `Collective.name`.
      seconds: from when the last device of its group has reached it; None if it has no time of its own.
      exposed_seconds: the part of them in which the device ran nothing else.
      waiting_seconds: before them, in which the device ran nothing and waited for others of its group.
      times: how often it occurred in a step.
      remark: why it has no time, or what else its time includes; "" for nothing.
    """

    name: str
    seconds: float | None
    exposed_seconds: float = 0.0
    waiting_seconds: float = 0.0
    times: int = 0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """A span on the first device, in seconds from the beginning of the step.

    Arguments:
      step: the number of its step of the program; -1 for none.
      rows: the names of its collectives, if it sends something.
      sends: whether it sends; waits: whether it waits for others of its group.
      label: its name if it has no step.
    """

    start: float
    end: float
    step: int
    rows: tuple[str, ...] = ()
    sends: bool = False
    waits: bool = False
    label: str = ""


@dataclass(frozen=True, slots=True)
class GroupTime:
    """The kernels of one line in one phase of the program, per step.

    Arguments:
      phase: "forward", "backward" or "update"; "boxing" for the local part of moves.
      source: the user's line.
      ops: their number, equal layers counted.
      estimated_seconds: by the plan, seconds.
      seconds: measured.
    """

    phase: str
    source: str
    ops: int
    estimated_seconds: float
    seconds: float


@dataclass(frozen=True)
class MeasuredStep:
    """One step, attributed to kernels, collectives, waiting for other devices, and nothing.

    An instant in which a device runs kernels counts for these, in equal parts; else for its collectives, else
    for what it waits for. So the parts add up to the whole. All figures are means of the devices.

    Arguments:
      word: "measured" or "simulated"; how: by what, such as "by JAX's profiler".
      seconds: of the step.
      devices: how many devices were recorded.
      step_seconds: kernels by the steps of the program, numbered in the order of execution, those of bodies
        behind their loop; nothing if kernels could not be told apart.
      added_seconds: kernels of no step: XLA's own copies and counters.
      collectives: one for each of the plan's.
      before_seconds, between_seconds, after_seconds: in which a device ran nothing: before its first op,
        until the end of its last one, and then until all results were there.
      spans: the timeline of the first device.
    """

    word: str
    how: str
    seconds: float
    devices: int
    step_seconds: tuple[float, ...]
    added_seconds: float
    collectives: tuple[MeasuredCollective, ...]
    before_seconds: float
    between_seconds: float
    after_seconds: float
    spans: tuple[MeasuredSpan, ...] = ()

    @property
    def kernel_seconds(self) -> float:
        """Time in which kernels ran."""
        return math.fsum(self.step_seconds) + self.added_seconds

    @property
    def exposed_seconds(self) -> float:
        """Time in which a collective ran and no kernel."""
        return math.fsum(c.exposed_seconds for c in self.collectives)

    @property
    def waiting_seconds(self) -> float:
        """Time in which a device waited for others of a group, and ran nothing."""
        return math.fsum(c.waiting_seconds for c in self.collectives)

    @property
    def unclaimed_seconds(self) -> float:
        """Time in which nothing ran."""
        return self.before_seconds + self.between_seconds + self.after_seconds

    @cached_property
    def rows(self) -> Mapping[str, MeasuredCollective]:
        """The collectives, by the names of their rows."""
        return {c.name: c for c in self.collectives}

    def of(self, row: Collective) -> MeasuredCollective:
        """The times of the collectives of a row, which may stand for several."""
        found = [self.rows[name] for name in row.name.split("+") if name in self.rows]
        known = [c.seconds for c in found if c.seconds is not None]
        return MeasuredCollective(
            row.name,
            math.fsum(known) if known else None,
            math.fsum(c.exposed_seconds for c in found),
            math.fsum(c.waiting_seconds for c in found),
            sum(c.times for c in found),
            "; ".join(dict.fromkeys(c.remark for c in found if c.remark)),
        )


def steps_by_number(
    steps: Sequence[Mapping[str, Any]], times: int = 1
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The steps of a program in JSON, in the order of their numbers, each with its number of executions."""
    for step in steps:
        yield step, times
        for body in step.get("bodies", ()):
            yield from steps_by_number(body, times * step["assumed_trips"])


def kernel_estimate(step: Mapping[str, Any]) -> float:
    """The seconds of a step's own kernels in one execution, without collectives."""
    if "loop" in step or "row" in step:
        return 0.0
    sent = sum(s["seconds"] for s in step.get("sends", ()))
    return max(0.0, float(step.get("seconds", 0.0)) - float(sent))


def group_times(program: Mapping[str, Any], measured: MeasuredStep) -> list[GroupTime]:
    """The kernels by phase and line, the longest first.

    Arguments:
      program: as JSON has it.
    """
    found: dict[tuple[str, str], list[float]] = {}
    if not measured.step_seconds:
        return []
    for (step, times), seconds in zip(steps_by_number(program["steps"]), measured.step_seconds, strict=True):
        estimated = times * kernel_estimate(step)
        if not estimated and not seconds:
            continue
        # What counts the trips of a loop, and copies what it carries, is of the line of the loop.
        one = found.setdefault((BOXING, "") if "move" in step else (step["phase"], step["at"]), [0, 0.0, 0.0])
        one[0] += "loop" not in step
        one[1] += estimated
        one[2] += seconds
    out = [GroupTime(*key, int(n), estimated, seconds) for key, (n, estimated, seconds) in found.items()]
    if measured.added_seconds:
        out.append(GroupTime("", MADE_BY_XLA, 0, 0.0, measured.added_seconds))
    return sorted(
        (g for g in out if g.estimated_seconds or g.seconds), key=lambda g: (-g.seconds, g.phase, g.source)
    )


def kernels_estimate(program: Mapping[str, Any]) -> float:
    """The seconds of all kernels of a step, by the plan."""
    return math.fsum(times * kernel_estimate(step) for step, times in steps_by_number(program["steps"]))


def same_plan(a: PlanData, b: PlanData) -> bool:
    """Whether two plans are of the same program and do the same.

    Notes on arguments of calls may differ, and one of them may come from a file.
    """
    what = ("name", "placement", "collectives", "seconds", "in_sbp", "out_sbp", "in_paths", "out_paths")
    return all(getattr(a, name) == getattr(b, name) for name in what)
