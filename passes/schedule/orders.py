"""The named schedules: the order of every rank, and what each asks of the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count
from typing import TypeAlias

from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import Action, Kind, Schedule
from sbp.passes.schedule.requirements import ANY, LOOP, Requirements, V

StepActions: TypeAlias = tuple[Action, ...]
StepOrder: TypeAlias = Callable[[int, int, int, int], Iterator[StepActions]]
"""(rank, ranks, chunks per rank, micro-batches) -> the steps of that rank of a loop or V."""


@dataclass(frozen=True, slots=True)
class Generator:
    """A kind of schedule; in its formulas, F, I and W are the times of one stage.

    Arguments:
      title: its name in the literature.
      asks: what it asks of the model.
      order: the steps of one rank, where the map of its stages is given.
      splits: whether backwards are split into `I` and `W`.
      bubble: how long a rank waits in a step, for p ranks with v stages each and m micro-batches.
      peak: how many activations of a stage live on a rank at most; on rank r if it depends on r.
      source: where it was published.
    """

    title: str
    asks: Requirements
    order: StepOrder | None
    splits: bool
    bubble: str
    peak: str
    source: str


def make(name: str, rank_of: Sequence[int], microbatches: int) -> Schedule:
    """The schedule of that name for stages that live on these ranks.

    Arguments:
      name: a key of `GENERATORS`.
      rank_of: stage -> rank, as the placements of the model have it.
      microbatches: how many there are.

    Raises:
      ArgumentError: if there is no such schedule, or it does not suit the ranks or the number of
        micro-batches.
    """
    if name not in GENERATORS:
        got, legal = repr(name), ", ".join(map(repr, GENERATORS))
        close = get_close_matches(name, GENERATORS, 1, 0.0)[0]
        raise_all([Problem("argument", "schedule", got, legal, "there is none of that name", f"{close!r}")])
    g, rank_of = GENERATORS[name], tuple(rank_of)
    raise_all(g.asks.problems(name, rank_of, microbatches))
    if g.order is None:
        return Schedule(name, microbatches, rank_of, _by_stages(rank_of, microbatches, name != "forward"))
    ranks = len(set(rank_of))
    orders: dict[int, tuple[Action, ...]] = {}
    pairs: list[Action] = []
    for position, rank in enumerate(dict.fromkeys(rank_of)):
        steps = list(g.order(position, ranks, len(rank_of) // ranks, microbatches))
        orders[rank] = tuple(a for step in steps for a in step)
        pairs += [step[0] for step in steps if len(step) == 2]
    return Schedule(name, microbatches, rank_of, tuple(orders[r] for r in range(ranks)), frozenset(pairs))


def _by_stages(rank_of: tuple[int, ...], microbatches: int, trains: bool) -> tuple[tuple[Action, ...], ...]:
    """All forwards, then (of a training) all backwards: the forwards of the model turned round."""
    last = len(rank_of) - 1
    orders = [[Action(Kind.F, *at) for at in row] for row in _wave(rank_of, microbatches)]
    if trains:
        for order, row in zip(orders, _wave(rank_of[::-1], microbatches), strict=True):
            order += [Action(Kind.B, last - stage, mb) for stage, mb in row]
    return tuple(map(tuple, orders))


def _wave(rank_of: tuple[int, ...], microbatches: int) -> list[list[tuple[int, int]]]:
    """rank -> (stage, micro-batch), if all take as long: old micro-batches first, then late stages."""
    done = [0] * len(rank_of)
    orders: list[list[tuple[int, int]]] = [[] for _ in set(rank_of)]
    while done[-1] < microbatches:
        before = [microbatches, *done]
        ready = sorted((mb, -stage) for stage, mb in enumerate(done) if mb < before[stage])
        now: dict[int, tuple[int, int]] = {}
        for mb, stage in ready:
            now.setdefault(rank_of[-stage], (-stage, mb))
        for rank, (stage, mb) in now.items():
            orders[rank].append((stage, mb))
            done[stage] += 1
    return orders


class _Rank:
    """Hands out the actions of a rank's stages, of each in the order of its micro-batches."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages
        self._forwards = [count() for _ in stages]
        self._backwards = [count() for _ in stages]
        self._halves: list[Action] = []

    def do(self, kind: Kind, chunk: int = 0) -> StepActions:
        """The next forward (F) or backward (B, I) of a stage; W is that of its oldest I."""
        if kind is Kind.W:
            return self._weights(next(i for i in self._halves if i.stage == self.stages[chunk]))
        counts = self._forwards if kind is Kind.F else self._backwards
        action = Action(kind, self.stages[chunk], next(counts[chunk]))
        if kind is Kind.I:
            self._halves.append(action)
        return (action,)

    def oldest_weights(self) -> StepActions:
        """The W of the oldest I of any stage."""
        return self._weights(self._halves[0])

    def _weights(self, half: Action) -> StepActions:
        self._halves.remove(half)
        return (Action(Kind.W, half.stage, half.microbatch),)


