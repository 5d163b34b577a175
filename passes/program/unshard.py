"""A `shard_map` inside the program: what its devices do, done on one, with a dim per mesh axis.

Its collectives become ops along those dims (a sum, a transpose), so what is left is a plain program, which
the planner lays out as any other; the mesh that it was written for is forgotten.

What a program asks for in JAX's own words are constraints, reshards and `out_sharding=`. Shardings that JAX
infers between these, or derives for a backward pass, bind nobody: there the planner chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from sbp.annotation import Pin, annotate_p
from sbp.compat import core
from sbp.compat.core import Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn
from sbp.compat.untyped import Leaf, all_gather
from sbp.errors import AnnotationError, Problem
from sbp.notation.named_axes import named_signature

WORDS: Mapping[str, tuple[str, str]] = {
    "sharding_constraint": ("sharding", "with_sharding_constraint"),
    "reshard": ("dst_sharding", "reshard"),
    "device_put": ("devices", "device_put"),
    "reshape": ("sharding", "out_sharding"),
}
"""Per primitive the parameter that the user has given, and the function or argument by which they have."""
OTHERS = ("out_sharding", "out_sharding")
BOUND = ("sharding_constraint", "device_put")
"""Which speak of automatic axes too: where types have shardings, the others leave these to JAX."""


def asked_of(eqn: JaxprEqn, scope: str, of_jax: bool = False) -> Pin | None:
    """The annotation that an equation is for its results; None if it is none.

    Arguments:
      scope: its name stack: the transpose of an op was not written by the user.
      of_jax: whether it is in one of JAX's own functions: `jnp.where` reshards to match its other operands.
    """
    name = eqn.primitive.name
    key, words = WORDS.get(name, OTHERS)
    asked = _named(eqn.params.get(key))
    if asked is None or _is_derived(scope) or (of_jax and name == "reshard"):
        return None
    named = named_signature(asked, _ndim(eqn), bound=name in BOUND)
    speaks = named.says_nothing or set(asked.mesh.axis_names) - set(named.free)
    return Pin(None, None, None, named, words=words) if speaks else None


def _is_derived(scope: str) -> bool:
    """Whether JAX has made an op for a backward pass, other than to recompute an op of the user."""
    _, transposed, inner = scope.rpartition("transpose(")
    return bool(transposed) and "rematted_computation" not in inner


def _named(given: Any) -> NamedSharding | None:
    """A named sharding, which one of `device_put` holds in a tuple."""
    only = given[0] if isinstance(given, tuple) and len(given) == 1 else given
    return only if isinstance(only, NamedSharding) else None


def _ndim(eqn: JaxprEqn) -> int:
    aval: Any = eqn.outvars[0].aval
    return len(aval.shape)


SAYING = ("pvary", "pcast")
"""Ops that only say along which axes a value varies."""

REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "psum": jnp.sum,
    "psum_invariant": jnp.sum,
    "pmax": jnp.max,
    "pmin": jnp.min,
}

MeshAxes: TypeAlias = Sequence[tuple[str, ...]]
"""Per dim the mesh axes that split it, outer to inner."""

OnShards: TypeAlias = Callable[..., list[jax.Array]]
"""A function of shards."""


@dataclass(frozen=True)
class ShardMap:
    """The parameters of a `shard_map` equation.

    Arguments:
      body: a jaxpr over shards.
      sizes: of its mesh axes, outer to inner.
      ins, outs: per operand and result its spec.
    """

    body: Jaxpr
    sizes: Mapping[str, int]
    ins: Sequence[MeshAxes]
    outs: Sequence[MeshAxes]


def on_one_device(call: ShardMap, avals: Sequence[Aval]) -> ClosedJaxpr:
    """The jaxpr that computes what a `shard_map` over these logical operands does."""

    def run(*args: jax.Array) -> list[jax.Array]:
        blocks = [_blocks(x, spec, call.sizes) for x, spec in zip(args, call.ins, strict=True)]
        body: OnShards = partial(_evaluated, call.body)
        for name, size in reversed(list(call.sizes.items())):
            axes = [0 if any(name in names for names in spec) else None for spec in call.ins]
            if all(a is None for a in axes):  # vmap wants at least one mapped operand
                body = _repeated(body)
                axes.append(0)
            body = jax.vmap(body, in_axes=tuple(axes), out_axes=0, axis_name=name, axis_size=size)
            if len(axes) > len(call.ins):
                body = _counted(body, size)
        return [_whole(x, spec, call.sizes) for x, spec in zip(body(*blocks), call.outs, strict=True)]

    return jax.make_jaxpr(run)(*avals)


def _evaluated(jaxpr: Jaxpr, *shards: jax.Array, consts: Sequence[ArrayLike] = ()) -> list[jax.Array]:
    """The body where its axes are those of `vmap`s: which of them a value varies along need not be said.

    Raises:
      AnnotationError: for a loop that says it, whose types would no longer agree.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *shards], strict=True))

    def read(atom: Atom) -> Leaf:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        ins, name = [read(a) for a in eqn.invars], eqn.primitive.name
        if name in SAYING:
            outs = ins
        elif name in ("reshard", "sharding_constraint"):  # along axes that are not the body's
            pin = asked_of(eqn, "")
            outs = ins if pin is None else [annotate_p.bind(ins[0], pin=pin)]
        elif name in REDUCTIONS and not eqn.params.get("axis_index_groups"):
            outs = [_reduced(name, x, eqn.params["axes"]) for x in ins]
        elif name in core.CALLS:
            inner, held = core.sub_jaxpr(eqn.params, core.CALLS[name])
            outs = _evaluated(inner, *ins, consts=held)
        elif "psum_invariant" in str(eqn.params) or any(f" {p}[" in str(eqn.params) for p in SAYING):
            raise AnnotationError(_loop_problem(name))
        else:
            outs = core.bind(eqn.primitive, ins, eqn.params)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _reduced(op: str, x: jax.Array, axes: Sequence[str | int]) -> jax.Array:
    """A reduction over mesh axes as one over a dim: the planner knows it then."""
    for name in axes:
        if isinstance(name, str):
            x = REDUCTIONS[op](all_gather(x, name), axis=0)
    own = tuple(a for a in axes if not isinstance(a, str))
    return REDUCTIONS[op](x, axis=own) if own else x


