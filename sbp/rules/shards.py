"""What a printed program (docs/source.md) calls: primitives by name, and ops on the shards of one device."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike

from sbp.communication.joint import Sending, results_of
from sbp.communication.protocol import Context
from sbp.compat import core, ops
from sbp.errors import ArgumentError, Problem
from sbp.layout import Layout
from sbp.rules.registry import lookup
from sbp.signature import Signature

Lying = tuple[tuple[int, ...], Sequence[Signature]]
"""A logical shape, and the signature that it has: one `S(dim)`, `B` or `P` per mesh axis."""


def bind(name: str, *operands: ArrayLike, **params: Any) -> jax.Array | tuple[jax.Array, ...]:
    """Applies a primitive of JAX that has no public function.

    Arguments:
      name: of the primitive, as `jax.make_jaxpr` prints it.
      operands: arrays and scalars of exactly the types that it takes; nothing is promoted.
      params: all of its parameters; None where there is none.

    Returns:
      Its result, or a tuple of them if it may have several.

    Raises:
      ArgumentError: for a name that no primitive has.

    >>> import jax.numpy as jnp
    >>> bind("integer_pow", jnp.arange(3.0), y=3).tolist()
    [0.0, 1.0, 8.0]
    """
    primitive = _primitive(name)
    results = core.bind(primitive, operands, params)
    return tuple(results) if primitive.multiple_results else results[0]


def on_shards(
    name: str, *operands: jax.Array, takes: Sequence[Lying], gives: Sequence[Lying], **params: Any
) -> jax.Array | tuple[jax.Array, ...]:
    """Runs an op on the shards of one device, with its own communication: halos, exchanges, carries.

    It runs the body of the op's rule (docs/communication.md), inside a `shard_map` over all axes of its mesh.

    Arguments:
      name: of the op.
      operands: this device's shards, padding included.
      takes, gives: logical shape and signature of every operand and every result.
      params: of the primitive, as they are of the whole op.

    Returns:
      This device's shard of the result, or a tuple of them if the op may have several.

    Raises:
      ArgumentError: for a name that no op has, and outside a `shard_map`.

    >>> import jax.numpy as jnp
    >>> from functools import partial
    >>> from jax.sharding import PartitionSpec
    >>> from sbp.placement import placement
    >>> from sbp.signature import S
    >>> lies = ((8,), [S(0)])
    >>> total = partial(on_shards, "cumsum", takes=[lies], gives=[lies], axis=0, reverse=False)
    >>> spec = PartitionSpec("d")
    >>> mesh = placement("cpu", shape=(1,), axes=("d",)).mesh
    >>> run = jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    >>> run(jnp.ones(8)).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    """
    results = run_together(ShardsOp(name, operands, takes, gives, params))
    return results if _primitive(_op_of(name)).multiple_results else results[0]


@dataclass(frozen=True)
class ShardsOp:
    """An op on the shards of one device: what `on_shards` is given for it.

    Arguments:
      name, operands, takes, gives, params: as of `on_shards`.
    """

    name: str
    operands: Sequence[jax.Array]
    takes: Sequence[Lying]
    gives: Sequence[Lying]
    params: Mapping[str, Any]

    def begin(self) -> Sequence[jax.Array] | Sending[list[jax.Array]]:
        """What its body returns."""
        primitive, sizes = _primitive(_op_of(self.name)), _axis_sizes(self.name)
        takes, gives = (
            tuple(Layout(tuple(shape), tuple(nd), tuple(sizes.values())) for shape, nd in some)
            for some in (self.takes, self.gives)
        )
        coords, dtypes = [lax.axis_index(axis) for axis in sizes], [x.dtype for x in self.operands]
        ctx = Context(primitive, self.params, takes, gives, coords, tuple(sizes), dtypes)
        rule = lookup(self.name)
        if rule is None or rule.body is None:
            return ctx.bind(*self.operands)
        return rule.body(ctx, *self.operands)


def run_together(*calls: ShardsOp) -> tuple[jax.Array, ...]:
    """Runs ops on the shards of one device; what they send at one time goes as one message.

    Arguments:
      calls: the ops; none waits for another.

    Returns:
      The results of all, one after the other.

    Raises:
      ArgumentError: as `on_shards`.
    """
    return tuple(x for results in results_of([call.begin() for call in calls]) for x in results)


def _op_of(name: str) -> str:
    return name.partition("[")[0]


def _primitive(name: str) -> core.Bindable:
    """The primitive of a name."""
    known = ops.primitives()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 3)
    legal = "the name of a primitive" + (f", such as {' or '.join(map(repr, near))}" if near else "")
    why = "JAX has no primitive of this name, or has not imported its module"
    fix = "the name as jax.make_jaxpr prints it"
    raise ArgumentError(Problem("argument", "sbp.shards.bind(name, ...)", repr(name), legal, why, fix))


def _axis_sizes(name: str) -> Mapping[str, int]:
    """The axes of the mesh that we are inside of."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return dict(mesh.shape)
    why, fix = "the shards of an op lie on the devices of a mesh", "jax.shard_map(f, mesh=..., ...)"
    where = f"sbp.shards.on_shards({name!r}, ...)"
    raise ArgumentError(Problem("argument", where, "no mesh", "a call inside jax.shard_map", why, fix))
