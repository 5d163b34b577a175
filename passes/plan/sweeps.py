"""The solver's inner loops, compiled by numba: slow, evident references of each are in its tests.

What is compiled is kept on disk beside the module (or in the user's cache), so that a process compiles only
what nobody did before. Node `i` has the states `offsets[i]` to `offsets[i + 1]`; see flat_network.py for the
arrays. Inner loops run over slices: only there the compiler sees that places do not wrap around, and works on
four or eight numbers at once.
"""

import numpy as np

from sbp.compat.machine_code import compile_loops
from sbp.passes.plan import constants
from sbp.passes.plan.effort import WorkCount
from sbp.passes.plan.flat_network import FlatNetwork
from sbp.passes.plan.network import Indices, Table


@compile_loops
def sweep(flat: FlatNetwork, theta: Table, messages: Table, excess: Table, forward: bool) -> float:
    """One sweep of TRW-S over all nodes; returns the bound after it (up to rounding).

    A node collects from the edges to the nodes visited before it, then spreads its costs evenly over the
    edges to those after it. Raises `excess`, if it has a place per state, to what each state at least adds
    to the bound before the sweep.
    """
    offsets, first, turn, other = flat.offsets, flat.first, flat.turn, flat.other
    twin, table, message, pool = flat.twin, flat.table, flat.message, flat.pool
    nodes = offsets.size - 1
    widest = 0
    for node in range(nodes):
        widest = max(widest, offsets[node + 1] - offsets[node])
    least = np.empty(widest)
    bound = 0.0
    for step in range(nodes):
        node = step if forward else nodes - 1 - step
        at, size = offsets[node], offsets[node + 1] - offsets[node]
        begin, middle, end = first[node], turn[node], first[node + 1]
        back, back_end = (begin, middle) if forward else (middle, end)
        ahead, ahead_end = (middle, end) if forward else (begin, middle)
        for entry in range(back, back_end):
            cells, theirs, mine = table[entry], message[twin[entry]], message[entry]
            rows = offsets[other[entry] + 1] - offsets[other[entry]]
            least[:size] = np.inf
            for row in range(rows):
                put = messages[theirs + row]
                line = pool[cells : cells + size]
                for state in range(line.size):
                    cost = line[state] + put
                    least[state] = cost if cost < least[state] else least[state]
                cells += size
            for state in range(size):
                theta[at + state] += messages[mine + state] + least[state]
                messages[mine + state] = -least[state]
        lowest = np.inf
        for state in range(size):
            lowest = min(lowest, theta[at + state])
        if excess.size > 0:
            for state in range(size):
                excess[at + state] = max(excess[at + state], theta[at + state] - lowest)
        share = 1.0 / max(back_end - back, ahead_end - ahead, 1)
        for entry in range(ahead, ahead_end):
            for state in range(size):
                messages[message[entry] + state] += share * theta[at + state]
        rest = 1.0 - share * (ahead_end - ahead)
        for state in range(size):
            theta[at + state] *= rest
        bound += lowest * rest
    return bound


@compile_loops
def decode(flat: FlatNetwork, theta: Table, messages: Table, forward: bool, states: Indices) -> None:
    """Chooses states one node after the other, given the earlier choices; after a sweep the other way."""
    nodes = flat.offsets.size - 1
    for step in range(nodes):
        node = step if forward else nodes - 1 - step
        size = flat.offsets[node + 1] - flat.offsets[node]
        score = theta[flat.offsets[node] : flat.offsets[node + 1]].copy()
        begin = flat.first[node] if forward else flat.turn[node]
        end = flat.turn[node] if forward else flat.first[node + 1]
        for entry in range(begin, end):
            row = flat.table[entry] + states[flat.other[entry]] * size
            mine = flat.message[entry]
            for state in range(size):
                score[state] += messages[mine + state] + flat.pool[row + state]
        states[node] = score.argmin()


