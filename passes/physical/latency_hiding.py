"""XLA's latency-hiding scheduler: in which order kernels run beside collectives.

It goes backwards from the results (latency_hiding_scheduler.cc). A collective is waited for as soon as its
readers are placed, one at a time, and begins when kernels of its length stand between, or when there are none
left; one that waits for no other collective begins as early as it can. Which kernel is next: one behind the
longest chain of collectives, so that the next of them comes into sight; then one whose length comes nearest
to what is left to hide; one that waits for a collective itself; one that frees most others; the later one in
the order that takes little memory. Memory itself counts only where half of the device's is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

EDGE_SECONDS = 1e-6
"""From an op to its reader, and of the beginning and the end of a collective (`kLowLatency`, `kLowCost`): who
waits for a very short kernel is not the next one, if another can be."""


@dataclass(frozen=True, slots=True)
class HidingOp:
    """A kernel or a collective, as this scheduler sees it.

    Arguments:
      makers: positions of the ops that it waits for.
      seconds: how long it runs.
      sends: whether it is a collective, which kernels may run beside.
      holds_wires: whether it is a loop that sends something, and so runs beside no collective.
      position: in the order that takes little memory.
      arguments: of the program that nobody else reads.
    """

    makers: tuple[int, ...]
    seconds: float
    sends: bool
    holds_wires: bool
    position: float
    arguments: int = 0


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective that is waited for already, and the time at which it may begin, counted from the end."""

    op: int
    time: float


def plain_order(ops: Sequence[HidingOp]) -> list[int]:
    """By position, but each op after those that it waits for.

    >>> plain_order([HidingOp((1,), 0.0, False, False, 0.0), HidingOp((), 0.0, False, False, 1.0)])
    [1, 0]
    """
    readers: list[list[int]] = [[] for _ in ops]
    waits = [len(op.makers) for op in ops]
    for i, op in enumerate(ops):
        for m in op.makers:
            readers[m].append(i)
    ready = [(op.position, i) for i, op in enumerate(ops) if not op.makers]
    heapq.heapify(ready)
    out = list[int]()
    while ready:
        _, i = heapq.heappop(ready)
        out.append(i)
        for r in readers[i]:
            waits[r] -= 1
            if not waits[r]:
                heapq.heappush(ready, (ops[r].position, r))
    return out


def hidden_order(ops: Sequence[HidingOp]) -> list[tuple[int, bool]]:
    """What happens one after the other: positions of ops, and whether it is their beginning.

    A kernel is there once, with True; a collective begins, and is waited for later.

    >>> made, other = HidingOp((), 1.0, False, False, 0), HidingOp((), 1.0, False, False, 2)
    >>> sent, after = HidingOp((0,), 1.0, True, False, 1), HidingOp((1,), 1.0, False, False, 3)
    >>> hidden_order([made, sent, other, after])
    [(0, True), (1, True), (2, True), (1, False), (3, True)]
    """
    return _Backwards(ops).run()


@dataclass
class _Backwards:
    """The walk from the end to the beginning.

    Arguments:
      time: since the end.
      kernels: those that may be placed, by the length of the chain of collectives behind them.
      waits: collectives that may be waited for.
    """

    ops: Sequence[HidingOp]
    time: float = 0.0
    flight: Flight | None = None
    kernels: dict[float, list[int]] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    out: list[tuple[int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.ops)
        self.before, self.chain = [0.0] * n, [0.0] * n
        self.readers, self.rank = [0] * n, [0] * n
        self.since = [0.0] * n  # the time from which an op may run
        for at, i in enumerate(plain_order(self.ops)):
            op = self.ops[i]
            self.rank[i] = at
            self.before[i] = max((self.chain[m] for m in op.makers), default=0.0)
            self.chain[i] = self.before[i] + (op.seconds if op.sends else 0.0)
            for m in op.makers:
                self.readers[m] += 1
        for i in range(n):
            if not self.readers[i]:
                self._ready(i)

    def run(self) -> list[tuple[int, bool]]:
        """The order, forwards."""
        while self.kernels or self.waits or self.flight:
            if self.waits and self.flight is None:
                self._wait()
            elif (i := self._next()) is not None:
                self._place(i)
            else:
                self._begin()
        return self.out[::-1]

    def _ready(self, i: int) -> None:
        if self.ops[i].sends:
            self.waits.append(i)
        else:
            self.kernels.setdefault(self.chain[i], []).append(i)

    def _wait(self) -> None:
        i = max(self.waits, key=lambda i: (self.chain[i], self.rank[i]))
        self.waits.remove(i)
        self.out.append((i, False))
        self.time = max(self.time, self.since[i])
        self.flight = Flight(i, self.time + self.ops[i].seconds)
        self.time += EDGE_SECONDS

    def _next(self) -> int | None:
        """The kernel that is next; None if the collective begins instead."""
        flight = self.flight
        left = 0.0 if flight is None else flight.time - self.time
        if flight is not None and left <= 0 and self._begins_first(flight.op):
            return None
        for chain in sorted(self.kernels, reverse=True):
            able = [i for i in self.kernels[chain] if self.since[i] <= self.time and self._is_able(i)]
            if able:
                return max(able, key=lambda i: self._worth(i, left))
        soon = [i for alike in self.kernels.values() for i in alike if self._is_able(i)]
        best = min(soon, key=lambda i: (self.since[i], -self.chain[i], -self.rank[i]), default=None)
        stalls = best is not None and flight is not None and flight.time < self.since[best]
        return None if stalls else best

    def _is_able(self, i: int) -> bool:
        return self.flight is None or not self.ops[i].holds_wires

    def _begins_first(self, i: int) -> bool:
        """Whether a collective that is hidden begins before any other kernel."""
        if self.waits:
            return True
        return self.before[i] > 0 and self.before[i] >= max(self.kernels, default=0.0)

    def _worth(self, i: int, left: float) -> tuple[float, bool, int, int]:
        op = self.ops[i]
        waste = abs(left - op.seconds) if left > 0 else 0.0
        unlocks = any(self.ops[m].sends for m in op.makers)
        frees = op.arguments + sum(self.readers[m] == 1 for m in op.makers)
        return -waste, unlocks, frees, self.rank[i]

    def _place(self, i: int) -> None:
        alike = self.kernels[self.chain[i]]
        alike.remove(i)
        if not alike:
            del self.kernels[self.chain[i]]
        self.out.append((i, True))
        began = max(self.time, self.since[i])
        self.time = began + self.ops[i].seconds
        self._release(i, began)

    def _begin(self) -> None:
        assert self.flight is not None
        i, began = self.flight.op, max(self.time, self.flight.time)
        self.out.append((i, True))
        self.time, self.flight = began + EDGE_SECONDS, None
        self._release(i, began)

    def _release(self, i: int, began: float) -> None:
        for m in self.ops[i].makers:
            self.since[m] = max(self.since[m], began + EDGE_SECONDS)
            self.readers[m] -= 1
            if not self.readers[m]:
                self._ready(m)
