"""The physical program: the logical graph with a signature for every op and every collective in place;
and who makes a tensor there, and who wants it how.

Words: docs/glossary.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from sbp.compat.untyped import DType
from sbp.passes.boxing.moves import Move
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.traffic import OpTraffic
from sbp.passes.program.control import ports, trips
from sbp.passes.program.graph import Const, Graph, Node, Source
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
      owned: whether the move adds up a sum each element of which is one device's, with zeros on all others.
      sent_as: the narrower type in which it goes, which holds all of it; None for its own.
      after: what must be there before it begins, where it is made a second time; else it would be made once,
        and kept.
      source: the line that caused it.
      rows: the name of its row in the plan; () if it sends nothing.
    """

    value: int
    move: Move
    user: int
    bucket: int = -1
    owned: bool = False
    sent_as: DType | None = None
    after: Version | None = None
    source: Source = field(default_factory=Source, compare=False)
    rows: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Compute:
    """One op under its signature.

    Arguments:
      bucket: what ops of one bucket send at one time is one collective; -1 for an op on its own.
      rows: the names of the plan's rows of what it sends itself.
    """

    node: Node
    strategy: Strategy
    bucket: int = -1
    rows: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def reads(self) -> Sequence[Version]:
        """The versions that it uses."""
        pairs = zip(self.node.inputs, self.strategy.operands, strict=True)
        return [(x, nd) for x, nd in pairs if not isinstance(x, Const)]

    @cached_property
    def writes(self) -> Sequence[Version]:
        """The versions that it makes."""
        return list(zip(self.node.outputs, self.strategy.results, strict=True))


@dataclass(frozen=True, slots=True)
class Border:
    """A loop or a branch, with the steps of its bodies.

    Arguments:
      node: the op.
      inner_signatures: per port, the signature that the tensor has inside.
      bodies: the steps of each body.
    """

    node: Node
    inner_signatures: tuple[NdSbp, ...]
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
      traffic: per node id, what goes through memory.
    """

    graph: Graph
    placement: Placement
    steps: tuple[Step, ...]
    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]
    traffic: Mapping[int, OpTraffic] = field(default_factory=dict, compare=False, repr=False)

    def walk(self) -> Iterator[tuple[Step, int]]:
        """Every step, bodies included, with how often it is executed (an unknown number counts once)."""
        return walk_steps(self.steps)

    def sent_type(self, box: Box) -> tuple[tuple[int, ...], DType]:
        """The logical shape and the type of what a move sends."""
        value = self.graph.values[box.value]
        return value.shape, value.dtype if box.sent_as is None else box.sent_as

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


def barrier_of(step: Step | None) -> int:
    """The barrier that a step is of; -1 for none."""
    return step.node.barrier if isinstance(step, Compute) else -1


def lowering_group(step: Step) -> tuple[str, int] | None:
    """What steps next to each other are lowered with as one; None for a step by itself."""
    if barrier_of(step) >= 0:
        return "barrier", barrier_of(step)
    if isinstance(step, Border) or step.bucket < 0:
        return None
    return "moves" if isinstance(step, Box) else "ops", step.bucket


def group_by_barrier(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Brings the ops of one barrier together: they are lowered as one, after all that they wait for."""
    # XLA may compute a recomputation early, and so keep it, unless all that enters it waits behind ONE
    # barrier.
    last = {barrier_of(s): i for i, s in enumerate(steps)}
    held: dict[int, list[Step]] = {}
    out: list[Step] = []
    for i, step in enumerate(steps):
        barrier = barrier_of(step)
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


def reads(step: Step) -> Sequence[Version]:
    """The versions that a step uses."""
    if isinstance(step, Compute):
        return step.reads
    if isinstance(step, Box):
        return [(step.value, step.move.before)]
    wired = zip(ports(step.node), step.inner_signatures, strict=True)
    entering = [(step.node.inputs[p.operand], p.outer(nd)) for p, nd in wired if p.operand is not None]
    made = {version for s in inner_steps(step) for version in writes(s)}
    made |= {(v, nd) for p, nd in zip(ports(step.node), step.inner_signatures, strict=True) for v in p.enters}
    closed = [r for s in inner_steps(step) for r in reads(s) if r not in made]
    return [(x, nd) for x, nd in entering if not isinstance(x, Const)] + closed


def prerequisites(step: Step) -> list[Version]:
    """The versions that must be there before a step begins."""
    after = step.after if isinstance(step, Box) else None
    return [*reads(step), *([] if after is None else [after])]


def writes(step: Step) -> Sequence[Version]:
    """The versions that a step makes."""
    if isinstance(step, Compute):
        return step.writes
    if isinstance(step, Box):
        return [(step.value, step.move.after)]
    wired = zip(ports(step.node), step.inner_signatures, strict=True)
    return [(step.node.outputs[p.result], p.outer(nd)) for p, nd in wired if p.result is not None]


@dataclass(frozen=True)
class Flow:
    """The ways of the tensors of one physical program, bodies of loops included."""

    physical: Physical

    @cached_property
    def computations(self) -> Mapping[int, tuple[Node, Strategy]]:
        """Every op with its strategy, by the op's id."""
        return {s.node.id: (s.node, s.strategy) for s, _ in self.physical.walk() if isinstance(s, Compute)}

    @cached_property
    def borders(self) -> Mapping[int, Node]:
        """Loops and branches, by their ids."""
        return {s.node.id: s.node for s, _ in self.physical.walk() if isinstance(s, Border)}

    @cached_property
    def makers(self) -> Mapping[int, tuple[Node, Strategy]]:
        """The op that makes each value; none for arguments and for what comes out of a loop."""
        return {v: made for made in self.computations.values() for v in made[0].outputs}

    @cached_property
    def result_sbp(self) -> Mapping[int, NdSbp]:
        """How each value lies where it is made."""
        p = self.physical
        out = dict(zip(p.graph.inputs, p.inputs, strict=True))
        for step, _ in p.walk():
            if not isinstance(step, Box):
                out.update(writes(step))
            if isinstance(step, Border):
                wired = zip(ports(step.node), step.inner_signatures, strict=True)
                out.update((v, nd) for port, nd in wired for v in port.enters)
        return out

    @cached_property
    def readers(self) -> Mapping[int, Sequence[tuple[int, NdSbp]]]:
        """How each value is read: (node id, or -1 for what leaves the program or a body; signature)."""
        p = self.physical
        out: dict[int, list[tuple[int, NdSbp]]] = {}
        for step, _ in p.walk():
            if not isinstance(step, Box):
                for v, nd in reads(step):
                    out.setdefault(v, []).append((step.node.id, nd))
            if isinstance(step, Border):
                for port, nd in zip(ports(step.node), step.inner_signatures, strict=True):
                    for x in port.leaves:
                        if isinstance(x, int):
                            out.setdefault(x, []).append((-1, nd))
        for x, nd in zip(p.graph.outputs, p.outputs, strict=True):
            if not isinstance(x, Const):
                out.setdefault(x, []).append((-1, nd))
        return out

    @cached_property
    def across(self) -> Mapping[int, int]:
        """What a value is on the other side of a loop's or branch's border."""
        across: dict[int, int] = {}
        for node in self.borders.values():
            for port in ports(node):
                outside = None if port.operand is None else node.inputs[port.operand]
                if isinstance(outside, int):
                    across.update(dict.fromkeys(port.enters, outside))
                leaving = [x for x in port.leaves if isinstance(x, int)]
                if port.result is not None and leaving:
                    across[node.outputs[port.result]] = leaving[0]
        return across
