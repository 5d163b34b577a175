"""What each device does with its shard of a table, inside `shard_map`."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from sbp.compat.untyped import partition_spec


@dataclass(frozen=True, slots=True)
class TableShard:
    """The part of an array that a device has.

    Arguments:
      lead: the sizes of the array's dims that count rows.
      shape: of the part.
      first: where it begins, along each dim.
    """

    lead: tuple[int, ...]
    shape: tuple[int, ...]
    first: tuple[ArrayLike, ...]

    def rows(self, local: jax.Array) -> jax.Array:
        """The rows of the array that some rows of the part are, both counted in one."""
        places = jnp.unravel_index(local, self.shape[: len(self.lead)])
        found = jnp.zeros(local.shape, np.int32)
        for place, first, n in zip(places, self.first, self.lead, strict=False):
            found = found * np.int32(n) + place.astype(np.int32) + first
        return found

    def index(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        """The index into the part of some rows of the array; out of bounds for those that are elsewhere."""
        places, left = list[jax.Array](), rows
        for n in self.lead[:0:-1]:
            places.insert(0, lax.rem(left, np.int32(n)))
            left = lax.div(left, np.int32(n))
        places.insert(0, left)
        own = [p - f for p, f in zip(places, self.first, strict=False)]
        inside = functools.reduce(
            jnp.logical_and, [(i >= 0) & (i < n) for i, n in zip(own, self.shape, strict=False)]
        )
        return tuple(jnp.where(inside, i, np.int32(n)) for i, n in zip(own, self.shape, strict=False))


def whole_shard(lead: Sequence[int], shape: Sequence[int]) -> TableShard:
    """All of an array."""
    return TableShard(tuple(lead), tuple(shape), (0,) * len(shape))


def on_shards(
    body: Callable[..., jax.Array],
    lead: Sequence[int],
    shape: Sequence[int],
    sharding: NamedSharding,
    in_specs: Sequence[PartitionSpec],
    out_spec: PartitionSpec,
) -> Callable[..., jax.Array]:
    """A function of whole arrays whose body each device runs on its parts.

    Arguments:
      body: takes the `TableShard` of the table, then the parts.
      lead, shape, sharding: of the table.
    """

    def run(*parts: jax.Array) -> jax.Array:
        return body(_own(lead, shape, sharding), *parts)

    return jax.shard_map(
        run, mesh=sharding.mesh, in_specs=tuple(in_specs), out_specs=out_spec, check_vma=False
    )


def axes_of(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """The mesh axes that split a dim."""
    entry: Any = sharding.spec[dim] if dim < len(sharding.spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def columns_spec(sharding: NamedSharding, lead: int, ndim: int) -> PartitionSpec:
    """How rows lie that every device has, each its own columns of them: `[n, ...]`."""
    return partition_spec(None, *(axes_of(sharding, d) or None for d in range(lead, ndim)))


def _own(lead: Sequence[int], shape: Sequence[int], sharding: NamedSharding) -> TableShard:
    """The shard of the device that runs this."""
    sizes, first = list[int](), list[ArrayLike]()
    for dim, n in enumerate(shape):
        axes = axes_of(sharding, dim)
        sizes.append(n // math.prod(sharding.mesh.shape[a] for a in axes))
        first.append(lax.axis_index(axes) * np.int32(sizes[-1]) if axes else np.int32(0))
    return TableShard(tuple(lead), tuple(sizes), tuple(first))
