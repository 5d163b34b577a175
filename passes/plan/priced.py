"""Where a search under a limit starts: the cheapest plan at one price for all bytes above the limit.

Products of matrices have the signatures of the fastest plan. Open are what is kept, what is recomputed, how
state is split, and what loops gather before they start. A price is added for bytes at the times at which that
plan needs too much; this problem has no limit and is mostly solved in a second. The search is for the lowest
price at which the plan keeps the limit. Where none is found in time all ops have the fastest plan's
signatures.
"""

import math
from collections.abc import Sequence

import numpy as np

from sbp.passes.plan import constants
from sbp.passes.plan.budget import Budget, loads_on
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat import Indices
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Infeasible
from sbp.passes.plan.parts import restricted
from sbp.passes.plan.prices import NO_PRICES, TimePrices
from sbp.passes.plan.reduce import reduce_network
from sbp.passes.plan.room import RoomModel
from sbp.passes.plan.solve import solve


def priced_starts(
    model: RoomModel, network: CostNetwork, budget: Budget, fastest: ChosenSignatures, effort: Effort
) -> tuple[tuple[int, ...], ...]:
    """States to start from: those that keep the limit come last, the cheapest of them at the very end.

    Arguments:
      network: of the model, as it was built.
      effort: for all of it.
    """
    starts: tuple[tuple[int, ...], ...] = ()
    for every, part in ((False, effort.part(0.5)), (True, effort)):
        if not starts or budget.peak_bytes(starts[-1]) > budget.limit:
            kept = as_chosen(model, fastest, every)
            starts = (*starts, *_starts_among(kept, network, budget, fastest, part))
    return starts


def _starts_among(
    kept: Sequence[Indices],
    network: CostNetwork,
    budget: Budget,
    fastest: ChosenSignatures,
    effort: Effort,
) -> tuple[tuple[int, ...], ...]:
    """The same on some of the states of each node."""
    try:
        loads = loads_on((x for x in budget.loads if x.start < x.end), kept)
        reduction = reduce_network(restricted(network, kept), effort, loads)
    except Infeasible:
        return ()

    def solved(prices: TimePrices) -> tuple[int, ...]:
        """The cheapest states at some prices."""
        kernel = reduction.kernel
        priced = CostNetwork(prices.charged(kernel.unary, reduction.loads), kernel.edges)
        found = solve(priced, effort=effort, proves=False)
        if math.isinf(found.cost):  # a start that is no plan is worth nothing
            found = solve(priced, proves=False)
        states = reduction.expand(found.states)
        return tuple(int(own[k]) for own, k in zip(kept, states, strict=True))

    free = solved(NO_PRICES)
    excess = budget.peak_bytes(free) - budget.limit
    if excess <= 0.0:
        return (free,)
    busy = np.array([time for time, alive in budget.course(free) if alive > budget.limit])
    price, low, high = constants.FIRST_PRICE * abs(fastest.seconds) / excess, 0.0, math.inf
    fitting, others = list[tuple[float, tuple[int, ...]]](), list[tuple[int, ...]]()
    for _ in range(constants.PRICES_TRIED):
        if effort.is_spent:
            break
        states = solved(TimePrices(busy, np.full(busy.size, price / busy.size)))
        if budget.peak_bytes(states) <= budget.limit:
            fitting.append((network.cost(states), states))
            high = price
        else:
            others.append(states)
            low = price
        between = low > 0.0 and high < math.inf
        price = math.sqrt(low * high) if between else price * constants.PRICE_FACTOR ** (1 if low else -1)
    return (*others, *(states for _, states in sorted(fitting, reverse=True)))


def states_of(model: Model, network: CostNetwork, chosen: ChosenSignatures) -> tuple[int, ...]:
    """The cheapest states of a model in which all ops have the signatures of a plan."""
    kept = as_chosen(model, chosen, every=True)
    found = solve(restricted(network, kept), proves=False)
    return tuple(int(own[k]) for own, k in zip(kept, found.states, strict=True))


def as_chosen(model: Model, chosen: ChosenSignatures, every: bool) -> list[Indices]:
    """The states of all variables, of ops only those that a plan has.

    Arguments:
      every: of all ops, not of products alone.
    """
    kept = [np.arange(len(states)) for states in model.states]
    for node in model.graph.walk():
        is_product = node.rule is not None and node.rule.matmul is not None
        if node.id in model.nodes and (every or is_product):
            variable = model.nodes[node.id]
            same = [s is chosen.strategies[node.id] for s in model.states[variable]]
            kept[variable] = np.flatnonzero(same)
    for id, variables in model.ports.items() if every else ():
        for variable, nd in zip(variables, chosen.ports[id], strict=True):
            kept[variable] = np.flatnonzero([s == nd for s in model.states[variable]])
    return kept
