"""XLA's latency-hiding scheduler: in which order kernels run beside collectives.

It goes backwards from the results (latency_hiding_scheduler.cc; the walk is in backwards.py). A collective is
waited for as soon as its readers are placed, one at a time, and begins when kernels of its length stand
between, or when there are none left; one that waits for no other collective begins as early as it can. Which
kernel is next: one behind the longest chain of collectives, so that the next of them comes into sight; then
one whose length comes nearest to what is left to hide; one that waits for a collective itself; one that frees
most others; the later one in the order that takes little memory. Memory itself counts only where half of the
device's is taken.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sbp.passes.physical.backwards import HidingArrays, walk

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


def plain_order(ops: Sequence[HidingOp]) -> list[int]:
    """By position, but each op after those that it waits for.

    >>> plain_order([HidingOp((1,), 0.0, False, False, 0.0), HidingOp((), 0.0, False, False, 1.0)])
    [1, 0]
    """
    return by_place([op.position for op in ops], [op.makers for op in ops])


def by_place(places: Sequence[float], makers: Sequence[Collection[int]]) -> list[int]:
    """What has places in their order, but each behind those that it waits for."""
    readers: list[list[int]] = [[] for _ in places]
    waits = list(map(len, makers))
    for i, own in enumerate(makers):
        for m in own:
            readers[m].append(i)
    ready = [(places[i], i) for i, n in enumerate(waits) if not n]
    heapq.heapify(ready)
    out = list[int]()
    while ready:
        _, i = heapq.heappop(ready)
        out.append(i)
        for r in readers[i]:
            waits[r] -= 1
            if not waits[r]:
                heapq.heappush(ready, (places[r], r))
    return out


def hidden_order(ops: Sequence[HidingOp]) -> list[tuple[int, bool]]:
    """What happens one after the other: positions of ops, and whether it is their beginning.

    A kernel is there once, with True; a collective begins, and is waited for later.

    >>> made, other = HidingOp((), 1.0, False, False, 0), HidingOp((), 1.0, False, False, 2)
    >>> sent, after = HidingOp((0,), 1.0, True, False, 1), HidingOp((1,), 1.0, False, False, 3)
    >>> hidden_order([made, sent, other, after])
    [(0, True), (1, True), (2, True), (1, False), (3, True)]
    """
    found = walk(_arrays(ops), EDGE_SECONDS)
    return [(x >> 1, bool(x & 1)) for x in found[::-1].tolist()]


def _arrays(ops: Sequence[HidingOp]) -> HidingArrays:
    n = len(ops)
    first = np.zeros(n + 1, np.int64)
    first[1:] = np.cumsum([len(op.makers) for op in ops])
    return HidingArrays(
        first,
        np.fromiter((m for op in ops for m in op.makers), np.int64, int(first[-1])),
        np.fromiter((op.seconds for op in ops), np.float64, n),
        np.fromiter((op.sends for op in ops), np.bool_, n),
        np.fromiter((op.holds_wires for op in ops), np.bool_, n),
        np.fromiter((op.arguments for op in ops), np.int64, n),
        np.array(plain_order(ops), np.int64),
    )
