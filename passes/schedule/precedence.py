"""What must come before what, over all ranks: the graph that orders and proofs are made from."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sbp.passes.schedule.actions import RECEIVES, Action, Schedule
from sbp.passes.schedule.dataflow import Dataflow, makes, receive_of, value_of


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
        if a.kind in RECEIVES:
            return a.other_end
        return self.first.get(a, a)

    def sorted(self, priority: Callable[[Action], Any]) -> tuple[list[Action], set[Action]]:
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
