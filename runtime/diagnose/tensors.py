"""Tensors inside a distributed program, fetched by running it with other results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from sbp.hardware.catalogue import hardware_for
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.program import Box, Physical, Step, writes
from sbp.passes.program.graph import Graph
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.lower.lowering import lower, shardings
from sbp.runtime.lower.reference_interpreter import Tensor
from sbp.runtime.processes.addressable import moved_to
from sbp.signature import B, NdSbp, Partial, Split

CHUNK = 200
"""Tensors that are fetched at once."""


def probe(built: CompiledProgram, inputs: Sequence[Tensor], values: Sequence[int]) -> list[jax.Array]:
    """The values of some tensors, gathered.

    Arguments:
      inputs: the leaves of the arguments, then the arrays that the function closes over.
    """
    physical = built.plan.physical
    assert physical is not None
    probed = with_outputs(physical, values)
    mesh = probed.placement.mesh
    ins, _ = shardings(probed, mesh)
    return list(lower(probed, mesh, ())(*moved_to(list(inputs), ins)))


def with_outputs(physical: Physical, values: Sequence[int]) -> Physical:
    """The same program with other results: `values`, each brought to B right after it is made."""
    graph, placement = physical.graph, physical.placement
    wanted, whole = set(values), (B,) * placement.ndim
    boxings = Boxings(Network(placement, hardware_for(placement.kind)))
    steps: list[Step] = []
    for step in physical.steps:
        steps.append(step)
        if not isinstance(step, Box):
            for v, nd in writes(step):
                if v in wanted:
                    steps += [Box(v, m, -1) for m in _gather(boxings, graph, v, nd, whole)]
    outputs = tuple(whole for _ in values)
    return replace(physical, graph=replace(graph, outputs=tuple(values)), steps=tuple(steps), outputs=outputs)


def _gather(boxings: Boxings, graph: Graph, v: int, nd: NdSbp, whole: NdSbp) -> tuple[Move, ...]:
    value = graph.values[v]
    partials = frozenset(s.op for s in nd if isinstance(s, Partial))
    dims = {s.dim for s in nd if isinstance(s, Split)} | {d for d, n in enumerate(value.shape) if n > 1}
    return boxings.of(value.shape, value.dtype, partials, tuple(sorted(dims))).path(nd, whole)
