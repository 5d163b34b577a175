"""Sends and receives, in one order that all ranks follow; and the order for a single driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import Action, Schedule
from sbp.passes.schedule.dataflow import Edge, dataflow, makes, value_of
from sbp.passes.schedule.deadlock import check_no_deadlock
from sbp.passes.schedule.precedence import Precedence, precedence
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times, equal_times


def add_transfers(
    schedule: Schedule, edges: Sequence[Edge] | None = None, times: Times | None = None
) -> Schedule:
    """The schedule with a send and a receive for each value and gradient that goes to another rank.

    All events are put into one order, by the time at which each would run with sends that take no time of a
    rank; each rank's order is its part of that one. So no rank can get stuck, even where sends block: of the
    events that are not done, the first one stands first on all its ranks. A send comes at once after what it
    sends, so that where sends do not block nothing waits longer than for the dataflow.

    Arguments:
      schedule: without transfers.
      edges: which stage feeds which, neighbours or not; without them, each the next one.
      times: how long actions take; only the places of the receives depend on it. Without them all take 1.

    Raises:
      ArgumentError: for a schedule that has transfers or gets stuck, and for edges or times that do not fit.
    """
    if schedule.has_transfers:
        where, got = f"schedule {schedule.name!r}", "sends and receives"
        fix = "the schedule as `orders.make` gives it"
        raise_all([Problem("argument", where, got, "none yet", "each value must travel once", fix)])
    graph = precedence(schedule, dataflow(schedule.rank_of, edges))
    order = _by_time(schedule, graph, edges, times)
    ranks: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for e in order:
        for a in _members(graph, e):
            ranks[schedule.rank_of[a.stage]].append(a)
    return replace(schedule, orders=tuple(map(tuple, ranks)))


def issue_order(
    schedule: Schedule, edges: Sequence[Edge] | None = None, times: Times | None = None
) -> tuple[Action, ...]:
    """All actions of all ranks in one order, for a single driver: by simulated start, after what they need.

    Each rank's actions keep their order. A send is followed at once by its receive, a pair's forward by its
    backward.

    Arguments:
      schedule: with or without transfers.
      edges: which stage feeds which; without them, each the next one.
      times: how long actions take; without them all take 1, and transfers nothing.

    Raises:
      ArgumentError: for a schedule that gets stuck with sends that block, and for edges or times that do not
        fit.
    """
    check_no_deadlock(schedule, edges)
    graph = precedence(schedule, dataflow(schedule.rank_of, edges))
    order = _by_time(schedule, graph, edges, times)
    return tuple(a for e in order if e.computes or schedule.has_transfers for a in _members(graph, e))


def _by_time(
    schedule: Schedule, graph: Precedence, edges: Sequence[Edge] | None, times: Times | None
) -> list[Action]:
    """All events by simulated starts, as the graph allows; transfers before what starts with them."""
    times = equal_times(schedule.stages) if times is None else times
    timeline = simulate(schedule, times, edges)
    starts = {s.action: s.start for spans in timeline.spans for s in spans}
    made = {made: s.end for spans in timeline.spans for s in spans for made in makes(s.action)}

    def priority(e: Action) -> tuple[float, bool, int]:
        start = starts[e] if e in starts else made[value_of(e)]
        return start, e.computes, schedule.rank_of[e.stage]

    order, stuck = graph.sorted(priority)
    assert not stuck, "a schedule that can be simulated has no cycle"
    return order


def _members(graph: Precedence, e: Action) -> tuple[Action, ...]:
    """The actions of an event, in order."""
    if not e.computes:
        return (e, e.other_end)
    return (e, graph.second[e]) if e in graph.second else (e,)
