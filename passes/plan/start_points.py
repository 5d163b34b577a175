"""Where a search under a limit starts: the cheapest plans at one price for all bytes above the limit.

All ops have the signatures of the fastest plan. Open are what is kept, what is recomputed, how state is
split, and what loops gather before they start. A price is added for bytes at the times at which that plan
needs too much; this problem has no limit and is mostly solved in a second. Of two plans of which one keeps
the limit the next price is that at which both cost the same: either another one is cheaper there, or no price
has any between them (the lower convex hull of cost and bytes).
"""

import math
from collections.abc import Sequence

import numpy as np

from sbp.passes.plan import constants
from sbp.passes.plan.budget import Budget, loads_on
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.memory_problem import RoomModel
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Indices, Infeasible, restriction
from sbp.passes.plan.prices import NO_PRICES, TimePrices
from sbp.passes.plan.reduce import reduce_network
from sbp.passes.plan.solve import solve


def priced_starts(
    model: RoomModel, network: CostNetwork, budget: Budget, fastest: ChosenSignatures, effort: Effort
) -> tuple[tuple[int, ...], ...]:
    """States to start from: those that keep the limit come last, the cheapest of them at the very end.

    Arguments:
      network: of the model, as it was built.
      effort: for all of it; something that keeps the limit is looked for whatever that takes.
    """
    found = _starts_among(as_chosen(model, fastest), network, budget, fastest, effort)
    fits = {x: budget.peak_bytes(x) <= budget.limit for x in found}
    return tuple(sorted(fits, key=lambda x: (fits[x], -network.cost(x))))


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
        reduction = reduce_network(restriction(network, kept), effort, loads)
    except Infeasible:
        return ()

    def solved(prices: TimePrices, effort: Effort) -> tuple[int, ...]:
        """The cheapest states at some prices."""
        unary = prices.priced_unary(reduction.kernel.unary, reduction.loads)
        found = solve(CostNetwork(unary, reduction.kernel.edges), effort=effort)
        states = reduction.expand(found.states)
        return tuple(int(own[k]) for own, k in zip(kept, states, strict=True))

    each = effort.seconds_left
    dear, small = solved(NO_PRICES, effort), None
    over = budget.peak_bytes(dear) - budget.limit
    busy = dict.fromkeys(time for time, alive in budget.course(dear) if alive > budget.limit)

    def line(states: tuple[int, ...]) -> tuple[float, float]:
        """What states cost, and what is alive at these times, on average."""
        return network.cost(states), sum(x for t, x in budget.course(states) if t in busy) / max(len(busy), 1)

    lines, least = {dear: line(dear)}, math.inf
    price = constants.FIRST_PRICE * abs(fastest.seconds) / max(over, 1.0)
    for tried in range(constants.MOST_PRICES if over > 0.0 else 0):
        if small is not None and (effort.is_spent or tried >= constants.PRICES_TRIED):
            break
        prices = TimePrices(np.array([*busy]), np.full(len(busy), price / len(busy)))
        states = solved(prices, Effort(effort.count).at_most(each) if small is None else effort)
        lines[states] = cost, size = line(states)
        if not cost + price * size < (1.0 - constants.NOISE) * least:
            break  # no price gives anything between the two
        if budget.peak_bytes(states) <= budget.limit:
            small = states
        else:
            dear = states
        price *= constants.PRICE_FACTOR
        if small is not None:  # that at which both cost the same
            more, saved = np.subtract(lines[small], lines[dear]) * (1.0, -1.0)
            if min(more, saved) <= 0.0:
                break
            price = more / saved
            least = lines[dear][0] + price * lines[dear][1]
    return tuple(x for x, (cost, _) in lines.items() if cost < math.inf)


def states_of(model: Model, network: CostNetwork, chosen: ChosenSignatures) -> tuple[int, ...]:
    """The cheapest states of a model in which all ops have the signatures of a plan."""
    kept = as_chosen(model, chosen)
    return tuple(int(own[k]) for own, k in zip(kept, solve(restriction(network, kept)).states, strict=True))


def as_chosen(model: Model, chosen: ChosenSignatures) -> list[Indices]:
    """The states of all variables, of ops only those that a plan has; of loops all."""
    kept = [np.arange(len(states)) for states in model.states]
    for node in model.graph.walk():
        if node.id in model.nodes:
            variable = model.nodes[node.id]
            same = [s is chosen.strategies[node.id] for s in model.states[variable]]
            kept[variable] = np.flatnonzero(same)
    return kept
