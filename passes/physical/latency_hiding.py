"""XLA's latency-hiding scheduler: in which order kernels run beside collectives.

It goes backwards from the results (latency_hiding_scheduler.cc). A collective is waited for as soon as its
readers are placed, one at a time, and begins when kernels of its length stand between, or when there are none
left; one that waits for no other collective begins as early as it can. Which kernel is next: one behind the
longest chain of collectives, so that the next of them comes into sight; then one whose length comes nearest
to what is left to hide; one that waits for a collective itself; one that frees most others; the later one in
the order that takes little memory. Memory itself counts only where half of the device's is taken. The walk is
machine code: which op is next is asked of all that may be placed, once per op; in a step of 96 layers that is
tens of thousands of times, of up to thousands each.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sbp.compat.machine_code import compile_loops

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

NONE = -1


class HidingArrays(NamedTuple):
    """Ops as arrays; `HidingOp` says what they are.

    Arguments:
      first, makers: op i waits for `makers[first[i] : first[i + 1]]`.
      order: all ops, each after those that it waits for.
    """

    first: Integers
    makers: Integers
    seconds: Floats
    sends: Flags
    holds_wires: Flags
    arguments: Integers
    order: Integers


class WalkState(NamedTuple):
    """What is known of each op on the way.

    Arguments:
      before, chain: the longest chain of collectives that it waits for, without and with itself.
      unlocks: whether it waits for a collective itself.
      rank: its place in `HidingArrays.order`.
      readers: how many that wait for it are not placed.
      since: the time from which it may run.
    """

    before: Floats
    chain: Floats
    unlocks: Flags
    rank: Integers
    readers: Integers
    since: Floats


@compile_loops
def walk_state(ops: HidingArrays) -> WalkState:
    """What is known at the end."""
    n = ops.seconds.size
    before, chain, since = np.zeros(n), np.zeros(n), np.zeros(n)
    found = WalkState(
        before, chain, np.zeros(n, np.bool_), np.zeros(n, np.int64), np.zeros(n, np.int64), since
    )
    for at in range(n):
        i = ops.order[at]
        found.rank[i] = at
        for m in ops.makers[ops.first[i] : ops.first[i + 1]]:
            found.before[i] = max(found.before[i], found.chain[m])
            found.unlocks[i] = found.unlocks[i] or ops.sends[m]
            found.readers[m] += 1
        found.chain[i] = found.before[i] + (ops.seconds[i] if ops.sends[i] else 0.0)
    return found


@compile_loops
def last_wait(x: WalkState, waits: Integers) -> int:
    """The place among some collectives of the one that ends the longest chain."""
    place = 0
    for at in range(1, waits.size):
        i, best = waits[at], waits[place]
        if x.chain[i] > x.chain[best] or (x.chain[i] == x.chain[best] and x.rank[i] > x.rank[best]):
            place = at
    return place


@compile_loops
def freed_count(ops: HidingArrays, x: WalkState, i: int) -> int:
    """How many tensors nobody needs before op i."""
    found = int(ops.arguments[i])
    for m in ops.makers[ops.first[i] : ops.first[i + 1]]:
        found += x.readers[m] == 1
    return found


@compile_loops
def next_now(
    ops: HidingArrays, x: WalkState, kernels: Integers, time: float, left: float, in_flight: bool
) -> int:
    """The place among some kernels of the one that runs next; `NONE` if none may run yet.

    Arguments:
      left: seconds that are left to hide.
      in_flight: whether a collective runs.
    """
    place, least_waste, most_freed = NONE, 0.0, NONE
    for at in range(kernels.size):
        i = kernels[at]
        if x.since[i] > time or (in_flight and ops.holds_wires[i]):
            continue
        waste = abs(left - ops.seconds[i]) if left > 0 else 0.0
        frees = NONE  # counted where all before it is equal
        if place != NONE:
            best = kernels[place]
            if x.chain[i] != x.chain[best]:
                better = x.chain[i] > x.chain[best]
            elif waste != least_waste:
                better = waste < least_waste
            elif x.unlocks[i] != x.unlocks[best]:
                better = x.unlocks[i]
            else:
                frees = freed_count(ops, x, i)
                most_freed = freed_count(ops, x, best) if most_freed == NONE else most_freed
                better = x.rank[i] > x.rank[best] if frees == most_freed else frees > most_freed
            if not better:
                continue
        place, least_waste, most_freed = at, waste, frees
    return place


@compile_loops
def next_soon(ops: HidingArrays, x: WalkState, kernels: Integers, in_flight: bool) -> int:
    """The place among some kernels of the one that may run first; `NONE` if none may."""
    place = NONE
    for at in range(kernels.size):
        i = kernels[at]
        if in_flight and ops.holds_wires[i]:
            continue
        if place != NONE:
            best = kernels[place]
            if x.since[i] != x.since[best]:
                better = x.since[i] < x.since[best]
            elif x.chain[i] != x.chain[best]:
                better = x.chain[i] > x.chain[best]
            else:
                better = x.rank[i] > x.rank[best]
            if not better:
                continue
        place = at
    return place


@compile_loops
def begins_first(x: WalkState, kernels: Integers, flight: int) -> bool:
    """Whether a collective that is hidden begins before any of some kernels."""
    longest = 0.0
    for i in kernels:
        longest = max(longest, x.chain[i])
    return bool(x.before[flight] > 0 and x.before[flight] >= longest)


@compile_loops
def walk(ops: HidingArrays, edge_seconds: float) -> Integers:
    """What happens, from the end: `2 * i + 1` where op i begins or runs, `2 * i` where collective i is waited
    for.

    Arguments:
      edge_seconds: from an op to its reader.
    """
    n, x = ops.seconds.size, walk_state(ops)
    kernels, waits = np.empty(n, np.int64), np.empty(n, np.int64)
    n_kernels, n_waits = 0, 0
    for i in range(n):
        if not x.readers[i] and ops.sends[i]:
            waits[n_waits] = i
            n_waits += 1
        elif not x.readers[i]:
            kernels[n_kernels] = i
            n_kernels += 1
    out = np.empty(n + int(ops.sends.sum()), np.int64)
    size, time, flight, until = 0, 0.0, NONE, 0.0
    while n_kernels or n_waits or flight != NONE:
        if n_waits and flight == NONE:
            place = last_wait(x, waits[:n_waits])
            flight = waits[place]
            n_waits -= 1
            waits[place] = waits[n_waits]
            out[size] = 2 * flight
            size += 1
            time = max(time, x.since[flight])
            until = time + ops.seconds[flight]
            time += edge_seconds
            continue
        may, place = kernels[:n_kernels], NONE
        left = 0.0 if flight == NONE else until - time
        begins = flight != NONE and left <= 0 and (n_waits > 0 or begins_first(x, may, flight))
        if not begins:
            place = next_now(ops, x, may, time, left, flight != NONE)
            if place == NONE:
                place = next_soon(ops, x, may, flight != NONE)
                if place != NONE and flight != NONE and until < x.since[kernels[place]]:
                    place = NONE
        if place == NONE:
            i, began = flight, max(time, until)
            time, flight = began + edge_seconds, NONE
        else:
            i = kernels[place]
            n_kernels -= 1
            kernels[place] = kernels[n_kernels]
            began = max(time, x.since[i])
            time = began + ops.seconds[i]
        out[size] = 2 * i + 1
        size += 1
        for m in ops.makers[ops.first[i] : ops.first[i + 1]]:
            x.since[m] = max(x.since[m], began + edge_seconds)
            x.readers[m] -= 1
            if not x.readers[m] and ops.sends[m]:
                waits[n_waits] = m
                n_waits += 1
            elif not x.readers[m]:
                kernels[n_kernels] = m
                n_kernels += 1
    return out[:size]


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
    return [(x >> 1, bool(x & 1)) for x in walk(_arrays(ops), EDGE_SECONDS)[::-1].tolist()]


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
