"""A transfer between placements whose devices belong to several processes.

`jax.device_put` cannot send between processes. So a tensor is sent by a program over the devices of both
placements, in which each sender's shard goes to the receivers that want it: `ppermute`, which XLA sends
from point to point. If the shardings of both sides differ, the tensor is resharded before or afterwards, on
its own placement.

All processes that have devices on either side run the program, in one order (that of the schedule's actions,
or of the transfers that happen once); other processes skip it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from sbp.compat import untyped
from sbp.compat.untyped import JaxDevice, partition_spec
from sbp.runtime.lower.lowering import JittedFunction
from sbp.runtime.pipeline.shared_executables import Executable
from sbp.runtime.processes.addressable import is_here

Hops: TypeAlias = tuple[tuple[int, int], ...]
"""Who sends to whom, by their positions among the devices of a crossing."""
Shard: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of a shard in each dim."""

WAY = "way"


def shards_of(sharding: NamedSharding, shape: Sequence[int]) -> list[Shard]:
    """The shard of each device, in the order of the mesh."""
    held = sharding.devices_indices_map(tuple(shape))
    return [
        tuple(s.indices(n)[:2] for s, n in zip(held[d], shape, strict=True))
        for d in sharding.mesh.devices.flat
    ]


def rounds_of(have: Sequence[Shard], want: Sequence[Shard]) -> list[list[tuple[int, int]]] | None:
    """Senders and receivers of each round, in as few rounds as possible; None if a wanted shard is missing.

    In one round a device sends to at most one other. Senders and receivers are numbered from 0 each.

    >>> a, b = ((0, 2),), ((2, 4),)
    >>> rounds_of([a, b], [b, a]), rounds_of([a, b], [a, a, b]), rounds_of([a], [b])
    ([[(1, 0), (0, 1)]], [[(0, 0), (1, 2)], [(0, 1)]], None)
    """
    holders: dict[Shard, list[int]] = {}
    for i, shard in enumerate(have):
        holders.setdefault(shard, []).append(i)
    asked: dict[Shard, int] = {}
    rounds: list[list[tuple[int, int]]] = []
    for j, shard in enumerate(want):
        if shard not in holders:
            return None
        turn, at = divmod(asked.setdefault(shard, 0), len(holders[shard]))
        asked[shard] += 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append((holders[shard][at], j))
    return rounds


def _devices(sharding: NamedSharding) -> list[JaxDevice]:
    return list(sharding.mesh.devices.flat)


def _folded(like: NamedSharding, onto: NamedSharding) -> NamedSharding:
    """The sharding of one placement, repeated over the devices of a larger one."""
    copies = onto.mesh.size // like.mesh.size
    devices = onto.mesh.devices.reshape(copies, *like.mesh.devices.shape)
    return NamedSharding(Mesh(devices, ("copies", *like.mesh.axis_names)), like.spec)


@dataclass(frozen=True)
class ProcessTransfer:
    """The transfer of tensors of one shape from one sharding to another.

    Arguments:
      shape: of the tensor, at least one dim.
      dtype: any but those of keys.
      leaves, comes: the sharding on both sides.
    """

    shape: tuple[int, ...]
    dtype: untyped.DType
    leaves: NamedSharding
    comes: NamedSharding

    @cached_property
    def middle(self) -> tuple[NamedSharding, NamedSharding]:
        """The shardings in which it is sent and received, so that every wanted shard exists."""
        out, into = self.leaves, self.comes
        if rounds_of(shards_of(out, self.shape), shards_of(into, self.shape)) is not None:
            return out, into
        if out.mesh.size % into.mesh.size == 0:
            return _folded(into, out), into
        if into.mesh.size % out.mesh.size == 0:
            return out, _folded(out, into)
        return NamedSharding(out.mesh, partition_spec()), NamedSharding(into.mesh, partition_spec())

    @cached_property
    def devices(self) -> list[JaxDevice]:
        """All devices that take part."""
        return list(dict.fromkeys([*_devices(self.middle[0]), *_devices(self.middle[1])]))

    @cached_property
    def rounds(self) -> list[Hops]:
        """Senders and receivers by position in `devices`; a device that has its shard receives nothing."""
        out, into = self.middle
        found = rounds_of(shards_of(out, self.shape), shards_of(into, self.shape))
        assert found is not None, "every shard that is wanted is there"
        at = {d: i for i, d in enumerate(self.devices)}
        senders, receivers = [at[d] for d in _devices(out)], [at[d] for d in _devices(into)]
        pairs = [tuple((senders[i], receivers[j]) for i, j in turn) for turn in found]
        return [tuple((i, j) for i, j in turn if i != j) for turn in pairs]

    @cached_property
    def sharding(self) -> NamedSharding:
        """The sharding of the array that is sent: the shards of all devices, stacked."""
        return NamedSharding(Mesh(np.array(self.devices, dtype=object), (WAY,)), partition_spec(WAY))

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(self.middle[1].shard_shape(self.shape))

    @cached_property
    def program(self) -> JittedFunction:
        """The program that every process with one of the devices runs; it gives the received array."""
        mapped = jax.shard_map(
            self._sent,
            mesh=self.sharding.mesh,
            in_specs=partition_spec(WAY),
            out_specs=(partition_spec(WAY),),
            check_vma=False,
        )
        return jax.jit(mapped)

    def _sent(self, x: jax.Array) -> tuple[jax.Array]:
        out, at = x, lax.axis_index(WAY)
        for pairs in self.rounds:
            come = jnp.isin(at, np.array([j for _, j in pairs], np.int32))
            out = jnp.where(come, untyped.ppermute(x, WAY, pairs), out) if pairs else out
        return (out,)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The array that is sent."""
        whole = len(self.devices) * self.local[0], *self.local[1:]
        return untyped.struct(whole, self.dtype, sharding=self.sharding)

    @cached_property
    def receive_buffers(self) -> dict[JaxDevice, jax.Array]:
        """The buffers of this process's receivers, which have no shard to send."""
        there = [d for d in _devices(self.middle[1]) if is_here(d)]
        senders = set(_devices(self.middle[0]))
        zeros = np.zeros(self.local, self.dtype)
        return {d: jax.device_put(zeros, d) for d in there if d not in senders}

    def run(self, x: jax.Array | None, program: Executable) -> jax.Array | None:
        """Sends and receives; gives the received array, if this process has devices that receive.

        Arguments:
          x: the tensor as it is sent, if this process has devices that send it.
          program: the compiled `program`.
        """
        held = dict(self.receive_buffers)
        if x is not None:
            held.update({s.device: s.data for s in x.addressable_shards})
        shards = [held[d] for d in self.devices if d in held]
        (crossed,) = program(
            jax.make_array_from_single_device_arrays(self.struct.shape, self.sharding, shards)
        )
        come = {s.device: s.data for s in crossed.addressable_shards}
        mine = [come[d] for d in _devices(self.middle[1]) if d in come]
        if not mine:
            return None
        return jax.make_array_from_single_device_arrays(self.shape, self.middle[1], mine)

    def __reduce__(self) -> tuple[type[ProcessTransfer], tuple[object, ...]]:
        """Only the arguments are pickled; cached properties are computed again."""
        return ProcessTransfer, (self.shape, self.dtype, self.leaves, self.comes)
