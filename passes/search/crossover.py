"""Parts of known plans in the best one.

Where two plans differ they mostly differ in several places that have nothing to do with each other: a layer
here, the optimizer of a weight there. Each of these places by itself may make the better plan better still,
which only the clock can say: what is cheap one thing after the other may be waited for. So the places are
tried one by one, those first that cost least by what is exposed in the best plan (path relinking: Glover,
1996).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from sbp.passes.plan.network import CostNetwork, Table
from sbp.passes.plan.parts import labels_of

Part = tuple[tuple[int, int], ...]
"""Nodes and their states."""


class Crossover:
    """Parts of assignments of a network, put into others."""

    def __init__(self, network: CostNetwork) -> None:
        self.network = network
        self.ends = np.array([(i, j) for i, j, _ in network.edges], np.int64).reshape(-1, 2)

    def gains(
        self,
        best: Sequence[int],
        other: Sequence[int],
        unary: Sequence[Table],
        shares: Table,
    ) -> dict[Part, float]:
        """The connected nodes in which another assignment differs, each with what it costs more there.

        Arguments:
          unary: what states cost.
          shares: what part of its table counts, per edge.

        >>> table = np.array([[0.0, 3.0], [3.0, 2.0]])
        >>> network = CostNetwork((np.zeros(2),) * 4, ((0, 1, table), (1, 2, table), (2, 3, table)))
        >>> Crossover(network).gains((0, 0, 0, 0), (1, 1, 0, 1), network.unary, np.array([1.0, 1.0, 0.5]))
        {((0, 1), (1, 1)): 5.0, ((3, 1),): 1.5}
        """
        differ = np.array(best) != np.array(other)
        at = differ[self.ends]
        labels = np.where(differ, labels_of(self.ends[at.all(axis=1)], differ.size), -1)
        nodes, gained = defaultdict[int, list[int]](list), defaultdict[int, float](float)
        for n in np.flatnonzero(differ).tolist():
            nodes[labels[n]].append(n)
            gained[labels[n]] += float(unary[n][other[n]] - unary[n][best[n]])
        for k in np.flatnonzero(at.any(axis=1)).tolist():
            i, j, table = self.network.edges[k]
            more = float(table[other[i], other[j]] - table[best[i], best[j]])
            gained[max(labels[i], labels[j])] += float(shares[k]) * more
        return {tuple((n, other[n]) for n in nodes[x]): gained[x] for x in nodes}

    def cheaper(
        self,
        best: Sequence[int],
        others: Iterable[Sequence[int]],
        unary: Sequence[Table],
        shares: Table,
    ) -> list[Part]:
        """The parts of others with which an assignment costs less, the cheapest first; arguments as of
        `gains`."""
        found = dict[Part, float]()
        for other in others:
            found |= self.gains(best, other, unary, shares)
        return sorted((part for part in found if found[part] < 0.0), key=lambda part: (found[part], part))


def with_part(states: Sequence[int], part: Part) -> tuple[int, ...]:
    """An assignment with another part."""
    return tuple((dict(enumerate(states)) | dict(part)).values())
