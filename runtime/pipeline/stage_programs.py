"""One piece of a pipeline as a jitted program over its placement's mesh.

A tensor that a `jax.Array` can represent is one. Any other (partial sums, uneven splits) is handed on
*packed*: the shards of all devices, stacked along a new dim 0.

Words: docs/glossary.md.
"""

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
from sbp.runtime.lower.device import Device, Env, Shards
from sbp.runtime.lower.lowering import ProgramName, rows_in
from sbp.runtime.nan_checks.probe import NanProbe
from sbp.runtime.pipeline.shared_executables import Executable, Executables
from sbp.runtime.processes.addressable import absent


@dataclass(frozen=True)
class SlotLayout:
    """The form of the tensors in the slots of a placement, present or absent."""

    physical: Physical

    def is_packed(self, slot: Slot) -> bool:
        """Whether no array can represent the tensor under its signature."""
        shape = slot.shape(self.physical.graph)
        return at_rest(shape, slot.nd, self.physical.placement.shape) != slot.nd

    def spec(self, slot: Slot) -> PartitionSpec:
        """The `PartitionSpec` of the array."""
        placement = self.physical.placement
        if self.is_packed(slot):
            return untyped.partition_spec(placement.axes)
        return to_partition_spec(slot.nd, len(slot.shape(self.physical.graph)), placement)

    def dtype(self, slot: Slot) -> DType:
        """The dtype of the array."""
        return self.physical.graph.values[slot.value].dtype

    def memory_key(self, slot: Slot) -> Hashable:
        """A key that is equal for two arrays which can share memory; None for a number."""
        if slot.value < 0:
            return None
        return slot.shape(self.physical.graph), str(self.dtype(slot)), slot.nd

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """The shape of the array."""
        hierarchy, shape = self.physical.placement.shape, slot.shape(self.physical.graph)
        if self.is_packed(slot):
            return math.prod(hierarchy), *local_shape(shape, slot.nd, hierarchy)
        return shape


@dataclass(frozen=True)
class Slots(SlotLayout):
    """The same on devices."""

    mesh: Mesh

    def sharding(self, slot: Slot) -> NamedSharding:
        """The sharding of the array."""
        return NamedSharding(self.mesh, self.spec(slot))

    def absent(self, slot: Slot) -> jax.Array:
        """The array where all its shards are in other processes."""
        struct = self.struct(slot)
        return absent(struct.shape, self.sharding(slot), struct.dtype)

    def struct(self, slot: Slot) -> jax.ShapeDtypeStruct:
        """The array as a `ShapeDtypeStruct`."""
        return untyped.struct(self.shape(slot), self.dtype(slot), sharding=self.sharding(slot))


@dataclass(frozen=True)
class Runnable:
    """A piece that can be run.

    Arguments:
      piece: the steps.
      run: from the number of the micro-batch and the arrays that it reads to the arrays that it writes.
      watch: the NaN probe of its ops, which adds one result.
    """

    piece: Piece
    run: Executable
    watch: NanProbe | None = None


class RemoteStage:
    """Stands for a program that other processes run; it is never called here."""

    def __call__(self, *args: ArrayLike) -> Sequence[jax.Array]:
        """Never called."""
        raise AssertionError("a program of another process")

    def as_text(self) -> str | None:
        """An empty text: the program is not compiled here."""
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
    """Compiles the program of a piece, on the caller's thread, which has the user's settings of JAX.

    Arguments:
      executables: programs that other placements have compiled.
      donated, title, watch, given: as in `traced_piece`.
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
      donated: slots whose arrays are dropped afterwards.
      title: of the whole program; the piece is named after it and its phase. The stage is not in the name, so
        that equal stages can share a program.
      watch: the NaN probe of its ops and of the program's arguments.
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
    """Which of some slots a piece reads, in order."""
    return [r for r in piece.reads if r.slot in given]


def arrays_read(piece: Piece, microbatches: int) -> list[Read]:
    """The slots that a piece reads, each array once."""
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
      made: makes the object that runs its steps.
      given: slots of arguments, which the NaN probe checks first.
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
        outs = (x[None] if slots.is_packed(w.slot) else x for x, w in zip(found, piece.writes, strict=True))
        return (*outs, *device.end((), env))

    return run


def _taken(
    slots: SlotLayout, read: Read, given: Iterator[jax.Array], index: jax.Array, microbatches: int
) -> jax.Array:
    """The shards that a piece reads, as its steps want them."""

    def one() -> jax.Array:
        x = next(given)
        return x[0] if slots.is_packed(read.slot) else x

    if read.how is How.STACK:
        return jnp.stack([one() for _ in range(microbatches)])
    x: jax.Array = one()
    if read.how is How.SLICE:
        x = lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)
    return x


def donations(
    slots: Slots, pieces: Sequence[Piece], kept: Collection[Slot], free: Collection[Slot]
) -> dict[int, set[Slot]]:
    """Per position of a piece, the slots whose arrays it can overwrite: nobody reads them after it.

    Arguments:
      kept: slots that are read by others, or that belong to the user.
      free: slots among these that the user has donated.
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
    """The `donations` of the pieces of a placement.

    Arguments:
      donate: positions of arguments whose memory the results may take.
    """
    kept = {*cut.arguments, *cut.closure, *cut.receives.values(), *cut.sends.values(), *cut.results}
    kept |= {*cut.micro_sends.values()}
    free = {s for i, s in zip(cut.subgraph.arguments, cut.arguments, strict=True) if i in donate}
    return donations(slots, cut.pieces, kept, free - {*cut.results, *cut.sends.values()})


def _used(slots: Slots, piece: Piece, given: Collection[Slot]) -> set[Slot]:
    """The slots in whose place a result of the same shape is written: sums in place of themselves."""
    unused = Counter(slots.memory_key(w.slot) for w in piece.writes if w.slot.value >= 0)
    out: set[Slot] = set()
    for slot in sorted(given, key=lambda s: (not _writes(piece, s), s.value)):
        if unused[slots.memory_key(slot)]:
            unused[slots.memory_key(slot)] -= 1
            out.add(slot)
    return out


def _writes(piece: Piece, slot: Slot) -> bool:
    return any(w.slot == slot for w in piece.writes)
