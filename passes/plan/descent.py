"""Cheaper assignments near one that is known, by moves of whole forests (forests.py).

Where costs have changed a little, what is cheapest near the assignment of before is found at once; the
cheapest of all takes the solver a hundred times as long.

Equal parts of a network are laid upon each other first, so that layers that are alike choose alike. What is
found is an assignment of the whole network at the cost that is said, and the cheapest of those that treat
alike what looks alike nearby; it is not proven to be the cheapest of all.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan import constants, forests
from sbp.passes.plan.budget import Budget, flat_budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import entries_of, flat_network, ranges
from sbp.passes.plan.network import CostNetwork, Table, ceiling_of

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Odd numbers whose products spread over 64 bits (splitmix64, Steele et al., 2014)."""

Colours = NDArray[np.uint64]


@dataclass(frozen=True)
class FoldedNetwork:
    """A smaller network that stands for a larger one.

    Arguments:
      network: one node per class.
      classes: per node of the larger one, its node here.
      kinds: of the edges.
    """

    network: CostNetwork
    classes: tuple[int, ...]
    kinds: tuple[int, ...] = ()

    def expand(self, states: Sequence[int]) -> tuple[int, ...]:
        """States of the larger network, at the same cost."""
        return tuple(states[k] for k in self.classes)


def classes_of(
    unary: Sequence[Table], edges: Sequence[tuple[int, int, object]], kinds: Colours, hops: int
) -> tuple[int, ...]:
    """Classes of nodes that have the same costs, and so have all around them.

    Arguments:
      kinds: a number per edge.
    """
    colours = mix_bits(numbers_of(unary))
    if not edges:
        return colour_numbers(colours)
    tables = mix_bits(kinds)
    i, j = (np.array(ends) for ends in zip(*((a, b) for a, b, _ in edges), strict=True))
    for _ in range(hops):
        around = np.zeros_like(colours)
        # A sum does not depend on the order of the edges; 64 bits of it do not meet by chance.
        np.add.at(around, i, mix_bits(tables + colours[j] * np.uint64(3)))
        np.add.at(around, j, mix_bits(tables * np.uint64(5) + colours[i] * np.uint64(7)))
        colours = mix_bits(colours * np.uint64(11) + around)
    return colour_numbers(colours)


def fold(network: CostNetwork, hops: int, kinds: Colours | None = None) -> FoldedNetwork:
    """The network with each class of nodes as one; what the nodes and edges of a class cost is added up.

    Arguments:
      kinds: a number per edge; those of one have one table and count as equal. Without, equal tables do.

    >>> theta, table = np.array([0.0, 1.0]), np.array([[2.0, 0.0], [0.0, 0.0]])
    >>> folded = fold(CostNetwork((theta,) * 9, tuple((i, i + 1, table) for i in range(8))), hops=1)
    >>> len(folded.network.unary), folded.network.cost((0, 1, 0)) == 7.0
    (3, True)
    """
    kinds = numbers_of([table for _, _, table in network.edges]) if kinds is None else kinds
    classes = classes_of(network.unary, network.edges, kinds, hops)
    members = Counter(classes)
    first = {k: node for node, k in reversed(list(enumerate(classes)))}
    known: dict[tuple[int, int], Table] = {}

    def times(table: Table, n: int) -> Table:
        if n == 1:
            return table
        if (id(table), n) not in known:
            known[id(table), n] = table * n
        return known[id(table), n]

    counts: Counter[tuple[int, int, int]] = Counter()
    tables: dict[int, Table] = {}
    for (i, j, table), kind in zip(network.edges, kinds.tolist(), strict=True):
        counts[classes[i], classes[j], kind] += 1
        tables[kind] = table
    edges = tuple((i, j, times(tables[kind], n)) for (i, j, kind), n in counts.items())
    unary = tuple(times(network.unary[first[k]], n) for k, n in sorted(members.items()))
    return FoldedNetwork(CostNetwork(unary, edges), classes, tuple(kind for _, _, kind in counts))


def fold_if_alike(network: CostNetwork, kinds: Colours | None = None) -> FoldedNetwork:
    """The network folded if many of its parts are equal, else as it is."""
    kinds = numbers_of([table for _, _, table in network.edges]) if kinds is None else kinds
    folded = fold(network, constants.ALIKE_HOPS, kinds)
    if len(folded.network.unary) <= constants.ALIKE_PART * len(network.unary):
        return folded
    return FoldedNetwork(network, tuple(range(len(network.unary))), tuple(kinds.tolist()))