@compile_loops
def minima(flat: FlatNetwork, theta: Table, messages: Table) -> tuple[float, float]:
    """The sum of all minima of nodes and edges, with messages, and the sum of their sizes."""
    total, size_of_all = 0.0, 0.0
    both = np.empty(np.diff(flat.offsets).max() if flat.offsets.size > 1 else 0)
    for node in range(flat.offsets.size - 1):
        least = float(theta[flat.offsets[node] : flat.offsets[node + 1]].min())
        total += least
        size_of_all += abs(least)
        size = flat.offsets[node + 1] - flat.offsets[node]
        for entry in range(flat.first[node], flat.turn[node]):
            cells, theirs = flat.table[entry], flat.message[flat.twin[entry]]
            mine, rows = flat.message[entry], flat.message[flat.twin[entry] + 1] - theirs
            both[:size] = np.inf
            for row in range(rows):
                put, line = messages[theirs + row], flat.pool[cells : cells + size]
                for state in range(line.size):
                    cost = line[state] + put
                    both[state] = cost if cost < both[state] else both[state]
                cells += size
            least = (both[:size] + messages[mine : mine + size]).min()
            total += least
            size_of_all += abs(least)
    return total, size_of_all


@compile_loops
def total_cost(flat: FlatNetwork, states: Indices) -> float:
    """The cost of an assignment, summed in the order of the nodes."""
    total = 0.0
    for node in range(flat.offsets.size - 1):
        size = flat.offsets[node + 1] - flat.offsets[node]
        total += flat.theta[flat.offsets[node] + states[node]]
        for entry in range(flat.first[node], flat.turn[node]):
            total += flat.pool[flat.table[entry] + states[flat.other[entry]] * size + states[node]]
    return total


@compile_loops
def min_plus(left: Table, right: Table) -> Table:
    """The least of `left[k, i] + right[k, j]` over k, for each i and j."""
    result = np.full((left.shape[1], right.shape[1]), np.inf)
    for i in range(left.shape[1]):
        least = result[i]
        for k in range(left.shape[0]):
            cost = left[k, i]
            if cost < np.inf:
                line = right[k]
                for j in range(line.size):
                    both = cost + line[j]
                    least[j] = both if both < least[j] else least[j]
    return result


@compile_loops
def replacement(table: Table) -> Table:
    """Entry (a, b): the most that row b can cost more than row a; any row can stand for a forbidden one."""
    rows, columns = table.shape
    result = np.full((rows, rows), -np.inf)
    for a in range(rows):
        for b in range(rows):
            most = -np.inf
            for column in range(columns):
                if table[a, column] < np.inf:
                    most = max(most, table[b, column] - table[a, column])
            result[a, b] = most
    return result


_NO_EXCESS = np.zeros(0)
"""For a sweep that need not tell what states add."""


class Dual:
    """A network with its costs moved about to raise the bound: TRW-S (Kolmogorov 2006; SRMP, 2015).

    A sweep visits the nodes in order. A node collects, from the edges to earlier nodes, the least cost each
    of its states has there; then it spreads its costs evenly over the edges to later nodes. The network's
    value never changes, so the sum of all node and edge minima is a lower bound, and no sweep lowers it.

    All costs are finite: of a network with others any ceiling for them gives true bounds, and one above what
    an optimum can lose on an edge makes them as good as infinity would.
    """

    def __init__(self, flat: FlatNetwork, count: WorkCount | None = None) -> None:
        self.flat, self.theta = flat, flat.theta.copy()
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
        return sweep(self.flat, self.theta, self.messages, excess, forward)

    def lower_bound(self) -> float:
        """A lower bound, safe from rounding: the sum of all minima, less what rounding may have added."""
        total, size = minima(self.flat, self.theta, self.messages)
        return total - 1e-12 * size

    def decode(self, forward: bool) -> Indices:
        """States chosen one node after the other, given the earlier choices; after a sweep the other way."""
        states = np.zeros(self.flat.turn.size, dtype=np.int64)
        decode(self.flat, self.theta, self.messages, forward, states)
        return states
