"""Counts of the keys that sparse exchanges were given and have served, kept over all calls of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp.passes.graph import Node

# Calls whose counts may wait on the devices before they are added up on the host.
MOST_PENDING = 64


@dataclass(frozen=True, slots=True)
class KeyCount:
    """What one exchange has done so far.

    Arguments:
      op: "sbp_lookup", "sbp_add_rows" or "sbp_update_rows"; the latter two count distinct keys of a device.
      source: the user's line.
      calls: how often it ran.
      given, served: keys of all devices, in all calls.
      most_rounds: that any call took.
    """

    op: str
    source: str
    calls: int
    given: int
    served: int
    most_rounds: int

    def __str__(self) -> str:
        kept = "all served" if self.given == self.served else f"ONLY {self.served} SERVED"
        rounds = "1 round" if self.most_rounds == 1 else f"{self.most_rounds} rounds"
        what = f"{self.op} at {self.source}: {self.given} keys in {self.calls} calls"
        return f"{what}, {kept}, in {rounds} at most"


@dataclass
class Counting:
    """The counts of one compiled program; `exchanges` are the ops that count, in order."""

    exchanges: list[Node] = field(default_factory=list)
    pending: list[jax.Array] = field(default_factory=list)
    calls: int = 0
    totals: Any = None
    rounds: Any = None

    def stacked(self, reports: Sequence[tuple[Node, Any]]) -> Any:
        """What a device returns besides its results, "1 exchanges 3"; called while it is traced."""
        self.exchanges[:] = [node for node, _ in reports]
        lines = [jnp.stack([jnp.asarray(x, np.int32) for x in tally]) for _, tally in reports]
        return jnp.stack(lines)[None] if lines else jnp.zeros((1, 0, 3), np.int32)

    def add(self, counts: jax.Array) -> None:
        """Takes the counts of one call, "devices exchanges 3"."""
        self.calls += 1
        self.pending.append(counts)
        if len(self.pending) >= MOST_PENDING:
            self.fold()

    def fold(self) -> None:
        """Adds up what waits."""
        if self.pending:
            new = np.stack([np.asarray(x, np.int64) for x in self.pending])
            sums, most = new[..., :2].sum((0, 1)), new[..., 2].max((0, 1))
            self.totals = sums if self.totals is None else self.totals + sums
            self.rounds = most if self.rounds is None else np.maximum(self.rounds, most)
            self.pending.clear()

    def read(self) -> tuple[KeyCount, ...]:
        """The counts so far."""
        self.fold()
        if self.totals is None:
            return ()
        lines = zip(self.exchanges, self.totals, self.rounds, strict=True)
        return tuple(
            KeyCount(n.op, str(n.source), self.calls, int(given), int(served), int(rounds))
            for n, (given, served), rounds in lines
        )