def numbers_of(tables: Sequence[Table]) -> Colours:
    """A number per table, by first sight; equal ones have one."""
    objects: dict[int, int] = {}
    seen: dict[tuple[tuple[int, ...], bytes], int] = {}
    for table in tables:
        if id(table) not in objects:
            objects[id(table)] = seen.setdefault((table.shape, table.tobytes()), len(seen))
    return np.array([objects[id(table)] for table in tables], dtype=np.uint64)


def mix_bits(x: Colours) -> Colours:
    """Numbers spread over all 64 bits."""
    a, b, c = (np.uint64(f) for f in _FACTORS)
    x = (x + np.uint64(1)) * a
    x = (x ^ (x >> np.uint64(30))) * b
    x = (x ^ (x >> np.uint64(27))) * c
    return x ^ (x >> np.uint64(31))


def colour_numbers(colours: Colours) -> tuple[int, ...]:
    """Colours as 0, 1, ... by first sight."""
    seen: dict[Any, int] = {}
    return tuple(seen.setdefault(c, len(seen)) for c in colours.tolist())


class Descent:
    """A network whose tables count in part, and whose states may cost more or less.

    Arguments:
      kinds: a number per edge; edges of one have one table and count alike. Parts of the network that are
        equal choose alike, if there are many.
      budget: that assignments keep, if any; they do not choose alike then.
      charged: the costs of states with those of their bytes; without, bytes cost nothing.
    """

    def __init__(
        self,
        network: CostNetwork,
        kinds: Colours,
        budget: Budget | None = None,
        charged: Sequence[Table] | None = None,
    ) -> None:
        whole = FoldedNetwork(network, tuple(range(len(network.unary))), tuple(kinds.tolist()))
        folded = whole if budget else fold_if_alike(network, kinds)
        self.classes, small = folded.classes, folded.network
        self.first = {k: node for node, k in reversed(list(enumerate(self.classes)))}
        self.ceiling = ceiling_of(small) / constants.LEAST_PART
        self.flat = flat_network(small, self.ceiling)
        order = entries_of(small.edges, len(small.unary)).order
        self.kinds = np.array(folded.kinds, dtype=np.int64)[order % max(1, len(small.edges))]
        self.limit = budget.limit if budget else np.inf
        self.budget = flat_budget(self.flat, budget.loads if budget else (), self.limit)
        sizes = np.array([theta.size for theta in network.unary])
        self.places = ranges(self.flat.offsets[list(self.classes)], sizes)
        self.prices = self.theta(network.unary if charged is None else charged) - self.theta(network.unary)
        self.discounts = (0.0,) if charged is None else constants.DISCOUNTS

    def theta(self, unary: Sequence[Table]) -> Table:
        """What states of classes cost, where those of nodes cost so much."""
        costs = np.bincount(self.places, np.concatenate(list(unary)), self.flat.theta.size)
        return np.minimum(costs, self.ceiling)

    def run(
        self,
        unary: Sequence[Table],
        parts: Table,
        start: Sequence[int],
        cost: float,
        effort: Effort,
        limit: float | None = None,
    ) -> tuple[int, ...]:
        """States that no forest of nodes makes cheaper, as far as it was looked.

        Arguments:
          unary: what states cost, infinite for those that are not wanted.
          parts: what part of their tables counts, per kind of edges.
          start: states to begin at; they may be forbidden, or need too much.
          cost: about what assignments cost.
          limit: that they keep, if not that of the budget.
        """
        theta = self.theta(unary)
        flat = self.flat._replace(theta=theta)
        states = np.array([start[self.first[k]] for k in range(flat.turn.size)], dtype=np.int64)
        more = 0.0 if limit is None else limit - self.limit
        budget = self.budget._replace(room=self.budget.room + more)
        work = forests.workplace(flat, budget, 1, np.maximum(parts[self.kinds], constants.LEAST_PART))

        def priced(k: int, _: Table) -> Table:
            priced: Table = theta + self.discounts[k % len(self.discounts)] * self.prices
            return priced

        kinds = len(self.discounts)
        # With several a plan begins where another search has ended: once each is enough.
        rounds = constants.MOVE_ROUNDS if kinds == 1 else kinds
        forests.improve_in_rounds(flat, budget, priced, work, states, cost, effort, rounds, kinds)
        return tuple(states[list(self.classes)].tolist())
