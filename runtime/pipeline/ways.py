"""Ways between placements: `jax.device_put` within a process, a crossing between processes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import NamedSharding

from sbp import compat
from sbp.compat import is_key
from sbp.runtime.pipeline.crossing import Crossing
from sbp.runtime.processes.here import brought, is_alone, takes_part
from sbp.untyped import DType, Leaf, struct


@dataclass(frozen=True, slots=True)
class Cargo:
    """A tensor that is sent.

    Arguments:
      shape, dtype: of the tensor.
      leaves, comes: how it lies on both sides.
    """

    shape: tuple[int, ...]
    dtype: DType
    leaves: NamedSharding
    comes: NamedSharding

    @property
    def is_own(self) -> bool:
        """Whether all of it is a matter of this process alone."""
        return is_alone(self.leaves, self.comes)

    @property
    def crossing(self) -> Crossing:
        """Its way between processes. Numbers have no dim that could be cut, and keys go as their words."""
        example = jax.eval_shape(self.packed, struct(self.shape, self.dtype))
        return Crossing(example.shape, example.dtype, self.leaves, self.comes)

    def packed(self, x: jax.Array) -> jax.Array:
        """As it crosses."""
        words = jax.random.key_data(x) if is_key(self.dtype) else x
        return words if words.ndim else words[None]

    def unpacked(self, x: jax.Array) -> jax.Array:
        """As it was."""
        if not is_key(self.dtype):
            return x if self.shape else x[0]
        keys: jax.Array = jax.random.wrap_key_data(x, impl=jax.random.key_impl(compat.zeros((), self.dtype)))
        return keys


@dataclass
class Ways:
    """The ways that the arrays of a program take, each made when it is first taken."""

    known: dict[Hashable, Crossing] = field(default_factory=dict)

    def send(self, x: jax.Array | None, cargo: Cargo) -> jax.Array | None:
        """A tensor on the other side, as far as this process has devices there; all that have some on either
        side must come here in one order.

        Arguments:
          x: where this process has devices that send it.
        """
        if cargo.is_own:
            return None if x is None else jax.device_put(x, cargo.comes)
        if not takes_part(cargo.leaves) and not takes_part(cargo.comes):
            return None
        if cargo not in self.known:
            self.known[cargo] = cargo.crossing
        come = self.known[cargo].run(None if x is None else cargo.packed(x))
        return None if come is None else cargo.unpacked(come)

    def bring_all(self, xs: Sequence[Leaf], comes: Sequence[NamedSharding]) -> Sequence[jax.Array | None]:
        """Arguments where a placement wants them, as `bring` does it."""
        if is_alone(*comes) and jax.process_count() == 1:
            moved: Sequence[jax.Array] = jax.device_put(list(xs), list(comes))  # at once is cheaper
            return moved
        return [self.bring(x, to) for x, to in zip(xs, comes, strict=True)]

    def bring(self, x: Leaf, comes: NamedSharding) -> jax.Array | None:
        """An argument where a placement wants it; all processes come here in one order."""
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            # One array of all processes, such as a result: some may have nothing of it.
            if x.sharding == comes:
                return x if takes_part(comes) else None
            held = x if takes_part(x.sharding) else None
            return self.send(held, Cargo(x.shape, x.dtype, x.sharding, comes))
        if is_alone(comes):
            own: jax.Array = jax.device_put(x, comes)
            return own
        return brought(x, comes) if takes_part(comes) else None
