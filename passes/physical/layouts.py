"""Tensors that XLA:GPU lays out anew: for collectives, for convolutions, for the gradients of pools.

It gathers and scatters along the outermost dim in memory alone: updates may have to turn a tensor over. A
tensor that is gathered or scattered along another dim has that dim outermost (`GpuLayoutAssignment`, for
all-gathers and reduce-scatters); arguments and results of a program have their dims in order. An element-wise
kernel of both goes through them tile by tile, and can write over none of its operands.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from sbp.passes.physical.fusion import KernelOp, ShardSizes, is_padded
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.order import Turns
from sbp.passes.physical.program import Box, Compute, Version
from sbp.passes.program.graph import Const
from sbp.signature import Split


@dataclass(frozen=True, slots=True)
class TurnedTensor:
    """A tensor that is turned over, and what is made of it.

    Arguments:
      tensor: it is gathered or scattered along a dim that is not its outermost one.
      results: of one kernel, each in the space of an argument: what one tensor updates, such as the moments
        of an optimizer and the parameter, is computed at once.
    """

    tensor: Buffer
    results: tuple[Buffer, ...]


def turned_tensors(k: Kernels, sizes: ShardSizes, taken: Collection[Buffer]) -> Iterator[TurnedTensor]:
    """Every tensor that is turned over and updates arguments, or is a result of the program itself.

    Arguments:
      taken: results that take the spaces of arguments.
    """
    found: dict[Version, Buffer] = {}
    updates: dict[Version, list[Buffer]] = {}
    for t, origin in k.memo("origins", lambda: _origins(k, sizes)):
        if origin == t.version:
            found[origin] = t
        elif t in taken:
            updates.setdefault(origin, []).append(t)
    for origin, t in found.items():
        if origin in updates or t in taken:
            yield TurnedTensor(t, tuple(updates.get(origin, ())))


def _origins(k: Kernels, sizes: ShardSizes) -> list[tuple[Buffer, Version]]:
    """Tensors that are made element by element of one that is turned over, and that one."""
    walk, found = _Walk(sizes), list[tuple[Buffer, Version]]()
    for i, op in enumerate(k.ops):
        walk.pass_by(op)
        own = ((t, walk.origins.get(t.version)) for t in k.writes[i])
        found += [(t, origin) for t, origin in own if origin is not None]
    return found


@dataclass
class _Walk:
    """A walk through the ops in order.

    Arguments:
      orders: dims of tensors, outer to inner, where a collective says them.
      origins: of what is made element by element of a tensor that is turned over, that tensor.
    """

    sizes: ShardSizes
    orders: dict[Version, tuple[int, ...]] = field(default_factory=dict)
    origins: dict[Version, Version] = field(default_factory=dict)

    def pass_by(self, op: KernelOp) -> None:
        """Notes what an op makes."""
        step = op.step
        if isinstance(step, Box):
            self._moved(step)
        elif op.name == "transpose" and isinstance(step, Compute) and op.reads[0] in self.orders:
            permutation = list(step.node.params["permutation"])
            self._lies(op.writes[0], tuple(permutation.index(d) for d in self.orders[op.reads[0]]))
        elif self.origins and isinstance(step, Compute) and step.node.rule and step.node.rule.pointwise:
            found = next((self.origins[v] for v in op.reads if v in self.origins), None)
            if found is not None:
                self.origins.update(dict.fromkeys(op.writes, found))

    def _moved(self, box: Box) -> None:
        before, after = (box.value, box.move.before), (box.value, box.move.after)
        split = {"all_gather": box.move.old, "reduce_scatter": box.move.new}.get(box.move.kind)
        if isinstance(split, Split):
            rest = (d for d in range(len(self.sizes.shape(box.value))) if d != split.dim)
            self._lies(after, (split.dim, *rest))
        elif box.move.kind == "keep" and before in self.orders:
            self._lies(after, self.orders[before])

    def _lies(self, version: Version, order: tuple[int, ...]) -> None:
        self.orders[version] = order
        long = [d for d in order if self.sizes.shape(version[0])[d] > 1]
        if long != sorted(long):
            self.origins[version] = version


INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Places:
    """Where maxima are, and the zeros to which the gradient is added.

    Arguments:
      version: of the gradient.
      places_bytes: of the numbers: one per dim and maximum.
      zeros_bytes: of the zeros and their copy, as long as there is no gradient.
      first, last: the turns of the op after which they are made, and of the one that reads them.
    """

    version: Version
    places_bytes: float
    zeros_bytes: float
    first: int
    last: int


def places(k: Kernels, sizes: ShardSizes, turn: Turns) -> Iterator[Places]:
    """What the gradients of max pooling hold beside operands and results.

    XLA:GPU makes a scatter of them (`SelectAndScatterExpander`): a pass over the pooled tensor finds where
    each maximum is, one number per dim, and the gradient is added there to zeros. Neither needs what comes
    back through the net, and so they may come long before. The zeros are those of the activation before the
    pool, which are the same constant; if they hide a collective, the addition in place has a copy of them.
    """
    flights = [(turn.born[j], turn.read[j]) for j, op in enumerate(k.ops) if op.sends and k.runs(j)]
    for i, first in turn.maxima_turns.items():
        op = k.ops[i]
        hides = any(begin < first < end for begin, end in flights)
        dims = len(sizes.shape(op.writes[0][0]))
        found = INDEX_BYTES * dims * sizes.elements(op.reads[0])
        zeros = sizes.bytes(op.writes[0]) if hides else 0.0
        yield Places(op.writes[0], found, zeros, first, turn.born[i])


@dataclass(frozen=True, slots=True)
class Copy:
    """An operand as a library wants it.

    Arguments:
      tensor: of which it is a copy.
      bytes: of the copy, which may be padded.
      users: the positions of the ops that read it; the first one has it made.
    """

    tensor: Buffer
    bytes: float
    users: tuple[int, ...]


def copies(k: Kernels, sizes: ShardSizes) -> Iterator[Copy]:
    """What convolutions read that others have laid out otherwise.

    XLA transposes every kernel for cuDNN (`GpuLayoutAssignment` asks for the order that it is fastest in),
    and pads what is padded unevenly before the call (`ConvPaddingLegalization`). Later convolutions of the
    same operand, which are its gradients', read the copy too.
    """
    users: dict[Buffer, list[int]] = {}
    wanted: dict[Buffer, float] = {}
    for i, op in enumerate(k.ops):
        if op.name != "conv_general_dilated" or not k.runs(i):
            continue
        assert isinstance(op.step, Compute)
        image, kernel = (k.source(i, j) for j in range(2))
        for t in (image, kernel):
            if t is not None:
                users.setdefault(t, []).append(i)
        if not _is_forward(op.step, sizes):
            continue
        padded = _padded(op.step, sizes)
        if image is not None and padded > 1:
            wanted.setdefault(image, padded * image.bytes)
        if kernel is not None:
            wanted.setdefault(kernel, kernel.bytes)
    yield from (Copy(t, n, tuple(users[t])) for t, n in wanted.items())


def _spatial(step: Compute, sizes: ShardSizes) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The spatial sizes of image, kernel and result."""
    dims = step.node.params["dimension_numbers"]
    specs = dims.lhs_spec[2:], dims.rhs_spec[2:], dims.out_spec[2:]
    values = (*step.node.inputs, *step.node.outputs)
    shapes = [x.shape if isinstance(x, Const) else sizes.shape(x) for x in values]
    image, kernel, out = ([shape[d] for d in spec] for shape, spec in zip(shapes, specs, strict=True))
    return image, kernel, out


def _is_forward(step: Compute, sizes: ShardSizes) -> bool:
    """Whether it is no gradient: those of images dilate them, those of kernels give less than they are given
    (as XLA's `ConvRewriter` tells them apart)."""
    _, kernel, out = _spatial(step, sizes)
    dilated = any(d > 1 for d in step.node.params["lhs_dilation"])
    return not dilated and all(a <= b for a, b in zip(kernel, out, strict=True))


def _padded(step: Compute, sizes: ShardSizes) -> float:
    """How many times larger an image is with its padding, if that is uneven; else 1."""
    padding: Sequence[tuple[int, int]] = step.node.params["padding"]
    image, _, _ = _spatial(step, sizes)
    if not is_padded(step.node.params):
        return 1.0
    return math.prod((n + low + high) / n for n, (low, high) in zip(image, padding, strict=True) if n)
