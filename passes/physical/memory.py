"""What a device holds at a time, as XLA:GPU lays it out: which tensors are alive when most is.

Of what fusion leaves in memory (kernels.py):

- Arguments and results lie in spaces of their own for the whole step. A result takes the space of a donated
  argument of its shape; where that is still read after the result is there, XLA copies, and it is counted.
- Everything else shares one space, and is there from its kernel to its last reader. A kernel writes over an
  operand of the same size that nobody else needs, if it reads it element by element (buffer assignment).
- A loop carries values in place, and writes what it stacks into the stack at once; what a trip holds beside
  that is there once. What it only sends before it stacks it, XLA sends one trip later (its collective
  pipeliner), and so holds for one trip more; the first trip then runs before the loop (trips.py).
- What is gathered along an inner dim is turned over: what it updates is written apart (layouts.py). Ops hold
  more inside: exchanges of rows what they send (communication/wire.py), gradients of max pooling where the
  maxima are, convolutions their operands as the library wants them (layouts.py).
- An all-reduce adds up in place: its result lies where its operand was made. Those that XLA sends as one are
  packed into a space of their own (schedule_nodes.py).
- What is made of little comes as late as it can, and what makes space as early as it can (order.py); where
  there are collectives to hide, XLA's scheduler has its own order (latency_hiding.py). What a collective
  makes is there from its beginning, and what it reads until its end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sbp.passes.physical.fusion import PRODUCTS, Fusing, KernelOp, Seconds, ShardSizes
from sbp.passes.physical.kernels import Buffer, Kernels, is_row_by_row, kernels
from sbp.passes.physical.layouts import Copy, TurnedTensor, copies, places, turned_tensors
from sbp.passes.physical.order import BodyOrder, Turns, WholeProgram, turns
from sbp.passes.physical.program import Border, Box, Physical, Step, Version
from sbp.passes.physical.schedule_nodes import sent_together
from sbp.passes.physical.trips import TripOps, peeled_ops, read_in_loops, sent_later, sunk_into, trip_ops


@dataclass(frozen=True, slots=True)
class Live:
    """A tensor that a device holds.

    Arguments:
      version: which tensor, under which signature.
      bytes: of one device's shard.
    """

    version: Version
    bytes: float


@dataclass(frozen=True, slots=True)
class Spaces:
    """What of a body's tensors lies in spaces that are counted elsewhere.

    Arguments:
      donors: what is there at the end, and whose space it takes, which is there at the beginning.
      foreign: what is there at the end in a space that is counted elsewhere.
      seconds: of an op; None where memory is short, and collectives are not hidden at its cost.
      hastens: whether what frees memory runs as soon as it can.
      in_loop: whether it is the body of a loop or of a branch.
    """

    donors: Mapping[Version, Version]
    foreign: frozenset[Version]
    seconds: Seconds | None = None
    hastens: bool = True
    in_loop: bool = False


@dataclass(frozen=True, slots=True)
class Peak:
    """What a device holds when it holds most.

    Arguments:
      live: the tensors.
      hastens: where only an order that takes little memory keeps the limit, whether what frees memory runs as
        soon as it can in it; None where collectives are hidden at the cost of memory.
      course: bytes turn by turn, those that lie unused between counted.
      ops: the ops that run, each with its turn.
    """

    live: Sequence[Live]
    hastens: bool | None = None
    course: Sequence[float] = ()
    ops: Sequence[tuple[int, Step]] = ()


def peak(
    steps: Sequence[Step],
    sizes: ShardSizes,
    kept: Iterable[Version],
    held: Iterable[Version] = (),
    donated: Mapping[Version, Version] | None = None,
    seconds: Seconds | None = None,
    limit_bytes: float = math.inf,
    holes: float = 0.0,
    whole: WholeProgram | None = None,
) -> Peak:
    """What a device holds when it holds most.

    Arguments:
      kept: versions that are needed after the last step.
      held: versions that are there before the first one. What is read beside them is not counted.
      donated: results, and the argument whose memory each takes.
      seconds: of an op; None where collectives are not hidden at the cost of memory.
      limit_bytes: what there is; what needs more does not hide collectives either, as XLA's scheduler.
      holes: of what shares the space, what lies unused between.
      whole: the kernels of all of this, without a loop, in their order with these seconds, if known.
    """
    taken = donated or {}
    if whole is None:
        ops, there = peeled_ops(steps, sizes), list(dict.fromkeys(held))
        known = {*there, *(v for op in ops for v in op.writes)}
        results = [v for v in dict.fromkeys(kept) if v in known]
        k, order = kernels(ops, sizes, results, there), None
    else:
        k, sizes, order = whole.k, whole.sizes, whole.order
        there, results = list(whole.live_before), list(whole.live_after)
    rest = [Live(v, sizes.bytes(v)) for v in (*there, *(v for v in results if v not in taken))]
    rest_bytes = _bytes(rest)
    spaces = Spaces(taken, frozenset(results), seconds=seconds)
    laid = Laid.of(k, sizes, spaces, order, None if whole is None else whole.groups)
    sweep = swept(k, sizes, spaces, laid)

    def found(sweep: Sweep, hastens: bool | None) -> Peak:
        course = [rest_bytes + (1.0 + holes) * n for n in itertools.accumulate(sweep.change)]
        ran = ((sweep.turn.born[i], op.step) for i, op in enumerate(k.ops) if k.runs(i))
        begun = [(turn, step) for turn, step in ran if step is not None]
        return Peak([*rest, *sweep.most()], hastens, course, begun)

    hiding = sweep.most_bytes
    if rest_bytes + (1.0 + holes) * hiding <= limit_bytes or seconds is None:
        return found(sweep, None)
    # The program is lowered so that it runs in the better one of two orders (sections.py).
    others = {h: swept(k, sizes, replace(spaces, seconds=None, hastens=h), laid) for h in (True, False)}
    hastens = min(others, key=lambda h: others[h].most_bytes)
    if hiding <= others[hastens].most_bytes:
        return found(sweep, None)
    return found(others[hastens], hastens)


def _bytes(live: Iterable[Live]) -> float:
    return sum(x.bytes for x in live)


@dataclass(frozen=True)
class Laid:
    """What is the same in whatever order kernels run.

    Arguments:
      donors: results, and the arguments whose spaces they take.
      turned_tensors, copies: what is laid out otherwise.
      groups: collectives that are sent as one.
      order: with collectives hidden, if it is known.
    """

    donors: Mapping[Buffer, Buffer]
    turned_tensors: Sequence[TurnedTensor]
    copies: Sequence[Copy]
    groups: Sequence[tuple[int, ...]]
    order: BodyOrder | None = None

    @classmethod
    def of(
        cls,
        k: Kernels,
        sizes: ShardSizes,
        spaces: Spaces,
        order: BodyOrder | None = None,
        together: Sequence[tuple[int, ...]] | None = None,
    ) -> Laid:
        """That of a body; what is sent as one is looked for unless it is known."""
        there = {t.version: t for t in k.tensors if t.maker < 0}
        taken = {k.ends[v]: there[a] for v, a in spaces.donors.items() if v in k.ends and a in there}
        together = sent_together(k) if together is None else together
        return cls(taken, list(turned_tensors(k, sizes, taken)), list(copies(k, sizes)), together, order)


def alive(k: Kernels, sizes: ShardSizes, spaces: Spaces, laid: Laid | None = None) -> list[Live]:
    """What lies in the space that all share, when most does.

    Arguments:
      laid: of this body, if it is known.
    """
    return swept(k, sizes, spaces, laid).most()


def swept(k: Kernels, sizes: ShardSizes, spaces: Spaces, laid: Laid | None) -> Sweep:
    """All births and deaths in the space that all share."""
    read_in_loops(k)
    laid = laid or Laid.of(k, sizes, spaces)
    taken = laid.donors
    own = {k.ends[v] for v in spaces.foreign if v in k.ends}
    elsewhere = {t for t in k.tensors if t.maker < 0 or t in own}
    sent = sent_later(k)
    order = laid.order if spaces.seconds is not None else None
    together, in_loop = laid.groups, spaces.in_loop
    turn = turns(k, elsewhere, spaces.seconds, sent, spaces.hastens, together, order, in_loop)
    sweep = Sweep(turn)
    _add_sent_later(k, turn, sweep, sent)
    _add_tensors(k, turn, sweep, elsewhere, taken)
    for x in laid.turned_tensors:
        _turn_over(k, x, turn, sweep, taken)
    for c in laid.copies:
        at = [turn.born[i] for i in c.users]
        sweep.add(Live(c.tensor.version, c.bytes), min(at), max(at))
    for p in places(k, sizes, turn):
        sweep.add(Live(p.version, p.places_bytes), p.first, p.last)
        if p.first < p.last:  # the gradient takes their space
            sweep.add(Live(p.version, p.zeros_bytes), p.first, p.last - 1)
    packed = {i for x in turn.packed_reductions for i in x.members}
    for i, op in enumerate(k.ops):
        if k.runs(i) and k.writes[i] and i not in packed:
            _write_over(k, i, turn, sweep)
        if op.held_bytes and k.runs(i):
            sweep.add(Live(op.writes[0], op.held_bytes), turn.born[i], _held_until(k, i, turn))
        if isinstance(op.step, Border) and k.runs(i):
            sweep.add_body(turn.born[i], _inside(op, sizes, spaces.seconds))
    return sweep


def _held_until(k: Kernels, i: int, turn: Turns) -> int:
    """The turn in which what an op holds inside goes: the parts of a product are added up by its only reader,
    if that computes what it reads."""
    readers = [r for t in k.writes[i] for r in t.readers] if k.ops[i].name in PRODUCTS else []
    computed = len(readers) == 1 and readers[0] < k.end and k.ops[readers[0]].kind is not Fusing.CALL
    return turn.read[readers[0]] if computed else turn.read[i]


def _add_sent_later(k: Kernels, turn: Turns, sweep: Sweep, sent: Sequence[KernelOp]) -> None:
    """Adds what the trip before has left to send, until that is sent; that of this trip stays to its end."""
    ids = {id(op) for op in sent}
    for i, op in enumerate(k.ops):
        for t in k.reads[i] if id(op) in ids else ():
            sweep.add(Live(t.version, t.bytes), 0, turn.read[i])
            t.readers[k.end] = False


def _add_tensors(
    k: Kernels, turn: Turns, sweep: Sweep, elsewhere: Collection[Buffer], taken: Mapping[Buffer, Buffer]
) -> None:
    """Adds what ops make: what shares the space, what is copied to where it belongs, and packed sums."""
    packed = {i for x in turn.packed_reductions for i in x.members}
    found = {t: _summed(k, t, elsewhere) for t in taken if t.maker not in packed}
    sums = {t: made for t, made in found.items() if made is not None}
    parts = set(sums.values())
    for t in k.tensors:
        if t in parts:
            continue
        if t not in elsewhere:
            until = max((turn.read[r] for r in t.readers), default=turn.read[t.maker])
            sweep.add(Live(t.version, t.bytes), turn.born[t.maker], until, t)
        elif t in taken and t.maker >= 0:
            # A sum takes the space of its parts, and if that is not the argument's, it is copied there last.
            made = sums.get(t, t)
            born, over = turn.born[made.maker], taken[t].readers.get(made.maker, True)
            others = (r for r in taken[t].readers if r not in (made.maker, k.end))
            until = max((turn.read[r] for r in others), default=-1)
            if until > born or not over:
                last = max(until, born) if made is t else turn.read[k.end]
                sweep.add(Live(t.version, t.bytes), born, last, made)
    for x in turn.packed_reductions:
        for t in (t for i in x.members for t in k.writes[i]):
            sweep.add(Live(t.version, t.bytes), x.first, x.last)


def _summed(k: Kernels, t: Buffer, elsewhere: Collection[Buffer]) -> Buffer | None:
    """What an all-reduce adds up in place to make a tensor, if nobody else needs it."""
    if t.maker < 0 or not isinstance(box := k.ops[t.maker].step, Box) or box.move.kind != "all_reduce":
        return None
    parts = k.reads[t.maker]
    alone = len(parts) == 1 and len(parts[0].readers) == 1 and parts[0].maker >= 0
    return parts[0] if alone and parts[0] not in elsewhere else None


def _turn_over(
    k: Kernels, x: TurnedTensor, turn: Turns, sweep: Sweep, taken: Mapping[Buffer, Buffer]
) -> None:
    """Adds what is written apart: results that cannot take the spaces of operands, which are copied there
    when all else is done, and a turned tensor that is a result itself."""
    at = min((turn.born[t.maker] for t in x.results), default=turn.born[x.tensor.maker])
    for t in x.results:
        if max((turn.read[r] for r in taken[t].readers if r < k.end), default=-1) >= at:
            sweep.add(Live(t.version, t.bytes), at, turn.read[k.end])
    if x.tensor in taken:
        sweep.add(Live(x.tensor.version, x.tensor.bytes), turn.born[x.tensor.maker], at)


def _write_over(k: Kernels, i: int, turn: Turns, sweep: Sweep) -> None:
    """Lets the results of a kernel take the spaces of operands that nobody needs after it."""
    for t in k.writes[i]:
        if t not in sweep.lives or is_row_by_row(k, i, t):
            continue
        for y in k.reads[i]:
            fits = y.bytes == t.bytes and y.readers[i]
            if (
                fits
                and y in sweep.lives
                and sweep.lives[y][1] == turn.read[i]
                and sweep.give(y, turn.born[i])
            ):
                break


class Sweep:
    """One sweep over births and deaths, not a set per step: a step of 96 layers has tens of thousands of
    steps, and thousands of tensors alive."""

    def __init__(self, turn: Turns) -> None:
        self.turn = turn
        self.change = [0.0] * (max(turn.read) + 2)
        self.found: list[tuple[Live, int, int, Buffer | None]] = []
        self.lives: dict[Buffer, tuple[int, int, float]] = {}
        self.given: dict[Buffer, int] = {}
        self.bodies: dict[int, list[Live]] = {}

    def add(self, live: Live, born: int, dies: int, tensor: Buffer | None = None) -> None:
        """A tensor, from one turn to another, both included."""
        self.found.append((live, born, dies, tensor))
        self.change[born] += live.bytes
        self.change[dies + 1] -= live.bytes
        if tensor is not None:
            self.lives[tensor] = born, dies, live.bytes

    def give(self, tensor: Buffer, since: int) -> bool:
        """Lets another tensor have the space of this one from a turn on, to its last one; whether it is
        still to be had."""
        if tensor in self.given:
            return False
        self.given[tensor] = since
        _, dies, n = self.lives[tensor]
        self.change[since] -= n
        self.change[dies + 1] += n
        return True

    def add_body(self, turn: int, live: list[Live]) -> None:
        """What a loop or a branch holds while it runs."""
        self.bodies[turn] = live
        n = sum(x.bytes for x in live)
        self.change[turn] += n
        self.change[turn + 1] -= n

    @property
    def most_bytes(self) -> float:
        """How much is there when most is."""
        return max(0.0, *itertools.accumulate(self.change))

    def most(self) -> list[Live]:
        """What is there when most is."""
        at, most, now = -1, 0.0, 0.0
        for turn, change in enumerate(self.change):
            now += change
            if now > most:
                at, most = turn, now
        here = [
            live
            for live, born, dies, t in self.found
            if born <= at <= dies and not (t in self.given and at >= self.given[t])
        ]
        return [*here, *self.bodies.get(at, ())]


def _inside(op: KernelOp, sizes: ShardSizes, seconds: Seconds | None) -> list[Live]:
    """What the hungriest body of a loop or a branch holds beyond what is counted outside of it.

    What enters whole is the outer tensor, and a carried value takes the space of the last one.
    """
    step = op.step
    assert isinstance(step, Border)
    bodies = [_body(trip_ops(step, k, sizes, sunk_into(op)), sizes, seconds) for k in range(len(step.bodies))]
    return max(bodies, key=_bytes, default=[])


def _body(trip: TripOps, sizes: ShardSizes, seconds: Seconds | None) -> list[Live]:
    spaces = Spaces(trip.donors, frozenset(trip.donors), seconds, in_loop=True)
    return alive(kernels(trip.ops, sizes, trip.whole, trip.whole_inputs), sizes, spaces)


@dataclass(frozen=True)
class SmallestPeak:
    """The least memory that plans are known to need.

    Arguments:
      physical: the program with the smallest peak that was found.
      bytes: what it needs, by the evaluator.
      bound_bytes: what every plan needs, as the search counts it.
    """

    physical: Physical
    bytes: float
    bound_bytes: float
