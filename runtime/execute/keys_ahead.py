"""The keys of the next batch, which a step sends while it computes: from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from sbp.compat.untyped import Leaf, PyTree
from sbp.passes.physical.exchanges import ReadAhead
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
      placed: the same on the devices.
      keys: what came of its keys.
    """

    leaves: Sequence[Leaf]
    placed: Sequence[jax.Array]
    keys: PyTree


@dataclass
class KeysAhead:
    """What a compiled program knows of the next batch.

    Arguments:
      ahead: what a step does of it.
      program: sends the keys of a batch by themselves.
      lies: the shardings of its arrays.
      consts: closed-over arrays.
      announced: the arrays of the next batch; None if nobody has said.
      sent: the batch whose keys were sent last, and were announced.
    """

    ahead: ReadAhead
    program: Callable[..., PyTree]
    lies: Sequence[NamedSharding]
    consts: Sequence[jax.Array]
    announced: Sequence[Leaf] | None = None
    sent: SentBatch | None = None

    def announce(self, leaves: Sequence[Leaf]) -> None:
        """Takes the arguments of the next call but one: the call behind the next one."""
        self.announced = [leaves[i] for i in self.ahead.inputs]

    def placed(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The arguments of a call; those that were announced are on the devices already."""
        out, sent = list(leaves), self.sent
        if sent is None:
            return out
        if not all(map(is_, sent.leaves, (leaves[i] for i in self.ahead.inputs))):
            self.sent = None
            warn_user(OTHER_BATCH)
            return out
        for i, x in zip(self.ahead.inputs, sent.placed, strict=True):
            out[i] = x
        return out

    def arguments(self, placed: Sequence[jax.Array]) -> list[PyTree]:
        """What came of the keys of a call, and the batch to read ahead; without one, that of the call.

        Arguments:
          placed: the arguments of the call, on the devices.
        """
        own = [placed[i] for i in self.ahead.inputs]
        keys = self.program(own, self.consts) if self.sent is None else self.sent.keys
        self.sent = None
        following = own if self.announced is None else moved_to(self.announced, self.lies)
        return [keys, following]

    def keep(self, keys: PyTree, following: Sequence[jax.Array]) -> None:
        """Takes what came of the keys of the batch that was read ahead."""
        if self.announced is not None:
            self.sent, self.announced = SentBatch(self.announced, following, keys), None
