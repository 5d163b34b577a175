"""The physical program of one placement, cut into pieces: what runs once, and what runs per micro-batch.

The planner has seen the placement's whole program, so signatures agree wherever two pieces meet. A tensor
that one piece makes and another reads lies in a *slot*, as it lies on the devices: uneven and partial too.

    physical program            pieces           slots that they read            slots that they write
    ------------------------    -------------    ----------------------------    --------------------------
    gather weights              before 0         ONCE arguments                  ONCE whole weights
    loop over micro-batches:                                                     CARRY zeros for the sums
      ops of the forward        F 0              ONCE weights, EACH input        EACH activations, EACH output
      ops of the backward       I 0              EACH activations, EACH gradient EACH gradient for others
                                W 0              EACH activations                CARRY sums of gradients
    optimizer                   after 0          CARRY sums, ONCE state          ONCE new state

What others send in the loop arrives in an EACH slot too. A move goes to the first part that wants what it
makes, so that what is gathered for one part is not held for the step.

Words: docs/glossary.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sbp.passes.physical.program import Border, Box, Physical, Step, Version, lowering_group, reads, writes
from sbp.passes.pipeline.slots import Cut, How, Piece, Read, Slot, SlotKind, Write
from sbp.passes.pipeline.split import Subgraph
from sbp.passes.program.control import Port, ports
from sbp.passes.program.graph import Const, Operand
from sbp.passes.program.role import Part, Phase
from sbp.signature import NdSbp


def border_of(physical: Physical) -> Border | None:
    """The loop over micro-batches."""
    found = (s for s in physical.steps if isinstance(s, Border) and s.node.op == "scan")
    return next((s for s in found if s.node.role.microbatches and s.node.role.part), None)


def transfers_inside(subgraph: Subgraph, physical: Physical) -> dict[int, NdSbp]:
    """How every value that is sent or received in the loop lies inside of it."""
    loop = border_of(physical)
    if loop is None:
        return {}
    by_stack = {stack: v for v, stack in subgraph.stacks.items()}
    out: dict[int, NdSbp] = {}
    for port, nd in zip(ports(loop.node), loop.inner_signatures, strict=True):
        x = loop.node.inputs[port.operand] if port.operand is not None else None
        y = loop.node.outputs[port.result] if port.result is not None else None
        for v in (x, y):
            if isinstance(v, int) and v in by_stack:
                out[by_stack[v]] = nd
    return out


def cut(subgraph: Subgraph, physical: Physical, merged: bool) -> Cut:
    """Cuts the program of a placement.

    Arguments:
      merged: whether a backward pass is one piece; otherwise what other stages wait for is one of its own.
    """
    return _Cutting(subgraph, physical, merged).run()


@dataclass
class _Draft:
    part: Part
    steps: list[Step] = field(default_factory=list)


class _Cutting:
    """Gives steps to parts (`assign`), then links parts by slots (`pieces`)."""

    def __init__(self, subgraph: Subgraph, physical: Physical, merged: bool) -> None:
        self.subgraph, self.physical, self.merged = subgraph, physical, merged
        self.loop = border_of(physical)
        self.wired: list[tuple[Port, NdSbp]] = []
        if self.loop is not None:
            self.wired = list(zip(ports(self.loop.node), self.loop.inner_signatures, strict=True))
        self.parts = {n.id: p for n in physical.graph.walk() if (p := n.role.part) is not None}
        self.made: dict[int, Part] = {}
        self.drafts: dict[Part, _Draft] = {}

    def run(self) -> Cut:
        self.assign([s for s in self.physical.steps if s is not self.loop], Part(Phase.AFTER, 0))
        inner = self.loop.bodies[0] if self.loop is not None else ()
        first = next((p for s in inner if (p := self.part_of(s)) is not None), Part(Phase.FORWARD, 0))
        self.assign(inner, first)
        if self.loop is not None:
            self.draft_of(self.merge(self.parts[self.loop.node.id]))
        drafts = [_unbucketed(d) for d in sorted(self.drafts.values(), key=lambda d: _rank(d.part))]
        return self.cut_of(self.pieces(drafts))

    def merge(self, part: Part) -> Part:
        return replace(part, phase=Phase.INPUT) if self.merged and part.phase == Phase.WEIGHT else part

    def draft_of(self, part: Part) -> _Draft:
        return self.drafts.setdefault(part, _Draft(part))

    def part_of(self, step: Step) -> Part | None:
        """The part that a step's op belongs to."""
        return None if isinstance(step, Box) else self.parts.get(step.node.id)

    def assign(self, steps: Sequence[Step], default: Part) -> None:
        """Gives every step to a part.

        An op says its own; a move goes to the first part that wants what it makes; what is left goes where
        what it reads is made. No step stands before the last part that makes something for it.
        """
        wanted = self.first_readers(steps)
        for step in steps:
            sources = [self.made[v] for v, _ in reads(step) if v in self.made]
            latest = max(sources, key=_rank, default=None)
            part = self.part_of(step) or min(
                (wanted[v] for v in writes(step) if v in wanted), key=_rank, default=None
            )
            part = (latest or default) if part is None else self.merge(part)
            if latest is not None and _rank(part) < _rank(latest):
                part = latest
            self.draft_of(part).steps.append(step)
            for v, _ in writes(step):
                if not isinstance(step, Box):
                    self.made[v] = part

    def first_readers(self, steps: Sequence[Step]) -> dict[Version, Part]:
        """The first part that reads each version, through moves."""
        out: dict[Version, Part] = {}
        if self.loop is not None and steps is not self.loop.bodies[0]:
            out.update(dict.fromkeys(reads(self.loop), self.parts[self.loop.node.id]))
        elif self.loop is not None:
            # Another stage may wait for what leaves: it is there as soon as its op has run.
            makers = {v: part for s in steps if (part := self.part_of(s)) is not None for v, _ in writes(s)}
            leaving = ((x, nd) for p, nd in self.wired if p.result is not None for x in p.leaves)
            out.update(((x, nd), makers[x]) for x, nd in leaving if isinstance(x, int) and x in makers)
        for step in reversed(steps):
            # A move, and what a pin has put there, is of no part itself.
            wanted = (out[v] for v in writes(step) if v in out)
            part = self.part_of(step) or min(wanted, key=_rank, default=None)
            if part is not None:
                out.update({v: _first(out.get(v, part), part) for v in reads(step)})
        return out

    def reads_of_entering(self) -> tuple[dict[Version, Read], dict[Version, Const]]:
        """What the body's pieces read of what enters the loop."""
        found: dict[Version, Read] = {}
        numbers: dict[Version, Const] = {}
        assert self.loop is not None
        by_stack = {stack: v for v, stack in self.subgraph.stacks.items()}
        for port, nd in self.wired:
            x = self.loop.node.inputs[port.operand] if port.operand is not None else None
            if x is None:
                continue
            (v,) = port.enters
            version = v, nd
            if port.result is not None:
                found[version] = Read(Slot(SlotKind.CARRY, v, nd), version)
            elif isinstance(x, Const):
                numbers[version] = x
            elif port.stacked and x in by_stack and by_stack[x] in self.subgraph.micro_receives:
                found[version] = Read(Slot(SlotKind.EACH, v, nd), version)
            else:
                outer = Slot(SlotKind.ONCE, x, port.outer(nd))
                found[version] = Read(outer, version, How.SLICE if port.stacked else How.WHOLE)
        return found, numbers

    def pieces(self, drafts: Sequence[_Draft]) -> list[Piece]:
        """The pieces, with the slots between them."""
        inside = [d for d in drafts if d.part.phase not in (Phase.BEFORE, Phase.AFTER)]
        outside = [d for d in drafts if d.part.phase in (Phase.BEFORE, Phase.AFTER)]
        entering, numbers = self.reads_of_entering() if self.loop is not None else ({}, {})
        pieces = _link(inside, entering, numbers, self.writes_of_leaving(inside), SlotKind.EACH)
        stacked = self.reads_after_loop()
        begin = Part(Phase.AFTER, 0)
        if begin not in self.drafts and any(
            isinstance(x, Const) or (x, nd) in stacked for x, nd in self.results_and_sent()
        ):
            outside.append(_Draft(begin))
        wanted: dict[Part, list[Write]] = {d.part: [] for d in outside}
        made = {v: d.part for d in outside for s in d.steps for v in writes(s)}
        if self.loop is not None:
            wanted[self.merge(self.parts[self.loop.node.id])] += self.first_carries()
        once = {r.slot for p in pieces for r in p.reads if r.slot.kind == SlotKind.ONCE}
        for x, nd in self.results_and_sent():
            if isinstance(x, Const):
                wanted[begin].append(Write(x, nd, Slot(SlotKind.ONCE, -1 - len(wanted[begin]), nd)))
            elif not isinstance(x, Const):
                once.add(Slot(SlotKind.ONCE, x, nd))
        for slot in sorted(once, key=lambda s: s.value):
            part = made.get((slot.value, slot.nd))
            if part is None and (slot.value, slot.nd) in stacked:
                part = begin
            if part is not None:
                wanted[part].append(Write(slot.value, slot.nd, slot))
        return [*pieces, *_link(outside, stacked, {}, wanted, SlotKind.ONCE)]

    def results_and_sent(self) -> list[tuple[Operand, NdSbp]]:
        """What leaves once: results, and what is sent."""
        count = len(self.subgraph.results) + len(self.subgraph.sends)
        return list(zip(self.physical.graph.outputs, self.physical.outputs, strict=True))[:count]

    def writes_of_leaving(self, drafts: Sequence[_Draft]) -> dict[Part, list[Write]]:
        """What the body's pieces write of what leaves the loop."""
        out: dict[Part, list[Write]] = {d.part: [] for d in drafts}
        makers = {v: d.part for d in drafts for s in d.steps for v in writes(s)}
        nexts: dict[int, Part] = {}
        for port, nd in self.wired:
            if port.result is None:
                continue
            (x,) = port.leaves
            part = makers.get((x, nd)) if isinstance(x, int) else None
            if port.operand is not None:
                (v,) = port.enters
                if x == v:
                    continue
                part = part or self.latest(out)
                nexts[v] = part
                out[part].append(Write(x, nd, Slot(SlotKind.CARRY, v, nd)))
        for port, nd in self.wired:
            if port.result is not None and port.operand is None:
                (x,) = port.leaves
                part = makers.get((x, nd)) if isinstance(x, int) else None
                part = part or (nexts.get(x) if isinstance(x, int) else None) or self.latest(out)
                out[part].append(Write(x, nd, self.stack_slot(port, nd)))
        return out

    def stack_slot(self, port: Port, nd: NdSbp) -> Slot:
        """The slot of what leaves for every micro-batch: by the stack that stands for it."""
        assert self.loop is not None and port.result is not None
        return Slot(SlotKind.EACH, self.loop.node.outputs[port.result], nd, slice=True)

    def latest(self, parts: Iterable[Part]) -> Part:
        """The part that runs last."""
        return max(parts, key=_rank)

    def first_carries(self) -> list[Write]:
        """The first values of what is carried."""
        assert self.loop is not None
        out: list[Write] = []
        for port, nd in self.wired:
            if port.operand is not None and port.result is not None:
                x = self.loop.node.inputs[port.operand]
                out.append(Write(x, nd, Slot(SlotKind.CARRY, port.enters[0], nd)))
        return out

    def reads_after_loop(self) -> dict[Version, Read]:
        """How what comes after the loop reads its results."""
        found: dict[Version, Read] = {}
        for port, nd in self.wired:
            if port.result is None or self.loop is None:
                continue
            version = self.loop.node.outputs[port.result], port.outer(nd)
            if port.operand is not None:
                found[version] = Read(Slot(SlotKind.CARRY, port.enters[0], nd), version)
            else:
                found[version] = Read(self.stack_slot(port, nd), version, How.STACK)
        return found

    def cut_of(self, pieces: Sequence[Piece]) -> Cut:
        """The cut, with the slots of all that the subgraph takes and gives, in its order."""
        subgraph, p = self.subgraph, self.physical
        slots = [Slot(SlotKind.ONCE, v, nd) for v, nd in zip(p.graph.inputs, p.inputs, strict=True)]
        n, k, f = len(subgraph.arguments), len(subgraph.receives), len(subgraph.micro_receives)
        numbers = {w.slot for piece in pieces for w in piece.writes if w.slot.value < 0}
        spare = sorted(numbers, key=lambda s: -s.value)
        ends: list[Slot] = []
        for x, nd in self.results_and_sent():
            ends.append(spare.pop(0) if isinstance(x, Const) else Slot(SlotKind.ONCE, x, nd))
        r, s = len(subgraph.results), len(subgraph.sends)
        enters = (
            {
                self.loop.node.inputs[q.operand]: (q, nd)
                for q, nd in self.wired
                if q.operand is not None and q.stacked
            }
            if self.loop
            else {}
        )
        leaves = (
            {self.loop.node.outputs[q.result]: (q, nd) for q, nd in self.wired if q.result is not None}
            if self.loop
            else {}
        )
        fed: dict[int, Slot] = {}
        for v in subgraph.micro_receives:
            port, nd = enters[subgraph.stacks[v]]
            fed[v] = Slot(SlotKind.EACH, port.enters[0], nd)
        passed: dict[int, Slot] = {}
        for v in subgraph.micro_sends:
            port, nd = leaves[subgraph.stacks[v]]
            passed[v] = self.stack_slot(port, nd)
        return Cut(
            subgraph,
            p,
            tuple(pieces),
            tuple(slots[:n]),
            tuple(slots[n + k + f :]),
            tuple(ends[:r]),
            dict(zip(subgraph.receives, slots[n : n + k], strict=True)),
            dict(zip(subgraph.sends, ends[r : r + s], strict=True)),
            fed,
            passed,
        )


