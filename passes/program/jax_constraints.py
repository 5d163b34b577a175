"""Signatures that a program asks for in JAX's own words: constraints, reshards, `out_sharding=`.

Shardings that JAX infers between these, or derives for a backward pass, bind nobody: there the planner
chooses.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding

from sbp.annotation import Pin
from sbp.compat.core import JaxprEqn
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
