"""The keys of the next batch, which a step sends while it computes: from call to call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding

from sbp.compat.untyped import Leaf, PyTree, partition_spec, struct
from sbp.passes.physical.exchanges import ReadAhead
from sbp.passes.physical.program import Physical
from sbp.runtime.lower.device import Device, Env
from sbp.runtime.lower.lowering import DeviceMesh, shardings
from sbp.runtime.lower.read_ahead import input_version, sent_ahead
from sbp.runtime.processes.addressable import moved_to
from sbp.text.user_warnings import warn_user

OTHER_BATCH = (
    "Program.read_ahead announced another batch than the one that came: its keys were sent for nothing, and "
    "those of the batch that came are sent by a program of their own. Announce the very arrays that come"
)


class SentBatch(NamedTuple):
    """A batch whose keys are sent.

    Arguments:
      leaves: its arrays, as they were announced.
      arrays: the same on the devices.
      keys: what came of its keys.
    """

    leaves: Sequence[Leaf]
    arrays: Sequence[jax.Array]
    keys: PyTree


@dataclass
class KeysAhead:
    """What a compiled program knows of the next batch.

    Arguments:
      read_ahead: what a step does of it.
      program: sends the keys of a batch by themselves.
      lies: the shardings of its arrays.
      consts: closed-over arrays.
      next_leaves: the arrays of the next batch; None if nobody has said.
      sent_batch: the batch whose keys were sent last, and were announced.
    """

    read_ahead: ReadAhead
    program: Callable[..., PyTree]
    lies: Sequence[NamedSharding]
    consts: Sequence[jax.Array]
    next_leaves: Sequence[Leaf] | None = None
    sent_batch: SentBatch | None = None

    def announce(self, leaves: Sequence[Leaf]) -> None:
        """Takes the arguments of the next call but one: the call behind the next one."""
        self.next_leaves = [leaves[i] for i in self.read_ahead.inputs]

    def place(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The arguments of a call; those that were announced are on the devices already."""
        out, sent = list(leaves), self.sent_batch
        if sent is None:
            return out
        if not all(map(is_, sent.leaves, (leaves[i] for i in self.read_ahead.inputs))):
            self.sent_batch = None
            warn_user(OTHER_BATCH)
            return out
        for i, x in zip(self.read_ahead.inputs, sent.arrays, strict=True):
            out[i] = x
        return out

    def arguments(self, placed: Sequence[jax.Array]) -> list[PyTree]:
        """What came of the keys of a call, and the batch to read ahead; without one, that of the call.

        Arguments:
          placed: the arguments of the call, on the devices.
        """
        own = [placed[i] for i in self.read_ahead.inputs]
        keys = self.program(own, self.consts) if self.sent_batch is None else self.sent_batch.keys
        self.sent_batch = None
        following = own if self.next_leaves is None else moved_to(self.next_leaves, self.lies)
        return [keys, following]

    def keep(self, keys: PyTree, following: Sequence[jax.Array]) -> None:
        """Takes what came of the keys of the batch that was read ahead."""
        if self.next_leaves is not None:
            self.sent_batch, self.next_leaves = SentBatch(self.next_leaves, following, keys), None


def key_program(physical: Physical, mesh: DeviceMesh, ahead: ReadAhead) -> Callable[..., PyTree]:
    """The jitted program that sends the keys of a batch: its arrays, and closed-over ones, in."""
    ins, _ = shardings(physical, mesh)
    consts = range(len(ins) - len(physical.graph.consts), len(ins))

    def on_device(batch: Sequence[jax.Array], closed: Sequence[jax.Array]) -> PyTree:
        coords = [lax.axis_index(name) for name in physical.placement.axes]
        env: Env = {input_version(physical, i): x for i, x in zip(consts, closed, strict=True)}
        return sent_ahead(Device(physical, coords), ahead, env, batch)

    taken = [ins[i] for i in ahead.inputs], [ins[i] for i in consts]
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple([s.spec for s in some] for some in taken),
        out_specs=partition_spec(physical.placement.axes),
        check_vma=False,
    )
    return jax.jit(mapped, in_shardings=taken, out_shardings=by_device(physical, mesh))


def by_device(physical: Physical, mesh: DeviceMesh) -> NamedSharding:
    """How what comes of keys lies: a line for each device."""
    return NamedSharding(mesh, partition_spec(physical.placement.axes))


def read_ahead_structs(physical: Physical, mesh: DeviceMesh, ahead: ReadAhead) -> tuple[PyTree, PyTree]:
    """The shapes of what a step is given beside its own: of what came of its keys, and of the next batch."""
    graph, (ins, _) = physical.graph, shardings(physical, mesh)
    given = [graph.values[v] for v in graph.inputs]
    structs = [struct(x.shape, x.dtype, sharding=s) for x, s in zip(given, ins, strict=True)]
    batch, consts = [structs[i] for i in ahead.inputs], structs[len(ins) - len(graph.consts) :]
    lies = by_device(physical, mesh)
    sent = jax.eval_shape(key_program(physical, mesh, ahead), batch, consts)
    return jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=lies), sent), batch
