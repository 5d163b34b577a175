"""The program of one device as a jaxpr whose equations know their steps: what is printed is what runs."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp.communication.protocol import Context
from sbp.compat import core
from sbp.compat.untyped import partition_spec
from sbp.notation.resolve import to_partition_spec
from sbp.passes.explain.collectives import scope_of_rows
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Box, Compute, Physical, Step, writes
from sbp.passes.pipeline.slots import Piece
from sbp.passes.program.views import Said
from sbp.runtime.lower.device import Device, Env
from sbp.runtime.lower.local_kernels import run_bodies
from sbp.runtime.lower.lowering import device_function
from sbp.runtime.pipeline.stage_programs import SlotLayout, arrays_read, piece_function
from sbp.signature import NdSbp, Partial

MOST_INLINE = 24
"""Equations of a body that are printed one by one; a longer one is a call by name."""
IS = "is"
"""The function of a named call that gives what it takes, and says of which step that is."""
STEP = re.compile(r"sbp\.step(\d+)")


@dataclass(frozen=True, eq=False)
class NamedCall:
    """A call of a public function that stands for many equations.

    Arguments:
      function: its name, as the module imports it.
      args: the arguments behind the arrays, by name; "" for those by position.
      ops: of ops on shards, the name of each and what its body knows; none for another function.
    """

    function: str
    args: tuple[tuple[str, Any], ...] = ()
    ops: tuple[tuple[str, Context], ...] = ()


@dataclass(frozen=True)
class TracedDevice:
    """What one device executes.

    Arguments:
      jaxpr: of its shards.
      closed_arrays: per input, the array of the program that it is; None for an argument.
      consts: arrays that stand in it, for its constvars.
      steps: of the plan, in the order in which they were traced: `step_of` gives the position.
    """

    jaxpr: core.Jaxpr
    closed_arrays: Sequence[Any]
    consts: Sequence[Any]
    steps: Sequence[tuple[Step, ...]]


def _shapes(*args: jax.Array, call: NamedCall, results: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Arrays of the types of the results: a named call is only printed, and never runs."""
    return [core.zeros(tuple(r.shape), r.dtype) for r in results]


named_call_p = core.make_op("sbp_named_call", _shapes)
"""Stands in the jaxpr for what the source says by the name of a function."""


