"""What a step took beside what its plan says: by collective, by op, and what of it belongs to neither.

Nothing here measures: `runtime/profile` does, and the simulator of compiled programs may.
"""

from __future__ import annotations

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
    """What one collective of a plan took: per step, the mean of all devices.

    Arguments:
      name: of its row, as `Collective.name`.
      seconds: from when the last device of its group had come to it; None if it has no time of its own.
      exposed_seconds: of these, in which the device ran nothing else.
      waiting_seconds: before them, in which the device ran nothing and the others of its group had not come.
      times: how often it was seen in a step.
      remark: why it has no time, or what else is in it; "" for nothing.
    """

    name: str
    seconds: float | None
    exposed_seconds: float = 0.0
    waiting_seconds: float = 0.0
    times: int = 0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """Something that ran on the first device, in seconds from the beginning of the step.

    Arguments:
      step: the step of the program that it is of, by its number; -1 for none.
      rows: the names of the collectives that it is for, if it sends something.
      sends: whether it does; waits: whether others of its group have not come to it yet.
      label: what it is called where the step says nothing.
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
    """The kernels of one line in one pass over the program, per step.

    Arguments:
      phase: "forward", "backward" or "update"; "boxing" for the local part of moves.
      source: the user's line.
      ops: how many, equal layers counted.
      estimated: by the plan, seconds.
      seconds: measured.
    """

    phase: str
    source: str
    ops: int
    estimated: float
    seconds: float


@dataclass(frozen=True)
class MeasuredStep:
    """One step, divided: kernels, collectives, waiting for other devices, and what nobody claims.

    An instant in which a device runs kernels is theirs, in equal parts; else what it sends has it, else what
    it waits to send. So the parts add up to the whole. All figures are means of the devices.

    Arguments:
      word: "measured" or "simulated"; how: by what, such as "by JAX's profiler".
      seconds: of the step that was divided.
      devices: how many were looked at.
      step_seconds: kernels by the steps of the program, which are numbered as they are executed, those of
        bodies behind their loop; nothing where kernels were not told apart.
      added_seconds: kernels that are of none of them: XLA's own copies and counters.
      collectives: one for each of the plan's.
      before_seconds, between_seconds, after_seconds: in which a device ran nothing: until its first op
        began, until its last one had ended, and then until all results were there.
      spans: what ran when on the first device.
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
        """In which kernels ran."""
        return math.fsum(self.step_seconds) + self.added_seconds

    @property
    def exposed_seconds(self) -> float:
        """In which something was sent, and no kernel ran."""
        return math.fsum(c.exposed_seconds for c in self.collectives)

    @property
    def waiting_seconds(self) -> float:
        """In which others of a group had not come, and nothing ran."""
        return math.fsum(c.waiting_seconds for c in self.collectives)

    @property
    def unclaimed_seconds(self) -> float:
        """In which nothing ran."""
        return self.before_seconds + self.between_seconds + self.after_seconds

    @cached_property
    def rows(self) -> Mapping[str, MeasuredCollective]:
        """The collectives, by the names of their rows."""
        return {c.name: c for c in self.collectives}

    def of(self, row: Collective) -> MeasuredCollective:
        """What the collectives of a row took, which may stand for several."""
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


def numbered(steps: Sequence[Mapping[str, Any]], times: int = 1) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The steps of a program as JSON has it, in the order of their numbers; how often each is executed."""
    for step in steps:
        yield step, times
        for body in step.get("bodies", ()):
            yield from numbered(body, times * step["assumed_trips"])


def kernel_estimate(step: Mapping[str, Any]) -> float:
    """The seconds of a step's own kernels, one execution, without what it sends."""
    if "loop" in step or "row" in step:
        return 0.0
    sent = sum(s["seconds"] for s in step.get("sends", ()))
    return max(0.0, float(step.get("seconds", 0.0)) - float(sent))


def group_times(program: Mapping[str, Any], measured: MeasuredStep) -> list[GroupTime]:
    """The kernels by pass and line, those that took longest first.

    Arguments:
      program: as JSON has it.
    """
    found: dict[tuple[str, str], list[float]] = {}
    if not measured.step_seconds:
        return []
    for (step, times), seconds in zip(numbered(program["steps"]), measured.step_seconds, strict=True):
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
    return sorted((g for g in out if g.estimated or g.seconds), key=lambda g: (-g.seconds, g.phase, g.source))


def kernels_estimate(program: Mapping[str, Any]) -> float:
    """The seconds of all kernels of a step, by the plan."""
    return math.fsum(times * kernel_estimate(step) for step, times in numbered(program["steps"]))


def same_plan(a: PlanData, b: PlanData) -> bool:
    """Whether two plans are of the same program, which does the same.

    What was noted of arguments that came may differ, and whether one of them was read from a file.
    """
    what = ("name", "placement", "collectives", "seconds", "in_sbp", "out_sbp", "in_paths", "out_paths")
    return all(getattr(a, name) == getattr(b, name) for name in what)
