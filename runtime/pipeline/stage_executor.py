"""Runs the programs of one placement of a pipeline, and keeps the arrays between them.

Words: docs/glossary.md.
"""

import functools
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import numpy as np

from sbp.compat.untyped import partition_spec
from sbp.passes.pipeline.slots import Cut, How, Read, Slot, SlotKind
from sbp.passes.program.role import Part, Phase
from sbp.placement import Placement
from sbp.runtime.lower.lowering import ProgramName
from sbp.runtime.nan_checks.probe import NanProbe
from sbp.runtime.pipeline.shared_executables import Executables
from sbp.runtime.pipeline.stage_programs import RemoteStage, Runnable, Slots, given_away, runnable
from sbp.runtime.processes.addressable import is_here, to_devices

OUTSIDE = -1
"""The number of the micro-batch of what does not belong to one."""
Key: TypeAlias = tuple[Slot, int]
"""A slot, and the micro-batch whose array is in it."""


@dataclass(frozen=True)
class StageRecord:
    """The NaN checks of one piece.

    Arguments:
      run: the piece.
      cut: the placement's program that it belongs to.
      microbatch: its micro-batch; OUTSIDE for a piece that runs once.
      flags: "devices 7", as in runtime/nan_checks/probe.py.
    """

    run: Runnable
    cut: Cut
    microbatch: int
    flags: jax.Array


@dataclass
class BufferStore:
    """The arrays of one placement during one step, by slot and micro-batch.

    A reader waits for an array that another thread puts here. An array without further readers is dropped.

    Arguments:
      records: the NaN checks of its pieces, if the user asked for them.
      come: slots of arrays that are sent once and have arrived from other processes.
    """

    arrays: dict[Key, jax.Array] = field(default_factory=dict)
    come: set[Key] = field(default_factory=set)
    uses_left: dict[Key, int] = field(default_factory=dict)
    arrival: threading.Condition = field(default_factory=threading.Condition)
    failure: BaseException | None = None
    records: list[StageRecord] = field(default_factory=list)

    def put(self, arrays: Mapping[Key, jax.Array]) -> None:
        """Puts arrays into slots."""
        with self.arrival:
            self.arrays.update(arrays)
            self.arrival.notify_all()

    def get(self, slot: Slot) -> jax.Array:
        """The array of a slot that does not belong to a micro-batch."""
        return self.take([((slot, OUTSIDE), 0)], False)[0]

    def take(self, wanted: Sequence[tuple[Key, int]], blocking: bool) -> list[jax.Array]:
        """The arrays of some slots, given the number of readers of each; the last one drops it (0: never).

        Arguments:
          blocking: whether to wait for them.
        """
        out = []
        with self.arrival:
            for key, readers in wanted:
                while blocking and key not in self.arrays and self.failure is None:
                    self.arrival.wait()
                if self.failure is not None:
                    raise RuntimeError("another stage failed") from self.failure
                out.append(self.arrays[key])
                if readers:
                    self.uses_left[key] = self.uses_left.get(key, readers) - 1
                    if not self.uses_left[key]:
                        del self.arrays[key]
        return out

    def fail(self, why: BaseException) -> None:
        """Wakes the waiting threads after an error: no array will come."""
        with self.arrival:
            self.failure = why
            self.arrival.notify_all()

    def arrays_of(self, slots: Collection[Slot], microbatch: int) -> list[jax.Array]:
        """The arrays of a micro-batch that are in some slots now."""
        with self.arrival:
            return [self.arrays[key] for slot in slots if (key := (slot, microbatch)) in self.arrays]

    @property
    def microbatch_arrays(self) -> list[jax.Array]:
        """The arrays that are kept for micro-batches."""
        with self.arrival:
            return [x for (slot, _), x in self.arrays.items() if slot.kind is SlotKind.EACH]


