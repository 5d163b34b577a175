"""Physical program -> one function per device, wrapped in `shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sbp.passes.graph import Const, Node, Operand
from sbp.passes.moves import Move
from sbp.passes.physical import Border, Box, Compute, Physical, Step, Version, writes
from sbp.passes.plan.candidates import rule_of
from sbp.passes.plan.cost import layouts
from sbp.passes.wiring import ports
from sbp.placement import Placement
from sbp.resolve import to_partition_spec
from sbp.rules.local import Local
from sbp.runtime.buckets import Parcel, apply_bucket
from sbp.runtime.collectives import apply_move
from sbp.runtime.control import CONTROL, Leaving, Region
from sbp.runtime.counts import Counting
from sbp.signature import B, NdSbp, Partial

Env: TypeAlias = dict[Version, Any]


def device_function(physical: Physical, counting: Counting | None = None) -> Callable[..., tuple[Any, ...]]:
    """The program of one device: local shards in, local shards out, in the order of the graph's inputs.

    Arguments:
      counting: takes what exchanges count, which then is one result more.
    """
    graph, placement = physical.graph, physical.placement

    def run(*shards: Any) -> tuple[Any, ...]:
        reports: list[tuple[Node, Any]] | None = None if counting is None else []
        device = Device(physical, [lax.axis_index(name) for name in placement.axes], reports)
        env: Env = dict(zip(zip(graph.inputs, physical.inputs, strict=True), shards, strict=True))
        device.run(physical.steps, env)
        outs = tuple(device.read(x, nd, env) for x, nd in zip(graph.outputs, physical.outputs, strict=True))
        return outs if counting is None or reports is None else (*outs, counting.stacked(reports))

    return run


@dataclass(frozen=True)
class Device:
    """Executes steps on one device's shards.

    Arguments:
      coords: its traced positions along the placement's axes.
      reports: what ops count, if somebody asks; inside a loop nobody can.
    """

    physical: Physical
    coords: Sequence[Any]
    reports: list[tuple[Node, Any]] | None = None

    def run(self, steps: Sequence[Step], env: Env) -> None:
        """Executes `steps`, adding the versions that they make to `env`."""
        i = 0
        while i < len(steps):
            step = steps[i]
            if isinstance(step, Compute) and step.node.barrier >= 0:
                i = _barrier(steps, i, env)
                continue
            if isinstance(step, Box) and step.bucket >= 0:
                i = self.bucket(steps, i, env)
                continue
            if isinstance(step, Box):
                self.move(step, env)
            elif isinstance(step, Border):
                env.update(zip(writes(step), CONTROL[step.node.op](self.region(step, env)), strict=True))
            else:
                self.compute(step, env)
            i += 1

    def move(self, step: Box, env: Env) -> None:
        """One boxing move."""
        placement, shape = self.physical.placement, self.physical.graph.values[step.value].shape
        x = env[step.value, step.move.before]
        moved = apply_move(
            x, step.move, shape, placement.shape, placement.axes, self.coords, owned=step.owned
        )
        env[step.value, step.move.after] = moved

    def bucket(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """All moves of one bucket as one; returns the position after them."""
        values, placement = self.physical.graph.values, self.physical.placement
        boxes: list[Box] = []
        for step in steps[i:]:
            if not isinstance(step, Box) or (boxes and step.bucket != boxes[0].bucket):
                break
            boxes.append(step)
        parcels = [Parcel(env[b.value, b.move.before], b.move, values[b.value].shape, b.owned) for b in boxes]
        moved = apply_bucket(parcels, placement.shape, placement.axes)
        env.update(zip(((b.value, b.move.after) for b in boxes), moved, strict=True))
        return i + len(boxes)

    def read(self, x: Operand, nd: NdSbp, env: Env) -> Any:
        """A version of a value, or a scalar."""
        return _constant(x, nd, self.physical.placement, self.coords) if isinstance(x, Const) else env[x, nd]

    def compute(self, step: Compute, env: Env) -> None:
        """Runs one op on the shards."""
        graph, placement = self.physical.graph, self.physical.placement
        node, strategy = step.node, step.strategy
        operands = [self.read(x, nd, env) for x, nd in zip(node.inputs, strategy.operands, strict=True)]
        counts: list[Any] = []
        local = Local(
            node.primitive,
            node.params,
            *layouts(graph, node, strategy, placement.shape),
            self.coords,
            placement.axes,
            [graph.operand(x).dtype for x in node.inputs],
            counts,
        )
        rule = rule_of(node)
        own = rule.local if rule is not None else None
        results = local.bind(*operands) if own is None else own(local, *operands)
        env.update(zip(writes(step), results, strict=True))
        if self.reports is not None:
            self.reports.extend((node, x) for x in counts)

    def region(self, step: Border, env: Env) -> Region:
        """A loop or a branch with what enters it here."""
        wired = list(zip(ports(step.node), step.inside, strict=True))

        def body(k: int, entering: Mapping[int, Any], leaving: Leaving) -> list[Any]:
            inputs, inner = set(step.node.bodies[k].inputs), dict(env)
            for i, x in entering.items():
                port, nd = wired[i]
                inner.update({(v, nd): x for v in port.enters if v in inputs})
            replace(self, reports=None).run(step.bodies[k], inner)
            return [self.read(x, nd, inner) for x, nd in leaving]

        outer = {
            i: self.read(step.node.inputs[p.operand], p.outer(nd), env)
            for i, (p, nd) in enumerate(wired)
            if p.operand is not None
        }
        return Region(step.node, tuple(p for p, _ in wired), step.inside, outer, body)


def _constant(x: Const, nd: NdSbp, placement: Placement, coords: Sequence[Any]) -> Any:
    """A scalar of the program; as a sum, only the first device along the axis has it."""
    value = np.asarray(x.value, x.dtype)
    for axis, s in enumerate(nd):
        if s == Partial("sum"):
            fill = Move("fill", (axis,), nd, nd, B, s)
            value = apply_move(value, fill, (), placement.shape, placement.axes, coords)
    return value


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


def shardings(
    physical: Physical, mesh: Any, counting: Counting | None = None
) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """How arguments arrive and results leave, as JAX's shardings."""
    graph, placement = physical.graph, physical.placement

    def named(shape: Sequence[int], nd: NdSbp) -> NamedSharding:
        return NamedSharding(mesh, to_partition_spec(nd, len(shape), placement))

    ins = [named(graph.values[v].shape, nd) for v, nd in zip(graph.inputs, physical.inputs, strict=True)]
    outs = [named(graph.operand(x).shape, nd) for x, nd in zip(graph.outputs, physical.outputs, strict=True)]
    if counting is not None:
        outs.append(NamedSharding(mesh, PartitionSpec(placement.axes)))
    return ins, outs


def lower(physical: Physical, mesh: Any, donate: Sequence[int], counting: Counting | None = None) -> Any:
    """The jitted program over `mesh` (a real or an abstract one): flat arguments in, flat results out.

    Arguments:
      counting: takes what exchanges count, which then is one result more.
    """
    ins, outs = shardings(physical, mesh, counting)
    mapped = jax.shard_map(
        device_function(physical, counting),
        mesh=mesh,
        in_specs=tuple(s.spec for s in ins),
        out_specs=tuple(s.spec for s in outs),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=tuple(donate), in_shardings=tuple(ins), out_shardings=tuple(outs))
