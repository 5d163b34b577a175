"""Which stage feeds which, and so what each action waits for."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.compat.exact_keys import memo
from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import Action, Kind


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that a stage's forward gives to that of a later stage.

    Arguments:
      source: the stage that makes it.
      target: the stage that needs it; it need not be the next one.
      gradient: whether a gradient comes back: not for masks, ids and the like.
    """

    source: int
    target: int
    gradient: bool = True


def chain(stages: int) -> tuple[Edge, ...]:
    """Each stage feeds the next one."""
    return tuple(Edge(s, s + 1) for s in range(stages - 1))


def check_edges(edges: Sequence[Edge], stages: int) -> None:
    """Raises `ArgumentError` for an edge that goes backward or out of the model, or is there twice."""
    wrong = [e for e in edges if not 0 <= e.source < e.target < stages]
    places = [(e.source, e.target) for e in edges]
    wrong += [e for e in dict.fromkeys(edges) if places.count((e.source, e.target)) > 1]
    raise_all(
        Problem(
            "argument",
            f"edge {e.source} -> {e.target}",
            f"one of {len(edges)} edges between {stages} stages",
            "each pair of stages once, from an earlier to a later stage",
            "stages are numbered in the order of the dataflow",
            "renumber the stages, or send several values as one",
        )
        for e in wrong
    )


@dataclass(frozen=True)
class Dataflow:
    """The edges of a model, as its actions see them.

    Arguments:
      rank_of: stage -> rank.
      sources: stage -> the stages whose values its forward needs.
      returns: stage -> the stages whose gradients its backward needs.
    """

    rank_of: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    returns: tuple[tuple[int, ...], ...]

    @memo
    def needs(self, a: Action) -> tuple[Action, ...]:
        """What must be done before a computing action; gradients are named by `I`, even if `B` makes them."""
        f, i = Action(Kind.F, a.stage, a.microbatch), Action(Kind.I, a.stage, a.microbatch)
        match a.kind:
            case Kind.F:
                return tuple(Action(Kind.F, s, a.microbatch) for s in self.sources[a.stage])
            case Kind.W:
                return (i,)
            case _:
                return (f, *(Action(Kind.I, s, a.microbatch) for s in self.returns[a.stage]))

    def crosses(self, a: Action, b: Action) -> bool:
        """Whether a value of `a` reaches `b` from another rank."""
        return self.rank_of[a.stage] != self.rank_of[b.stage]


def dataflow(rank_of: tuple[int, ...], edges: Sequence[Edge] | None = None) -> Dataflow:
    """The dataflow of stages on these ranks; without edges, each stage feeds the next one.

    Raises:
      ArgumentError: for edges that do not fit the stages.
    """
    found = chain(len(rank_of)) if edges is None else edges
    check_edges(found, len(rank_of))
    sources, returns = defaultdict(list), defaultdict(list)
    for e in found:
        sources[e.target].append(e.source)
        if e.gradient:
            returns[e.source].append(e.target)
    stages = range(len(rank_of))
    return Dataflow(
        rank_of,
        tuple(tuple(sorted(sources[s])) for s in stages),
        tuple(tuple(sorted(returns[s])) for s in stages),
    )


def makes(a: Action) -> tuple[Action, ...]:
    """What is done once `a` is: a `B` is both its halves."""
    if a.kind is Kind.B:
        return (Action(Kind.I, a.stage, a.microbatch), Action(Kind.W, a.stage, a.microbatch))
    return (a,)


def receive_of(need: Action, by: Action) -> Action:
    """The receive, on the rank of `by`, of what `need` makes there."""
    kind = Kind.RECV_F if need.kind is Kind.F else Kind.RECV_B
    return Action(kind, by.stage, by.microbatch, need.stage)


def value_of(send: Action) -> Action:
    """What a send gives away: a forward, or a gradient named by its `I`."""
    return Action(Kind.F if send.kind is Kind.SEND_F else Kind.I, send.stage, send.microbatch)
