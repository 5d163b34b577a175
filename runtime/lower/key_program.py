"""The program that sends the keys of a batch by themselves: of one that no step has read ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.sharding import NamedSharding

from sbp.compat.untyped import PyTree, partition_spec, struct
from sbp.passes.physical.exchanges import ReadAhead
from sbp.passes.physical.program import Physical
from sbp.runtime.lower.device import Device, Env
from sbp.runtime.lower.lowering import DeviceMesh, shardings
from sbp.runtime.lower.read_ahead import input_version, sent_ahead


def key_program(physical: Physical, mesh: DeviceMesh, ahead: ReadAhead) -> Callable[..., PyTree]:
    """The jitted program that sends the keys of a batch: its arrays, and closed-over ones, in."""
    ins, _ = shardings(physical, mesh)
    consts = range(len(ins) - len(physical.graph.consts), len(ins))

    def on_device(batch: Sequence[jax.Array], closed: Sequence[jax.Array]) -> PyTree:
        coords = [lax.axis_index(name) for name in physical.placement.axes]
        env: Env = {input_version(physical, i): x for i, x in zip(consts, closed, strict=True)}
        return sent_ahead(Device(physical, coords), ahead, env, batch)

    taken = [ins[i] for i in ahead.inputs], [ins[i] for i in consts]
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple([s.spec for s in some] for some in taken),
        out_specs=partition_spec(physical.placement.axes),
        check_vma=False,
    )
    return jax.jit(mapped, in_shardings=taken, out_shardings=by_device(physical, mesh))


def by_device(physical: Physical, mesh: DeviceMesh) -> NamedSharding:
    """How what comes of keys lies: a line for each device."""
    return NamedSharding(mesh, partition_spec(physical.placement.axes))


def read_ahead_structs(physical: Physical, mesh: DeviceMesh, ahead: ReadAhead) -> tuple[PyTree, PyTree]:
    """The shapes of what a step is given beside its own: of what came of its keys, and of the next batch."""
    graph, (ins, _) = physical.graph, shardings(physical, mesh)
    given = [graph.values[v] for v in graph.inputs]
    structs = [struct(x.shape, x.dtype, sharding=s) for x, s in zip(given, ins, strict=True)]
    batch, consts = [structs[i] for i in ahead.inputs], structs[len(ins) - len(graph.consts) :]
    lies = by_device(physical, mesh)
    sent = jax.eval_shape(key_program(physical, mesh, ahead), batch, consts)
    return jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=lies), sent), batch
