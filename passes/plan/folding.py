"""Equal parts of a network as one, so that layers that are alike choose alike: a tenth of the network.

Its answer is one of the whole network, at the cost that is said: the best of those in which equal parts
choose alike, not proven to be the best of all.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan import constants
from sbp.passes.plan.network import CostNetwork, IndexedNetwork, IndexedTable, Indices, Table
from sbp.passes.plan.tables import TableStore

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Odd numbers whose products spread over 64 bits (splitmix64, Steele et al., 2014)."""

Colours = NDArray[np.uint64]
Whole = TypeVar("Whole", CostNetwork, IndexedNetwork)


@dataclass(frozen=True)
class FoldedNetwork(Generic[Whole]):
    """A smaller network that stands for a larger one.

    Arguments:
      network: one node per class of nodes, and one edge per class of edges.
      classes: per node of the larger one, its node here.
      edges: per edge of the larger one, its edge here; -1 where it is left out.
    """

    network: Whole
    classes: tuple[int, ...]
    edges: Indices

    def expand(self, states: Sequence[int]) -> tuple[int, ...]:
        """States of the larger network, at the same cost."""
        return tuple(states[k] for k in self.classes)


def fold(network: Whole, hops: int, kinds: Colours | None = None) -> FoldedNetwork[Whole]:
    """The network with each class of nodes as one; what the nodes and edges of a class cost is added up.

    Of an indexed network edges that join a class to itself are left out: sweeps have no place for them.

    Arguments:
      kinds: a number per edge; those of one have one table and count as equal. Without, equal tables do.

    >>> theta, table = np.array([0.0, 1.0]), np.array([[2.0, 0.0], [0.0, 0.0]])
    >>> whole = CostNetwork((theta,) * 9, tuple((i, i + 1, table) for i in range(8)))
    >>> folded = fold(whole, hops=1)
    >>> len(folded.network.unary), folded.network.cost((0, 1, 0)) == 7.0
    (3, True)
    """
    kinds = numbers_of(table for _, _, table in network.edges) if kinds is None else kinds
    classes = _classes(network, kinds, hops)
    members, one = Counter(classes), dict[int, Any](zip(classes, network.unary, strict=True))
    tables = dict[int, Any](zip(kinds.tolist(), (table for _, _, table in network.edges), strict=True))
    keys = [(classes[i], classes[j], k) for (i, j, _), k in zip(network.edges, kinds.tolist(), strict=True)]
    loops = isinstance(network, CostNetwork)
    counts = Counter(key for key in keys if loops or key[0] != key[1])
    place = {key: k for k, key in enumerate(counts)}
    # What is one object stays one: the solver works on it once.
    costs = {(id(one[k]), n): one[k] * n for k, n in members.items()}
    times = {
        (k, n): tables[k] * n if n > 1 else tables[k] for k, n in {(k, n) for (_, _, k), n in counts.items()}
    }
    small: dict[str, Any] = {
        "unary": tuple(costs[id(one[k]), n] for k, n in sorted(members.items())),
        "edges": tuple((i, j, times[k, n]) for (i, j, k), n in counts.items()),
    }
    if isinstance(network, IndexedNetwork):
        small["order"] = np.array(list(dict.fromkeys(classes[node] for node in network.order.tolist())))
    edges = np.array([place.get(key, -1) for key in keys], np.int64)
    return FoldedNetwork(replace(network, **small), classes, edges)


def fold_if_alike(network: Whole, kinds: Colours | None = None) -> FoldedNetwork[Whole]:
    """The network folded if many of its parts are equal, else as it is."""
    folded = fold(network, constants.ALIKE_HOPS, kinds)
    is_less = len(folded.network.unary) <= constants.ALIKE_PART * len(network.unary)
    return folded if is_less else identity_fold(network)


def identity_fold(network: Whole) -> FoldedNetwork[Whole]:
    """A network that stands for itself."""
    return FoldedNetwork(network, tuple(range(len(network.unary))), np.arange(len(network.edges)))


def numbers_of(tables: Iterable[Table | IndexedTable]) -> Colours:
    """A number per table, by first sight; equal ones have one. Of indexed ones each object has its own."""
    store = TableStore()
    return key_numbers(id(x) if isinstance(x, IndexedTable) else store.put_shared(x) for x in tables)


def key_numbers(keys: Iterable[Hashable]) -> Colours:
    """A number per key, 0, 1, ... by first sight.

    >>> key_numbers("abac").tolist()
    [0, 1, 0, 2]
    """
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.uint64)


def _classes(network: CostNetwork | IndexedNetwork, kinds: Colours, hops: int) -> tuple[int, ...]:
    """Classes of nodes that have the same costs, and so have all around them."""
    colours, tables = _mix_bits(numbers_of(network.unary)), _mix_bits(kinds)
    i, j = np.array([(i, j) for i, j, _ in network.edges], np.int64).reshape(-1, 2).T
    for _ in range(hops):
        around = np.zeros_like(colours)
        # A sum does not depend on the order of the edges; 64 bits of it do not meet by chance.
        np.add.at(around, i, _mix_bits(tables + colours[j] * np.uint64(3)))
        np.add.at(around, j, _mix_bits(tables * np.uint64(5) + colours[i] * np.uint64(7)))
        colours = _mix_bits(colours * np.uint64(11) + around)
    return tuple(key_numbers(colours.tolist()).tolist())


def _mix_bits(x: Colours) -> Colours:
    """Numbers spread over all 64 bits."""
    a, b, c = (np.uint64(f) for f in _FACTORS)
    x = (x + np.uint64(1)) * a
    x = (x ^ (x >> np.uint64(30))) * b
    x = (x ^ (x >> np.uint64(27))) * c
    return x ^ (x >> np.uint64(31))