_PHASES = {Phase.BEFORE: 0, Phase.FORWARD: 1, Phase.INPUT: 2, Phase.WEIGHT: 2, Phase.AFTER: 4}


def _rank(part: Part) -> tuple[int, int, int]:
    """The order in which parts of one micro-batch can run: forward by stages, backward the other way."""
    backward = part.phase in (Phase.INPUT, Phase.WEIGHT)
    return _PHASES[part.phase], -part.at if backward else part.at, int(part.phase == Phase.WEIGHT)


def _first(one: Part, other: Part) -> Part:
    """The part that makes for two of them what both read: no stage waits for the weights' part of another."""
    first = min(one, other, key=_rank)
    waits = first.phase is Phase.WEIGHT and one.at != other.at
    return replace(first, phase=Phase.INPUT) if waits else first


def _unbucketed(draft: _Draft) -> _Draft:
    """The same without buckets that the cut has torn: what is left of one then goes by itself."""
    whole: list[Step] = []
    for i, s in enumerate(draft.steps):
        near = [draft.steps[j] for j in (i - 1, i + 1) if 0 <= j < len(draft.steps)]
        beside = any(lowering_group(s) == lowering_group(other) for other in near)
        whole.append(s if isinstance(s, Border) or beside else replace(s, bucket=-1))
    return _Draft(draft.part, whole)


