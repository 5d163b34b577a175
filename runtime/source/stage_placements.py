"""The placements of a program with stages, and what is in their slots called in a module."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.passes.explain.plan import PlanData
from sbp.passes.pipeline.cut import border_of
from sbp.passes.pipeline.slots import Cut, How, Piece, Slot, SlotKind
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.times import ways
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Graph
from sbp.passes.program.role import Phase
from sbp.runtime.pipeline.stage_programs import SlotLayout
from sbp.runtime.source.names import Hints, Unique, short_names

WORDS = {
    Phase.BEFORE: "before",
    Phase.FORWARD: "forward",
    Phase.INPUT: "backward",
    Phase.WEIGHT: "weights_backward",
    Phase.AFTER: "after",
}
"""What pieces are called, in the order in which they run."""
EACH, EVERY = "[i]", "[:]"
"""Behind the name of what each micro-batch has, and of that of all of them."""


@dataclass(frozen=True)
class StagePlace:
    """One placement.

    Arguments:
      number: its position.
      names: of its slots, those of a micro-batch with `[i]` behind.
    """

    number: int
    cut: Cut
    hints: Hints
    names: Mapping[Slot, str]

    @property
    def slot_layout(self) -> SlotLayout:
        """How tensors lie in its slots."""
        return SlotLayout(self.cut.physical)

    def read(self, slot: Slot, how: How = How.WHOLE) -> str:
        """What a piece reads of a slot; `[:]` for the arrays of all micro-batches."""
        name = self.names[slot]
        return name.removesuffix(EACH) + EVERY if how is How.STACK else name


@dataclass(frozen=True)
class StageNames:
    """All placements.

    Arguments:
      merged: whether a backward pass is one piece.
    """

    plan: PlanData
    stages: Stages
    merged: bool

    @cached_property
    def all(self) -> list[StagePlace]:
        """Each of them."""
        return [self._place(k, c) for k, c in enumerate(self.stages.cuts(self.merged))]

    def _place(self, number: int, cut: Cut) -> StagePlace:
        plan = self.plan.stages[number]
        hints = Hints(cut.physical.graph, (plan.in_paths, plan.out_paths), (), {})
        paths = self.stages.traced.in_paths
        short = short_names([*paths, *(f"constant_{k}" for k in range(len(self._constants)))])
        wanted = {s: short[i] for i, s in zip(cut.subgraph.arguments, cut.arguments, strict=True)}
        wanted |= {s: short[i] for i, s in zip(cut.subgraph.closure, cut.closure, strict=True)}
        for some in (cut.receives, cut.sends, cut.micro_receives, cut.micro_sends):
            wanted |= {slot: self._sent[v] for v, slot in some.items() if slot not in wanted}
        wanted |= {slot: name for slot, name in _sums(cut, hints).items() if slot not in wanted}
        slots = [*wanted, *cut.results]
        for piece in in_order(cut):
            slots += [*(r.slot for r in piece.reads), *(w.slot for w in piece.writes)]
        known = {s for piece in cut.pieces for s in (*_slots(piece),)} | {
            *cut.arguments,
            *cut.closure,
            *cut.results,
        }
        unique = Unique.from_taken(["microbatch"])
        names = {}
        for slot in dict.fromkeys(s for s in slots if s in known):
            plain = "number" if slot.value < 0 else hints.name_of(slot.value)
            name = unique.name(wanted.get(slot, plain))
            names[slot] = name + EACH if slot.kind is SlotKind.EACH else name
        return StagePlace(number, cut, hints, names)

    @cached_property
    def _sent(self) -> Mapping[int, str]:
        """What the user calls the values that are sent; gradients by what they are of."""
        labels, traced, cuts = self.stages.labels, self.stages.traced, self.stages.cuts(self.merged)
        hints = Hints(labels.graph, (traced.in_paths, traced.out_paths), (), {})
        makers, phases = labels.graph.producers(), hints.names.phases
        found: dict[int, str] = {}
        inside = [(w.value, w.source, w.target) for w in ways(self.stages, cuts) if w.inside]
        back = {v for v, _, _ in inside if v in makers and phases.get(makers[v].id) == "backward"}
        for c in cuts:
            found.update({v: hints.name_of(v) for v in (*c.sends, *c.micro_sends)})
        for v, p, q in inside:
            there = {w for w, *way in inside if way == [q, p] and w not in back}
            of = {found[w] for w in there if _kind(labels.graph, w) == _kind(labels.graph, v)}
            if v in back and len(of) == 1:
                found[v] = f"grad_{of.pop()}"
        return found

    @cached_property
    def _constants(self) -> Sequence[object]:
        return self.stages.traced.graph.consts


def _kind(graph: Graph, v: int) -> tuple[tuple[int, ...], str]:
    value = graph.values[v]
    return value.shape, str(value.dtype)


def _sums(cut: Cut, hints: Hints) -> dict[Slot, str]:
    """What is carried from one micro-batch to the next, called by what becomes of it."""
    loop = border_of(cut.physical)
    out: dict[Slot, str] = {}
    if loop is None:
        return out
    for port, nd in zip(ports(loop.node), loop.inner_signatures, strict=True):
        if port.operand is not None and port.result is not None:
            name = hints.value(loop.node.outputs[port.result])
            out[Slot(SlotKind.CARRY, port.enters[0], nd)] = f"sum_of_{name}" if name else "running_sum"
    return out


def in_order(cut: Cut) -> list[Piece]:
    """The pieces of a placement, those that run first first."""
    order = list(WORDS)
    return sorted(cut.pieces, key=lambda p: (order.index(p.part.phase), p.part.at))


def _slots(piece: Piece) -> Iterator[Slot]:
    yield from (r.slot for r in piece.reads)
    yield from (w.slot for w in piece.writes)
