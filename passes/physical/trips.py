"""One trip of a loop as ops, and the first trip of loops from which XLA:GPU takes it.

What a trip sends only to stack it is sent in the next one (collective_pipeliner.cc). The first trip then lies
before the loop, among the ops there, and what of it waits for nobody runs beside their collectives: layers
that are recomputed for their gradients need no gradient yet.

Tensors of scalars alone, such as masks, that a loop makes again XLA takes out, and merges equals. So a mask
that is in memory before a loop stays there until the last loop is done whose body makes the same one;
recomputed layers (`jax.checkpoint` in a scan) do. One scalar that is repeated is no such tensor: XLA takes it
into the loop.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sbp.passes.physical.fusion import Fusing, KernelOp, ShardSizes, op_of
from sbp.passes.physical.kernels import Kernels, kernels
from sbp.passes.physical.program import Border, Box, Compute, Step, Version, reads
from sbp.passes.program.control import Port, ports, trips
from sbp.passes.program.graph import Const
from sbp.signature import NdSbp


@dataclass(frozen=True, slots=True)
class TripOps:
    """What one trip of a loop computes, or a branch.

    Arguments:
      ops: those of the body, after those that take slices and before those that stack.
      whole_inputs: what enters whole.
      whole: what leaves, but for what is stacked.
      donors: what is carried to the next trip, and what entered in its place.
    """

    ops: Sequence[KernelOp]
    whole_inputs: Sequence[Version]
    whole: Sequence[Version]
    donors: Mapping[Version, Version]


def trip_ops(step: Border, k: int, sizes: ShardSizes, sunk: Collection[Version] = ()) -> TripOps:
    """A trip through body `k`: a slice of a scanned tensor is a loop, and so is what goes into a stack.

    Arguments:
      sunk: what a trip makes itself, though it enters (`sunk_into`).
    """
    inputs = set(step.node.bodies[k].inputs)
    slices, held, stacked, whole = list[Version](), list[Version](), list[Version](), list[Version]()
    taken = dict[Version, Version]()
    for p, nd in zip(ports(step.node), step.inner_signatures, strict=True):
        entering = [(v, nd) for v in p.enters if v in inputs]
        made_inside = p.stacked or _outside(step, p, nd) in sunk
        leaving = [(x, nd) for x in p.left_by(k) if isinstance(x, int)]
        (slices if made_inside else held).extend(entering)
        (stacked if p.stacked else whole).extend(leaving)
        if not p.stacked and entering and leaving:
            taken[leaving[0]] = entering[0]
    ops = [
        *(KernelOp(Fusing.LOOP, (), (v,)) for v in slices),
        *_sinking(step.bodies[k], sizes),
        *(KernelOp(Fusing.ROOT, (v,), ()) for v in stacked),
    ]
    return TripOps(ops, held, whole, taken)


def sunk_into(op: KernelOp) -> list[Version]:
    """What a loop makes itself in each trip, though it enters."""
    if not isinstance(op.step, Border):
        return []
    read = {*op.reads, *op.straight}
    return [v for v in reads(op.step) if v not in read]


def _sinking(steps: Iterable[Step], sizes: ShardSizes) -> Iterator[KernelOp]:
    """Steps as ops. A scalar that is repeated enters no loop, unless it is carried: XLA repeats it in each
    trip, where it is merged into what reads it (while_loop_constant_sinking.cc)."""
    repeated = set[Version]()
    for step in steps:
        op = op_of(step, sizes.physical)
        if op.name == "broadcast_in_dim" and not op.reads:
            repeated.update(op.writes)
        if isinstance(step, Border) and len(step.bodies) == 1 and not repeated.isdisjoint(op.reads):
            wired = list(zip(ports(step.node), step.inner_signatures, strict=True))
            other = {_outside(step, p, nd) for p, nd in wired if p.stacked or p.result is not None}
            op = replace(op, reads=[v for v in op.reads if v not in repeated or v in other])
        yield op


def _outside(step: Border, p: Port, nd: NdSbp) -> Version | None:
    """The tensor outside that enters at a port, if any."""
    x = None if p.operand is None else step.node.inputs[p.operand]
    return (x, p.outer(nd)) if isinstance(x, int) else None


def sent_later(k: Kernels) -> list[KernelOp]:
    """What a trip of a loop sends only to stack it: XLA sends it in the next trip."""
    stacked = [t for i, op in enumerate(k.ops) if not op.writes and op.step is None for t in k.reads[i]]
    alone = [k.ops[t.maker] for t in dict.fromkeys(stacked) if t.maker >= 0 and len(t.readers) == 1]
    return [op for op in alone if isinstance(op.step, Box) and op.sends]


def peeled_ops(steps: Sequence[Step], sizes: ShardSizes) -> list[KernelOp]:
    """Steps as ops, with the first trips of loops before them that are taken out."""
    out = list[KernelOp]()
    for op in _sinking(steps, sizes):
        step = op.step
        trip = None if step is None else _first_trip(step, sizes)
        if trip is not None:
            assert isinstance(step, Border)
            out.extend(replace(x, peeled=True) for x in (*_entering(step), *trip.ops))
            op = _without(op, step, trip)
        out.append(op)
    return out


def _first_trip(step: Step, sizes: ShardSizes) -> TripOps | None:
    """The first trip of a loop that sends something one trip later."""
    if not isinstance(step, Border) or len(step.bodies) != 1 or trips(step.node) < 2:
        return None
    trip = trip_ops(step, 0, sizes)
    if not any(op.sends and isinstance(op.step, Box) for op in trip.ops):
        return None
    if not sent_later(kernels(trip.ops, sizes, trip.whole, trip.whole_inputs)):
        return None
    # Slices are read from what is outside, and what is stacked stays until the loop has its stack.
    return replace(trip, ops=[op for op in trip.ops if op.step is not None])


def _entering(step: Border) -> Iterator[KernelOp]:
    """What enters the first trip: whole tensors under other names, and slices."""
    for p, nd in zip(ports(step.node), step.inner_signatures, strict=True):
        outside = None if p.operand is None else step.node.inputs[p.operand]
        read = () if outside is None or isinstance(outside, Const) else ((outside, p.outer(nd)),)
        kind = Fusing.VIEW if read and not p.stacked else Fusing.LOOP
        yield from (KernelOp(kind, read, ((v, nd),)) for v in p.enters)


def _without(op: KernelOp, step: Border, trip: TripOps) -> KernelOp:
    """A loop whose first trip has run: it goes on with what this one has left."""
    wired = list(zip(ports(step.node), step.inner_signatures, strict=True))
    left = [(x, nd) for p, nd in wired for x in p.left_by(0) if isinstance(x, int)]
    made = {v for inner in trip.ops for v in inner.writes}
    first = [v for v in dict.fromkeys(left) if v in made]
    carried = frozenset(v for v in first if v in trip.donors)
    stacks = {_outside(step, p, nd) for p, nd in wired if p.stacked}
    rest = [v for v in op.reads if v not in op.straight or v in stacks]
    return replace(op, reads=[*rest, *first], straight=carried | op.straight.intersection(rest))


def read_in_loops(k: Kernels) -> None:
    """Lets loops read what is in memory and what their bodies make as well."""
    steps = [op.step for op in k.ops if op.step is not None]
    loops = [(i, op.step) for i, op in enumerate(k.ops) if isinstance(op.step, Border)]
    if not loops:
        return
    there, numbers = {t.version: t for t in k.tensors if t.maker >= 0 and t.written}, _Numbers()
    known = {n: there[v] for v, n in _of_scalars(steps, numbers) if v in there and n not in numbers.repeated}
    for i, loop in loops if known else ():
        for _, n in (found for body in loop.bodies for found in _of_scalars(body, numbers)):
            if n in known and known[n].maker < i:
                known[n].readers.setdefault(i, False)


class _Numbers:
    """Numbers of tensors by how they are made: equal ones are one tensor.

    What a tensor is made of stands in its key by number: a key of keys would be as long as all paths to it.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}
        self.repeated: set[int] = set()

    def of(self, step: Compute, operands: tuple[int | str, ...], result: int) -> int:
        node, nd = step.node, step.strategy.results[result]
        params = tuple((name, repr(value)) for name, value in sorted(node.params.items()))
        n = self.known.setdefault((node.op, params, operands, result, nd), len(self.known))
        if node.op == "broadcast_in_dim" and not any(isinstance(x, int) for x in operands):
            self.repeated.add(n)
        return n


def _of_scalars(steps: Iterable[Step], numbers: _Numbers) -> Iterator[tuple[Version, int]]:
    """What some steps make of scalars alone, with its number."""
    found: dict[Version, int] = {}
    for step in steps:
        if not isinstance(step, Compute) or step.node.bodies:
            continue
        read = list(zip(step.node.inputs, step.strategy.operands, strict=True))
        if not all(isinstance(x, Const) or (x, nd) in found for x, nd in read):
            continue
        operands = tuple(f"{x.dtype} {x}" if isinstance(x, Const) else found[x, nd] for x, nd in read)
        for j, version in enumerate(zip(step.node.outputs, step.strategy.results, strict=True)):
            found[version] = numbers.of(step, operands, j)
            yield version, found[version]
