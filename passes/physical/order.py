"""In which order kernels run, and from when until when a collective holds memory.

XLA:GPU first finds an order that takes little memory, and then hides collectives behind kernels
(latency_hiding.py), as long as there is memory for it. How long a step takes (step_schedule.py) and what it
holds (memory.py) are asked of the same kernels in the same order, unless first trips of loops run before
these in memory. So they are merged and ordered once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sbp.passes.physical.fusion import PRODUCTS, Fusing, KernelOp, Seconds, ShardSizes
from sbp.passes.physical.kernels import Buffer, Kernels, program_kernels
from sbp.passes.physical.latency_hiding import hidden_order, plain_order
from sbp.passes.physical.program import Border, Step, Version
from sbp.passes.physical.schedule_nodes import (
    ScheduleNode,
    hiding_ops,
    in_sections,
    is_packed,
    numbers_of,
    schedule_nodes,
    sent_together,
)


@dataclass(frozen=True, slots=True)
class PackedReductions:
    """All-reduces that are sent as one, in a space of their own.

    Arguments:
      members: their positions.
      first, last: the turns in which they are packed, and in which the last of them is unpacked.
    """

    members: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Turns:
    """When what a body makes and reads is there, by turns; the end comes last.

    Of a kernel both are in its turn. What a collective makes is there as soon as it begins, and what it reads
    until it has ended.

    Arguments:
      born: per op, from when on what it makes is there; 0 for what is no kernel.
      read: per op, until when what it reads is there.
      packed_reductions: what is sent beside these.
      maxima_turns: of gradients of max pooling, when the places of the maxima are found.
    """

    born: Sequence[int]
    read: Sequence[int]
    packed_reductions: Sequence[PackedReductions] = ()
    maxima_turns: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BodyOrder:
    """What runs as one in a body, and what of it happens one after the other, as `hidden_order` gives it."""

    nodes: Sequence[ScheduleNode]
    events: Sequence[tuple[int, bool]]

    @classmethod
    def of(cls, nodes: Sequence[ScheduleNode], events: Iterable[tuple[int, bool]]) -> BodyOrder:
        """The order without what is no node: what is read under other shapes, what is between sections."""
        return cls(nodes, [(j, begins) for j, begins in events if j < len(nodes)])


def hiding_order(
    k: Kernels,
    together: Sequence[tuple[int, ...]],
    seconds: Seconds,
    numbers: Mapping[int, int] | None = None,
) -> BodyOrder:
    """The order of a whole program, collectives hidden; what lies in spaces of its own is what is there
    before the first op, and what is kept.

    Arguments:
      numbers: where the program runs in sections, of which one each op is.
    """
    ends = set(k.ends.values())
    when = known_places(k, {t for t in k.tensors if t.maker < 0 or t in ends}, together)
    nodes = schedule_nodes(k, together, when, seconds, numbers)
    ops = hiding_ops(k, nodes, ())
    if numbers is not None:
        ops = in_sections(ops, numbers_of(nodes, numbers))
    return BodyOrder.of(nodes, hidden_order(ops))


def body_order(
    k: Kernels,
    elsewhere: Collection[Buffer],
    together: Sequence[tuple[int, ...]],
    seconds: Seconds | None,
    sent: Sequence[KernelOp] = (),
    hastens: bool = True,
    in_loop: bool = False,
) -> BodyOrder:
    """The order of a body, collectives hidden if there are any and it is known what ops take.

    Arguments:
      elsewhere, seconds, sent, hastens, together, in_loop: as those of `turns`.
    """
    # A trip of a loop that has something to send changes who reads what.
    places = places_of if sent else known_places
    nodes = schedule_nodes(k, together, places(k, elsewhere, together, hastens), seconds)
    ops = hiding_ops(k, nodes, {id(op) for op in sent}, in_loop)
    if seconds is not None and any(op.sends for op in ops):
        return BodyOrder.of(nodes, hidden_order(ops))
    return BodyOrder.of(nodes, [(j, True) for j in plain_order(ops)])


def turns(
    k: Kernels,
    elsewhere: Collection[Buffer],
    seconds: Seconds | None,
    sent: Sequence[KernelOp] = (),
    hastens: bool = True,
    together: Sequence[tuple[int, ...]] | None = None,
    known: BodyOrder | None = None,
    in_loop: bool = False,
) -> Turns:
    """The turns of all ops.

    Arguments:
      elsewhere: tensors whose space is counted elsewhere.
      seconds: of an op; None where memory is short, and collectives are not hidden at its cost.
      sent: what the trip of a loop before this one has left to send.
      hastens: whether what frees memory runs as soon as it can.
      together: collectives that are sent as one; None to look for them.
      known: the order, if it was found before.
      in_loop: whether it is the body of a loop or of a branch.
    """
    together = sent_together(k) if together is None else together
    if known is None:
        known = body_order(k, elsewhere, together, seconds, sent, hastens, in_loop)
    found = dict[int, int]()
    born, read = [0] * len(k.ops) + [len(known.events)], [0] * len(k.ops) + [len(known.events)]
    for at, (j, begins) in enumerate(known.events):
        node = known.nodes[j]
        for i in node.makes if begins else ():
            born[i] = at
        for i in node.reads:
            read[i] = at
        if node.pool >= 0:
            found[node.pool] = at
    packed = [
        PackedReductions(members, read[members[0]], max(born[i] for i in members))
        for members in together
        if is_packed(k, members)
    ]
    return Turns(born, read, packed, found)


def saving_turns(k: Kernels, elsewhere: Collection[Buffer]) -> list[int]:
    """The turn of each op, and of the end, in the order that takes little memory; ops that are no kernels
    have one too."""
    when, turn = places_of(k, elsewhere, ()), [0] * (len(k.ops) + 1)
    for at, i in enumerate(sorted(range(len(when)), key=when.__getitem__)):
        turn[i] = at
    return turn


def known_places(
    k: Kernels, elsewhere: Collection[Buffer], together: Sequence[tuple[int, ...]], hastens: bool = True
) -> Sequence[float]:
    """The same as `places_of`, looked for once."""
    key = "places", frozenset(elsewhere), tuple(together), hastens
    return k.memo(key, lambda: places_of(k, elsewhere, together, hastens))


def places_of(
    k: Kernels, elsewhere: Collection[Buffer], together: Sequence[tuple[int, ...]], hastens: bool = True
) -> list[float]:
    """The place of each op, and of the end, in the order that takes little memory."""
    when = [float(i) for i in range(len(k.ops) + 1)]
    for members in together:
        for i in members:
            # All that they read stays until the last of them has its operand.
            when[i] = float(members[-1])
    _wait(k, when)
    if hastens:
        _hasten(k, when, elsewhere, {i for members in together for i in members})
    _delay(k, when, elsewhere)
    return when


def _wait(k: Kernels, when: list[float]) -> None:
    """Nothing runs before what it reads is there."""
    for i, own in enumerate(k.makers):
        at = when[i]
        for m in own:
            at = max(at, when[m])
        when[i] = at


def _delay(k: Kernels, when: list[float], elsewhere: Collection[Buffer]) -> None:
    """What is made of less than it takes is made when it is needed first."""
    for i in reversed(range(len(k.ops))):
        # What only a barrier waits for is written, and read by nobody.
        if k.ops[i].kind is not Fusing.LOOP or not any(t.readers for t in k.writes[i]):
            continue
        first = min(when[r] for t in k.writes[i] for r in t.readers)
        longer = sum(
            t.bytes for t in k.reads[i] if t not in elsewhere and all(when[r] < first for r in t.readers)
        )
        if first > when[i] + 1 and longer < sum(t.bytes for t in k.writes[i] if t not in elsewhere):
            when[i] = first - 0.5


def _hasten(k: Kernels, when: list[float], elsewhere: Collection[Buffer], together: Collection[int]) -> None:
    """What frees more than it takes runs as soon as it can; loops with products have their turns, and so have
    collectives that are combined."""
    for i, op in enumerate(k.ops):
        if i in together or not k.runs(i):
            continue
        ready = max((when[m] for m in k.makers[i]), default=-1.0)
        makes = sum(t.bytes for t in k.writes[i] if t not in elsewhere)
        # Most have a reader that is still to come: one is enough, of a scalar that thousands read.
        at = when[i]
        freed = sum(
            t.bytes for t in k.reads[i] if t not in elsewhere and all(when[r] <= at for r in t.readers)
        )
        # A reduction is merged with what makes its operand, or reads the same (multi-output fusion).
        if op.product and (freed <= makes or op.name not in PRODUCTS):
            continue
        reduces = op.kind is Fusing.ROOT and makes < sum(t.bytes for t in k.reads[i])
        if ready + 1 < when[i] and (freed >= makes or reduces):
            when[i] = ready + 0.25


@dataclass(frozen=True)
class WholeProgram:
    """A program as its kernels.

    Arguments:
      live_after: versions that are needed after the last op.
      live_before: versions that are there before the first one.
      groups: collectives that are sent as one.
      order: collectives hidden.
    """

    k: Kernels
    sizes: ShardSizes
    live_after: Sequence[Version]
    live_before: Sequence[Version]
    groups: Sequence[tuple[int, ...]]
    order: BodyOrder

    @property
    def sends(self) -> bool:
        """Whether there are collectives to hide."""
        return any(node.sends for node in self.order.nodes)


def has_loops(steps: Iterable[Step]) -> bool:
    """Whether a loop or a branch is among some steps."""
    return any(isinstance(step, Border) for step in steps)


def whole_program(sizes: ShardSizes, seconds: Seconds, known: dict[int, KernelOp]) -> WholeProgram:
    """The kernels of a program.

    Arguments:
      sizes: of its tensors.
      seconds: what the scheduler takes an op to be.
      known: what ops are to fusion, which is added to.
    """
    physical = sizes.physical
    there = list(dict.fromkeys(zip(physical.graph.inputs, physical.inputs, strict=True)))
    k = program_kernels(sizes, known)
    together = sent_together(k)
    return WholeProgram(k, sizes, list(k.ends), there, together, hiding_order(k, together, seconds))
