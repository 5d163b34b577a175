"""TRW-S (Kolmogorov 2006) in its SRMP form (Kolmogorov 2015): lower bounds by moving costs along edges.

A sweep visits the nodes in order. A node collects, from the edges to earlier nodes, the least cost each of
its states has there; then it spreads its costs evenly over the edges to later nodes. The network's value
never changes, so the sum of all node and edge minima is a lower bound, and no sweep lowers it.
"""

import numpy as np

from sbp.passes.plan import constants, sweeps
from sbp.passes.plan.effort import WorkCount
from sbp.passes.plan.flat import FlatNetwork, Indices
from sbp.passes.plan.network import Table

_NO_EXCESS = sweeps.no_excess()


class Dual:
    """A network with its costs moved about to raise the bound.

    `ceiling` stands in for infinite entries: it is added to the least entry of their table. Any value gives
    true bounds; one above what an optimum can lose on an edge makes them as good as infinity would.
    """

    def __init__(self, flat: FlatNetwork, ceiling: float, count: WorkCount | None = None) -> None:
        self.flat = flat.filled(ceiling)
        self.theta = self.flat.theta.copy()
        self.messages = np.zeros(int(flat.message[-1]))
        """What nodes have put on their edges."""
        self.count = WorkCount() if count is None else count
        self.sweep_seconds = constants.SWEPT_CELL_SECONDS * flat.cells

    def sweep(self, forward: bool, excess: Table = _NO_EXCESS) -> float:
        """One sweep; returns the bound after it (up to rounding).

        Given `excess`, a place per state, raises it to what each state at least adds to the bound before
        the sweep.
        """
        self.count.add(self.sweep_seconds)
        return sweeps.sweep(self.flat, self.theta, self.messages, excess, forward)

    def bound(self) -> float:
        """A lower bound, safe from rounding: the sum of all minima, less what rounding may have added."""
        total, size = sweeps.minima(self.flat, self.theta, self.messages)
        return total - 1e-12 * size

    def decode(self, forward: bool) -> Indices:
        """States chosen one node after the other, given the earlier choices; after a sweep the other way."""
        states = np.zeros(self.flat.turn.size, dtype=np.int64)
        sweeps.decode(self.flat, self.theta, self.messages, forward, states)
        return states
