"""What a device of each placement holds over a step, in bytes, by what its compiled pieces need.

The step is walked through as `PipelineExecutor` runs it, with bytes in place of arrays: what lies in the
slots of a placement, and while a piece runs, what XLA has assigned to it besides.

Words: docs/glossary.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sbp.compat.core import itemsize
from sbp.passes.pipeline.slots import Cut, How, Piece, Read, Slot, SlotKind
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.actions import Action
from sbp.runtime.pipeline.pipeline_executor import PHASES, routes
from sbp.runtime.pipeline.stage_executor import OUTSIDE, Key
from sbp.runtime.pipeline.stage_programs import Slots

NUMBER_BYTES = 8.0
"""Of a number that has a slot, at the most."""


@dataclass(frozen=True, slots=True)
class PieceNeeds:
    """What a piece takes of a device while it runs, besides what it reads, in bytes.

    Arguments:
      temporary: by XLA's buffer assignment.
      fresh: results that lie in no argument's memory.
      donated: slots whose arrays are gone afterwards.
    """

    temporary: float
    fresh: float
    donated: frozenset[Slot] = frozenset()


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most that a device of a placement holds.

    Arguments:
      bytes: of all of it.
      part: the piece that runs then.
      lying: what lies in slots then, what the piece reads included.
      needs: what that piece takes besides.
    """

    bytes: float
    part: Part
    lying: float
    needs: PieceNeeds


@dataclass
class _Ledger:
    """The bytes in the slots of one placement, as a `BufferStore` has arrays."""

    lying: dict[Key, float] = field(default_factory=dict)
    left: dict[Key, int] = field(default_factory=dict)
    peak: PeakMemory | None = None

    def run(self, part: Part, needs: PieceNeeds) -> None:
        """Notes what is held while a piece runs."""
        lying = math.fsum(self.lying.values())
        held = lying + needs.temporary + needs.fresh
        if self.peak is None or held > self.peak.bytes:
            self.peak = PeakMemory(held, part, lying, needs)

    def take(self, key: Key, readers: int) -> None:
        """Takes away what the last reader reads; 0 readers leave it for ever."""
        if readers:
            self.left[key] = self.left.get(key, readers) - 1
            if not self.left[key]:
                self.lying.pop(key, None)


@dataclass(frozen=True)
class MemoryWalk:
    """A step, with bytes in place of arrays.

    Arguments:
      cuts, slots: per placement.
      stages: per stage, the position of its placement.
      order: all actions of the loop, in one order; () without micro-batches.
      microbatches: how many there are.
      needs: of each piece, by placement and part.
    """

    cuts: Sequence[Cut]
    slots: Sequence[Slots]
    stages: Sequence[int]
    order: Sequence[Action]
    microbatches: int
    needs: Mapping[tuple[int, Part], PieceNeeds]

    def peaks(self) -> list[PeakMemory | None]:
        """The most that a device of each placement holds; None where nothing runs."""
        ledgers = [_Ledger() for _ in self.cuts]
        receivers, sources = routes(self.cuts)
        for place, (ledger, cut) in enumerate(zip(ledgers, self.cuts, strict=True)):
            given = {*cut.arguments, *cut.closed}
            ledger.lying.update({(slot, OUTSIDE): self.bytes(place, slot) for slot in given})
        readers = [Counter(r.slot for piece in cut.pieces for r in piece.reads) for cut in self.cuts]
        pieces = [{p.part: p for p in cut.pieces} for cut in self.cuts]
        self._once(ledgers, readers, Phase.BEFORE, sources)
        for place, cut in enumerate(self.cuts):
            self._bring(ledgers, place, [p for p in cut.pieces if _in_loop(p)], sources)
        for action in self.order:
            place = self.stages[action.stage]
            for phase in PHASES[action.kind]:
                piece = pieces[place].get(Part(phase, action.stage))
                if piece is not None:
                    self._run(ledgers[place], readers[place], place, piece, action.microbatch)
                    for w in piece.writes:
                        for q, slot in receivers.get((place, w.slot), ()):
                            ledgers[q].lying[slot, action.microbatch] = self.bytes(q, slot)
        self._once(ledgers, readers, Phase.AFTER, sources)
        return [ledger.peak for ledger in ledgers]

    def _once(
        self,
        ledgers: Sequence[_Ledger],
        readers: Sequence[Mapping[Slot, int]],
        phase: Phase,
        sources: Mapping[tuple[int, Slot], tuple[int, Slot]],
    ) -> None:
        todo = [(p.part.at, k, p) for k, c in enumerate(self.cuts) for p in c.pieces if p.part.phase == phase]
        for _, place, piece in sorted(todo, key=lambda x: x[:2]):
            self._bring(ledgers, place, [piece], sources)
            self._run(ledgers[place], readers[place], place, piece, OUTSIDE)

    def _bring(
        self,
        ledgers: Sequence[_Ledger],
        place: int,
        pieces: Sequence[Piece],
        sources: Mapping[tuple[int, Slot], tuple[int, Slot]],
    ) -> None:
        """What is sent once comes when somebody reads it."""
        for slot in {r.slot for p in pieces for r in p.reads if (place, r.slot) in sources}:
            ledgers[place].lying[slot, OUTSIDE] = self.bytes(place, slot)

    def _run(
        self, ledger: _Ledger, readers: Mapping[Slot, int], place: int, piece: Piece, microbatch: int
    ) -> None:
        needs = self.needs[place, piece.part]
        ledger.run(piece.part, needs)
        for read in piece.reads:
            for key in self._keys(read, microbatch):
                is_each = read.slot.kind is SlotKind.EACH and read.how is not How.STACK
                ledger.take(key, readers[read.slot] if is_each else 0)
                if read.slot in needs.donated:
                    ledger.lying.pop(key, None)
        for w in piece.writes:
            if w.slot.kind is not SlotKind.EACH or w.slot in readers:
                at = microbatch if w.slot.kind is SlotKind.EACH else OUTSIDE
                ledger.lying[w.slot, at] = self.bytes(place, w.slot)

    def _keys(self, read: Read, microbatch: int) -> Iterator[Key]:
        if read.how is How.STACK:
            yield from ((read.slot, i) for i in range(self.microbatches))
        else:
            yield read.slot, microbatch if read.slot.kind is SlotKind.EACH else OUTSIDE

    def bytes(self, place: int, slot: Slot) -> float:
        """What one device has of the array in a slot."""
        return slot_bytes(self.slots[place], slot)


def slot_bytes(slots: Slots, slot: Slot) -> float:
    """What one device has of the array in a slot."""
    if slot.value < 0:
        return NUMBER_BYTES
    return math.prod(slots.sharding(slot).shard_shape(slots.shape(slot))) * itemsize(slots.dtype(slot))


def _in_loop(piece: Piece) -> bool:
    return piece.part.phase not in (Phase.BEFORE, Phase.AFTER)
