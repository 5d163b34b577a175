"""The physical program: the logical graph with a signature for every op and every collective in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sbp.passes.boxing import Boxings, makes_sum
from sbp.passes.graph import Const, Graph, Node, Source
from sbp.passes.moves import Move, itemsize
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.cost import local_bytes, node_seconds
from sbp.passes.plan.model import Assignment, boxing_of
from sbp.passes.wiring import Port, ports, trips
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
      bucket: moves of one bucket are sent as one collective; -1 for a move on its own.
      owned: whether the move adds up a sum of which one device has each element, and the others zeros.
      source: the line that caused it.
      rows: the name of its row in the plan; () if it sends nothing.
    """

    value: int
    move: Move
    user: int
    bucket: int = -1
    owned: bool = False
    source: Source = field(default_factory=Source, compare=False)
    rows: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Compute:
    """One op under its signature.

    Arguments:
      rows: the names of the plan's rows of what it sends itself.
    """

    node: Node
    strategy: Strategy
    rows: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Border:
    """A loop or a branch, with the steps of its bodies.

    Arguments:
      node: the op.
      inside: per port, the signature that the tensor has inside.
      bodies: the steps of each body.
    """

    node: Node
    inside: tuple[NdSbp, ...]
    bodies: tuple[tuple[Step, ...], ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """It sends nothing but what the steps of its bodies send."""
        return ()


Step: TypeAlias = Box | Compute | Border


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

    def walk(self) -> Iterator[tuple[Step, int]]:
        """Every step, bodies included, with how often it is executed (an unknown number counts once)."""
        return walk_steps(self.steps)

    def boxes(self) -> Iterator[tuple[Box, int]]:
        """The moves alone, with how often each is executed."""
        return ((s, n) for s, n in self.walk() if isinstance(s, Box))


def walk_steps(steps: Iterable[Step], times: int = 1) -> Iterator[tuple[Step, int]]:
    """Every step, bodies included, with how often it is executed."""
    for step in steps:
        yield step, times
        if isinstance(step, Border):
            for body in step.bodies:
                yield from walk_steps(body, times * trips(step.node))


class _Insertion:
    """Walks the ops of one body (or of the program) and brings every value where it is wanted."""

    def __init__(self, c: Candidates, a: Assignment, boxings: Boxings, have: dict[int, list[NdSbp]]) -> None:
        self.c, self.a, self.boxings = c, a, boxings
        self.graph = c.graph
        self.have = {v: list(nds) for v, nds in have.items()}
        self.filled: set[Version] = set()
        self.steps: list[Step] = []

    def bring(self, v: int, wanted: NdSbp, user: int, strict: bool) -> None:
        """Makes the version `wanted` of a value, from the cheapest one that exists."""
        have = self.have[v]
        if wanted in have and not (strict and (v, wanted) in self.filled):
            return
        boxing = boxing_of(self.boxings, self.c, self.graph.values[v].shape, self.graph.values[v].dtype, v)
        share = self.a.shares.get(v)
        if share is not None and share not in have:
            self.take(v, boxing.path(have[0], share, strict=True), user)
        table, j = boxing.strict_seconds if strict else boxing.seconds, boxing.index[wanted]
        sources = [nd for nd in self.have[v] if (v, nd) not in self.filled]
        source = min(sources, key=lambda nd: table[boxing.index[nd], j])
        self.take(v, boxing.path(source, wanted, strict=strict), user)

    def take(self, v: int, path: tuple[Move, ...], user: int) -> None:
        fresh = False
        for move in path:
            fresh = fresh or makes_sum(move)
            if move.after not in self.have[v] or (not fresh and (v, move.after) in self.filled):
                self.steps.append(Box(v, move, user))
                self.have[v] = [*dict.fromkeys([*self.have[v], move.after])]
                (self.filled.add if fresh else self.filled.discard)((v, move.after))

    def run(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.bodies:
                self.border(node)
                continue
            strategy = self.a.strategies[node.id]
            for x, wanted, strict in zip(node.inputs, strategy.operands, strategy.strict, strict=True):
                if not isinstance(x, Const):
                    self.bring(x, wanted, node.id, strict)
            self.steps.append(Compute(node, strategy))
            for v, nd in zip(node.outputs, strategy.results, strict=True):
                self.have[v] = [nd]

    def border(self, node: Node) -> None:
        """A loop or a branch: what enters is brought to its port outside, what leaves inside."""
        wired, inside = ports(node), self.a.ports[node.id]
        for port, nd in zip(wired, inside, strict=True):
            x = node.inputs[port.operand] if port.operand is not None else None
            if isinstance(x, int):
                self.bring(x, port.outer(nd), node.id, True)
        bodies = []
        for k, body in enumerate(node.bodies):
            inner = _Insertion(self.c, self.a, self.boxings, self.have)
            inner.have.update({v: [nd] for p, nd in zip(wired, inside, strict=True) for v in p.enters})
            inner.run(body.nodes)
            for port, nd in zip(wired, inside, strict=True):
                for x in port.leaves:
                    if isinstance(x, int) and _leaves_from(node, port, x, k):
                        inner.bring(x, nd, node.id, True)
            bodies.append(grouped(inner.steps))
        self.steps.append(Border(node, inside, tuple(bodies)))
        for port, nd in zip(wired, inside, strict=True):
            if port.result is not None:
                self.have[node.outputs[port.result]] = [port.outer(nd)]


def _leaves_from(node: Node, port: Port, x: int, k: int) -> bool:
    """Whether body `k` hands back `x` through the port."""
    if node.op == "cond":
        return port.leaves[k] == x
    if node.op == "while":
        return port.whole == (k == 0)
    return True


def insert_boxing(candidates: Candidates, assignment: Assignment, boxings: Boxings) -> Physical:
    """Puts the moves between the ops; a value is boxed once to each signature that is asked for."""
    graph = candidates.graph
    have = {v: [nd] for v, nd in zip(graph.inputs, assignment.inputs, strict=True)}
    main = _Insertion(candidates, assignment, boxings, have)
    main.run(graph.nodes)
    for i, (x, wanted) in enumerate(zip(graph.outputs, assignment.outputs, strict=True)):
        if not isinstance(x, Const):
            main.bring(x, wanted, -1 - i, False)
    return Physical(graph, candidates.placement, grouped(main.steps), assignment.inputs, assignment.outputs)


def grouped(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Brings the ops of one barrier together: they are lowered as one, after all that they wait for."""
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


def inner_steps(step: Border) -> Iterator[Step]:
    """The steps of all bodies."""
    return itertools.chain.from_iterable(step.bodies)


def reads(step: Step) -> list[Version]:
    """The versions that a step uses."""
    if isinstance(step, Box):
        return [(step.value, step.move.before)]
    if isinstance(step, Border):
        wired = zip(ports(step.node), step.inside, strict=True)
        entering = [(step.node.inputs[p.operand], p.outer(nd)) for p, nd in wired if p.operand is not None]
        made = {version for s in inner_steps(step) for version in writes(s)}
        made |= {(v, nd) for p, nd in zip(ports(step.node), step.inside, strict=True) for v in p.enters}
        closed = [r for s in inner_steps(step) for r in reads(s) if r not in made]
        return [(x, nd) for x, nd in entering if not isinstance(x, Const)] + closed
    pairs = zip(step.node.inputs, step.strategy.operands, strict=True)
    return [(x, nd) for x, nd in pairs if not isinstance(x, Const)]


def writes(step: Step) -> list[Version]:
    """The versions that a step makes."""
    if isinstance(step, Box):
        return [(step.value, step.move.after)]
    if isinstance(step, Border):
        wired = zip(ports(step.node), step.inside, strict=True)
        return [(step.node.outputs[p.result], p.outer(nd)) for p, nd in wired if p.result is not None]
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
