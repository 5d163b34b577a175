"""A limit on what lives at the same time, beside a cost network: its data, and its answer."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.flat_network import FlatNetwork
from sbp.passes.plan.network import RELATIVE_NOISE, Indices, Table


class Load(NamedTuple):
    """What a node's choice keeps alive at the times `start <= t < end`.

    Arguments:
      node: whose choice; -1: nobody's, there is one entry of bytes.
      bytes: per state of the node.
    """

    node: int
    start: int
    end: int
    bytes: Table


def loads_on(loads: Iterable[Load], kept: Sequence[NDArray[np.intp]]) -> tuple[Load, ...]:
    """Loads of nodes that have only some of their states.

    Arguments:
      kept: per node, which.
    """
    return tuple(x if x.node < 0 else x._replace(bytes=x.bytes[kept[x.node]]) for x in loads)


@dataclass(frozen=True)
class Budget:
    """At each time the loads alive may add up to at most `limit` bytes. A node may have several loads.

    Raises ValueError for bytes that are negative or not finite.

    >>> early, late = Load(0, 0, 2, np.array([5.0, 1.0])), Load(1, 1, 3, np.array([2.0]))
    >>> Budget((early, late), 6.0).peak_bytes((0, 0))
    7.0
    """

    loads: tuple[Load, ...]
    limit: float

    def __post_init__(self) -> None:
        for k, load in enumerate(self.loads):
            if not (load.bytes.min(initial=0.0) >= 0.0 and load.bytes.max(initial=0.0) < np.inf):
                raise ValueError(
                    f"budget: load {k} of node {load.node} has bytes that are negative or not finite; give "
                    "sizes, and forbid a state by its cost"
                )

    @cached_property
    def _arrays(self) -> tuple[Indices, Indices, Indices, Indices, Indices, Table]:
        """The loads that are there at any time: the times at which some begin or end, where among these each
        does, its node, and where its bytes begin among all."""
        alive = [load for load in self.loads if load.start < load.end]
        begins, ends = _times(alive, "start"), _times(alive, "end")
        times = np.unique(np.concatenate([begins, ends]))
        lengths = np.array([load.bytes.size for load in alive], dtype=np.int64)
        at = np.searchsorted(times, begins), np.searchsorted(times, ends)
        sizes = np.concatenate([np.zeros(0), *(load.bytes for load in alive)])
        return times, *at, _times(alive, "node"), np.cumsum(lengths) - lengths, sizes

    def alive(self, states: Indices) -> Table:
        """What is alive from each of the times on, `[times, assignments]`.

        Arguments:
          states: `[nodes, assignments]`.
        """
        times, start, end, nodes, first, sizes = self._arrays
        of_nobody = np.zeros((1, states.shape[1]), dtype=np.int64)  # the last: node -1
        chosen = sizes[first[:, None] + np.vstack([states, of_nobody])[nodes]]
        change = np.zeros((times.size, states.shape[1]))
        np.add.at(change, start, chosen)
        np.subtract.at(change, end, chosen)
        return np.cumsum(change, axis=0)

    def course(self, states: Sequence[int]) -> list[tuple[int, float]]:
        """The times at which something begins or ends under these states, and what is alive from there on."""
        alive = self.alive(np.array(states, dtype=np.int64)[:, None])[:, 0]
        return list(zip(self._arrays[0].tolist(), alive.tolist(), strict=True))

    def peak_bytes(self, states: Sequence[int], start: float = -math.inf, end: float = math.inf) -> float:
        """The most that lives at once under these states, of all times or those from `start` until `end`."""
        course = [*self.course(states), (math.inf, 0.0)]
        return max((b for (t, b), (after, _) in pairwise(course) if t < end and after > start), default=0.0)


@dataclass(frozen=True, slots=True)
class BudgetSolution:
    """The answer under a budget.

    Arguments:
      states: that fit and cost `cost`; if none was found that fit, those with the smallest peak found.
      cost: of these states, whether they fit or not.
      bound: a lower bound on the cost of all that fit; infinite if it is proven that none does.
      peak_bytes: of these states.
      least_peak_bytes: a lower bound on the peak of any states, sought only where none were found that fit.
      limit: that was asked for.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    peak_bytes: float
    least_peak_bytes: float
    limit: float

    @property
    def fits(self) -> bool:
        """Whether the states keep the limit and are legal; a search without time may find none that are."""
        return self.peak_bytes <= self.limit and math.isfinite(self.cost)

    @property
    def gap(self) -> float:
        """Proven relative distance from the cheapest states that fit; infinite if these do not."""
        if not self.fits:
            return math.inf
        difference = self.cost - self.bound
        if difference <= RELATIVE_NOISE * abs(self.cost):
            return 0.0
        return difference / max(abs(self.cost), math.ulp(0.0))


class FlatBudget(NamedTuple):
    """The loads of a flat network, over the few times at which the limit can bind.

    Arguments:
      first: `[n + 1]`, the first load of each node.
      start, end: `[loads]`, positions among the times.
      at: `[loads]`, where a load's bytes per state begin in `bytes`.
      bytes: `[.]`.
      room: `[times]`, what the loads may add up to there.
      times: `[times]`, which these are: each stands for those until the next.
      tightest: `[times]`, of these the one with the least room.
    """

    first: Indices
    start: Indices
    end: Indices
    at: Indices
    bytes: Table
    room: Table
    times: Indices
    tightest: Indices


def flat_budget(flat: FlatNetwork, loads: Iterable[Load], limit: float) -> FlatBudget:
    """The same loads, flat. Times whose loads are all among those of another time are left out.

    Loads of no node take from the room of their times.
    """
    alive = [load for load in loads if load.start < load.end]
    free = sorted((load for load in alive if load.node >= 0), key=lambda load: load.node)
    begins, ends = _times(alive, "start"), _times(alive, "end")
    last = _busiest(begins, ends)
    fixed = [load for load in alive if load.node < 0]
    change = np.zeros(last.size + 1)
    size = np.array([float(load.bytes[0]) for load in fixed])
    np.add.at(change, np.searchsorted(last, _times(fixed, "start")), size)
    np.add.at(change, np.searchsorted(last, _times(fixed, "end")), -size)
    room = limit - np.cumsum(change)[:-1]
    # Between two times with the same free loads only the tighter one counts.
    start, end = np.searchsorted(last, _times(free, "start")), np.searchsorted(last, _times(free, "end"))
    cuts = np.unique(np.concatenate([start, end, [0]]))
    cuts = cuts[cuts < last.size]
    starts = np.append(cuts, last.size)
    tightest = [a + int(room[a:b].argmin()) for a, b in pairwise(starts.tolist())]
    room = room[tightest] if last.size else room
    lengths = np.array([load.bytes.size for load in free], dtype=np.int64)
    return FlatBudget(
        np.searchsorted([load.node for load in free], np.arange(flat.turn.size + 1)).astype(np.int64),
        np.searchsorted(cuts, start).astype(np.int64),
        np.searchsorted(cuts, end).astype(np.int64),
        np.cumsum(lengths) - lengths,
        np.concatenate([load.bytes for load in free]) if free else np.zeros(0),
        room,
        last[cuts],
        last[tightest] if last.size else last,
    )


def _times(loads: Sequence[Load], field: str) -> NDArray[np.int64]:
    return np.array([getattr(load, field) for load in loads], dtype=np.int64)


def _busiest(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last beginning before each end that follows one: no other time has more loads alive than these."""
    begins = np.unique(begins)
    return np.unique(begins[np.searchsorted(begins, np.unique(ends), side="left") - 1])
