"""One placement of a pipeline at run time: its programs, and what lies between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from sbp.passes.pipeline.order import Part, Phase
from sbp.passes.pipeline.slots import Cut, How, Kind, Read, Slot
from sbp.placement import Placement
from sbp.runtime.pipeline.pieces import Runnable, Slots, donations, runnable

OUTSIDE = -1
"""The number of the micro-batch of what does not belong to one."""


@dataclass
class Shelf:
    """The arrays of one placement during one step, by slot and micro-batch.

    What is put here by another thread is waited for; what nobody will read any more is dropped.
    """

    arrays: dict[tuple[Slot, int], Any] = field(default_factory=dict)
    left: Counter[tuple[Slot, int]] = field(default_factory=Counter)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    failed: BaseException | None = None

    def put(self, slot: Slot, microbatch: int, array: Any) -> None:
        """Puts an array into a slot."""
        with self.arrived:
            self.arrays[slot, microbatch if slot.kind is Kind.EACH else OUTSIDE] = array
            self.arrived.notify_all()

    def get(self, slot: Slot, microbatch: int, patient: bool) -> Any:
        """The array in a slot; `patient` waits for it to come."""
        key = slot, microbatch if slot.kind is Kind.EACH else OUTSIDE
        with self.arrived:
            while patient and key not in self.arrays and self.failed is None:
                self.arrived.wait()
            if self.failed is not None:
                raise RuntimeError("another stage failed") from self.failed
            return self.arrays[key]

    def used(self, slot: Slot, microbatch: int, readers: int) -> None:
        """Notes that one of the readers of a slot is done."""
        if slot.kind is not Kind.EACH:
            return
        self.left[slot, microbatch] += 1
        if self.left[slot, microbatch] >= readers:
            with self.arrived:
                self.arrays.pop((slot, microbatch), None)

    def fail(self, why: BaseException) -> None:
        """Wakes up who waits: nothing will come."""
        with self.arrived:
            self.failed = why
            self.arrived.notify_all()

    @property
    def kept(self) -> list[Any]:
        """What is kept for micro-batches."""
        with self.arrived:
            return [x for (slot, _), x in self.arrays.items() if slot.kind is Kind.EACH]


@dataclass(frozen=True)
class Station:
    """The programs of one placement.

    Arguments:
      runnables: by part.
      readers: per slot, how many pieces read it.
      indices: the number of each micro-batch, on the devices.
    """

    placement: Placement
    cut: Cut
    slots: Slots
    runnables: Mapping[Part, Runnable]
    readers: Mapping[Slot, int]
    indices: tuple[Any, ...]

    def outside(self, phase: Phase) -> list[Runnable]:
        """What runs once, before or after the loop, in order."""
        found = [r for p, r in self.runnables.items() if p.phase == phase]
        return sorted(found, key=lambda r: r.piece.part.at)

    def inside(self) -> list[Runnable]:
        """What runs for every micro-batch."""
        return [r for p, r in self.runnables.items() if p.phase not in (Phase.BEFORE, Phase.AFTER)]

    def arrays(self, shelf: Shelf, read: Read, microbatch: int, patient: bool) -> list[Any]:
        """What a piece reads."""
        if read.how is How.STACK:
            return [shelf.get(read.slot, i, patient) for i in range(len(self.indices))]
        return [shelf.get(read.slot, microbatch, patient)]

    def run(
        self, shelf: Shelf, run: Runnable, microbatch: int, patient: bool = False
    ) -> list[tuple[Slot, Any]]:
        """Runs one piece; what it has written."""
        reads = run.piece.reads
        given = [x for r in reads for x in self.arrays(shelf, r, microbatch, patient)]
        index = self.indices[max(microbatch, 0)] if self.indices else np.int32(0)
        made = run.run(index, *given)
        for r in reads:
            shelf.used(r.slot, microbatch, self.readers[r.slot])
        written = [(w.slot, x) for w, x in zip(run.piece.writes, made, strict=True)]
        for slot, x in written:
            shelf.put(slot, microbatch, x)
        return written


def make_station(cut: Cut, microbatches: int) -> Station:
    """The station of a placement whose devices are there."""
    placement = cut.physical.placement
    slots = Slots(cut.physical, placement.mesh)
    kept = {*cut.arguments, *cut.closed, *cut.received.values(), *cut.sent.values(), *cut.results}
    kept |= {*cut.passed.values()}
    taken = donations(slots, cut.pieces, kept)
    readers = Counter(r.slot for piece in cut.pieces for r in piece.reads)
    runnables = {
        piece.part: runnable(slots, piece, microbatches, taken.get(i, set()))
        for i, piece in enumerate(cut.pieces)
    }
    everywhere = jax.sharding.NamedSharding(slots.mesh, jax.sharding.PartitionSpec())
    indices = tuple(jax.device_put(np.int32(i), everywhere) for i in range(microbatches))
    return Station(placement, cut, slots, runnables, readers, indices)


def parts_of(stations: Sequence[Station]) -> list[Part]:
    """The parts of all stations."""
    return [part for s in stations for part in s.runnables]
