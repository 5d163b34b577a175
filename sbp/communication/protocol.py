"""The protocol: `Context`, through which a body sends, and `Communication`, what a rule declares of it.

docs/communication.md explains both, method by method.

Checks what a rule declares of a collective: its kind, its bytes, and the place in its reason.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from sbp.compat import core
from sbp.compat.untyped import DType, Position, PyTree, all_gather, all_to_all, pmax, pmin, ppermute, psum
from sbp.errors import Problem, raise_all
from sbp.layout import Layout, chunk_sizes


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective inside the body of an op, beyond those that the signatures of operands and results imply.

    Arguments:
      kind: one of `COLLECTIVES`: "permute" for a halo, "all_gather" for a carry.
      axes: the placement axes that take part, outer to inner.
      wire_bytes: the bytes that one device sends.
      operand: the operand that is sent.
      reason: one sentence; `{axes}` stands for their names.
      operand_part: a key of the part of the operand's shards that is sent: ops that send the same part share
        one collective. None if the op computes what it sends.
      result: the only result that needs it: if nobody uses that, nothing is sent. None if it is always sent.

    Raises:
      RuleError: if the kind is unknown, the bytes are negative, or the reason has another place than
        `{axes}`.
    """

    kind: str
    axes: tuple[int, ...]
    wire_bytes: float
    operand: int
    reason: str
    operand_part: Hashable = None
    result: int | None = None

    def __post_init__(self) -> None:
        raise_all(communication_problems(self.kind, self.wire_bytes, self.reason))


