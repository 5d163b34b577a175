"""The memory of a device of each placement over a step, in bytes, from the needs of its compiled pieces.

The step is simulated in the order of `PipelineExecutor`, with bytes in place of arrays: the arrays in the
slots of a placement, and while a piece runs, XLA's temporary memory.

Words: docs/glossary.md.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sbp.compat.core import itemsize
from sbp.passes.pipeline.slots import Cut, How, Piece, Read, Slot, SlotKind
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.actions import Action
from sbp.runtime.pipeline.pipeline_executor import PHASES
from sbp.runtime.pipeline.stage_executor import OUTSIDE, Key
from sbp.runtime.pipeline.stage_programs import Slots
from sbp.runtime.pipeline.transfer_engine import routes

NUMBER_BYTES = 8.0
"""Of a number that has a slot, at the most."""


@dataclass(frozen=True, slots=True)
class PieceNeeds:
    """The memory of a device that a piece needs while it runs, besides the arrays that it reads, in bytes.

    Arguments:
      temporary: by XLA's buffer assignment.
      fresh: results that do not take the memory of an argument.
      donated: slots whose arrays are dropped afterwards.
    """

    temporary: float
    fresh: float
    donated: frozenset[Slot] = frozenset()


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak of a device of a placement.

    Arguments:
      bytes: in all.
      part: the piece that runs then.
      slot_bytes: bytes in slots then, with those that the piece reads.
      needs: what that piece needs besides.
    """

    bytes: float
    part: Part
    slot_bytes: float
    needs: PieceNeeds


@dataclass
class _Ledger:
    """The bytes in the slots of one placement, where a `BufferStore` has arrays."""

    lying: dict[Key, float] = field(default_factory=dict)
    left: dict[Key, int] = field(default_factory=dict)
    peak: PeakMemory | None = None

    def run(self, part: Part, needs: PieceNeeds) -> None:
        """Adds the needs of a piece while it runs."""
        lying = math.fsum(self.lying.values())
        held = lying + needs.temporary + needs.fresh
        if self.peak is None or held > self.peak.bytes:
            self.peak = PeakMemory(held, part, lying, needs)

    def take(self, key: Key, readers: int) -> None:
        """Drops an array at its last reader; 0 readers keep it for ever."""
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
      microbatches: their number.
      needs: of each piece, by placement and part.
    """

    cuts: Sequence[Cut]
    slots: Sequence[Slots]
    stages: Sequence[int]
    order: Sequence[Action]
    microbatches: int
    needs: Mapping[tuple[int, Part], PieceNeeds]

    def peaks(self) -> list[PeakMemory | None]:
        """The peak of a device of each placement; None where nothing runs."""
        ledgers = [_Ledger() for _ in self.cuts]
        receivers, sources = routes(self.cuts)
        for place, (ledger, cut) in enumerate(zip(ledgers, self.cuts, strict=True)):
            given = {*cut.arguments, *cut.closure}
            ledger.lying.update({(slot, OUTSIDE): self.bytes(place, slot) for slot in given})
        readers = [Counter(r.slot for piece in cut.pieces for r in piece.reads) for cut in self.cuts]
        pieces = [{p.part: p for p in cut.pieces} for cut in self.cuts]
        self._once(ledgers, readers, Phase.BEFORE, sources)
        for place, cut in enumerate(self.cuts):
            self._bring(
                ledgers,
                place,
                [p for p in cut.pieces if p.part.phase not in (Phase.BEFORE, Phase.AFTER)],
                sources,
            )
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
        """Receives an array that is sent once when its first reader comes."""
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
        """The bytes of the array in a slot, on one device."""
        return slot_bytes(self.slots[place], slot)


def slot_bytes(slots: Slots, slot: Slot) -> float:
    """The bytes of the array in a slot, on one device."""
    if slot.value < 0:
        return NUMBER_BYTES
    return math.prod(slots.sharding(slot).shard_shape(slots.shape(slot))) * itemsize(slots.dtype(slot))
