"""The physical program: the logical graph with a signature for every op and every collective in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sbp import compat
from sbp.passes.boxing import Boxings, makes_sum
from sbp.passes.graph import Const, Graph, Node
from sbp.passes.moves import Move
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.cost import local_bytes, node_seconds
from sbp.passes.plan.model import Assignment, boxing_of
from sbp.placement import Placement
from sbp.signature import NdSbp

Version: TypeAlias = tuple[int, NdSbp]
"""A value as it lies under one signature."""


@dataclass(frozen=True, slots=True)
class Box:
    """One move of one value.

    Arguments:
      value: the value's id.
      move: from which signature to which.
      user: the node that asked for it, or the position of the output (-1 - i).
    """

    value: int
    move: Move
    user: int


@dataclass(frozen=True, slots=True)
class Compute:
    """One op under its signature."""

    node: Node
    strategy: Strategy


Step: TypeAlias = Box | Compute


@dataclass(frozen=True)
class Physical:
    """What one device executes.

    Arguments:
      graph, placement: the logical graph and where it lies.
      steps: moves and ops, in order.
      inputs, outputs: signatures at rest.
    """

    graph: Graph
    placement: Placement
    steps: tuple[Step, ...]
    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]

    def boxes(self) -> Iterator[Box]:
        """The moves alone."""
        return (s for s in self.steps if isinstance(s, Box))


def insert_boxing(candidates: Candidates, assignment: Assignment, boxings: Boxings) -> Physical:
    """Puts the moves between the ops; a value is boxed once to each signature that is asked for.

    Each demand starts from the cheapest version that exists by then.
    """
    graph = candidates.graph
    have: dict[int, list[NdSbp]] = {
        v: [nd] for v, nd in zip(graph.inputs, assignment.inputs, strict=True)
    }
    filled: set[Version] = set()
    steps: list[Step] = []

    def bring(v: int, wanted: NdSbp, user: int, strict: bool) -> None:
        if wanted in have[v] and not (strict and (v, wanted) in filled):
            return
        boxing = boxing_of(boxings, candidates, graph.values[v].shape, graph.values[v].dtype, v)
        share = assignment.shares.get(v)
        if share is not None and share not in have[v]:
            take(v, boxing.path(have[v][0], share, strict=True), user)
        table, j = boxing.strict_seconds if strict else boxing.seconds, boxing.index[wanted]
        sources = [nd for nd in have[v] if (v, nd) not in filled]
        source = min(sources, key=lambda nd: table[boxing.index[nd], j])
        take(v, boxing.path(source, wanted, strict=strict), user)

    def take(v: int, path: tuple[Move, ...], user: int) -> None:
        fresh = False
        for move in path:
            fresh = fresh or makes_sum(move)
            if move.after not in have[v] or (not fresh and (v, move.after) in filled):
                steps.append(Box(v, move, user))
                have[v] = [*dict.fromkeys([*have[v], move.after])]
                (filled.add if fresh else filled.discard)((v, move.after))

    for node, strategy in zip(graph.nodes, assignment.strategies, strict=True):
        for x, wanted, strict in zip(node.inputs, strategy.operands, strategy.strict, strict=True):
            if not isinstance(x, Const):
                bring(x, wanted, node.id, strict)
        steps.append(Compute(node, strategy))
        for v, nd in zip(node.outputs, strategy.results, strict=True):
            have[v] = [nd]
    for i, (x, wanted) in enumerate(zip(graph.outputs, assignment.outputs, strict=True)):
        if not isinstance(x, Const):
            bring(x, wanted, -1 - i, False)
    return Physical(
        graph, candidates.placement, _grouped(steps), assignment.inputs, assignment.outputs
    )


def _grouped(steps: list[Step]) -> tuple[Step, ...]:
    """Brings the ops of one barrier together: they are lowered as one, after everything that they wait for."""
    last = {s.node.barrier: i for i, s in enumerate(steps) if isinstance(s, Compute) and s.node.barrier >= 0}
    held: dict[int, list[Step]] = {}
    out: list[Step] = []
    for i, step in enumerate(steps):
        barrier = step.node.barrier if isinstance(step, Compute) else -1
        if barrier < 0:
            out.append(step)
            continue
        held.setdefault(barrier, []).append(step)
        if last[barrier] == i:
            out.extend(held.pop(barrier))
    return tuple(out)


def reads(step: Step) -> list[Version]:
    """The versions that a step uses."""
    if isinstance(step, Box):
        return [(step.value, step.move.before)]
    pairs = zip(step.node.inputs, step.strategy.operands, strict=True)
    return [(x, nd) for x, nd in pairs if not isinstance(x, Const)]


def writes(step: Step) -> list[Version]:
    """The versions that a step makes."""
    if isinstance(step, Box):
        return [(step.value, step.move.after)]
    return list(zip(step.node.outputs, step.strategy.results, strict=True))


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
    kept += [(x, nd) for x, nd in zip(graph.outputs, physical.outputs, strict=True) if not isinstance(x, Const)]
    last.update(dict.fromkeys(kept, end))
    ends: dict[int, list[Version]] = {}
    for version, i in last.items():
        ends.setdefault(i, []).append(version)
    live = peak = sum(size(v) for v in zip(graph.inputs, physical.inputs, strict=True))
    for i, step in enumerate(physical.steps):
        live += sum(size(v) for v in writes(step) if v in last)
        peak = max(peak, live)
        live -= sum(size(v) for v in ends.get(i, []))
    return peak


def total_seconds(physical: Physical, boxings: Boxings) -> float:
    """The estimated time of one step: ops and moves one after the other."""
    graph, hierarchy, network = physical.graph, physical.placement.shape, boxings.network
    seconds = 0.0
    for step in physical.steps:
        if isinstance(step, Box):
            value = graph.values[step.value]
            seconds += network.seconds(step.move, value.shape, compat.itemsize(value.dtype))
        else:
            seconds += node_seconds(graph, step.node, step.strategy, hierarchy, network.hardware)
    return seconds


__all__ = ["Box", "Compute", "Physical", "insert_boxing", "peak_bytes", "total_seconds"]