@dataclass(frozen=True, slots=True)
class Context:
    """One op on one device, with the layouts of its operands and results.

    Arguments:
      primitive, params: the op, its parameters with logical shapes.
      operands, results: the layout of each.
      coords: this device's traced position along each placement axis.
      names: the placement axes' names, for bodies that send.
      dtypes: of the operands.
      reports: collects the counts of bodies; None if nobody asks.
      collectives: collects the collectives that the body runs, as kind and axes; None if nobody asks.
      keys: what came of the keys of an exchange that were sent before the body runs; None if it sends them.
    """

    primitive: core.Primitive
    params: Mapping[str, Any]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    coords: Sequence[Position]
    names: Sequence[str] = ()
    dtypes: Sequence[DType] = ()
    reports: list[PyTree] | None = None
    collectives: list[tuple[str, tuple[int, ...]]] | None = None
    keys: PyTree | None = None

    def bind(self, *args: ArrayLike, **changed: Any) -> list[jax.Array]:
        """The primitive on local arrays, with some parameters changed."""
        return core.bind(self.primitive, args, {**self.params, **changed})

    def report(self, counts: PyTree) -> None:
        """Reports some numbers of this device to the collector of counts."""
        if self.reports is not None:
            self.reports.append(counts)

    def says(self, kind: str, axes: Sequence[int]) -> None:
        """Notes a collective, for the comparison with the declarations of the rule."""
        if self.collectives is not None:
            self.collectives.append((kind, tuple(axes)))

    def offset(self, layout: Layout, dim: int) -> Position:
        """The logical position of this shard's first row along `dim`, an int32 scalar."""
        axes = layout.axes(dim)
        sizes = chunk_sizes(layout.shape[dim], axes, layout.hierarchy)
        parts = [self.coords[a] * np.int32(c) for a, c in zip(axes, sizes, strict=True)]
        return sum(parts, start=np.int32(0))

    def length(self, layout: Layout, dim: int) -> Position:
        """The number of real rows of this shard along `dim`, an int32 scalar."""
        size: Position = np.int32(layout.shape[dim])
        axes = layout.axes(dim)
        for axis, c in zip(axes, chunk_sizes(layout.shape[dim], axes, layout.hierarchy), strict=True):
            size = jnp.clip(size - self.coords[axis] * np.int32(c), np.int32(0), np.int32(c))
        return size

    def positions(self, layout: Layout, dim: int) -> jax.Array:
        """The logical position of every row of this shard along `dim`, int32."""
        return self.offset(layout, dim) + lax.iota(np.int32, layout.local[dim])

    def mask(self, x: jax.Array, layout: Layout, dims: Sequence[int], fill: ArrayLike) -> jax.Array:
        """`x` with the padding along `dims` replaced by `fill`; `x` itself where there is none."""
        for dim in dims:
            if layout.has_padding(dim):
                rows = lax.broadcasted_iota(np.int32, x.shape, dim)
                x = jnp.where(rows < self.length(layout, dim), x, jnp.asarray(fill, x.dtype))
        return x

    def is_first(self, axes: Sequence[int]) -> jax.Array | np.bool_:
        """Whether this device is at position 0 along all of `axes`."""
        out: jax.Array | np.bool_ = np.bool_(True)
        for axis in axes:
            out = jnp.logical_and(out, self.coords[axis] == 0)
        return out

    def group(self, axes: Sequence[int]) -> int:
        """The number of devices along `axes` together."""
        return math.prod(self.operands[0].hierarchy[a] for a in axes)

    def rank(self, axes: Sequence[int]) -> Position:
        """This device's position along `axes` together, outer to inner, an int32 scalar."""
        at: Position = np.int32(0)
        for axis in axes:
            at = at * np.int32(self.operands[0].hierarchy[axis]) + self.coords[axis]
        return at

    def gather(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """The `x` of every device along `axes`, outer to inner, in a new first dim."""
        self.says("all_gather", axes)
        whole = x[None]
        for axis in reversed(axes):
            whole = all_gather(whole, self.names[axis], axis=0, tiled=True)
        return whole

    def shift(self, x: jax.Array, axes: Sequence[int], by: int) -> jax.Array:
        """The `x` of the device `by` places before this one along `axes`; zeros where there is none."""
        n = self.group(axes)
        return self.permute(x, axes, [(i, i + by) for i in range(n) if 0 <= i + by < n])

    def permute(self, x: jax.Array, axes: Sequence[int], pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """The `x` of the device that sends to this one; zeros where none does.

        Arguments:
          pairs: (sender, receiver) ranks along `axes`; each rank at most once on either side.
        """
        self.says("permute", axes)
        names = tuple(self.names[a] for a in axes)
        return ppermute(x, names if len(names) > 1 else names[0], pairs)

    def all_to_all(self, x: jax.Array, axis: int) -> jax.Array:
        """Row i of `x` to the device at position i along `axis`, whose row for this one becomes row i."""
        self.says("all_to_all", (axis,))
        return all_to_all(x, self.names[axis], split_axis=0, concat_axis=0, tiled=True)

    def total(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """The sum over the devices along `axes`."""
        self.says("all_reduce", axes)
        return psum(x, tuple(self.names[a] for a in axes))

    def maximum(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """The maximum over the devices along `axes`; NaN may be lost (`sbp.communication.bits`)."""
        self.says("all_reduce", axes)
        return pmax(x, tuple(self.names[a] for a in axes))

    def minimum(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """The minimum over the devices along `axes`; NaN may be lost (`sbp.communication.bits`)."""
        self.says("all_reduce", axes)
        return pmin(x, tuple(self.names[a] for a in axes))


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
"""The collectives between the devices of one placement."""


@cache
def unknown_places(reason: str) -> tuple[str, ...]:
    """The places of a reason that nothing fills in; only `{axes}` is known.

    >>> unknown_places("needs {rows} of {axes}")
    ('{rows}',)
    """
    try:
        places = [name for _, name, _, _ in Formatter().parse(reason) if name is not None]
    except ValueError:
        return ("a brace that is not closed",)
    return tuple(dict.fromkeys(f"{{{name}}}" for name in places if name != "axes"))


def reason_problem(where: str, reason: str) -> Iterator[Problem]:
    """The problem of the places of a reason, if there is one."""
    if unknown := unknown_places(reason):
        why = f"nothing fills in {' and '.join(unknown)}: a plan knows the names of the axes alone"
        fix = "write numbers into the text (an f-string with {{axes}}), and braces of its own twice"
        yield Problem("rule", where, repr(reason), "{axes}, or no place", why, fix)


def communication_problems(kind: str, wire_bytes: float, reason: str) -> Iterator[Problem]:
    """The problems of a `Communication`, by its fields."""
    if kind not in COLLECTIVES:
        legal, why = ", ".join(COLLECTIVES), "the plan lists it among the collectives of these kinds"
        plain = str(kind).lower().replace("-", "").replace("_", "")
        close = next((k for k in COLLECTIVES if k.replace("_", "") == plain), "")
        other = "'all_reduce' for a sum, 'permute' to a neighbour"
        fix = f"did you mean {close!r}?" if close else other
        yield Problem("rule", "Communication(kind=...)", repr(kind), legal, why, fix)
    if not wire_bytes >= 0:
        why, fix = "it is what one device sends", "0 for nothing: the plan then leaves it out"
        yield Problem("rule", "Communication(wire_bytes=...)", str(wire_bytes), "0 or more bytes", why, fix)
    yield from reason_problem("Communication(reason=...)", reason)
