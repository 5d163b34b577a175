"""Where a search under a limit begins: what is cheapest at one price for all bytes that are in the way.

The ops are as in the fastest plan; free is what is kept, what is recomputed, how state lies at rest. With a
price for what is alive at the times at which the fastest plan has too much, that is a problem without a
limit, which is solved in a second; the lowest price whose answer keeps the limit is looked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from sbp.passes.plan.budget import Budget
from sbp.passes.plan.flat import Indices
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.room import RoomModel
from sbp.passes.plan.solve import solve

TRIES = 7
"""Prices that are looked at."""
DEAR = 0.3
"""Of the cost of the fastest plan: the first price of the bytes that are too many."""
FACTOR = 4.0
"""Between two prices, until one answer keeps the limit and one does not."""


def priced_starts(
    model: RoomModel, network: CostNetwork, budget: Budget, fastest: ChosenSignatures, seconds: float
) -> Iterator[tuple[int, ...]]:
    """States to start from, those that keep the limit last, the cheapest of them at the very end.

    Arguments:
      network: of the model, as it was built.
      seconds: for all of it.
    """
    until = time.monotonic() + seconds
    unary = _as_fastest(model, network.unary, fastest)
    try:
        free = solve(CostNetwork(unary, network.edges), time_limit_seconds=seconds / 4).states
    except Infeasible:
        return
    busy = _busy(budget, free)
    excess = budget.peak_bytes(free) - budget.limit
    if excess <= 0.0:
        yield free
        return
    price, low, high = DEAR * abs(fastest.seconds) / excess, 0.0, math.inf
    fitting: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(TRIES):
        if time.monotonic() > until:
            break
        priced = _priced(unary, budget, busy, price)
        left = max(until - time.monotonic(), 0.1)
        states = solve(CostNetwork(priced, network.edges), time_limit_seconds=left / 2).states
        if budget.peak_bytes(states) <= budget.limit:
            fitting.append((network.cost(states), states))
            high = price
        else:
            yield states
            low = price
        between = low > 0.0 and high < math.inf
        price = math.sqrt(low * high) if between else price * FACTOR ** (1 if low else -1)
    yield from (states for _, states in sorted(fitting, reverse=True))


def _as_fastest(model: RoomModel, unary: Sequence[Table], fastest: ChosenSignatures) -> tuple[Table, ...]:
    """The costs with all other signatures of ops forbidden."""
    found = list(unary)
    for node, variable in model.nodes.items():
        same = [s is fastest.strategies[node] for s in model.states[variable]]
        found[variable] = np.where(same, unary[variable], np.inf)
    for node, variables in model.ports.items():
        for variable, nd in zip(variables, fastest.ports[node], strict=True):
            found[variable] = np.where([s == nd for s in model.states[variable]], unary[variable], np.inf)
    return tuple(found)


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


def _priced(unary: Sequence[Table], budget: Budget, busy: Indices, price: float) -> tuple[Table, ...]:
    """The costs with what is alive at busy times, at a price for a byte at all of them."""
    found = list(unary)
    for x in budget.loads:
        if x.node >= 0 and x.start < x.end:
            first, last = np.searchsorted(busy, [x.start, x.end])
            # What is alive when nothing is short has a little price: of equal choices the smaller one.
            share = (last - first) / busy.size + 1e-3 * (x.end - x.start) / max(busy[-1], 1)
            found[x.node] = found[x.node] + price * share * x.bytes
    return tuple(found)
