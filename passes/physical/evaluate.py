"""The evaluator: what a physical program takes, in seconds and bytes."""

from __future__ import annotations

from sbp.passes.boxing.moves import itemsize
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.program import (
    Border,
    Box,
    Compute,
    Physical,
    Version,
    inner_steps,
    reads,
    walk_steps,
    writes,
)
from sbp.passes.plan.cost import local_bytes, node_seconds
from sbp.passes.program.graph import Const


def peak_bytes(physical: Physical) -> float:
    """The most bytes that are live on one device at once: arguments, results, and what steps still need.

    Arguments stay for the whole step (donation is not counted), so the figure is an upper estimate of XLA's.
    """
    graph, hierarchy = physical.graph, physical.placement.shape

    def size(version: Version) -> float:
        value = graph.values[version[0]]
        return local_bytes(value.shape, value.dtype, version[1], hierarchy)

    last: dict[Version, int] = {}
    for i, step in enumerate(physical.steps):
        last.update(dict.fromkeys(reads(step), i))
    end = len(physical.steps)
    kept = [*zip(graph.inputs, physical.inputs, strict=True)]
    kept += [
        (x, nd) for x, nd in zip(graph.outputs, physical.outputs, strict=True) if not isinstance(x, Const)
    ]
    last.update(dict.fromkeys(kept, end))
    ends: dict[int, list[Version]] = {}
    for version, i in last.items():
        ends.setdefault(i, []).append(version)
    live = peak = sum(size(v) for v in zip(graph.inputs, physical.inputs, strict=True))
    for i, step in enumerate(physical.steps):
        live += sum(size(v) for v in writes(step) if v in last)
        inside = (
            sum(size(v) for s, _ in walk_steps(inner_steps(step)) for v in writes(s))
            if isinstance(step, Border)
            else 0
        )
        peak = max(peak, live + inside)
        live -= sum(size(v) for v in ends.get(i, []))
    return peak


def total_seconds(physical: Physical, boxings: Boxings) -> float:
    """The estimated time of one step: ops and moves one after the other."""
    graph, network = physical.graph, boxings.network
    seconds = 0.0
    for step, times in physical.walk():
        if isinstance(step, Box):
            value = graph.values[step.value]
            seconds += times * network.seconds(step.move, value.shape, itemsize(step.move, value.dtype))
        elif isinstance(step, Compute):
            seconds += times * node_seconds(graph, step.node, step.strategy, network)
    return seconds
