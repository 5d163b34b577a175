"""One piece of a pipeline as a jitted program over its placement's mesh.

What lies as a `jax.Array` can is one; anything else (partial sums, uneven splits) is handed on *packed*: the
shards of all devices stacked along a new dim 0.

Words: docs/glossary.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from sbp.compat import untyped
from sbp.compat.untyped import DType
from sbp.layout import at_rest, local_shape
from sbp.notation.resolve import to_partition_spec
from sbp.passes.physical.program import Physical
from sbp.passes.pipeline.slots import Cut, How, Piece, Read, Slot, SlotKind
from sbp.passes.program.role import Phase
from sbp.runtime.lower.lowering import Device, Env, ProgramName, Shards, rows_in
from sbp.runtime.nan_checks.probe import NanProbe
from sbp.runtime.pipeline.shared_executables import Executable, Executables
from sbp.runtime.processes.addressable import absent


@dataclass(frozen=True)
class SlotLayout:
    """How tensors in the slots of a placement are held, whether its devices are here or not."""

    physical: Physical

    def packed(self, slot: Slot) -> bool:
        """Whether no array can hold the tensor as it lies."""
        shape = slot.shape(self.physical.graph)
        return at_rest(shape, slot.nd, self.physical.placement.shape) != slot.nd

    def spec(self, slot: Slot) -> PartitionSpec:
        """How the array lies that holds it."""
        placement = self.physical.placement
        if self.packed(slot):
            return untyped.partition_spec(placement.axes)
        return to_partition_spec(slot.nd, len(slot.shape(self.physical.graph)), placement)

    def dtype(self, slot: Slot) -> DType:
        """The dtype of what is in a slot that has a value."""
        dtype: DType = self.physical.graph.values[slot.value].dtype
        return dtype

    def held(self, slot: Slot) -> Hashable:
        """What two arrays have in common that can take each other's memory; None for a number."""
        if slot.value < 0:
            return None
        return slot.shape(self.physical.graph), str(self.dtype(slot)), slot.nd

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """The shape of the array that holds what is in a slot."""
        hierarchy, shape = self.physical.placement.shape, slot.shape(self.physical.graph)
        if self.packed(slot):
            return math.prod(hierarchy), *local_shape(shape, slot.nd, hierarchy)
        return shape


@dataclass(frozen=True)
class Slots(SlotLayout):
    """The same on devices."""

    mesh: Mesh

    def sharding(self, slot: Slot) -> NamedSharding:
        """How the array lies, as JAX has it."""
        return NamedSharding(self.mesh, self.spec(slot))

    def absent(self, slot: Slot) -> jax.Array:
        """The array that holds it, where other processes have all of it."""
        struct = self.struct(slot)
        return absent(struct.shape, self.sharding(slot), struct.dtype)

    def struct(self, slot: Slot) -> jax.ShapeDtypeStruct:
        """The array that holds it."""
        return untyped.struct(self.shape(slot), self.dtype(slot), sharding=self.sharding(slot))


@dataclass(frozen=True)
class Runnable:
    """A piece that can be run.

    Arguments:
      piece: what it is.
      run: from the micro-batch's number and the arrays in its reads' slots to those of its writes.
      watch: what looks at what its ops make; it then gives one result more.
    """

    piece: Piece
    run: Executable
    watch: NanProbe | None = None


class RemoteStage:
    """Stands for a program that other processes run, and nobody calls in this one."""

    def __call__(self, *args: ArrayLike) -> Sequence[jax.Array]:
        """Nobody does."""
        raise AssertionError("a program of another process")

    def as_text(self) -> str | None:
        """Nothing: it was not compiled here."""
        return None


def runnable(
    slots: Slots,
    piece: Piece,
    microbatches: int,
    donated: Collection[Slot],
    executables: Executables,
    title: ProgramName,
    watch: NanProbe | None = None,
    given: Collection[Slot] = (),
) -> Runnable:
    """Compiles the program of a piece: on the caller's thread, which has the user's settings of JAX.

    Arguments:
      executables: what other placements have compiled.
      donated, title, watch, given: as of `traced_piece`.
    """
    lowered = traced_piece(slots, piece, microbatches, donated, title, watch, given).lower()
    found = executables.get(lowered, list(slots.mesh.devices.flat), rows_in(piece.steps))
    return Runnable(piece, found, watch)


def traced_piece(
    slots: Slots,
    piece: Piece,
    microbatches: int,
    donated: Collection[Slot],
    title: ProgramName,
    watch: NanProbe | None = None,
    given: Collection[Slot] = (),
) -> jax.stages.Traced:
    """The program of a piece, before it is lowered.

    Arguments:
      donated: slots whose arrays are gone afterwards.
      title: of the whole program; the piece is called by it and its phase. Its stage is not in the name, so
        that stages that are alike can share it.
      watch: what looks at what its ops make, and at what comes in with arguments.
      given: slots of the program's arguments, and of the arrays that it closes over.
    """
    reads = arrays_read(piece, microbatches)
    # One row per device.
    extra = () if watch is None else (untyped.partition_spec(slots.physical.placement.axes),)
    mapped = jax.shard_map(
        piece_function(slots, piece, microbatches, Device if watch is None else watch.device, given),
        mesh=slots.mesh,
        in_specs=(untyped.partition_spec(), *(slots.spec(r.slot) for r in reads)),
        out_specs=(*(slots.spec(w.slot) for w in piece.writes), *extra),
        check_vma=False,
    )
    everywhere = NamedSharding(slots.mesh, untyped.partition_spec())
    ins = [untyped.struct((), np.int32, sharding=everywhere), *(slots.struct(r.slot) for r in reads)]
    jitted = jax.jit(
        replace(title, name=f"{title.name}_{piece.part.phase}").of(mapped),
        donate_argnums=tuple(1 + i for i, r in enumerate(reads) if r.slot in donated),
        in_shardings=tuple(x.sharding for x in ins),
        out_shardings=(
            *(slots.sharding(w.slot) for w in piece.writes),
            *(NamedSharding(slots.mesh, s) for s in extra),
        ),
        keep_unused=True,
    )
    return jitted.trace(*ins)


