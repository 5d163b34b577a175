"""Where a search under a limit starts: the cheapest plan at one price for all bytes above the limit.

Ops have the signatures of the fastest plan. Open are what is kept, what is recomputed, and how state is
split. A price is added for bytes at the times at which the fastest plan needs too much; that problem has no
limit and is solved in a second. The search is for the lowest price at which the plan keeps the limit. If
there is none, only matrix products have the signatures of the fastest plan: whether a loop gathers its
weights before it starts, or in each trip, depends on the signatures of its carried values and of the ops in
its body.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.budget import Budget, loads_on
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat import Indices
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.parts import restricted
from sbp.passes.plan.reduce import reduce_network
from sbp.passes.plan.room import RoomModel
from sbp.passes.plan.solve import solve

TRIES = 7
"""The prices that are tried."""
DEAR = 0.3
"""Of the cost of the fastest plan: the first price of the bytes that are too many."""
FACTOR = 4.0
"""Between two prices, until one answer keeps the limit and one does not."""

NEAR_MOST = 0.95
"""For a bound, what is alive beyond the limit has a price when it is no less than this part of the most,"""
PROVING = 0.3
"""and this part of the price of the start: where the limit binds at few times, these prove more."""
LITTLE = 1e-3
"""Of the price, for a byte at all times."""


@dataclass(frozen=True)
class PricedStarts:
    """Where to begin.

    Arguments:
      states: that were found; those that keep the limit come last, the cheapest of them at the very end.
      free: of ops as in the fastest plan, where nothing has a price.
      price: seconds for a byte at all times at which those have too much: about what the limit is worth.
    """

    states: tuple[tuple[int, ...], ...] = ()
    free: tuple[int, ...] = ()
    price: float = 0.0


def priced_starts(
    model: RoomModel, network: CostNetwork, budget: Budget, fastest: ChosenSignatures, effort: Effort
) -> PricedStarts:
    """States and a price to start from.

    Arguments:
      network: of the model, as it was built.
      effort: for all of it.
    """
    starts = PricedStarts()
    for kept in (_as_fastest(model, fastest), _products_as_fastest(model, fastest)):
        if effort.is_spent:
            break
        found, fits = _starts_among(kept, network, budget, fastest, effort)
        starts = found if found.states or not starts.states else starts
        if fits:
            break
    return starts


def _starts_among(
    kept: Sequence[Indices],
    network: CostNetwork,
    budget: Budget,
    fastest: ChosenSignatures,
    effort: Effort,
) -> tuple[PricedStarts, bool]:
    """The same on some of the states of each node; and whether any keeps the limit."""
    try:
        problem = _Priced(network, budget, kept, effort)
    except Infeasible:
        return PricedStarts(), False
    free = problem.solved(0.0)
    excess = budget.peak_bytes(free) - budget.limit
    if excess <= 0.0:
        return PricedStarts((free,), free), True
    problem.busy = _busy(budget, free)
    price, low, high = DEAR * abs(fastest.seconds) / excess, 0.0, math.inf
    fitting, others = list[tuple[float, tuple[int, ...]]](), list[tuple[int, ...]]()
    for _ in range(TRIES):
        if effort.is_spent:
            break
        states = problem.solved(price)
        if budget.peak_bytes(states) <= budget.limit:
            fitting.append((network.cost(states), states))
            high = price
        else:
            others.append(states)
            low = price
        between = low > 0.0 and high < math.inf
        price = math.sqrt(low * high) if between else price * FACTOR ** (1 if low else -1)
    ends = (states for _, states in sorted(fitting, reverse=True))
    price = high if math.isfinite(high) else price
    return PricedStarts((*others, *ends), free, price), bool(fitting)


class _Priced:
    """A network on some of its states, with a price for bytes; `busy` are the times at which they cost it."""

    def __init__(self, network: CostNetwork, budget: Budget, kept: Sequence[Indices], effort: Effort) -> None:
        self.kept, self.busy, self.effort = kept, np.zeros(0, dtype=np.int64), effort
        loads = loads_on((x for x in budget.loads if x.start < x.end), kept)
        self.reduction = reduce_network(restricted(network, kept), effort, loads)

    def solved(self, price: float) -> tuple[int, ...]:
        """The cheapest states at a price for a byte at all busy times."""
        kernel = self.reduction.kernel
        unary = list(kernel.unary)
        for x in self.reduction.loads if self.busy.size else ():
            if x.node >= 0:
                first, last = np.searchsorted(self.busy, [x.start, x.end])
                # What is alive when nothing is short has a little price: of equal choices the smaller one.
                share = (last - first) / self.busy.size + LITTLE * (x.end - x.start) / self.busy[-1]
                unary[x.node] = unary[x.node] + price * share * x.bytes
        network = replace(kernel, unary=tuple(unary))
        found = solve(network, effort=self.effort, proves=False)
        if math.isinf(found.cost):  # a start that is no plan is worth nothing
            found = solve(network, proves=False)
        states = self.reduction.expand(found.states)
        return tuple(int(kept[k]) for kept, k in zip(self.kept, states, strict=True))


def _as_fastest(model: RoomModel, fastest: ChosenSignatures) -> list[Indices]:
    """The states of all variables, of ops only those that the fastest plan has."""
    kept = [np.arange(len(states)) for states in model.states]
    for node, variable in model.nodes.items():
        same = [s is fastest.strategies[node] for s in model.states[variable]]
        kept[variable] = np.flatnonzero(same)
    for node, variables in model.ports.items():
        for variable, nd in zip(variables, fastest.ports[node], strict=True):
            kept[variable] = np.flatnonzero([s == nd for s in model.states[variable]])
    return kept


def _products_as_fastest(model: RoomModel, fastest: ChosenSignatures) -> list[Indices]:
    """The same, but only products are those of the fastest plan."""
    kept = [np.arange(len(states)) for states in model.states]
    for node in model.graph.walk():
        if node.id in model.nodes and node.rule is not None and node.rule.matmul is not None:
            variable = model.nodes[node.id]
            same = [s is fastest.strategies[node.id] for s in model.states[variable]]
            kept[variable] = np.flatnonzero(same)
    return kept


def _busy(budget: Budget, states: Sequence[int]) -> Indices:
    """The times, of those at which something begins, at which more is alive than there may be."""
    loads = [x for x in budget.loads if x.start < x.end]
    times = np.unique(np.array([x.start for x in loads]))
    change = np.zeros(times.size + 1)
    for x in loads:
        size = float(x.bytes[states[x.node] if x.node >= 0 else 0])
        change[np.searchsorted(times, x.start)] += size
        change[np.searchsorted(times, x.end)] -= size
    found: Indices = times[np.cumsum(change)[:-1] > budget.limit]
    return found


def about_most(excess: Table) -> NDArray[np.bool_]:
    """Where about the most is alive beyond a limit: there the limit costs most, and prices prove most.

    >>> about_most(np.array([-1.0, 5.0, 100.0, 97.0])).tolist()
    [False, False, True, True]
    """
    found: NDArray[np.bool_] = excess > max(NEAR_MOST * float(excess.max(initial=0.0)), 0.0)
    return found
