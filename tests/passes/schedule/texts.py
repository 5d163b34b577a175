"""What the tests of schedules share: orders written as text, and every named schedule on its own map."""

from collections.abc import Iterator, Sequence

from sbp.passes.schedule.actions import Action, Kind, Schedule
from sbp.passes.schedule.dataflow import Edge, chain
from sbp.passes.schedule.orders import GENERATORS, make

MARKS = (">", "<")


def action(text: str) -> Action:
    """The action of a text such as `F2:5` or `SF2:5>3`."""
    peer = None
    for mark in MARKS:
        if mark in text:
            text, end = text.split(mark)
            peer = int(end)
    kind = text.rstrip("0123456789:")
    stage, microbatch = text.removeprefix(kind).split(":")
    return Action(Kind(kind), int(stage), int(microbatch), peer)


def order(text: str) -> tuple[Action, ...]:
    """The actions of a text, `+` joining those of a pair."""
    return tuple(action(word) for word in text.replace("+", " ").split())


def written(name: str, microbatches: int, rank_of: Sequence[int], *rows: str) -> Schedule:
    """A schedule from the text of each rank."""
    pairs = [order(word)[0] for row in rows for word in row.split() if "+" in word]
    return Schedule(name, microbatches, tuple(rank_of), tuple(map(order, rows)), frozenset(pairs))


def chunks(name: str) -> int:
    """Stages per rank, in these tests."""
    return GENERATORS[name].asks.least_chunks


def named(name: str, ranks: int, microbatches: int, per_rank: int = 0) -> Schedule:
    """A schedule on the map that it asks for."""
    rank_of = GENERATORS[name].asks.map.example(ranks, per_rank or chunks(name))
    return make(name, rank_of, microbatches)


def cases(*names: str) -> Iterator[tuple[str, int, int]]:
    """(name, ranks, micro-batches) of everything that the tests go through."""
    for name in names or GENERATORS:
        for ranks in (2, 4, 8):
            for rounds in (1, 2, 4):
                if rounds >= GENERATORS[name].asks.least_rounds:
                    yield name, ranks, rounds * ranks


def skipping(stages: int) -> tuple[Edge, ...]:
    """A chain with two skips, as a U-net has them; one carries no gradient."""
    skips = (Edge(0, stages - 1), Edge(0, 2), Edge(1, stages - 1, gradient=False))
    own = chain(stages)
    places = {(e.source, e.target) for e in own}
    return own + tuple(
        dict.fromkeys(e for e in skips if e.source < e.target < stages and (e.source, e.target) not in places)
    )
