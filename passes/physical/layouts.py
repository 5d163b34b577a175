"""Updates that turn a tensor over: XLA:GPU gathers and scatters along the outermost dim in memory alone.

A tensor that is gathered or scattered along another dim has that dim outermost (`GpuLayoutAssignment`, for
all-gathers and reduce-scatters); arguments and results of a program have their dims in order. An element-wise
kernel of both goes through them tile by tile, and can write over none of its operands.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from sbp.passes.physical.fusing import KernelOp, ShardSizes
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.program import Box, Compute, Version
from sbp.signature import Split


@dataclass(frozen=True, slots=True)
class Turned:
    """A tensor that is turned over, and what is made of it.

    Arguments:
      tensor: it is gathered or scattered along a dim that is not its outermost one.
      results: of one kernel, each in the space of an argument: what one tensor updates, such as the moments
        of an optimizer and the parameter, is computed at once.
    """

    tensor: Buffer
    results: tuple[Buffer, ...]


def turned(k: Kernels, sizes: ShardSizes, taken: Collection[Buffer]) -> Iterator[Turned]:
    """Every tensor that is turned over and updates arguments, or is a result of the program itself.

    Arguments:
      taken: results that take the spaces of arguments.
    """
    found: dict[Version, Buffer] = {}
    updates: dict[Version, list[Buffer]] = {}
    for t, origin in k.once("origins", lambda: _origins(k, sizes)):
        if origin == t.version:
            found[origin] = t
        elif t in taken:
            updates.setdefault(origin, []).append(t)
    for origin, t in found.items():
        if origin in updates or t in taken:
            yield Turned(t, tuple(updates.get(origin, ())))


def _origins(k: Kernels, sizes: ShardSizes) -> list[tuple[Buffer, Version]]:
    """Tensors that are made element by element of one that is turned over, and that one."""
    walk, found = _Walk(sizes), list[tuple[Buffer, Version]]()
    for i, op in enumerate(k.ops):
        walk.pass_by(op)
        own = ((t, walk.origins.get(t.version)) for t in k.made[i])
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
