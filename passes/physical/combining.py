"""Which collectives XLA:GPU sends as one: those of one kind and group that do not wait for each other, in the
order of the program, up to a number of bytes (its combiners of all-reduces, all-gathers and reduce-scatters).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

COMBINED_KINDS = frozenset(["all_reduce", "all_gather", "reduce_scatter"])
COMBINED_BYTES = 30 * 2**20
"""What collectives that are sent as one give at most (`kDefaultReduceScatterCombineThreshold`, and so on)."""


def combined(
    makers: Sequence[Sequence[int]], sent: Mapping[int, tuple[Hashable, float]]
) -> list[tuple[int, ...]]:
    """The positions of collectives that are sent as one.

    Arguments:
      makers: per op, the ops that it waits for; all come before it.
      sent: of each collective, with what it may be combined, and the bytes that it gives.

    >>> combined([[], [], [0]], {0: ("x", 1.0), 1: ("x", 1.0), 2: ("x", 1.0)})
    [(0, 1)]
    """
    open_sets: dict[Hashable, _Set] = {}
    found: list[_Set] = []
    bit, behind = 1, [0] * len(makers)  # which collectives an op needs, a bit each
    for i, makes in enumerate(makers):
        for m in makes:
            behind[i] |= behind[m]
        if i not in sent:
            continue
        key, size = sent[i]
        same = open_sets.get(key)
        if same is None or same.bytes + size > COMBINED_BYTES or behind[i] & same.bits:
            same = open_sets[key] = _Set()
            found.append(same)
        same.members.append(i)
        same.bytes += size
        same.bits |= bit
        behind[i] |= bit
        bit <<= 1
    return [tuple(same.members) for same in found if len(same.members) > 1]


def in_order(makers: Sequence[Sequence[int]], sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """All ops, those of a set as one, in an order in which each finds made what it waits for.

    Sets that wait for each other are taken apart again.

    >>> in_order([[], [0], []], [(0, 2)])
    [(0, 2), (1,)]
    """
    if not sets:
        return [(i,) for i in range(len(makers))]
    inside = {i for members in sets for i in members}
    units = [*sets, *((i,) for i in range(len(makers)) if i not in inside)]
    unit_of = [0] * len(makers)
    for u, members in enumerate(units):
        for i in members:
            unit_of[i] = u
    users: list[list[int]] = [[] for _ in units]
    waits = [0] * len(units)
    for u, members in enumerate(units):
        for m in {unit_of[m] for i in members for m in makers[i]}:
            users[m].append(u)
            waits[u] += 1
    # A set has its turn with its last member, as in the program.
    ready = [(members[-1], u) for u, members in enumerate(units) if not waits[u]]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        _, u = heapq.heappop(ready)
        out.append(u)
        for user in users[u]:
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (units[user][-1], user))
    if len(out) < len(units):
        return in_order(makers, [units[u] for u in sorted(out) if u < len(sets)])
    return [units[u] for u in out]


@dataclass(slots=True)
class _Set:
    members: list[int] = field(default_factory=list)
    bytes: float = 0.0
    bits: int = 0
