"""Transfers between placements: `jax.device_put` within a process, a collective program between processes."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding

from sbp.compat import core
from sbp.compat.core import is_key
from sbp.compat.untyped import DType, JaxDevice, Leaf, struct
from sbp.passes.pipeline.slots import Cut, Slot
from sbp.runtime.pipeline.process_transfer import ProcessTransfer
from sbp.runtime.pipeline.shared_executables import Executable, Executables
from sbp.runtime.processes.addressable import is_alone, takes_part, to_devices


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """A tensor that is sent from one placement to another.

    Arguments:
      shape, dtype: of the tensor.
      leaves, comes: its sharding on both sides.
    """

    shape: tuple[int, ...]
    dtype: DType
    leaves: NamedSharding
    comes: NamedSharding

    @property
    def is_own(self) -> bool:
        """Whether both sides lie wholly in this process."""
        return is_alone(self.leaves, self.comes)

    @property
    def is_ours(self) -> bool:
        """Whether this process has devices on either side."""
        return takes_part(self.leaves) or takes_part(self.comes)

    @property
    def is_packed(self) -> bool:
        """Whether it is sent in another form: scalars get a dim, and keys go as their words."""
        return is_key(self.dtype) or not self.shape

    @property
    def process_transfer(self) -> ProcessTransfer:
        """The collective program between processes."""
        example = jax.eval_shape(self.pack, struct(self.shape, self.dtype))
        return ProcessTransfer(example.shape, example.dtype, self.leaves, self.comes)

    def pack(self, x: jax.Array) -> jax.Array:
        """The tensor in the form in which it is sent."""
        words = jax.random.key_data(x) if is_key(self.dtype) else x
        return words if words.ndim else words[None]

    def unpack(self, x: jax.Array) -> jax.Array:
        """The tensor in its own form again."""
        if not is_key(self.dtype):
            return x if self.shape else x[0]
        keys: jax.Array = jax.random.wrap_key_data(x, impl=jax.random.key_impl(core.zeros((), self.dtype)))
        return keys


@dataclass(frozen=True)
class CompiledTransfer:
    """A transfer between processes, compiled.

    Arguments:
      before: packs the tensor and moves it to the sharding in which it is sent; None if it needs neither.
      program: sends it.
      afterwards: unpacks it and moves it to the wanted sharding; None likewise.
    """

    transfer: StageTransfer
    process_transfer: ProcessTransfer
    before: Executable | None
    program: Executable
    afterwards: Executable | None

    def run(self, x: jax.Array | None) -> jax.Array | None:
        """Sends and receives, as `ProcessTransfer.run` does."""
        if x is not None and self.before is not None:
            (x,) = self.before(x)
        come = self.process_transfer.run(x, self.program)
        if come is not None and self.afterwards is not None:
            (come,) = self.afterwards(come)
        return come

    @property
    def programs(self) -> Iterator[tuple[Executable, list[JaxDevice]]]:
        """The programs of it that this process runs, with the devices of each."""
        sides = (self.before, self.transfer.leaves), (self.afterwards, self.transfer.comes)
        yield self.program, self.process_transfer.devices
        yield from ((p, list(at.mesh.devices.flat)) for p, at in sides if p is not None)


def relays_of(transfer: StageTransfer, crossing: ProcessTransfer) -> tuple[bool, bool]:
    """Whether a tensor is packed or resharded before it is sent, and after it has arrived."""
    out, into = crossing.middle
    return transfer.is_packed or out is not transfer.leaves, transfer.is_packed or into is not transfer.comes


def compiled_transfer(transfer: StageTransfer, executables: Executables) -> CompiledTransfer:
    """The compiled transfer of a tensor that this process sends or receives.

    Arguments:
      executables: programs that were compiled before.
    """
    crossing = transfer.process_transfer
    (out, into), (packs, unpacks) = crossing.middle, relays_of(transfer, crossing)

    def relaid(
        fn: Callable[[jax.Array], jax.Array], x: jax.ShapeDtypeStruct, to: NamedSharding
    ) -> Executable | None:
        if not takes_part(to):
            return None
        lowered = jax.jit(lambda x: (fn(x),), out_shardings=(to,)).lower(x)
        return executables.get(lowered, list(to.mesh.devices.flat))

    sent = struct(crossing.shape, crossing.dtype, sharding=into)
    held = struct(transfer.shape, transfer.dtype, sharding=transfer.leaves)
    return CompiledTransfer(
        transfer,
        crossing,
        relaid(transfer.pack, held, out) if packs else None,
        executables.get(crossing.program.lower(crossing.struct), crossing.devices),
        relaid(transfer.unpack, sent, transfer.comes) if unpacks else None,
    )


@dataclass
class TransferEngine:
    """The transfers of a program, each compiled at its first use.

    Arguments:
      executables: programs that were compiled before, by other transfers too.
    """

    executables: Executables = field(default_factory=Executables)
    transfers: dict[StageTransfer, CompiledTransfer] = field(default_factory=dict)

    def compile(self, transfer: StageTransfer) -> CompiledTransfer:
        """The compiled transfer of a tensor between processes, of which this is one."""
        if transfer not in self.transfers:
            self.transfers[transfer] = compiled_transfer(transfer, self.executables)
        return self.transfers[transfer]

    def send(self, x: jax.Array | None, transfer: StageTransfer) -> jax.Array | None:
        """The tensor on the other side, as far as this process has devices there.

        All processes with devices on either side must call this in one order.

        Arguments:
          x: the tensor; anything where this process has no devices that send it.
        """
        if transfer.is_own:
            return None if x is None else jax.device_put(x, transfer.comes)
        return self.compile(transfer).run(x) if transfer.is_ours else None

    def bring_all(self, xs: Sequence[Leaf], comes: Sequence[NamedSharding]) -> Sequence[jax.Array | None]:
        """Arguments under the shardings of a placement; see `bring`."""
        if is_alone(*comes) and jax.process_count() == 1:
            moved: Sequence[jax.Array] = jax.device_put(list(xs), list(comes))  # at once is cheaper
            return moved
        return [self.bring(x, to) for x, to in zip(xs, comes, strict=True)]

    def bring(self, x: Leaf, comes: NamedSharding) -> jax.Array | None:
        """An argument under the sharding of a placement. All processes call this in one order."""
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            # One array of all processes, such as a result: some may have nothing of it.
            if x.sharding == comes:
                return x if takes_part(comes) else None
            held = x if takes_part(x.sharding) else None
            return self.send(held, StageTransfer(x.shape, x.dtype, x.sharding, comes))
        if is_alone(comes):
            own: jax.Array = jax.device_put(x, comes)
            return own
        return to_devices(x, comes) if takes_part(comes) else None


PlacedSlot: TypeAlias = tuple[int, Slot]
"""The position of a placement, and a slot there."""


@dataclass(frozen=True)
class SendBuffers:
    """The arrays that a piece sends together.

    Arguments:
      positions: of the arrays, among those that the piece writes.
      to: per array, the placement and the slot that receive it.
      peer: the nearest stage on one of these placements.
      cargos: per array, its transfer.
    """

    positions: tuple[int, ...]
    to: tuple[PlacedSlot, ...]
    transfers: tuple[StageTransfer, ...]
    peer: int

    @functools.cached_property
    def is_own(self) -> bool:
        """Whether all transfers are within this process."""
        return all(c.is_own for c in self.transfers)


def routes(
    cuts: Sequence[Cut],
) -> tuple[Mapping[PlacedSlot, tuple[PlacedSlot, ...]], Mapping[PlacedSlot, PlacedSlot]]:
    """The receivers of what is sent per micro-batch, and the sources of what is sent once."""
    receivers: dict[PlacedSlot, list[PlacedSlot]] = {}
    sources: dict[PlacedSlot, PlacedSlot] = {}
    for q, c in enumerate(cuts):
        for v, slot in c.micro_receives.items():
            p = next(p for p, other in enumerate(cuts) if v in other.micro_sends)
            receivers.setdefault((p, cuts[p].micro_sends[v]), []).append((q, slot))
        for v, slot in c.receives.items():
            p = next(p for p, other in enumerate(cuts) if v in other.sends)
            sources[q, slot] = p, cuts[p].sends[v]
    return {k: tuple(v) for k, v in receivers.items()}, sources
