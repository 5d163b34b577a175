"""`constrain`: a function with the constraints inside that make plain `jax.jit` follow a plan."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
from jax.sharding import AxisType, Mesh

from sbp.compat.untyped import PyTree, struct
from sbp.errors import ArgumentError, Problem
from sbp.options import IGNORE, Options
from sbp.passes.explain.internal_errors import public
from sbp.passes.face import Plan
from sbp.runtime.call.binding import Call, parameters
from sbp.runtime.constraints.programs import ConstrainedProgram, ExplicitProgram
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.program.program import Program
from sbp.signature import AUTO

P = ParamSpec("P")
R = TypeVar("R")


def constrain(fn: Callable[P, R], plan: Plan, *, mesh: Mesh | None = None) -> Callable[P, R]:
    """The function with constraints on its tensors, so that `jax.jit` follows a plan.

    `plan.constraint_gaps` lists what JAX cannot express. The shardings of the arguments alone are not
    enough: with only these, `jit` sent twelve times the plan's bytes for a Llama.

    Arguments:
      fn: the function that was planned.
      plan: from `Program.plan` or `sbp.load_plan`.
      mesh: a mesh with the placement's axes; None for the placement's own. On automatic axes the constraints
        are `with_sharding_constraint`s. On explicit axes they are `reshard`s and `out_sharding`s, and partial
        sums are `unreduced` if JAX has a rule for that.

    Raises:
      ArgumentError: for the plan of a program with stages, which `jit` cannot run as one program.

    >>> import jax.numpy as jnp
    >>> import sbp
    >>> devices = sbp.placement("cpu", shape=(1,))
    >>> plan = sbp.compile(jnp.sin, devices).plan(jnp.zeros(2))
    >>> jax.jit(constrain(jnp.sin, plan))(jnp.zeros(2)).tolist()
    [0.0, 0.0]
    """
    if plan.stages:
        why, fix = "each stage is a program of its own", "sbp.compile(fn, placement), which runs it"
        where, legal = "constrain(fn, plan)", "the plan of one program"
        raise ArgumentError(Problem("argument", where, "a plan with stages", legal, why, fix))
    there = mesh or plan.placement.mesh

    @functools.wraps(fn, updated=())
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        positions = [i for i, x in enumerate(args) if _is_static(x)]
        own, _ = parameters(fn, (), (), positions, [k for k, x in kwargs.items() if _is_static(x)])
        options = Options(plan=plan, constraints=IGNORE)  # the plan says where tensors lie
        program = Program(fn, plan.placement, AUTO, AUTO, own, options)
        return cast(R, _constrained(program, own.take(args, kwargs), there))

    return run


def _is_static(x: PyTree) -> bool:
    """Whether an argument is a Python value, as those are that `jit` does not trace."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and not any(hasattr(leaf, "shape") for leaf in leaves)


def _constrained(program: Program[..., Any], call: Call, mesh: Mesh) -> PyTree:
    """What a call gives, on the leaves that are given."""
    built = _built(program, call)
    physical = built.plan.physical
    assert physical is not None
    executes = ExplicitProgram if AxisType.Explicit in mesh.axis_types else ConstrainedProgram
    device = executes(physical, (), mesh=mesh)
    leaves = [jax.numpy.asarray(x) for x in (*call.leaves, *physical.graph.consts)]
    return jax.tree.unflatten(built.traced.out_tree, device.results(*leaves))


@public
def _built(program: Program[..., Any], call: Call) -> CompiledProgram:
    """The program for the shapes of a call, planned as it was."""
    avals = (jax.typeof(x) for x in call.leaves)
    args, kwargs = call.trace_args([struct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals])
    built = program._prepare(tuple(call.full(args)), {**kwargs, **call.static_kwargs})[1]
    assert isinstance(built, CompiledProgram)
    return built
