"""Whether the ranks of a schedule can get stuck when sends and receives wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import Action, Schedule, listed
from sbp.passes.schedule.dataflow import Dataflow, Edge, dataflow, receive_of
from sbp.passes.schedule.precedence import Precedence, precedence


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Why a schedule gets stuck.

    Arguments:
      cycle: actions that each must come before the next, the last one before the first; a send stands for its
        receive too.
      reasons: of each, in words, why it must come before the next.
      missing: sends and receives whose other end, or which themselves, are not in any order.
    """

    cycle: tuple[Action, ...] = ()
    reasons: tuple[str, ...] = ()
    missing: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.missing:
            return f"never done, and waited for: {listed(self.missing)}"
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
        return Deadlock(missing=missing)
    graph = precedence(schedule, flow)
    _, stuck = graph.sorted(lambda _: 0)
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
