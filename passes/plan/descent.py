"""Cheaper assignments near one that is known, by moves of whole forests (forests.py).

Where costs have changed a little, what is cheapest near the assignment of before is found at once; the
cheapest of all takes the solver a hundred times as long.

Equal parts of a network are laid upon each other first (folding.py), so that layers that are alike choose
alike.
"""

from collections.abc import Sequence

import numpy as np

from sbp.passes.plan import constants, forests
from sbp.passes.plan.budget import Budget, flat_budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import entries_of, flat_network, ranges
from sbp.passes.plan.folding import Colours, fold_if_alike, identity_fold
from sbp.passes.plan.network import CostNetwork, Table, ceiling_of


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
        folded = identity_fold(network) if budget else fold_if_alike(network, kinds)
        self.classes, small = folded.classes, folded.network
        self.first = {k: node for node, k in reversed(list(enumerate(self.classes)))}
        self.ceiling = ceiling_of(small) / constants.LEAST_PART
        self.flat = flat_network(small, self.ceiling)
        order, (_, first) = entries_of(small.edges, len(small.unary)).order, np.unique(folded.edges, True)
        self.kinds = kinds[first][order % max(1, first.size)]
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
            return theta + self.discounts[k % len(self.discounts)] * self.prices

        kinds = len(self.discounts)
        # With several a plan begins where another search has ended: once each is enough.
        rounds = constants.MOVE_ROUNDS if kinds == 1 else kinds
        forests.improve_in_rounds(flat, budget, priced, work, states, cost, effort, rounds, kinds)
        return tuple(states[list(self.classes)].tolist())