def reads_given(piece: Piece, given: Collection[Slot]) -> list[Read]:
    """What a piece reads of some slots, in order."""
    return [r for r in piece.reads if r.slot in given]


def arrays_read(piece: Piece, microbatches: int) -> list[Read]:
    """What a piece reads, once for each array."""
    return [r for r in piece.reads for _ in range(microbatches if r.how is How.STACK else 1)]


def piece_function(
    slots: SlotLayout,
    piece: Piece,
    microbatches: int,
    made: Callable[..., Device] = Device,
    given: Collection[Slot] = (),
) -> Callable[..., Shards]:
    """The piece on one device: the micro-batch's number and local shards in, local shards out.

    Arguments:
      made: makes who executes its steps.
      given: slots of arguments, which are looked at first.
    """
    physical, entering = slots.physical, [r.version for r in reads_given(piece, given)]

    def run(index: jax.Array, *shards: jax.Array) -> Shards:
        coords = [lax.axis_index(name) for name in physical.placement.axes]
        device, env = made(physical, coords), Env()
        shard = iter(shards)
        for read in piece.reads:
            env[read.version] = _taken(slots, read, shard, index, microbatches)
        for (v, nd), number in piece.numbers:
            env[v, nd] = device.read(number, nd, env)
        device.begin(entering, env)
        device.run(piece.steps, env)
        found = [device.read(w.operand, w.nd, env) for w in piece.writes]
        outs = (x[None] if slots.packed(w.slot) else x for x, w in zip(found, piece.writes, strict=True))
        return (*outs, *device.end((), env))

    return run


def _taken(
    slots: SlotLayout, read: Read, given: Iterator[jax.Array], index: jax.Array, microbatches: int
) -> jax.Array:
    """What a piece reads, as its steps want it."""

    def one() -> jax.Array:
        x = next(given)
        return x[0] if slots.packed(read.slot) else x

    if read.how is How.STACK:
        return jnp.stack([one() for _ in range(microbatches)])
    x = one()
    return lax.dynamic_index_in_dim(x, index, keepdims=False) if read.how is How.SLICE else x


def donations(
    slots: Slots, pieces: Sequence[Piece], kept: Collection[Slot], free: Collection[Slot]
) -> dict[int, set[Slot]]:
    """Per position of a piece, the slots whose arrays it can write its own into: nobody reads them after it.

    Arguments:
      kept: slots that are read by others, or that belong to the user.
      free: of those, slots that belong to the user no more.
    """
    readers: dict[Slot, list[int]] = {}
    for i, piece in enumerate(pieces):
        for r in piece.reads:
            if r.slot in free or r.slot not in kept:
                readers.setdefault(r.slot, []).append(i)
    stacked = {r.slot for piece in pieces for r in piece.reads if r.how is How.STACK}
    out: dict[int, set[Slot]] = {}
    for slot in readers.keys() - stacked:
        inside = [i for i in readers[slot] if pieces[i].part.phase not in (Phase.BEFORE, Phase.AFTER)]
        after = [i for i in readers[slot] if pieces[i].part.phase is Phase.AFTER]
        turns = inside if len(inside) == 1 and slot.kind is SlotKind.CARRY else []
        once = readers[slot] if slot.kind is SlotKind.EACH else after if slot in free or turns else []
        for i in (*turns, *once) if len(once) <= 1 else turns:
            out.setdefault(i, set()).add(slot)
    return {i: _used(slots, pieces[i], found) for i, found in out.items()}


def given_away(slots: Slots, cut: Cut, donate: Collection[int]) -> dict[int, set[Slot]]:
    """What `donations` finds for the pieces of a placement.

    Arguments:
      donate: positions of arguments whose memory the results may take.
    """
    kept = {*cut.arguments, *cut.closed, *cut.received.values(), *cut.sent.values(), *cut.results}
    kept |= {*cut.passed.values()}
    free = {s for i, s in zip(cut.share.arguments, cut.arguments, strict=True) if i in donate}
    return donations(slots, cut.pieces, kept, free - {*cut.results, *cut.sent.values()})


def _used(slots: Slots, piece: Piece, given: Collection[Slot]) -> set[Slot]:
    """Those slots that something of the same shape is written in place of: sums in place of themselves."""
    room = Counter(slots.held(w.slot) for w in piece.writes if w.slot.value >= 0)
    out: set[Slot] = set()
    for slot in sorted(given, key=lambda s: (not _writes(piece, s), s.value)):
        if room[slots.held(slot)]:
            room[slots.held(slot)] -= 1
            out.add(slot)
    return out


def _writes(piece: Piece, slot: Slot) -> bool:
    return any(w.slot == slot for w in piece.writes)
