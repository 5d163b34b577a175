"""The schedule as data: what each rank of a pipeline does, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from sbp.errors import Problem, raise_all


class Kind(StrEnum):
    """What an action does. `B` is a whole backward, `I` and `W` are its two halves."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: the gradients of the inputs and of the weights."""
    I = "I"  # noqa: E741  (the field's name of it)
    """Backward of the inputs: the gradients that other stages wait for."""
    W = "W"
    """Backward of the weights, any time after `I`."""
    SEND_F = "SF"
    """Sends a value of a forward to a later stage."""
    RECV_F = "RF"
    """Receives it there."""
    SEND_B = "SB"
    """Sends a gradient to an earlier stage."""
    RECV_B = "RB"
    """Receives it there."""

    # Actions are keys everywhere; the hash of an enum is Python code, and several times slower.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
_OTHER_END = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}
MOST_PROBLEMS = 6
"""Problems of one schedule that are listed."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does for one micro-batch.

    Arguments:
      kind: what it does.
      stage: the stage that computes, sends or receives.
      microbatch: its number, from 0.
      peer: of a transfer, the stage at the other end; it need not be a neighbour.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    @property
    def computes(self) -> bool:
        """Whether it is `F`, `B`, `I` or `W`."""
        return self.kind in COMPUTE

    @property
    def other_end(self) -> Action:
        """Of a send its receive, of a receive its send."""
        assert self.peer is not None
        return Action(_OTHER_END[self.kind], self.peer, self.microbatch, self.stage)

    def __str__(self) -> str:
        """For instance `F2:5`, stage 2 and micro-batch 5; `SF2:5>3` to and `RB2:5<3` from stage 3."""
        text = f"{self.kind}{self.stage}:{self.microbatch}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.kind in SENDS else '<'}{self.peer}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank does, in order; it checks that nothing is done twice, elsewhere or not at all.

    A stage is a chunk of the model, and a rank is whoever runs stages one action at a time: usually a group
    of devices. That the orders of the ranks fit together is another question: see `deadlock` and `simulate`.

    Arguments:
      name: what it is called.
      microbatches: how many there are.
      rank_of: stage -> rank. Ranks are numbered from 0, and each has a stage.
      orders: rank -> its actions.
      pairs: forward actions that run together with the backward that follows at once (DualPipeV).

    Raises:
      ArgumentError: if an action is missing, not wanted, twice, or on the wrong rank.
    """

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Action] = field(default=frozenset())

    def __post_init__(self) -> None:
        raise_all(list(_problems(self))[:MOST_PROBLEMS])

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.orders)

    @property
    def trains(self) -> bool:
        """Whether there is any backward."""
        return any(a.kind in (Kind.B, Kind.I) for order in self.orders for a in order)

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are actions of their own."""
        return any(a.kind in (Kind.I, Kind.W) for order in self.orders for a in order)

    @property
    def has_transfers(self) -> bool:
        """Whether its sends and receives are in it."""
        return any(not a.computes for order in self.orders for a in order)

    def steps(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """The actions of a rank one by one, those that run together as one tuple."""
        actions = iter(self.orders[rank])
        for a in actions:
            yield (a, next(actions)) if a in self.pairs else (a,)

    def __str__(self) -> str:
        """A table: a row per rank, in order; `+` joins what runs together."""
        rows = [["+".join(map(str, step)) for step in self.steps(rank)] for rank in range(self.ranks)]
        columns = max(map(len, rows))
        widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
        head = f"{self.name}: {self.stages} stages on {self.ranks} ranks, {self.microbatches} micro-batches"
        lines = [
            f"rank {rank}  " + " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            for rank, row in enumerate(rows)
        ]
        return "\n".join([head, *(line.rstrip() for line in lines)])


def actions_text(actions: Iterable[Action], most: int = 4) -> str:
    """The first few of many actions, in words."""
    names = [str(a) for a in sorted(actions, key=lambda a: (a.microbatch, a.stage, str(a)))]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _problems(s: Schedule) -> Iterator[Problem]:
    """All that is wrong with a schedule, the shape first: the rest needs it."""
    shape = list(_shape_problems(s))
    yield from shape
    if shape:
        return
    every = Counter(a for order in s.orders for a in order)
    yield from _misplaced(s)
    if twice := [a for a, count in every.items() if count > 1]:
        yield _problem(
            s, f"{actions_text(twice)} more than once", "each action once", "results would be added twice"
        )
    yield from _unfinished(s, frozenset(every))
    yield from _bad_pairs(s)


def _problem(s: Schedule, got: str, legal: str, why: str) -> Problem:
    return Problem("argument", f"schedule {s.name!r}", got, legal, why, "correct the order of the rank named")


def _shape_problems(s: Schedule) -> Iterator[Problem]:
    if s.microbatches < 1:
        yield _problem(s, f"{s.microbatches} micro-batches", "1 or more", "there is nothing to do")
    if not s.rank_of or set(s.rank_of) != set(range(s.ranks)):
        got = f"{s.ranks} orders, and stages on ranks {sorted(set(s.rank_of))}"
        yield _problem(
            s, got, "ranks 0, 1, ... with a stage each", "a rank without a stage has nothing to do"
        )


def _misplaced(s: Schedule) -> Iterator[Problem]:
    """Actions of stages that do not exist, are on another rank, or have no such partner."""
    for rank, order in enumerate(s.orders):
        at = f"on rank {rank}"
        known = [a for a in order if 0 <= a.stage < s.stages and 0 <= a.microbatch < s.microbatches]
        if len(known) < len(order):
            legal = f"stages 0 to {s.stages - 1}, micro-batches 0 to {s.microbatches - 1}"
            yield _problem(s, f"{actions_text(set(order) - set(known))} {at}", legal, "there is no such work")
        if away := [a for a in known if s.rank_of[a.stage] != rank]:
            yield _problem(
                s, f"{actions_text(away)} {at}", f"rank {s.rank_of[away[0].stage]}", "the stage lives there"
            )
        if odd := [a for a in known if not _good_peer(s, a)]:
            why = "a transfer is between stages of two ranks"
            yield _problem(s, f"{actions_text(odd)} {at}", "a stage of another rank after > or <", why)


def _good_peer(s: Schedule, a: Action) -> bool:
    if a.computes or a.peer is None:
        return a.computes and a.peer is None
    downwards = a.kind in (Kind.SEND_F, Kind.RECV_B)
    return (
        (s.trains or a.kind in (Kind.SEND_F, Kind.RECV_F))
        and 0 <= a.peer < s.stages
        and s.rank_of[a.peer] != s.rank_of[a.stage]
        and (a.stage < a.peer if downwards else a.peer < a.stage)
    )


def _unfinished(s: Schedule, every: frozenset[Action]) -> Iterator[Problem]:
    """Work that is missing: a forward, or a backward that is not `B` alone or `I` and `W`."""
    pieces = [(stage, mb) for stage in range(s.stages) for mb in range(s.microbatches)]
    if missing := {Action(Kind.F, *piece) for piece in pieces} - every:
        yield _problem(s, f"no {actions_text(missing)}", "each forward once", "later stages need it")
    if not s.trains:
        wrong = {a for a in every if a.kind is Kind.W}
    else:
        done = {p: [k for k in (Kind.B, Kind.I, Kind.W) if Action(k, *p) in every] for p in pieces}
        wrong = {Action(Kind.B, *p) for p, k in done.items() if k not in ([Kind.B], [Kind.I, Kind.W])}
    if wrong:
        got = f"the backward of {actions_text(wrong)} is not whole"
        yield _problem(s, got, "B once, or I and W once each", "a gradient would be missing or added twice")


def _bad_pairs(s: Schedule) -> Iterator[Problem]:
    follows = {a: b for order in s.orders for a, b in pairwise(order)}
    for a in s.pairs:
        b = follows.get(a)
        if a.kind is Kind.F and b is not None and b.kind is Kind.B and a.microbatch != b.microbatch:
            continue
        yield _problem(
            s, f"the pair {a}+{b}", "F, and at once a B of another micro-batch", "they must be independent"
        )