@dataclass(frozen=True)
class SourceDevice(Device):
    """Executes steps as `Device` does; bodies that talk or are long become calls by name.

    Arguments:
      steps: takes the steps that are traced.
    """

    steps: list[tuple[Step, ...]] = field(default_factory=list)

    def mark(self, *steps: Step) -> AbstractContextManager[None]:
        """The user's line, the rows of the plan, and the number of the step."""
        self.steps.append(steps)
        source = steps[0].source if isinstance(steps[0], Box) else steps[0].node.source
        rows = scope_of_rows([row for s in steps for row in s.rows])
        scope = f"sbp.step{len(self.steps) - 1}"
        return core.source_context(source.info, f"{rows}/{scope}" if rows else scope)

    def move_tensor(self, x: jax.Array, step: Box) -> jax.Array:
        """A move; reductions that look at bits are calls by name."""
        old = step.move.old
        if step.move.kind == "all_reduce" and isinstance(old, Partial):
            names = tuple(self.physical.placement.axes[a] for a in step.move.axes)
            real = jnp.issubdtype(x.dtype, jnp.inexact)
            if step.owned and real:
                return _named(NamedCall("owned_sum", (("", names),)), [x], [x])[0]
            if old.op == "prod":
                return _named(NamedCall("all_product", (("", names),)), [x], [x])[0]
            if not step.owned and old.op != "sum" and real:
                return _named(NamedCall("extremum", (("", old.op), ("", names))), [x], [x])[0]
        return super().move_tensor(x, step)

    def bucket(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """All moves of one bucket; what comes of each is marked as its own."""
        end = super().bucket(steps, i, env)
        for box in steps[i:end]:
            assert isinstance(box, Box)
            version = box.value, box.move.after
            with self.mark(box):
                (env[version],) = _named(NamedCall(IS), [env[version]], [env[version]])
        return end

    def compute(self, steps: Sequence[Compute], env: Env) -> None:
        """Ops on the shards: one, or some that send together."""
        rule = steps[0].node.rule
        if rule is None or rule.body is None or not steps[0].node.outputs:
            super().compute(steps, env)
            return
        said: list[list[Said]] = [[] for _ in steps]
        ops = [self.local_op(s, self.operands(s, env), None, x) for s, x in zip(steps, said, strict=True)]

        def run(operands: Sequence[Sequence[jax.Array]]) -> list[Sequence[jax.Array]]:
            return run_bodies([replace(op, operands=xs) for op, xs in zip(ops, operands, strict=True)])

        tried = jax.make_jaxpr(run)([op.operands for op in ops])
        if not any(said) and _length(tried.jaxpr) <= MOST_INLINE:
            super().compute(steps, env)
            return
        results = [core.struct(x.shape, x.dtype) for x in tried.out_avals]
        call = NamedCall("on_shards", ops=tuple((op.node.op, op.ctx) for op in ops))
        made = [version for step in steps for version in writes(step)]
        env.update(zip(made, _named(call, [x for op in ops for x in op.operands], results), strict=True))


def _named(call: NamedCall, operands: Sequence[Any], results: Sequence[Any]) -> list[jax.Array]:
    given = tuple(core.struct(x.shape, x.dtype) for x in results)
    out: list[jax.Array] = named_call_p.bind(*operands, call=call, results=given)
    return out


def _length(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those of calls and loops counted."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    nested = [p for e in inner.eqns for p in jax.tree.leaves(list(e.params.values()), is_leaf=_is_jaxpr)]
    return len(inner.eqns) + sum(_length(p) - 1 for p in nested if _is_jaxpr(p))


def _is_jaxpr(x: object) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def step_of(eqn: core.JaxprEqn) -> int:
    """The position of the step that an equation is of; -1 for none."""
    found = STEP.findall(core.scope_of(eqn.source_info))
    return int(found[-1]) if found else -1


def trace_device(physical: Physical, takes: Evaluator | None) -> TracedDevice:
    """Traces the program of one device, without devices.

    Arguments:
      takes: says in which sections it runs; None for all at once.
    """
    graph, placement = physical.graph, physical.placement
    seen: list[tuple[Step, ...]] = []
    sections = () if takes is None or takes.sections is None else takes.sections.sections
    on_device = device_function(physical, None, sections, made=partial(SourceDevice, steps=seen))
    specs = [
        [to_partition_spec(nd, len(shape), placement) for shape, nd in pairs] for pairs in boundary(physical)
    ]
    mapped = jax.shard_map(
        on_device,
        mesh=placement.abstract_mesh,
        in_specs=tuple(specs[0]),
        out_specs=tuple(specs[1]),
        check_vma=False,
    )
    values = (graph.values[v] for v in graph.inputs)
    return _traced(mapped, [core.struct(v.shape, v.dtype) for v in values], seen)


def trace_piece(held: SlotLayout, piece: Piece, microbatches: int) -> TracedDevice:
    """Traces a piece of a pipeline, of the micro-batch's number and of the arrays that it reads."""
    placement, graph = held.physical.placement, held.physical.graph
    seen: list[tuple[Step, ...]] = []
    reads = [r.slot for r in arrays_read(piece, microbatches)]
    mapped = jax.shard_map(
        piece_function(held, piece, microbatches, made=partial(SourceDevice, steps=seen)),
        mesh=placement.abstract_mesh,
        in_specs=(partition_spec(), *map(held.spec, reads)),
        out_specs=tuple(held.spec(w.slot) for w in piece.writes),
        check_vma=False,
    )
    given = [core.struct(held.shape(slot), graph.values[slot.value].dtype) for slot in reads]
    return _traced(mapped, [core.struct((), np.dtype(np.int32)), *given], seen)


def _traced(
    mapped: Callable[..., Any], given: Sequence[Any], seen: Sequence[tuple[Step, ...]]
) -> TracedDevice:
    """A function of shards, traced."""
    traced = jax.make_jaxpr(mapped)(*given)
    (eqn,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "shard_map")
    inner = eqn.params["jaxpr"]
    consts: Mapping[Any, Any] = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    entering = [None if isinstance(v, core.Literal) else consts.get(v) for v in eqn.invars]
    return TracedDevice(getattr(inner, "jaxpr", inner), entering, tuple(getattr(inner, "consts", ())), seen)


def boundary(physical: Physical) -> tuple[list[tuple[tuple[int, ...], NdSbp]], ...]:
    """Logical shapes and signatures of what enters and of what leaves."""
    graph = physical.graph
    ins = [(graph.values[v].shape, nd) for v, nd in zip(graph.inputs, physical.inputs, strict=True)]
    outs = [(graph.operand(x).shape, nd) for x, nd in zip(graph.outputs, physical.outputs, strict=True)]
    return ins, outs