def _link(
    drafts: Sequence[_Draft],
    entering: Mapping[Version, Read],
    numbers: Mapping[Version, Const],
    wanted: Mapping[Part, Sequence[Write]],
    kind: SlotKind,
) -> list[Piece]:
    """Pieces of drafts: what one makes and another reads goes through a slot.

    Arguments:
      entering, numbers: what the drafts read from elsewhere.
      wanted: what they write for others.
      kind: of the slots between them.
    """
    makers: dict[Version, Part] = {}
    needs: dict[Part, list[Version]] = {}
    for d in drafts:
        own: set[Version] = set()
        need: dict[Version, None] = {}
        for s in d.steps:
            need.update(dict.fromkeys(x for x in reads(s) if x not in own))
            own.update(writes(s))
        for w in wanted[d.part]:
            if isinstance(w.operand, int) and (w.operand, w.nd) not in own:
                need[w.operand, w.nd] = None
        needs[d.part] = list(need)
        for version in own:
            makers.setdefault(version, d.part)
    between: dict[Part, dict[Version, None]] = {d.part: {} for d in drafts}
    for d in drafts:
        for x in needs[d.part]:
            if x in makers and makers[x] != d.part:
                between[makers[x]][x] = None
    out: list[Piece] = []
    for d in drafts:
        gets = [entering.get(x, Read(Slot(kind, *x), x)) for x in needs[d.part] if x not in numbers]
        puts = {w.slot: w for w in wanted[d.part]}
        for v, nd in between[d.part]:
            puts.setdefault(Slot(kind, v, nd), Write(v, nd, Slot(kind, v, nd)))
        held = tuple((x, numbers[x]) for x in needs[d.part] if x in numbers)
        out.append(Piece(d.part, tuple(d.steps), tuple(gets), tuple(puts.values()), held))
    return out
