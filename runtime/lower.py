"""Physical program -> one function per device, wrapped in `shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from sbp.layout import Layout
from sbp.passes.graph import Const, Operand
from sbp.passes.moves import Move
from sbp.passes.physical import Border, Box, Compute, Physical, Step, Version, writes
from sbp.passes.plan.candidates import rule_of
from sbp.passes.wiring import ports
from sbp.placement import Placement
from sbp.resolve import to_partition_spec
from sbp.rules.local import Local
from sbp.runtime.collectives import apply_move
from sbp.signature import NdSbp, Partial

Env: TypeAlias = dict[Version, Any]
Leaving: TypeAlias = Sequence[tuple[Operand, NdSbp]]


def device_function(physical: Physical) -> Callable[..., tuple[Any, ...]]:
    """The program of one device: local shards in, local shards out, in the order of the graph's inputs."""
    graph, placement = physical.graph, physical.placement

    def run(*shards: Any) -> tuple[Any, ...]:
        device = _Device(physical, [lax.axis_index(name) for name in placement.axes])
        env: Env = dict(zip(zip(graph.inputs, physical.inputs, strict=True), shards, strict=True))
        device.run(physical.steps, env)
        return tuple(device.read(x, nd, env) for x, nd in zip(graph.outputs, physical.outputs, strict=True))

    return run


@dataclass(frozen=True)
class _Device:
    """Executes steps on one device's shards; `coords` are its traced positions along the placement's axes."""

    physical: Physical
    coords: Sequence[Any]

    def run(self, steps: Sequence[Step], env: Env) -> None:
        """Executes `steps`, adding the versions that they make to `env`."""
        i = 0
        while i < len(steps):
            step = steps[i]
            if isinstance(step, Compute) and step.node.barrier >= 0:
                i = _barrier(steps, i, env)
                continue
            if isinstance(step, Box):
                self.move(step, env)
            elif isinstance(step, Border):
                env.update(zip(writes(step), _CONTROL[step.node.op](self, step, env), strict=True))
            else:
                _compute(self.physical, step, env, self.coords)
            i += 1

    def move(self, step: Box, env: Env) -> None:
        """One boxing move."""
        placement, shape = self.physical.placement, self.physical.graph.values[step.value].shape
        moved = apply_move(
            env[step.value, step.move.before], step.move, shape, placement.shape, placement.axes, self.coords
        )
        env[step.value, step.move.after] = moved

    def read(self, x: Operand, nd: NdSbp, env: Env) -> Any:
        """A version of a value, or a scalar."""
        return _constant(x, nd, self.physical.placement, self.coords) if isinstance(x, Const) else env[x, nd]

    def body(self, step: Border, k: int, entering: dict[int, Any], leaving: Leaving, env: Env) -> list[Any]:
        """Runs body `k` on the tensors that enter, by port, and returns those that leave."""
        wired = list(zip(ports(step.node), step.inside, strict=True))
        inputs = set(step.node.bodies[k].inputs)
        inner: Env = dict(env)
        for p, x in entering.items():
            port, nd = wired[p]
            inner.update({(v, nd): x for v in port.enters if v in inputs})
        self.run(step.bodies[k], inner)
        return [self.read(x, nd, inner) for x, nd in leaving]


def _constant(x: Const, nd: NdSbp, placement: Placement, coords: Sequence[Any]) -> Any:
    """A scalar of the program; as a sum, only the first device along the axis has it."""
    value = np.asarray(x.value, x.dtype)
    for axis, s in enumerate(nd):
        if isinstance(s, Partial):
            whole = nd[:axis] + (Partial("sum"),) + nd[axis + 1 :]
            value = (
                apply_move(
                    value, Move("fill", (axis,), nd, whole, s, s), (), placement.shape, placement.axes, coords
                )
                if s.op == "sum"
                else value
            )
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


def _barrier(steps: Sequence[Step], i: int, env: Env) -> int:
    """Lowers all ops of one barrier as one; returns the position after them."""
    group = []
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


def _scan(device: _Device, step: Border, env: Env) -> list[Any]:
    """A scan over local slices; what it only reads is closed over."""
    node, wired = step.node, list(enumerate(zip(ports(step.node), step.inside, strict=True)))
    outer = {
        i: device.read(node.inputs[p.operand], p.outer(nd), env)
        for i, (p, nd) in wired
        if p.operand is not None
    }
    carried = [i for i, (p, _) in wired if p.operand is not None and p.result is not None]
    sliced = [i for i, (p, _) in wired if p.operand is not None and p.stacked]
    fixed = {i: x for i, x in outer.items() if i not in carried and i not in sliced}
    stacked = [i for i, (p, _) in wired if p.operand is None]
    leaving = [(wired[i][1][0].leaves[0], step.inside[i]) for i in (*carried, *stacked)]

    def trip(carry: Any, xs: Any) -> Any:
        entering = {**fixed, **dict(zip(carried, carry, strict=True)), **dict(zip(sliced, xs, strict=True))}
        out = device.body(step, 0, entering, leaving, env)
        return tuple(out[: len(carried)]), tuple(out[len(carried) :])

    first, rows = tuple(outer[i] for i in carried), tuple(outer[i] for i in sliced)
    p = node.params
    last, ys = lax.scan(trip, first, rows, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
    return [*last, *ys]


def _while(device: _Device, step: Border, env: Env) -> list[Any]:
    """A while loop; its predicate is whole, so that all devices leave it together."""
    node, wired = step.node, list(enumerate(zip(ports(step.node), step.inside, strict=True)))
    outer = {
        i: device.read(node.inputs[p.operand], p.outer(nd), env)
        for i, (p, nd) in wired
        if p.operand is not None
    }
    carried = [i for i, (p, _) in wired if p.result is not None]
    fixed = {i: x for i, x in outer.items() if i not in carried}
    test = [(p.leaves[0], nd) for _, (p, nd) in wired if p.whole]
    leaving = [(wired[i][1][0].leaves[0], step.inside[i]) for i in carried]

    def entering(carry: Any) -> dict[int, Any]:
        return {**fixed, **dict(zip(carried, carry, strict=True))}

    out = lax.while_loop(
        lambda carry: device.body(step, 0, entering(carry), test, env)[0],
        lambda carry: tuple(device.body(step, 1, entering(carry), leaving, env)),
        tuple(outer[i] for i in carried),
    )
    return list(out)


def _cond(device: _Device, step: Border, env: Env) -> list[Any]:
    """A branch; its index is whole, so that all devices take the same one."""
    node, wired = step.node, list(enumerate(zip(ports(step.node), step.inside, strict=True)))
    outer = {
        i: device.read(node.inputs[p.operand], p.outer(nd), env)
        for i, (p, nd) in wired
        if p.operand is not None
    }
    (index,) = (i for i, (p, _) in wired if p.whole)
    entering = {i: x for i, x in outer.items() if i != index}

    def branch(k: int) -> Callable[[], tuple[Any, ...]]:
        leaving = [(p.leaves[k], nd) for _, (p, nd) in wired if p.result is not None]
        return lambda: tuple(device.body(step, k, entering, leaving, env))

    return list(lax.switch(outer[index], [branch(k) for k in range(len(node.bodies))]))


_CONTROL: dict[str, Callable[[_Device, Border, Env], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


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
