"""Chooses the schedule of a program with stages: by a search for times and memory, or checks a given one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from sbp.errors import ArgumentError, MemoryLimitError, Problem
from sbp.passes.pipeline.edges import edges_of, trains
from sbp.passes.pipeline.plan import Figures, figures_of
from sbp.passes.pipeline.stages import Stages
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.memory import peaks
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.passes.schedule.search import ScheduleChoice, search
from sbp.passes.schedule.times import Times
from sbp.text.units import bytes_text

AUTO = "auto"
DEFAULT = "1f1b"


@dataclass(frozen=True)
class ScheduleTask:
    """The input of a search for schedules.

    Arguments:
      rank_of: stage -> placement.
      figures: bytes and estimated times.
      edges: which stage feeds which.
      capacity_bytes: of a device, if no limit is given.
      trains: whether there is a backward pass.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    figures: Figures
    edges: tuple[Edge, ...]
    capacity_bytes: float
    trains: bool

    def search(self, limit_bytes: float | None = None, times: Times | None = None) -> ScheduleChoice:
        """The fastest schedule found within the memory of a device.

        Arguments:
          limit_bytes: per device; None for its capacity.
          times: measured ones, instead of the estimates.

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
        """Checks the memory of a schedule.

        Raises:
          MemoryLimitError: with the placement that holds most, and how much.
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
            "split tensors that are whole on its devices, more stages, or more devices"
            if outside
            else "PipelineOptions(schedule='auto'), which looks for one that fits; smaller micro-batches",
        )


def task_of(stages: Stages) -> ScheduleTask:
    """The task of a program with micro-batches."""
    capacity = min((p.hardware.memory_bytes for p in stages.plans), default=math.inf)
    cuts = stages.cuts(False)
    return ScheduleTask(
        stages.stages, stages.microbatches, figures_of(stages), edges_of(cuts), capacity, trains(cuts)
    )


def found_schedule(choice: ScheduleChoice) -> Schedule:
    """The schedule of a search, with a name that says so."""
    return replace(choice.schedule, name=f"{AUTO} ({choice.schedule.name})")


def candidates_note(choice: ScheduleChoice, limit_bytes: float | None) -> str:
    """The candidates of the search, as a remark on the plan."""
    limit = ""
    if limit_bytes is not None and not math.isinf(limit_bytes):
        limit = f" within {bytes_text(limit_bytes)} per device"
    return f"schedules that were looked at{limit}:\n{choice}"


def split_seconds(whole: float, estimated: Sequence[float]) -> tuple[float, float]:
    """The time of a backward pass as those of its two halves, in the estimated proportion."""
    total = sum(estimated)
    part = estimated[0] / total if total else 0.5
    return whole * part, whole * (1 - part)


def schedule_for(
    stages: Stages, asked: str | Schedule | None, memory_limit_bytes: float | None = None
) -> tuple[Schedule | None, list[str]]:
    """The schedule of a program, and remarks on it.

    Raises:
      ArgumentError: if it does not suit the stages.
      MemoryLimitError: if it holds more than the limit, or if no candidate fits.
    """
    known = isinstance(asked, str) and asked in (*GENERATORS, AUTO)
    if asked is not None and not known and not isinstance(asked, Schedule):
        raise ArgumentError(_no_schedule(asked))
    if not stages.microbatches:
        if asked is not None:
            fix = "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1)"
            raise ArgumentError(
                _idle(asked, "a program with sbp.microbatch", "a schedule orders micro-batches", fix)
            )
        return None, []
    # Whether there is a backward pass does not depend on how it is cut.
    training = trains(stages.cuts(True))
    if asked == AUTO and training:
        choice = task_of(stages).search(memory_limit_bytes)
        return found_schedule(choice), [candidates_note(choice, memory_limit_bytes)]
    if isinstance(asked, Schedule):
        _check_suits(asked, stages)
        schedule = asked
    else:
        name = (asked or DEFAULT) if training or asked not in (None, AUTO) else "forward"
        schedule = make(name, stages.stages, stages.microbatches)
    if training and not schedule.trains:
        raise ArgumentError(_no_backward(schedule))
    if memory_limit_bytes is not None:
        task_of(stages).check(schedule, memory_limit_bytes)
    return schedule, []


def no_stages_problem(schedule: object) -> Problem:
    """The problem of a schedule for a program without stages."""
    fix = "with sbp.on(placement.split(0)[0]): ... in the model, or PipelineOptions(stages=...)"
    return _idle(schedule, "a program with stages", "a schedule says in which order stages run", fix)


def _idle(asked: object, legal: str, why: str, fix: str) -> Problem:
    """The problem of a schedule where there is nothing to order."""
    got = repr(asked if isinstance(asked, str) else "a schedule")
    return Problem("argument", "PipelineOptions(schedule=...)", got, legal, why, fix)


def _no_schedule(asked: object) -> Problem:
    return Problem(
        "argument",
        "PipelineOptions(schedule=...)",
        repr(asked),
        ", ".join(map(repr, (*GENERATORS, AUTO))) + ", a Schedule, or None",
        "it says in which order the stages run",
        repr(get_close_matches(asked, (*GENERATORS, AUTO), 1, 0.0)[0] if isinstance(asked, str) else DEFAULT),
    )


def _no_backward(schedule: Schedule) -> Problem:
    return Problem(
        "argument",
        f"PipelineOptions(schedule={schedule.name!r})",
        "a schedule without backward",
        "one of a training",
        "the program has gradients, which it would leave out",
        f"{DEFAULT!r}, or sbp.microbatch of the loss alone",
    )


def _check_suits(schedule: Schedule, stages: Stages) -> None:
    if schedule.rank_of != stages.stages or schedule.microbatches != stages.microbatches:
        raise ArgumentError(
            Problem(
                "argument",
                f"PipelineOptions(schedule={schedule.name!r})",
                f"stages on ranks {schedule.rank_of}, {schedule.microbatches} micro-batches",
                f"stages on {stages.stages}, {stages.microbatches} micro-batches",
                "the schedule is of another program",
                "the schedule's name, or one made for these stages",
            )
        )