@dataclass(frozen=True)
class StageExecutor:
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
    indices: tuple[jax.Array, ...]

    @functools.cached_property
    def is_here(self) -> bool:
        """Whether this process has some of the devices, and so runs the programs."""
        return any(map(is_here, self.slots.mesh.devices.flat))

    def pieces_once(self, phase: Phase) -> list[Runnable]:
        """The pieces that run once, before or after the loop, in order."""
        found = [r for p, r in self.runnables.items() if p.phase == phase]
        return sorted(found, key=lambda r: r.piece.part.at)

    def pieces_in_loop(self) -> list[Runnable]:
        """The pieces that run for every micro-batch."""
        return [r for p, r in self.runnables.items() if p.phase not in (Phase.BEFORE, Phase.AFTER)]

    @functools.cached_property
    def reads(self) -> Mapping[Part, list[tuple[Slot, int | None, int]]]:
        """Per part its reads: the slot; the micro-batch, None for its own; how many pieces read it."""
        return {
            part: [x for r in run.piece.reads for x in self._read(r)] for part, run in self.runnables.items()
        }

    def _read(self, read: Read) -> Iterator[tuple[Slot, int | None, int]]:
        if read.how is How.STACK:
            yield from ((read.slot, i, 0) for i in range(len(self.indices)))
        elif read.slot.kind is SlotKind.EACH:
            yield read.slot, None, self.readers[read.slot]
        else:
            yield read.slot, OUTSIDE, 0

    @functools.cached_property
    def writes(self) -> Mapping[Part, list[tuple[int, Slot, bool]]]:
        """Per part its writes that are kept here: position, slot, whether it belongs to the micro-batch."""
        return {
            part: [
                (i, w.slot, w.slot.kind is SlotKind.EACH)
                for i, w in enumerate(run.piece.writes)
                if w.slot.kind is not SlotKind.EACH or w.slot in self.readers
            ]
            for part, run in self.runnables.items()
        }

    @property
    def stages(self) -> set[int]:
        """The stages that run here."""
        return {part.at for part in self.runnables}

    def residuals(self, stage: int) -> set[Slot]:
        """Arrays of a micro-batch that the forward pass of a stage leaves for its backward pass."""
        pieces = [r.piece for part, r in self.runnables.items() if part.at == stage]
        forward = [p for p in pieces if p.part.phase is Phase.FORWARD]
        had = {r.slot for p in forward for r in p.reads} | {w.slot for p in forward for w in p.writes}
        wanted = {r.slot for p in pieces if p.part.phase in (Phase.INPUT, Phase.WEIGHT) for r in p.reads}
        return {slot for slot in had & wanted if slot.kind is SlotKind.EACH}

    def read_arrays(
        self, store: BufferStore, run: Runnable, microbatch: int, blocking: bool = False
    ) -> list[jax.Array]:
        """The arrays that a piece reads; `blocking` waits for them."""
        wanted = [
            ((slot, microbatch if i is None else i), readers)
            for slot, i, readers in self.reads[run.piece.part]
        ]
        return store.take(wanted, blocking)

    def run(
        self, store: BufferStore, run: Runnable, microbatch: int, given: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Runs one piece and keeps the results that somebody here will read."""
        index = self.indices[max(microbatch, 0)] if self.indices else np.int32(0)
        made: Sequence[jax.Array] = run.run(index, *given)
        if run.watch is not None:
            *made, flags = made
            store.records.append(StageRecord(run, self.cut, microbatch, flags))
        kept = self.writes[run.piece.part]
        store.put({(slot, microbatch if each else OUTSIDE): made[i] for i, slot, each in kept})
        return made


def make_stage_executor(
    cut: Cut,
    microbatches: int,
    title: ProgramName,
    executables: Executables,
    donate: Collection[int] = (),
    watch: NanProbe | None = None,
) -> StageExecutor:
    """The executor of a placement whose devices are there; its programs are compiled.

    Arguments:
      title: of the whole program.
      executables: programs that other placements have compiled.
      donate: positions of arguments whose memory the results may take.
      watch: the NaN probe; each piece gets one like it.
    """
    placement = cut.physical.placement
    slots = Slots(cut.physical, placement.mesh)
    taken = given_away(slots, cut, donate)
    readers = Counter(r.slot for piece in cut.pieces for r in piece.reads)
    if not any(map(is_here, slots.mesh.devices.flat)):  # other processes compile and run it
        away = {piece.part: Runnable(piece, RemoteStage()) for piece in cut.pieces}
        return StageExecutor(placement, cut, slots, away, readers, ())
    runnables = {
        piece.part: runnable(
            slots,
            piece,
            microbatches,
            taken.get(i, set()),
            executables,
            title,
            watch and watch.another(),
            cut.given_slots,
        )
        for i, piece in enumerate(cut.pieces)
    }
    everywhere = jax.sharding.NamedSharding(slots.mesh, partition_spec())
    indices = tuple(to_devices(np.int32(i), everywhere) for i in range(microbatches))
    return StageExecutor(placement, cut, slots, runnables, readers, indices)
