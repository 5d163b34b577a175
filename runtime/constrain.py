"""`constrain`: a function with the constraints inside that make plain `jax.jit` follow a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from sbp import compat
from sbp.compat_mesh import meshless
from sbp.errors import ArgumentError, Problem
from sbp.options import IGNORE, Options
from sbp.passes.face import PipelinePlan, Plan
from sbp.passes.physical.program import Box, Compute, Step, writes
from sbp.passes.program.graph import Const, Operand
from sbp.resolve import to_partition_spec
from sbp.runtime.built import Built
from sbp.runtime.call import Call, parameters
from sbp.runtime.execute import Program
from sbp.runtime.lower import Device, Env, shardings
from sbp.signature import AUTO, NdSbp, has_partial
from sbp.untyped import PyTree, struct, with_sharding_constraint

P = ParamSpec("P")
R = TypeVar("R")


def constrain(fn: Callable[P, R], plan: Plan, *, mesh: Mesh | None = None) -> Callable[P, R]:
    """A function that `jax.jit` runs as a plan says, with constraints on the tensors inside.

    What it cannot say to JAX, `plan.unsaid` lists. Argument shardings alone do not make `jit` follow a plan:
    on a Llama they sent twelve times its bytes.

    Arguments:
      fn: the function that was planned.
      plan: of `Program.plan`, or one that `sbp.load_plan` has read.
      mesh: with the placement's axes; None for the placement's own. On automatic axes the constraints are
        `with_sharding_constraint`s, on explicit ones `reshard`s.

    Raises:
      ArgumentError: for the plan of a program with stages, which is no one program of `jit`.

    >>> import jax.numpy as jnp
    >>> import sbp
    >>> devices = sbp.placement("cpu", shape=(1,))
    >>> plan = sbp.compile(jnp.sin, devices).plan(jnp.zeros(2))
    >>> jax.jit(constrain(jnp.sin, plan))(jnp.zeros(2)).tolist()
    [0.0, 0.0]
    """
    if isinstance(plan, PipelinePlan):
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
    types = (AxisType.Auto,) * len(mesh.axis_names)
    device = ConstrainedProgram(physical, (), mesh=Mesh(mesh.devices, mesh.axis_names, axis_types=types))
    inside: Callable[..., Sequence[jax.Array]] = device.results
    if AxisType.Explicit in mesh.axis_types:  # there types say how tensors lie, but inside of this
        _, outs = shardings(physical, mesh)
        inside = jax.sharding.auto_axes(inside, out_sharding=tuple(outs))
    leaves = [jax.numpy.asarray(x) for x in (*call.leaves, *physical.graph.consts)]
    return jax.tree.unflatten(built.traced.out_tree, inside(*leaves))


@meshless
def _built(program: Program[..., Any], call: Call) -> Built:
    """The program for the shapes of a call, planned as it was."""
    avals = (jax.typeof(x) for x in call.leaves)
    args, kwargs = call.traced([struct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals])
    built = program._prepare(tuple(call.full(args)), {**kwargs, **call.static_kwargs})[1]
    assert isinstance(built, Built)
    return built


@dataclass(frozen=True)
class ConstrainedProgram(Device):
    """Executes the steps of a device on whole tensors: a move is a constraint, and an op is the op itself.

    Arguments:
      mesh: whose axes the constraints name.
    """

    mesh: Mesh | None = None

    def results(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        """What the program gives on whole tensors, closed-over ones included."""
        graph, physical = self.physical.graph, self.physical
        given = zip(graph.inputs, physical.inputs, inputs, strict=True)
        env: Env = {(v, nd): self.laid(x, nd) for v, nd, x in given}
        self.run(physical.steps, env)
        return tuple(self.read(x, nd, env) for x, nd in zip(graph.outputs, physical.outputs, strict=True))

    def laid(self, x: jax.Array, nd: NdSbp) -> jax.Array:
        """A tensor with a signature; as it is, where shards of it are still to be added up."""
        assert self.mesh is not None
        if has_partial(nd) or not x.ndim or compat.is_key(x.dtype):
            return x
        named = NamedSharding(self.mesh, to_partition_spec(nd, x.ndim, self.physical.placement))
        return with_sharding_constraint(x, named)

    def read(self, x: Operand, nd: NdSbp, env: Env) -> jax.Array:
        """A version of a value, or a scalar."""
        return cast("jax.Array", np.asarray(x.value, x.dtype)) if isinstance(x, Const) else env[x, nd]

    def moved(self, x: jax.Array, step: Box) -> jax.Array:
        """What is sent, after the move."""
        return self.laid(x, step.move.after)

    def bucket(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """Moves of a bucket, each by itself; returns the position behind the first."""
        box = steps[i]
        assert isinstance(box, Box)
        with self.marked(box):
            self.move(box, env)
        return i + 1

    def compute(self, step: Compute, env: Env) -> None:
        """Runs one op on whole tensors."""
        node, strategy = step.node, step.strategy
        operands = [self.read(x, nd, env) for x, nd in zip(node.inputs, strategy.operands, strict=True)]
        results = compat.bind(node.primitive, operands, dict(node.params))
        laid = [self.laid(x, nd) for x, nd in zip(results, strategy.results, strict=True)]
        env.update(zip(writes(step), laid, strict=True))
