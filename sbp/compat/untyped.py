"""Names for values that JAX leaves untyped, and its untyped functions with types.

To a type checker most of the names are `Any`. They are used instead of it, so that a signature says what is
meant.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import layout
from jax.sharding import PartitionSpec

Tree = TypeVar("Tree")

PyTree: TypeAlias = Any
"""Arrays in containers that JAX can flatten, or one array: Python has no type for all of these containers."""

Prefix: TypeAlias = Any
"""A pytree prefix of another pytree: each of its leaves stands for all that is below it there."""

Leaf: TypeAlias = Any
"""What a pytree holds: arrays, traced values, `ShapeDtypeStruct`s, numbers; until it is checked, anything."""

TreeDef: TypeAlias = Any
"""The structure of a pytree, a `jax.tree_util.PyTreeDef`: jaxlib has it in C++, without a stub."""

DType: TypeAlias = np.dtype[Any]
"""As JAX has it, for typed PRNG keys too, whose dtype is no `np.dtype` and has no public class."""

Position: TypeAlias = jax.Array | np.integer[Any]
"""An integer scalar of a body: traced, or NumPy's own where it is the same on all devices."""

JaxDevice: TypeAlias = Any
"""A `jax.Device`, which jaxlib has in C++, without a stub."""

# The functions themselves: nothing is wrapped, a call costs what it costs, and frames are JAX's own.
struct: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
partition_spec: Callable[..., PartitionSpec] = PartitionSpec
set_jax: Callable[[str, Any], None] = jax.config.update
# These know bfloat16 and the eight-bit types, as NumPy's do not.
finfo: Callable[[DType], Any] = jnp.finfo
iinfo: Callable[[DType], Any] = jnp.iinfo
block_until_ready: Callable[[Tree], Tree] = jax.block_until_ready
live_arrays: Callable[[], list[jax.Array]] = jax.live_arrays
optimization_barrier: Callable[[Tree], Tree] = lax.optimization_barrier
psum: Callable[..., jax.Array] = lax.psum
pmax: Callable[..., jax.Array] = lax.pmax
pmin: Callable[..., jax.Array] = lax.pmin
all_gather: Callable[..., jax.Array] = lax.all_gather
psum_scatter: Callable[..., jax.Array] = lax.psum_scatter
all_to_all: Callable[..., jax.Array] = lax.all_to_all
ppermute: Callable[..., jax.Array] = lax.ppermute
with_sharding_constraint: Callable[..., jax.Array] = lax.with_sharding_constraint
reshard: Callable[..., jax.Array] = jax.reshard
with_layout_constraint: Callable[..., jax.Array] = layout.with_layout_constraint
