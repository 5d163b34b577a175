"""Counts the keys that sparse exchanges were given and have served, over all calls of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sbp.communication.exchange import Tally
from sbp.compat.untyped import partition_spec
from sbp.passes.program.graph import Node
from sbp.runtime.lower.sampling import whole

ExchangeReport: TypeAlias = tuple[Node, Tally]
"""An exchange, and what it has done."""

# Calls whose counts may wait on the devices before they are added up on the host.
MOST_PENDING = 64
# Rounds that nobody needs to hear of; the calls at first that are looked at, and then every n-th.
MOST_ROUNDS, FIRST_CALLS, EVERY = 2, 4, 16


@dataclass(frozen=True, slots=True)
class KeyCount:
    """The counts of one exchange.

    Arguments:
      op: "sbp_lookup", "sbp_add_rows" or "sbp_update_rows"; the latter two count distinct keys of a device.
      source: the user's line.
      calls: how often it ran.
      given_keys, served_keys: keys of all devices, in all calls.
      most_rounds: the most rounds of any call.
    """

    op: str
    source: str
    calls: int
    given_keys: int
    served_keys: int
    most_rounds: int

    def __str__(self) -> str:
        kept = "all served" if self.given_keys == self.served_keys else f"ONLY {self.served_keys} SERVED"
        rounds = "1 round" if self.most_rounds == 1 else f"{self.most_rounds} rounds"
        what = f"{self.op} at {self.source}: {self.given_keys} keys in {self.calls} calls"
        return f"{what}, {kept}, in {rounds} at most"


def is_looked_at(call: int) -> bool:
    """Whether the counts of a call are read: of the first calls, and then of every n-th."""
    return call <= FIRST_CALLS or call % EVERY == 0


def most_of_all(counts: jax.Array) -> jax.Array:
    """The largest counts of all devices, on each of them, so that all processes decide alike."""
    lies = counts.sharding
    assert isinstance(lies, jax.sharding.NamedSharding)
    return _most(jax.sharding.NamedSharding(lies.mesh, partition_spec()))(counts)


@functools.lru_cache(maxsize=16)
def _most(lies: jax.sharding.NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda counts: counts.max(0, keepdims=True), out_shardings=lies)


@dataclass
class KeyCounts:
    """The counts of one compiled program.

    Arguments:
      keys: whether keys are counted, and not only the rounds.
      watches: whether a program is planned again if its exchanges take many rounds.
      exchanges: the ops that count, in order.
      last_counts: counts of a call whose values are not there yet.
    """

    keys: bool = True
    watches: bool = False
    last_counts: Any = None  # a jax.Array: it has no type for `is_ready`
    exchanges: list[Node] = field(default_factory=list)
    pending_counts: list[jax.Array] = field(default_factory=list)
    calls: int = 0
    totals: NDArray[np.int64] | None = None
    rounds: NDArray[np.int64] | None = None

    def stack(self, reports: Sequence[ExchangeReport]) -> jax.Array:
        """The counts that a device returns beside its results; called while it is traced.

        "1 exchanges 4", the numbers of a `Tally`; without keys only its last one, "1 exchanges 1".
        """
        self.exchanges[:] = [node for node, _ in reports]
        width = 4 if self.keys else 1
        lines = [jnp.stack([jnp.asarray(x, np.int32) for x in tally[-width:]]) for _, tally in reports]
        return jnp.stack(lines)[None] if lines else jnp.zeros((1, 0, width), np.int32)

    def add(self, counts: jax.Array) -> None:
        """Adds the counts of one call, "devices exchanges 4" or "devices exchanges 1"."""
        self.calls += 1
        looked_at = is_looked_at(self.calls)
        if self.watches and looked_at and self.last_counts is None:
            self.last_counts = counts if counts.is_fully_addressable else most_of_all(counts)
        if self.keys:
            self.pending_counts.append(counts)
        if len(self.pending_counts) >= MOST_PENDING:
            self.fold()

    def onward(self) -> KeyCounts:
        """A counter for the same exchanges in another program, which starts from these counts."""
        self.fold()
        return replace(self, watches=False, last_counts=None, exchanges=[], pending_counts=[])

    def crowded_exchanges(self) -> list[tuple[Node, int]]:
        """Exchanges that took many rounds in a recent call, with the number of rounds.

        It waits for no device. Several processes must decide alike before the same call: there it reads the
        counts of the call that was read before, which are long there except after the first calls.
        """
        if self.last_counts is None:
            return []
        shared = not self.last_counts.is_fully_addressable
        if not (is_looked_at(self.calls + 1) if shared else self.last_counts.is_ready()):
            return []
        held = self.last_counts.addressable_data(0) if shared else self.last_counts
        most = np.asarray(held)[..., -1].max(0)
        self.last_counts = None
        return [
            (node, int(rounds))
            for node, rounds in zip(self.exchanges, most, strict=True)
            if rounds > MOST_ROUNDS and node.params["capacity"] is None
        ]

    def fold(self) -> None:
        """Adds up the waiting counts."""
        if self.pending_counts:
            new = np.stack([np.asarray(whole(x), np.int64) for x in self.pending_counts])
            sums, most = new[..., :2].sum((0, 1)), new[..., 2].max((0, 1))
            if self.totals is not None and len(self.totals) != len(sums):  # planned again, with others
                self.calls, self.totals, self.rounds = len(self.pending_counts), None, None
            self.totals = sums if self.totals is None else self.totals + sums
            self.rounds = most if self.rounds is None else np.maximum(self.rounds, most)
            self.pending_counts.clear()

    def read(self) -> tuple[KeyCount, ...]:
        """The counts so far."""
        self.fold()
        if self.totals is None or self.rounds is None:
            return ()
        lines = zip(self.exchanges, self.totals, self.rounds, strict=True)
        return tuple(
            KeyCount(n.op, str(n.source), self.calls, int(given), int(served), int(rounds))
            for n, (given, served), rounds in lines
        )
