"""Ops that stand for others: what an equation is in ops that the compiler knows."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from sbp.compat import core, ops
from sbp.compat.core import Aval, ClosedJaxpr, JaxprEqn
from sbp.passes.program.control import CONTROL
from sbp.passes.program.unshard import REDUCTIONS, ShardMap, on_one_device
from sbp.rules import REGISTRY


def _shard_map(eqn: JaxprEqn) -> ClosedJaxpr:
    """A program for several devices as one for one device."""
    return on_one_device(ShardMap(*core.shard_map_specs(eqn.params)), core.operands_of(eqn))


def _while(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """A loop whose rows end one by one, as `vmap` makes it: it runs while any row does, and only rows that
    still run change. None for a loop with one condition."""
    params = eqn.params
    test_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
    if not test_jaxpr.out_avals[0].shape:
        return None
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    test: Callable[..., Sequence[jax.Array]] = jaxpr_as_fun(test_jaxpr)
    body: Callable[..., Sequence[jax.Array]] = jaxpr_as_fun(body_jaxpr)

    def run(*operands: jax.Array) -> list[jax.Array]:
        of_test, of_body = operands[:n_test], operands[n_test : n_test + n_body]

        def runs(carry: Sequence[jax.Array]) -> jax.Array:
            return test(*of_test, *carry)[0]

        def trip(carry: Sequence[jax.Array]) -> list[jax.Array]:
            mine = runs(carry)
            new = body(*of_body, *carry)
            return [_selected(mine, x, old) for x, old in zip(new, carry, strict=True)]

        return lax.while_loop(lambda carry: _any(runs(carry)), trip, list(operands[n_test + n_body :]))

    return ops.retrace(run, eqn)


def _any(rows: jax.Array) -> jax.Array:
    """Whether any row holds, as a maximum of numbers: split rows then send one number."""
    return lax.reduce_max(rows.astype(np.int32), tuple(range(rows.ndim))) > 0


def _selected(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` in the rows (leading dims) where `rows` holds, else `old`."""
    return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - rows.ndim)), new, old)


def _empty(eqn: JaxprEqn) -> ClosedJaxpr:
    """Memory that nobody has written: zeros are as good, and may lie in any way."""
    made: Aval = eqn.outvars[0].aval
    return ops.retrace(lambda *_: lax.full(made.shape, 0, made.dtype), eqn)


def _reduction(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """A reduction over a dim that `vmap` named: positions instead of names. None over the axes of a mesh."""
    axes = eqn.params["axes"]
    if not all(isinstance(a, int) for a in axes) or eqn.params.get("axis_index_groups"):
        return None
    reduce = REDUCTIONS[eqn.primitive.name]
    return ops.retrace(lambda *args: [reduce(x, axis=tuple(axes)) for x in args], eqn)


ASSOCIATIVE: dict[str, Callable[..., jax.Array]] = {
    "add": lax.reduce_sum,
    "mul": lax.reduce_prod,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
    "xor": lax.reduce_xor,
}
"""Per op of two numbers the reduction by it."""


def _reduce(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """A reduction by functions that are associative ops, from where it starts; None by any others."""
    body, axes, n = eqn.params["jaxpr"].jaxpr, eqn.params["dimensions"], len(eqn.outvars)
    equations = {e.outvars[0]: e for e in body.eqns}
    steps: list[Any] = [equations.get(v) for v in body.outvars]
    pairs = [{a, b} for a, b in zip(body.invars[:n], body.invars[n:], strict=True)]
    found = [
        e is not None and e.primitive.name in ASSOCIATIVE and {*e.invars} == p
        for e, p in zip(steps, pairs, strict=True)
    ]
    if not all(found):
        return None

    def run(*operands: jax.Array) -> list[jax.Array]:
        reduced = [ASSOCIATIVE[e.primitive.name](x, axes) for e, x in zip(steps, operands[:n], strict=True)]
        starts = (lax.broadcast(start, x.shape) for start, x in zip(operands[n:], reduced, strict=True))
        return [e.primitive.bind(s, x, **e.params) for e, s, x in zip(steps, starts, reduced, strict=True)]

    return ops.retrace(run, eqn)


def _nothing(eqn: JaxprEqn) -> ClosedJaxpr:
    """Results without an element are known."""
    made: list[Aval] = [v.aval for v in eqn.outvars]
    return ops.retrace(lambda *_: [lax.full(x.shape, 0, x.dtype) for x in made], eqn)


def is_empty(eqn: JaxprEqn) -> bool:
    """Whether it gives arrays of numbers, and none at all in them."""
    if eqn.primitive.name == "broadcast_in_dim" or eqn.effects or not eqn.outvars:
        return False
    made: list[Aval] = [v.aval for v in eqn.outvars]
    return all(0 in x.shape and isinstance(x.dtype, np.dtype) for x in made)


PASSED = {
    "reshard": "an annotation: see `unshard`",
    "sharding_constraint": "an annotation: see `unshard`",
    "layout_constraint": "the order of dims in memory is XLA's",
    "relayout": "the order of dims in memory is XLA's",
    "with_memory_space_constraint": "the placement decides",
    "xla_metadata_value": "a remark for XLA",
    "shard_alike": "the plan decides",
    "stage": "a value as it is",
    "tie": "the second operand, in an order that the graph has anyway",
}
"""Ops whose results are their last operands, and what they say beside that."""


def is_passed(eqn: JaxprEqn) -> bool:
    """Whether the results of an equation are its last operands, as those of a reduction of no dims are.

    Derivatives under a mesh with explicit axes hold such sums.
    """
    name = eqn.primitive.name
    return name in PASSED or (name.startswith("reduce_") and eqn.params.get("axes") == ())


EXPANDED: dict[str, Callable[[JaxprEqn], ClosedJaxpr | None]] = {
    "shard_map": _shard_map,
    "while": _while,
    "empty": _empty,
    "reduce": _reduce,
    **dict.fromkeys(REDUCTIONS, _reduction),
}
"""Per primitive the closed jaxpr of an equation, or None if this one stays as it is."""


def expansion(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation stands for, if it is to be seen through but does not hold its body; else None."""
    name = eqn.primitive.name
    if name not in core.CALLS and is_empty(eqn):
        return _nothing(eqn)
    if name in EXPANDED:
        return EXPANDED[name](eqn)
    known = name in REGISTRY or name in CONTROL or name in core.CALLS
    return None if known else ops.expansion(eqn)


def plain(x: Any) -> Any:
    """A parameter with Python integers for NumPy's, which `vmap` puts into dims and sizes: they print, hash
    and compare otherwise; and without the shardings that a user's mesh gives to types."""
    if isinstance(x, np.integer | np.bool_):
        return x.item()
    if isinstance(x, NamedSharding):
        return None
    if isinstance(x, tuple):
        items = [plain(v) for v in x]
        if all(a is b for a, b in zip(items, x, strict=True)):
            return x
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, list):
        items = [plain(v) for v in x]
        return x if all(a is b for a, b in zip(items, x, strict=True)) else items
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return _plain_fields(x)
    return x


def _plain_fields(x: Any) -> Any:
    """A dataclass of dims, such as RaggedDotDimensionNumbers."""
    held = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
    new = {name: plain(v) for name, v in held.items()}
    changed = {name: v for name, v in new.items() if v is not held[name]}
    return dataclasses.replace(x, **changed) if changed else x


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """An equation's parameters, each as `plain` gives it."""
    return {name: plain(x) for name, x in params.items()}
