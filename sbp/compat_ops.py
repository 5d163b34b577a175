"""What JAX keeps for itself of how an op is written in other ops; the rest is in `compat`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.state.discharge import discharge_state
from jax.interpreters import mlir

from sbp.compat import Bindable, ClosedJaxpr, JaxprEqn, Primitive
from sbp.untyped import PyTree


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function with its refs as values, each op with its own line.

    Raises:
      NotImplementedError: for a ref in an op that JAX cannot discharge.
    """
    return discharge_state(closed)


def retraced(fun: Callable[..., PyTree], eqn: JaxprEqn) -> ClosedJaxpr:
    """The closed jaxpr of a function of an equation's operands; its ops have the equation's line."""
    with source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(fun)(*(v.aval for v in eqn.invars))


def expansion(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The closed jaxpr that an equation stands for, if JAX has one that the parameters do not hold."""
    primitive: Bindable = eqn.primitive
    params = eqn.params
    hi = primitive.name == "call_hi_primitive"  # of jax 0.12
    run = primitive.to_lojax if hi else lowered_function(primitive)
    return None if run is None else retraced(lambda *args: run(*args, **params), eqn)


@cache
def lowered_function(primitive: Primitive) -> Callable[..., PyTree] | None:
    """The function as which JAX lowers a primitive of its own, such as a sparse product; else None."""
    entry: Any = mlir
    rule: Any = getattr(entry._lowerings.get(primitive), "rule", None)
    if getattr(rule, "__qualname__", "") != "lower_fun.<locals>.f_lowered":
        return None
    held = inspect.getclosurevars(rule).nonlocals
    run = held["fun"]
    home = getattr(run, "func", run).__module__
    if not home.startswith("jax."):
        return None
    return run if held["multiple_results"] else lambda *args, **params: [run(*args, **params)]
