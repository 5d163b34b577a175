"""Sends and receives, in one order that all ranks follow; and the order for a single driver.

What must come before what, over all ranks: the graph that orders and proofs are made from.

Whether the ranks of a schedule can get stuck when sends and receives wait for each other.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import RECEIVES, Action, Schedule, actions_text
from sbp.passes.schedule.dataflow import Dataflow, Edge, dataflow, makes, receive_of, value_of
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times, equal_times


@dataclass(frozen=True, slots=True)
class Precedence:
    """Events and their predecessors. An event is named by one of its actions.

    A send and its receive are one event, and so are the two of a pair; everything else is its own. Values
    that cross ranks have an event also where the schedule has no transfers yet.

    Arguments:
      before: event -> the events that must come before it.
      second: of pairs, the forward, which names the event -> the backward.
      first: the same the other way round.
    """

    before: Mapping[Action, frozenset[Action]]
    second: Mapping[Action, Action]
    first: Mapping[Action, Action]

    def event(self, a: Action) -> Action:
        """The event of an action."""
        return a.other_end if a.kind in RECEIVES else self.first.get(a, a)

    def sort(self, priority: Callable[[Action], Any]) -> tuple[list[Action], set[Action]]:
        """The events in an order that keeps all precedences, the least priority first; and those in no order.

        The second is empty unless there is a cycle.
        """
        names = list(self.before)
        left = {e: len(self.before[e]) for e in names}
        after: dict[Action, list[Action]] = {e: [] for e in names}
        for e in names:
            for b in self.before[e]:
                after[b].append(e)
        number = {e: i for i, e in enumerate(names)}
        ready = [(priority(e), number[e]) for e in names if not left[e]]
        heapq.heapify(ready)
        order = []
        while ready:
            done = names[heapq.heappop(ready)[1]]
            order.append(done)
            for e in after[done]:
                left[e] -= 1
                if not left[e]:
                    heapq.heappush(ready, (priority(e), number[e]))
        return order, set(names) - set(order)


def precedence(schedule: Schedule, flow: Dataflow) -> Precedence:
    """The graph of a schedule: the order of each rank, and what each action needs."""
    second = {a: b for order in schedule.orders for a, b in pairwise(order) if a in schedule.pairs}
    graph = Precedence({}, second, {b: a for a, b in second.items()})
    before: dict[Action, set[Action]] = {}
    for order in schedule.orders:
        events = [graph.event(a) for a in order]
        for e in events:
            before.setdefault(e, set())
        for a, b in pairwise(events):
            if a != b:
                before[b].add(a)
    for a, b in _dataflow(schedule, flow):
        before.setdefault(graph.event(a), set())
        before.setdefault(graph.event(b), set()).add(graph.event(a))
    return replace(graph, before={e: frozenset(b) for e, b in before.items()})


def _dataflow(schedule: Schedule, flow: Dataflow) -> Iterator[tuple[Action, Action]]:
    """(before, after): who makes something, its transfer, and who needs it."""
    maker = {made: a for order in schedule.orders for a in order if a.computes for made in makes(a)}
    for order in schedule.orders:
        for a in order:
            if not a.computes:
                event = a.other_end if a.kind in RECEIVES else a
                yield maker[value_of(event)], event
                continue
            for need in flow.needs(a):
                if flow.crosses(need, a):
                    transfer = receive_of(need, a).other_end
                    yield maker[need], transfer
                    yield transfer, a
                else:
                    yield maker[need], a


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

    order, stuck = graph.sort(priority)
    assert not stuck, "a schedule that can be simulated has no cycle"
    return order


def _members(graph: Precedence, e: Action) -> tuple[Action, ...]:
    """The actions of an event, in order."""
    if not e.computes:
        return (e, e.other_end)
    return (e, graph.second[e]) if e in graph.second else (e,)


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Why a schedule gets stuck.

    Arguments:
      cycle: actions that each must come before the next, the last one before the first; a send stands for its
        receive too.
      reasons: of each, in words, why it must come before the next.
      missing_actions: sends and receives whose other end, or which themselves, are not in any order.
    """

    cycle: tuple[Action, ...] = ()
    reasons: tuple[str, ...] = ()
    missing_actions: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.missing_actions:
            return f"never done, and waited for: {actions_text(self.missing_actions)}"
        return "\n".join(self.reasons)


def find_deadlock(schedule: Schedule, edges: Sequence[Edge] | None = None) -> Deadlock | None:
    """Why the ranks get stuck with sends that block; None is a proof that they do not.

    The proof: every transfer is waited for on both sides, and the graph over all actions, in which a send and
    its receive are one event, has no cycle. Then some rank can always go on: the first event, in an order of
    the graph, that is not done stands first on each rank that takes part in it. A schedule without transfers
    is judged as if values travelled by themselves.

    Arguments:
      schedule: with its transfers.
      edges: which stage feeds which; without them, each the next one.

    Raises:
      ArgumentError: for edges that do not fit the stages.
    """
    flow = dataflow(schedule.rank_of, edges)
    if schedule.has_transfers and (missing := _missing(schedule, flow)):
        return Deadlock(missing_actions=missing)
    graph = precedence(schedule, flow)
    _, stuck = graph.sort(lambda _: 0)
    if not stuck:
        return None
    cycle = _cycle(graph, stuck)
    links = list(pairwise([*cycle, cycle[0]]))
    return Deadlock(cycle, tuple(_reason(schedule, graph, a, b) for a, b in links))


def check_no_deadlock(schedule: Schedule, edges: Sequence[Edge] | None = None) -> None:
    """Raises `ArgumentError`, with the reasons, if the schedule gets stuck with sends that block."""
    if found := find_deadlock(schedule, edges):
        why = "blocking sends and receives wait for each other in a circle, or for ever"
        fix = "transfers in one order on all ranks, as `communication.add_transfers` makes them"
        got, legal = "; ".join(str(found).splitlines()), "no circle"
        raise_all([Problem("argument", f"schedule {schedule.name!r}", got, legal, why, fix)])


def _missing(schedule: Schedule, flow: Dataflow) -> tuple[Action, ...]:
    """Ends of transfers that are not there, though the other end is, or a stage needs the value."""
    there = [a for order in schedule.orders for a in order]
    wanted = {a.other_end for a in there if not a.computes}
    for a in there:
        for need in flow.needs(a) if a.computes else ():
            if flow.crosses(need, a):
                wanted.add(receive_of(need, a))
    return tuple(sorted(wanted - set(there), key=str))


def _cycle(graph: Precedence, stuck: set[Action]) -> tuple[Action, ...]:
    """A cycle: each stuck event has a stuck one before it, so going back must come round."""
    at, seen = min(stuck, key=str), list[Action]()
    while at not in seen:
        seen.append(at)
        at = min(graph.before[at] & stuck, key=str)
    return tuple(reversed(seen[seen.index(at) :]))


def _reason(schedule: Schedule, graph: Precedence, a: Action, b: Action) -> str:
    """Why an event comes before another one: the order of a rank, or else the dataflow."""
    for rank, order in enumerate(schedule.orders):
        for x, y in pairwise(order):
            if (graph.event(x), graph.event(y)) == (a, b):
                return f"rank {rank} does {x} before {y}"
    return f"{b} needs {a}"