def _one_f_one_b(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[StepActions]:
    at, warm = _Rank(rank), min(microbatches, ranks - 1 - rank)
    yield from (at.do(Kind.F) for _ in range(warm))
    for _ in range(microbatches - warm):
        yield at.do(Kind.F)
        yield at.do(Kind.B)
    yield from (at.do(Kind.B) for _ in range(warm))


def _interleaved(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[StepActions]:
    """1F1B over all chunks; a round of micro-batches goes through one chunk, then through the next."""
    group, total = microbatches // max(1, microbatches // ranks), microbatches * chunks

    def at(kind: Kind, k: int) -> StepActions:
        chunk, round_ = k // group % chunks, k // (group * chunks)
        chunk = chunk if kind is Kind.F else chunks - 1 - chunk
        return (Action(kind, chunk * ranks + rank, round_ * group + k % group),)

    warm = min(total, (chunks - 1) * group + 2 * (ranks - 1 - rank))
    yield from (at(Kind.F, k) for k in range(warm))
    for k in range(total - warm):
        yield at(Kind.F, warm + k)
        yield at(Kind.B, k)
    yield from (at(Kind.B, k) for k in range(total - warm, total))


def _zb_h1(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[StepActions]:
    """1F1B with split backwards; the first `rank` weight gradients wait, to fill the end."""
    at, warm = _Rank(rank), min(microbatches, ranks - 1 - rank)
    yield from (at.do(Kind.F) for _ in range(warm))
    for k in range(microbatches):
        if k < microbatches - warm:
            yield at.do(Kind.F)
        yield at.do(Kind.I)
        if k >= rank:
            yield at.do(Kind.W)
    yield from (at.do(Kind.W) for _ in range(min(rank, microbatches)))


def _zb_v(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[StepActions]:
    """Few micro-batches take the order of 2 * ranks - 1, less those that are not there."""
    for step in _zb_v_whole(rank, ranks, max(microbatches, 2 * ranks - 1)):
        if step[0].microbatch < microbatches:
            yield step


def _zb_v_whole(rank: int, ranks: int, microbatches: int) -> Iterator[StepActions]:
    at, after = _Rank(rank, 2 * ranks - 1 - rank), ranks - rank
    yield from (at.do(Kind.F, 0) for _ in range(2 * after - 1))
    for _ in range(rank):
        yield at.do(Kind.F, 1)
        yield at.do(Kind.F, 0)
    for _ in range(after):
        yield from (at.do(kind, 1) for kind in (Kind.F, Kind.I, Kind.W))
    for k in range(microbatches - ranks):
        if 2 * ranks - 1 - rank + k < microbatches:
            yield at.do(Kind.F, 0)
        yield from (at.do(kind, 0) for kind in (Kind.I, Kind.W))
        yield from (at.do(kind, 1) for kind in (Kind.F, Kind.I, Kind.W))
    for _ in range(rank):
        yield at.do(Kind.I, 0)
        yield at.do(Kind.I, 1)
    for _ in range(after):
        yield at.do(Kind.I, 0)
        yield at.do(Kind.W, 0)
    yield from (at.do(Kind.W, 1) for _ in range(rank))
    yield from (at.do(Kind.W, 0) for _ in range(rank))


def _dualpipe_v(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[StepActions]:
    """Forwards of one half of the V run together with backwards of the other half."""
    at, after = _Rank(rank, 2 * ranks - 1 - rank), ranks - 1 - rank
    yield from (at.do(Kind.F, 0) for _ in range(2 * after))
    for _ in range(rank + 1):
        yield at.do(Kind.F, 0)
        yield at.do(Kind.F, 1)
    for _ in range(after):
        yield from (at.do(kind, 1) for kind in (Kind.I, Kind.W, Kind.F))
    for k in range(microbatches - 2 * ranks + rank + 1):
        first = (at.do(Kind.F, 0), at.do(Kind.B, 1))
        # On the last rank the first backward is of the forward just before: nothing else is there to overlap.
        yield from first if k == after == 0 else [first[0] + first[1]]
        yield at.do(Kind.F, 1) + at.do(Kind.B, 0)
    for _ in range(after):
        yield at.do(Kind.B, 1)
        yield at.do(Kind.F, 1) + at.do(Kind.B, 0)
    # The second half of these leaves its weight gradients for the end.
    for k, chunk in enumerate((1, 0) * (rank + 1)):
        yield at.do(Kind.B if k <= rank else Kind.I, chunk)
    for _ in range(after):
        yield at.oldest_weights()
        yield at.do(Kind.I, 0)
    yield from (at.oldest_weights() for _ in range(rank + 1))


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(
        "GPipe",
        Requirements(ANY, 1, None),
        None,
        splits=False,
        bubble="(p-1)(F+I+W) for v = 1",
        peak="vm",
        source="Huang et al., 2019, arXiv:1811.06965",
    ),
    "1f1b": Generator(
        "1F1B",
        Requirements(LOOP),
        _one_f_one_b,
        splits=False,
        bubble="(p-1)(F+I+W)",
        peak="min(m, p-r)",
        source="Narayanan et al., 2021, arXiv:2006.09503",
    ),
    "interleaved": Generator(
        "Interleaved 1F1B",
        Requirements(LOOP, 2, None, equal_rounds=True),
        _interleaved,
        splits=False,
        bubble="(p-1)(F+I+W)",
        peak="pv + p-1 - 2r",
        source="Narayanan et al., 2021, arXiv:2104.04473",
    ),
    "zb-h1": Generator(
        "ZB-H1",
        Requirements(LOOP),
        _zb_h1,
        splits=True,
        bubble="(p-1)(F+I-W)",
        peak="min(m, p)",
        source="Qi et al., 2024, arXiv:2401.10241",
    ),
    "zb-v": Generator(
        "ZB-V",
        Requirements(V, 2, 2),
        _zb_v,
        splits=True,
        bubble="(p-1)F for F = I = W",
        peak="2p",
        source="Qi et al., 2024, arXiv:2405.15362",
    ),
    "dualpipe-v": Generator(
        "DualPipeV",
        Requirements(V, 2, 2, least_rounds=2),
        _dualpipe_v,
        splits=True,
        bubble="(p-1)(F&B+I-2W)",
        peak="2p + 1",
        source="Liu et al., 2024, arXiv:2412.19437; halved to a V by Sea AI Lab, 2025",
    ),
    "forward": Generator(
        "Forward only",
        Requirements(ANY, 1, None),
        None,
        splits=False,
        bubble="(p-1)F for v = 1",
        peak="0",
        source="the forwards of GPipe",
    ),
}
"""name -> the kind of schedule; "forward" has no backward, for evaluation."""
