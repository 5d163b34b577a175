"""The best schedule for given times within a memory limit: named ones, list scheduling, local improvement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from sbp.errors import Problem, SbpError, raise_all
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.greedy import GreedyPolicy, OrderTask, list_schedule
from sbp.passes.schedule.improve import improve
from sbp.passes.schedule.memory import Footprint, peaks
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import Timeline
from sbp.passes.schedule.times import Times
from sbp.text.units import bytes_text, seconds_text

TRIES = 200
"""Simulations that local improvement may take."""
PATIENCE = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that was looked at.

    Arguments:
      name: of the schedule, or of the policy that made it.
      schedule: None if there is none of that name here.
      seconds: its time per step.
      peak_bytes: what each rank holds at most.
      reason: why it was not taken; "" if it could be.
    """

    name: str
    schedule: Schedule | None
    seconds: float
    peak_bytes: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The schedule that was found, when it runs, and all that were looked at, the fastest first."""

    schedule: Schedule
    timeline: Timeline
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        """A table of the candidates."""
        rows = [("schedule", "time", "peak", "")]
        for c in self.candidates:
            mark = "taken" if c.schedule is self.schedule else c.reason
            if c.schedule is None:
                rows.append((c.name, "", "", mark))
            else:
                rows.append((c.name, seconds_text(c.seconds), bytes_text(max(c.peak_bytes)), mark))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = (f"{n:<{widths[0]}}  {t:>{widths[1]}}  {p:>{widths[2]}}  {mark}" for n, t, p, mark in rows)
        return "\n".join(line.rstrip() for line in lines)


def search(
    rank_of: Sequence[int],
    microbatches: int,
    times: Times,
    footprint: Footprint,
    limit_bytes: Sequence[float],
    edges: Sequence[Edge] | None = None,
    *,
    split: bool = True,
    barrier: bool = True,
    tries: int = TRIES,
) -> ScheduleChoice:
    """The fastest schedule found that respects the memory of every rank.

    All named schedules that suit are candidates, so the result is never slower than the best of them that
    fits.

    Arguments:
      rank_of: stage -> rank.
      microbatches: how many there are.
      times: measured or estimated seconds of each stage's actions and transfers.
      footprint: bytes that a micro-batch leaves on each stage.
      limit_bytes: what the activations of each rank may take, weights and optimizer state not counted.
      edges: which stage feeds which; without them, each the next one.
      split: whether backwards may be split into `I` and `W`.
      barrier: whether all ranks wait for each other between steps, as for a global gradient norm. Then the
        time of a step is the makespan, else it is the longest that any rank takes from its first to its last
        action.
      tries: simulations that local improvement may take.

    Raises:
      ArgumentError: for times, sizes, limits or edges that do not fit the stages.
      MemoryLimitError: if nothing fits; it says the least that would.
    """
    rank_of = tuple(rank_of)
    raise_all(GENERATORS["gpipe"].asks.problems("auto", rank_of, microbatches))
    raise_all(_limit_problems(rank_of, limit_bytes))
    times.check(len(rank_of))
    footprint.check(len(rank_of))
    task = OrderTask(rank_of, microbatches, times, footprint, tuple(limit_bytes), edges, barrier)
    found = [*_named(task, split), *_listed(task, split)]
    fitting = [c for c in found if not c.reason]
    if not fitting:
        raise_all([_least(task)])
    best = min(fitting, key=_rank)
    found += _improvement(task, best, tries)
    best = min((c for c in found if not c.reason), key=_rank)
    assert best.schedule is not None
    timeline = simulate(best.schedule, times, edges)
    return ScheduleChoice(best.schedule, timeline, tuple(sorted(found, key=_rank)))


def _rank(c: Candidate) -> tuple[bool, float, float]:
    """The fastest first, of equals that with the lowest peak; what is no schedule last."""
    return c.schedule is None, c.seconds, max(c.peak_bytes, default=0)


def _candidate(task: OrderTask, schedule: Schedule) -> Candidate:
    seconds = task.seconds(simulate(schedule, task.times, task.edges))
    held = peaks(schedule, task.footprint)
    over = [r for r in range(task.ranks) if held[r] > task.limits[r]]
    refused = f"rank {over[0]} needs {bytes_text(held[over[0]])}" if over else ""
    return Candidate(schedule.name, schedule, seconds, held, refused)


def _named(task: OrderTask, split: bool) -> Iterator[Candidate]:
    """The named schedules, or why they do not suit."""
    for name, generator in GENERATORS.items():
        if name == "forward":
            continue
        if generator.splits and not split:
            yield Candidate(name, None, 0, (), "splits backwards")
            continue
        try:
            yield _candidate(task, make(name, task.rank_of, task.microbatches))
        except SbpError as e:
            yield Candidate(
                name, None, 0, (), "; ".join(f"{p.got}, not {p.legal.split(':')[0]}" for p in e.problems)
            )


def _listed(task: OrderTask, split: bool) -> Iterator[Candidate]:
    """List schedules by all policies, those that came out alike once."""
    chunks = len(task.rank_of) > task.ranks
    choices = product((True, False) if split else (False,), (True, False), (False, True), PATIENCE)
    seen = {(least := _one_at_a_time(task)).orders}
    yield _candidate(task, least)
    for policy in (GreedyPolicy(*choice) for choice in choices):
        if (not policy.split and policy.patience) or (not chunks and (policy.deep or policy.reserve)):
            continue
        schedule = list_schedule(task, policy)
        if schedule is not None and schedule.orders not in seen:
            seen.add(schedule.orders)
            yield _candidate(task, schedule)


def _one_at_a_time(task: OrderTask) -> Schedule:
    """The schedule that holds least: no rank has two micro-batches."""
    task = replace(task, footprint=replace(task.footprint, for_weights=())).least
    schedule = list_schedule(task, GreedyPolicy(split=False, deep=True, reserve=True, patience=0.0))
    assert schedule is not None
    return replace(schedule, name="one at a time")


def _improvement(task: OrderTask, best: Candidate, tries: int) -> list[Candidate]:
    """The best candidate with its gaps filled, if that makes it faster."""
    assert best.schedule is not None
    better = improve(task, best.schedule, tries)
    name = f"{best.name}, improved"
    return [] if better is best.schedule else [_candidate(task, replace(better, name=name))]


def _limit_problems(rank_of: tuple[int, ...], limit_bytes: Sequence[float]) -> Iterator[Problem]:
    if len(limit_bytes) != len(set(rank_of)):
        got, legal = f"{len(limit_bytes)} limits", f"{len(set(rank_of))}, one per rank"
        yield Problem("argument", "limit_bytes", got, legal, "ranks may have different memory", "")


def _least(task: OrderTask) -> Problem:
    """One micro-batch at a time on each rank is the least that any schedule holds."""
    least = peaks(_one_at_a_time(task), task.footprint)
    over = [r for r in range(task.ranks) if least[r] > task.limits[r]]
    return Problem(
        "memory",
        f"search for a schedule of {len(task.rank_of)} stages on {task.ranks} ranks",
        "limits of " + ", ".join(f"{bytes_text(task.limits[r])} (rank {r})" for r in over),
        "at least " + ", ".join(f"{bytes_text(least[r])} (rank {r})" for r in over),
        "one micro-batch at a time holds that much",
        "smaller micro-batches, checkpoints inside the stages, or stages on more ranks",
    )
