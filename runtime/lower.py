"""Physical program -> one function per device, wrapped in `shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from sbp.layout import Layout
from sbp.passes.graph import Const
from sbp.passes.moves import Move
from sbp.passes.physical import Box, Compute, Physical, Version
from sbp.passes.plan.candidates import rule_of
from sbp.placement import Placement
from sbp.resolve import to_partition_spec
from sbp.rules.local import Local
from sbp.runtime.collectives import apply_move
from sbp.signature import NdSbp, Partial


def device_function(physical: Physical) -> Callable[..., tuple[Any, ...]]:
    """The program of one device: local shards in, local shards out, in the order of the graph's inputs."""
    graph, placement = physical.graph, physical.placement

    def run(*shards: Any) -> tuple[Any, ...]:
        coords = [lax.axis_index(name) for name in placement.axes]
        env: dict[Version, Any] = dict(zip(zip(graph.inputs, physical.inputs, strict=True), shards, strict=True))
        steps = physical.steps
        i = 0
        while i < len(steps):
            step = steps[i]
            if isinstance(step, Box):
                version = step.value, step.move.before
                shape = graph.values[step.value].shape
                env[step.value, step.move.after] = apply_move(
                    env[version], step.move, shape, placement.shape, placement.axes, coords
                )
                i += 1
            elif step.node.barrier >= 0:
                i = _barrier(physical, i, env)
            else:
                _compute(physical, step, env, coords)
                i += 1
        return tuple(
            _constant(x, nd, placement, coords) if isinstance(x, Const) else env[x, nd]
            for x, nd in zip(graph.outputs, physical.outputs, strict=True)
        )

    return run


def _constant(x: Const, nd: NdSbp, placement: Placement, coords: Sequence[Any]) -> Any:
    """A scalar of the program; as a sum, only the first device along the axis has it."""
    value = np.asarray(x.value, x.dtype)
    for axis, s in enumerate(nd):
        if isinstance(s, Partial):
            whole = nd[:axis] + (Partial("sum"),) + nd[axis + 1 :]
            value = apply_move(
                value, Move("fill", (axis,), nd, whole, s, s), (), placement.shape, placement.axes, coords
            ) if s.op == "sum" else value
    return value


def _compute(physical: Physical, step: Compute, env: dict[Version, Any], coords: Sequence[Any]) -> None:
    """Runs one op on the shards."""
    graph, placement, node, strategy = physical.graph, physical.placement, step.node, step.strategy
    operands = [
        _constant(x, nd, placement, coords) if isinstance(x, Const) else env[x, nd]
        for x, nd in zip(node.inputs, strategy.operands, strict=True)
    ]
    local = Local(
        node.primitive,
        node.params,
        tuple(
            Layout(graph.operand(x).shape, nd, placement.shape)
            for x, nd in zip(node.inputs, strategy.operands, strict=True)
        ),
        tuple(
            Layout(graph.values[v].shape, nd, placement.shape)
            for v, nd in zip(node.outputs, strategy.results, strict=True)
        ),
        coords,
    )
    rule = rule_of(node)
    if node.op in ("sbp_annotate", "sbp_cotangent"):
        results = operands
    elif rule is None or rule.local is None:
        results = local.bind(*operands)
    else:
        results = rule.local(local, *operands)
    env.update(zip(zip(node.outputs, strategy.results, strict=True), results, strict=True))


def _barrier(physical: Physical, i: int, env: dict[Version, Any]) -> int:
    """Lowers all ops of one barrier as one; returns the position after them."""
    steps, group = physical.steps, []
    first = steps[i]
    assert isinstance(first, Compute)
    while i < len(steps):
        step = steps[i]
        if not isinstance(step, Compute) or step.node.barrier != first.node.barrier:
            break
        group.append(step)
        i += 1
    reads = [(s.node.inputs[0], s.strategy.operands[0]) for s in group]
    held = lax.optimization_barrier(tuple(env[x, nd] for x, nd in reads if not isinstance(x, Const)))
    env.update(zip(((s.node.outputs[0], s.strategy.results[0]) for s in group), held, strict=True))
    return i


def shardings(physical: Physical, mesh: Any) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """How arguments arrive and results leave, as JAX's shardings."""
    graph, placement = physical.graph, physical.placement

    def named(shape: Sequence[int], nd: NdSbp) -> NamedSharding:
        return NamedSharding(mesh, to_partition_spec(nd, len(shape), placement))

    ins = [named(graph.values[v].shape, nd) for v, nd in zip(graph.inputs, physical.inputs, strict=True)]
    outs = [named(graph.operand(x).shape, nd) for x, nd in zip(graph.outputs, physical.outputs, strict=True)]
    return ins, outs


def lower(physical: Physical, mesh: Any, donate: Sequence[int]) -> Any:
    """The jitted program over `mesh` (a real or an abstract one): flat arguments in, flat results out."""
    ins, outs = shardings(physical, mesh)
    mapped = jax.shard_map(
        device_function(physical),
        mesh=mesh,
        in_specs=tuple(s.spec for s in ins),
        out_specs=tuple(s.spec for s in outs),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=tuple(donate), in_shardings=tuple(ins), out_shardings=tuple(outs))



