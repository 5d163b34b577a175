"""Local improvement of a schedule: work that is ready moves forward into gaps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from sbp.errors import SbpError
from sbp.passes.schedule.actions import Action, Kind, Schedule
from sbp.passes.schedule.dataflow import Dataflow, dataflow, makes
from sbp.passes.schedule.greedy import OrderTask
from sbp.passes.schedule.memory import peak
from sbp.passes.schedule.simulate import simulate_flow
from sbp.passes.schedule.spans import Timeline

Swap: TypeAlias = tuple[int, int, int]
"""(rank, from where, to where) in that rank's order."""


def improve(task: OrderTask, schedule: Schedule, tries: int) -> Schedule:
    """The schedule after every move found that makes it faster, or no slower with its work done earlier.

    A move puts an action that is ready before a gap into it, or a weight gradient behind what is more urgent.
    It must keep the memory limits. Schedules with pairs stay as they are.

    Arguments:
      task: what is scheduled, with its limits.
      schedule: where to start; it must fit.
      tries: the most simulations.
    """
    if schedule.pairs:
        return schedule
    flow = dataflow(task.rank_of, task.edges)
    timeline = simulate_flow(schedule, task.times, flow)
    bound = least_seconds(task)
    while tries > 0 and task.seconds(timeline) > bound:
        for move in _moves(task, schedule, timeline, flow):
            order = _moved(schedule.orders[move[0]], move)
            if peak(((a,) for a in order), task.footprint) > task.limits[move[0]]:
                continue
            changed = _with_order(schedule, move[0], order)
            tries -= 1
            after = _simulated(task, changed, flow)
            if after is not None and _cost(task, after) < _cost(task, timeline):
                schedule, timeline = changed, after
                break
            if tries <= 0:
                return schedule
        else:
            return schedule
    return schedule


def least_seconds(task: OrderTask) -> float:
    """What no schedule without pairs can beat: a rank's work, with a barrier after what it must wait for."""
    flow, ranks = dataflow(task.rank_of, task.edges), range(task.ranks)
    begins: list[float] = []
    for sources in flow.sources:
        begins.append(max((begins[s] + task.times.forward[s] for s in sources), default=0))
    work, head = [0.0 for _ in ranks], [float("inf") for _ in ranks]
    for stage, rank in enumerate(task.rank_of):
        both = task.times.of(Action(Kind.F, stage, 0)) + task.times.of(Action(Kind.B, stage, 0))
        work[rank] += task.microbatches * both
        head[rank] = min(head[rank], begins[stage] if task.barrier else 0)
    return max(w + h for w, h in zip(work, head, strict=True))


def _cost(task: OrderTask, timeline: Timeline) -> tuple[float, float]:
    return task.seconds(timeline), sum(s.end for spans in timeline.spans for s in spans)


def _simulated(task: OrderTask, schedule: Schedule, flow: Dataflow) -> Timeline | None:
    """None where the move put an action before what it needs by way of another rank."""
    try:
        return simulate_flow(schedule, task.times, flow)
    except SbpError:
        return None


def _moved(order: tuple[Action, ...], move: Swap) -> tuple[Action, ...]:
    _, start, to = move
    changed = list(order)
    changed.insert(to, changed.pop(start))
    return tuple(changed)


def _with_order(schedule: Schedule, rank: int, order: tuple[Action, ...]) -> Schedule:
    orders = [order if r == rank else old for r, old in enumerate(schedule.orders)]
    return replace(schedule, orders=tuple(orders))


def _urgent(order: Sequence[Action], i: int) -> Iterator[int]:
    """Where the next action that is no weight gradient is, and where the next one that others wait for."""
    for kinds in ((Kind.F, Kind.I, Kind.B), (Kind.I, Kind.B)):
        yield from [j for j in range(i + 1, len(order)) if order[j].kind in kinds][:1]


def _moves(task: OrderTask, schedule: Schedule, timeline: Timeline, flow: Dataflow) -> Iterator[Swap]:
    """Moves into gaps, the longest first, of the next of each kind and stage; then of weight gradients."""
    spans = {s.action: s for rank in timeline.spans for s in rank}
    ends = {made: s.end for s in spans.values() for made in makes(s.action)}

    def ready(a: Action) -> float:
        times: list[float] = [0]
        for need in flow.needs(a):
            way = task.times.on_the_way(need.stage, a.stage) if flow.crosses(need, a) else 0
            times.append(ends[need] + way)
        return max(times)

    gaps, swaps = [], list[Swap]()
    for rank, order in enumerate(schedule.orders):
        free: float = 0
        for i, a in enumerate(order):
            span = spans[a]
            if span.start > free:
                gaps.append((free - span.start, rank, i, span.start))
            if a.kind is Kind.W:
                swaps += [(rank, i, j) for j in _urgent(order, i) if ready(order[j]) < span.end or j > i + 1]
            free = span.end
    for _, rank, i, until in sorted(gaps):
        order = schedule.orders[rank]
        first: dict[tuple[Kind, int], int] = {}
        for j in range(i + 1, len(order)):
            first.setdefault((order[j].kind, order[j].stage), j)
        yield from ((rank, j, i) for j in first.values() if ready(order[j]) < until)
    yield from swaps
