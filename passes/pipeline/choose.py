"""The schedule of a program with stages: searched for times and memory, or checked against the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sbp.errors import MemoryLimitError, Problem
from sbp.passes.pipeline.chain import Stages
from sbp.passes.pipeline.edges import edges_of, trains
from sbp.passes.pipeline.figures import Figures, figures_of
from sbp.passes.report import bytes_text
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.memory import peaks
from sbp.passes.schedule.search import Choice, search
from sbp.passes.schedule.times import Times

AUTO = "auto"


@dataclass(frozen=True)
class Task:
    """What a schedule is searched for.

    Arguments:
      rank_of: stage -> placement.
      figures: bytes and estimated times.
      edges: which stage feeds which.
      capacity_bytes: what a device has, where no limit is given.
      trains: whether there is a backward pass.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    figures: Figures
    edges: tuple[Edge, ...]
    capacity_bytes: float
    trains: bool

    def search(self, limit_bytes: float | None = None, times: Times | None = None) -> Choice:
        """The fastest schedule found within the memory of a device.

        Arguments:
          limit_bytes: per device; None for all that it has.
          times: measured ones, instead of those estimated.

        Raises:
          MemoryLimitError: if nothing fits.
        """
        most = self.capacity_bytes if limit_bytes is None else limit_bytes
        left = [max(0.0, most - p.steady_bytes) for p in self.figures.places]
        measured = self.figures.times if times is None else times
        try:
            found = search(
                self.rank_of, self.microbatches, measured, self.figures.footprint, left, self.edges
            )
        except MemoryLimitError as e:
            steady = max(p.steady_bytes for p in self.figures.places)
            why = f"; the limits are what up to {bytes_text(steady)} of arguments, sums and work leave"
            raise MemoryLimitError(*(replace(p, why=p.why + why) for p in e.problems)) from None
        self.check(found.schedule, most)
        return found

    def check(self, schedule: Schedule, limit_bytes: float) -> None:
        """Refuses a schedule that holds too much.

        Raises:
          MemoryLimitError: with the placement that holds most, and what it holds.
        """
        need = self.figures.memory(schedule)
        place = max(range(len(need)), key=lambda i: need[i])
        if need[place] > limit_bytes:
            raise MemoryLimitError(self._problem(schedule, limit_bytes, place, need[place]))

    def _problem(self, schedule: Schedule, limit_bytes: float, place: int, need: float) -> Problem:
        held = peaks(schedule, self.figures.footprint)[place]
        figures = self.figures.places[place]
        outside = figures.outside_bytes > limit_bytes
        return Problem(
            "memory",
            f"schedule {schedule.name!r}, Options(memory_limit={limit_bytes:.4g})",
            f"{bytes_text(need)} per device of placement {place} at the peak",
            f"at most {bytes_text(limit_bytes)}",
            f"before and after the micro-batches it needs {bytes_text(figures.outside_bytes)}"
            if outside
            else f"micro-batches hold {bytes_text(held)} there, all else {bytes_text(figures.steady_bytes)}",
            "split what lies whole on its devices, more stages, or more devices"
            if outside
            else "Options(schedule='auto'), which looks for one that fits; smaller micro-batches",
        )


def task_of(stages: Stages) -> Task:
    """The task of a program with micro-batches."""
    capacity = min((p.hardware.memory_bytes for p in stages.plans), default=math.inf)
    cuts = stages.cuts(False)
    return Task(
        stages.stages, stages.microbatches, figures_of(stages), edges_of(cuts), capacity, trains(cuts)
    )


def found_schedule(choice: Choice) -> Schedule:
    """The schedule of a search, with a name that says so."""
    return replace(choice.schedule, name=f"{AUTO} ({choice.schedule.name})")


def candidates_note(choice: Choice, limit_bytes: float | None) -> str:
    """What was looked at, as a remark on the plan."""
    limit = "" if limit_bytes is None else f" within {bytes_text(limit_bytes)} per device"
    return f"schedules that were looked at{limit}:\n{choice}"


def split_seconds(whole: float, estimated: Sequence[float]) -> tuple[float, float]:
    """A backward's time as those of its two halves, in the estimated proportion."""
    total = sum(estimated)
    part = estimated[0] / total if total else 0.5
    return whole * part, whole * (1 - part)