def _loop_problem(name: str) -> Problem:
    return Problem(
        "annotation",
        f"{name} inside jax.shard_map",
        "a loop or a branch whose collectives are checked for the axes that values vary along",
        "loops in shard_map(..., check_vma=False), or outside of it",
        "a shard_map inside a program is read as a program for one device, where no value varies",
        "jax.shard_map(..., check_vma=False)",
    )


def _repeated(body: OnShards) -> OnShards:
    """The body with one more operand, which it does not use."""
    return lambda *args: body(*args[:-1])


def _counted(body: OnShards, size: int) -> OnShards:
    """The body with that operand given."""
    return lambda *args: body(*args, jnp.arange(size))


def _blocks(x: jax.Array, spec: MeshAxes, sizes: Mapping[str, int]) -> jax.Array:
    """The shards: one leading dim for each mesh axis in the spec, in the order of the mesh."""
    shape, place = list[int](), dict[str, int]()
    for d, n in enumerate(x.shape):
        names = spec[d] if d < len(spec) else ()
        for name in names:
            place[name] = len(shape)
            shape.append(sizes[name])
            n //= sizes[name]
        shape.append(n)
    lead = [place[name] for name in sizes if name in place]
    return x.reshape(shape).transpose([*lead, *[d for d in range(len(shape)) if d not in lead]])


def _whole(x: jax.Array, spec: MeshAxes, sizes: Mapping[str, int]) -> jax.Array:
    """The opposite: all mesh axes lead; the shards of those that are not in the spec are equal."""
    named = [name for names in spec for name in names]
    kept = [name for name in sizes if name in named]
    x = x[tuple(slice(None) if name in named else 0 for name in sizes)]
    ndim, order, shape = x.ndim - len(kept), list[int](), list[int]()
    for d in range(ndim):
        names = spec[d] if d < len(spec) else ()
        order += [*(kept.index(name) for name in names), len(kept) + d]
        n = x.shape[len(kept) + d]
        for name in names:
            n *= sizes[name]
        shape.append(n)
    return x.transpose(order).reshape(shape)
