"""Local search by forests, compiled: nodes chosen anew together, exactly given all others.

A set of nodes among which the network has no cycle is solved by dynamic programming from its leaves to its
roots, however many nodes it has. So a move changes hundreds of nodes at once, and the edges that forbid
changing any of them alone do not hold it up. Bytes have a price in a move; whether it is made is decided by
what it costs and by what it keeps alive.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sbp.compat.machine_code import compile_loops
from sbp.passes.plan import constants
from sbp.passes.plan.budget import FlatBudget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import FlatNetwork
from sbp.passes.plan.network import Indices, Table


class Workplace(NamedTuple):
    """Room to work in, as large as the network; what must survive between moves is said.

    Arguments:
      move_taken, move_touched: `[n]`, the number of the move in which a node was taken, or last had a
        neighbour taken.
      taken_neighbours: `[n]`, how many of its neighbours are taken, in that move.
      order, frontier: `[n]`, nodes taken and nodes beside them.
      above: `[n]`, a taken node's entry at its parent; -1 at a root.
      before: `[n]`, the state before the move.
      score: `[all states]`.
      change: `[times + 1]`, zero between moves.
      part: `[2 m]`, what part of an entry's table counts.
      random: `[1]`, the state of the random numbers.
      move: `[1]`, the number of the last move.
    """

    move_taken: Indices
    move_touched: Indices
    taken_neighbours: Indices
    order: Indices
    frontier: Indices
    above: Indices
    before: Indices
    score: Table
    change: Table
    part: Table
    random: Indices
    move: Indices


def workplace(flat: FlatNetwork, budget: FlatBudget, seed: int, part: Table | None = None) -> Workplace:
    """An empty one; equal seeds give equal moves. Without parts tables count whole."""
    n = flat.turn.size
    inside, near, beside, order, frontier, above, before = np.zeros((7, n), dtype=np.int64)
    score, change = np.zeros(flat.theta.size), np.zeros(budget.room.size + 1)
    part = np.ones(flat.other.size) if part is None else part
    random, move = np.array([seed], dtype=np.int64), np.zeros(1, dtype=np.int64)
    return Workplace(inside, near, beside, order, frontier, above, before, score, change, part, random, move)


@compile_loops
def price_loads(budget: FlatBudget, prices: Table, theta: Table, offsets: Indices) -> None:
    """Adds to the costs of nodes what their bytes cost at these prices per byte and time."""
    until = np.zeros(prices.size + 1)
    for time in range(prices.size):
        until[time + 1] = until[time] + prices[time]
    for node in range(offsets.size - 1):
        for load in range(budget.first[node], budget.first[node + 1]):
            price = until[budget.end[load]] - until[budget.start[load]]
            if price != 0.0:
                for state in range(offsets[node + 1] - offsets[node]):
                    theta[offsets[node] + state] += price * budget.bytes[budget.at[load] + state]


@compile_loops
def use_of(budget: FlatBudget, states: Indices) -> Table:
    """Bytes alive at each time."""
    change = np.zeros(budget.room.size + 1)
    for node in range(states.size):
        for load in range(budget.first[node], budget.first[node + 1]):
            size = budget.bytes[budget.at[load] + states[node]]
            change[budget.start[load]] += size
            change[budget.end[load]] -= size
    return np.cumsum(change)[:-1]


@compile_loops
def draw(work: Workplace, below: int) -> int:
    """A random number from 0 to `below` - 1 (a linear congruential generator, its upper bits)."""
    work.random[0] = (work.random[0] * 1103515245 + 12345) & 0x7FFFFFFFFFFF
    return int((work.random[0] >> 16) % below)


@compile_loops
def grow(flat: FlatNetwork, work: Workplace, most: int, among: Indices, roots: int, scatter: int) -> int:
    """Takes up to `most` nodes without a cycle, around random roots of some nodes; returns how many.

    A parent is always before its children in `order`. Of `scatter` + 1 nodes beside the forest one is taken
    at random, the others in the order in which they were met.
    """
    work.move[0] += 1
    move = work.move[0]
    taken, head, tail = 0, 0, 0
    for _ in range(roots if among.size > 0 else 0):
        root = among[draw(work, among.size)]
        if work.move_taken[root] == move or (
            work.move_touched[root] == move and work.taken_neighbours[root] > 0
        ):
            continue
        work.above[root] = -1
        current = root
        while True:
            work.move_taken[current] = move
            work.order[taken] = current
            taken += 1
            for entry in range(flat.first[current], flat.first[current + 1]):
                other = flat.other[entry]
                if work.move_touched[other] != move:
                    work.move_touched[other] = move
                    work.taken_neighbours[other] = 0
                work.taken_neighbours[other] += 1
                if (
                    work.taken_neighbours[other] == 1
                    and work.move_taken[other] != move
                    and tail < flat.turn.size
                ):
                    work.above[other] = entry
                    work.frontier[tail] = other
                    tail += 1
            found = -1
            while head < tail and taken < most:
                if draw(work, scatter + 1) == 0:
                    pick = head + draw(work, tail - head)
                    work.frontier[head], work.frontier[pick] = work.frontier[pick], work.frontier[head]
                node = work.frontier[head]
                head += 1
                if work.taken_neighbours[node] == 1 and work.move_taken[node] != move:
                    found = node
                    break
            if found < 0:
                break
            current = found
    return taken


@compile_loops
def choose_on(flat: FlatNetwork, theta: Table, work: Workplace, taken: int, states: Indices) -> None:
    """Cheapest states of the nodes taken, given all others; what they were is left in `before`."""
    move, offsets, pool = work.move[0], flat.offsets, flat.pool
    # Inner loops run over slices, as in sweeps.py: the compiler works on several numbers at once there.
    for k in range(taken):
        node = work.order[k]
        at, size = offsets[node], offsets[node + 1] - offsets[node]
        work.before[node] = states[node]
        work.score[at : at + size] = theta[at : at + size]
        for entry in range(flat.first[node], flat.first[node + 1]):
            other = flat.other[entry]
            if work.move_taken[other] != move:
                row, part = flat.table[entry] + states[other] * size, work.part[entry]
                line, score_of = pool[row : row + size], work.score[at : at + size]
                for state in range(line.size):
                    score_of[state] += part * line[state]
    for k in range(taken - 1, -1, -1):
        node = work.order[k]
        entry = work.above[node]
        if entry >= 0:
            parent = flat.other[flat.twin[entry]]
            at, size = offsets[parent], offsets[parent + 1] - offsets[parent]
            least = np.full(size, np.inf)
            cells, part = flat.table[entry], work.part[entry]
            for row in range(offsets[node], offsets[node + 1]):
                score = work.score[row]
                line = pool[cells : cells + size]
                for state in range(line.size):
                    cost = part * line[state] + score
                    least[state] = cost if cost < least[state] else least[state]
                cells += size
            for state in range(size):
                work.score[at + state] += least[state]
    for k in range(taken):
        node = work.order[k]
        at, size = offsets[node], offsets[node + 1] - offsets[node]
        row, part = -1, 0.0
        if work.above[node] >= 0:
            entry = flat.twin[work.above[node]]
            row, part = flat.table[entry] + states[flat.other[entry]] * size, work.part[entry]
        best, least_cost = 0, np.inf
        for state in range(size):
            cost = work.score[at + state] + (part * pool[row + state] if row >= 0 else 0.0)
            if cost < least_cost:
                best, least_cost = state, cost
        states[node] = best


@compile_loops
def cost_change(flat: FlatNetwork, work: Workplace, taken: int, states: Indices) -> float:
    """What the states of the nodes taken cost more than those before."""
    move, total = work.move[0], 0.0
    for k in range(taken):
        node = work.order[k]
        old, new = work.before[node], states[node]
        if old == new:
            continue
        at, size = flat.offsets[node], flat.offsets[node + 1] - flat.offsets[node]
        total += flat.theta[at + new] - flat.theta[at + old]
        for entry in range(flat.first[node], flat.first[node + 1]):
            other = flat.other[entry]
            was = work.before[other] if work.move_taken[other] == move else states[other]
            if was == states[other] or other < node:  # of two that changed the later one counts the edge
                cells = flat.table[entry]
                more = pool_difference(flat, cells, states[other] * size + new, was * size + old)
                total += work.part[entry] * more
    return total


@compile_loops
def pool_difference(flat: FlatNetwork, cells: int, new: int, old: int) -> float:
    """Of two cells of a table."""
    return float(flat.pool[cells + new] - flat.pool[cells + old])


@compile_loops
def excess_change(budget: FlatBudget, work: Workplace, taken: int, states: Indices, use: Table) -> float:
    """How much more lies above the limit, summed over the times. Leaves the changes in `change`."""
    low, high = budget.room.size, 0
    for k in range(taken):
        node = work.order[k]
        old, new = work.before[node], states[node]
        if old != new:
            for load in range(budget.first[node], budget.first[node + 1]):
                at = budget.at[load]
                more = budget.bytes[at + new] - budget.bytes[at + old]
                if more != 0.0:
                    work.change[budget.start[load]] += more
                    work.change[budget.end[load]] -= more
                    low, high = min(low, budget.start[load]), max(high, budget.end[load])
    running, total = 0.0, 0.0
    for time in range(low, high):
        running += work.change[time]
        over = use[time] - budget.room[time]
        total += max(over + running, 0.0) - max(over, 0.0)
    return total


@compile_loops
def settle_change(
    budget: FlatBudget, work: Workplace, taken: int, states: Indices, use: Table, accepted: bool
) -> None:
    """Takes the change into use, or puts the states back; either way `change` is zero again."""
    low, high = budget.room.size, 0
    for k in range(taken):
        node = work.order[k]
        if work.before[node] != states[node]:
            for load in range(budget.first[node], budget.first[node + 1]):
                low, high = min(low, budget.start[load]), max(high, budget.end[load])
            if not accepted:
                states[node] = work.before[node]
    running = 0.0
    for time in range(low, high):
        running += work.change[time]
        work.change[time] = 0.0
        if accepted:
            use[time] += running
    work.change[high] = 0.0


@compile_loops
def nodes_over(budget: FlatBudget, use: Table, count: int) -> Indices:
    """The nodes of which something is there at times with too much; all, if there are none."""
    over = np.zeros(use.size + 1)
    for time in range(use.size):
        over[time + 1] = over[time] + (1.0 if use[time] > budget.room[time] else 0.0)
    found, nodes = 0, np.arange(count)
    for node in range(count if over[-1] > 0.0 else 0):
        for load in range(budget.first[node], budget.first[node + 1]):
            if over[budget.end[load]] > over[budget.start[load]]:
                nodes[found] = node
                found += 1
                break
    return nodes[:found] if found else nodes


@compile_loops
def improve(
    flat: FlatNetwork,
    budget: FlatBudget,
    theta: Table,
    work: Workplace,
    states: Indices,
    use: Table,
    moves: int,
    nodes: int,
    most: int,
    noise: float,
) -> tuple[float, float]:
    """Makes the moves that bring the use nearer to the limit, or cost less and bring it no further away.

    While there is too much at some times they begin at what is there then.

    Arguments:
      theta: costs of nodes with the price of their bytes.
      states, use: changed in place.
      moves, nodes: no more moves than this, of no more nodes all together.
      most: nodes in a move.

    Returns the change of the cost, and of what lies above the limit.
    """
    gained, excess, touched = 0.0, 0.0, 0
    among = nodes_over(budget, use, states.size)
    bits = 1
    while (1 << bits) < most:
        bits += 1
    for _ in range(moves):
        if touched >= nodes:
            break
        wanted = min(most, 1 << draw(work, bits + 1))
        taken = grow(flat, work, wanted, among, 1 + draw(work, 3), 1 + draw(work, 8))
        touched += taken
        choose_on(flat, theta, work, taken, states)
        cost = cost_change(flat, work, taken, states)
        over = excess_change(budget, work, taken, states, use)
        accepted = over < -1e-6 or (over <= 0.0 and cost < -noise)
        settle_change(budget, work, taken, states, use, accepted)
        if accepted:
            gained += cost
            excess += over
    return gained, excess


def improve_in_rounds(
    flat: FlatNetwork,
    budget: FlatBudget,
    priced: Callable[[int, Table], Table],
    work: Workplace,
    states: Indices,
    cost: float,
    effort: Effort,
    rounds: int,
    kinds: int = 1,
) -> None:
    """Moves in rounds, of about as many nodes as there are, until some rounds gain nothing.

    Arguments:
      priced: the costs of states with those of their bytes, by the number of the round and the use.
      states: changed in place.
      cost: about what assignments cost.
      rounds: at the most.
      kinds: of costs, which rounds take in turn; so many without gain are the last.
    """
    use, idle = use_of(budget, states), 0
    nodes = max(states.size, constants.MOVES)
    for k in range(rounds):
        theta = priced(k, use)
        most, noise = constants.FOREST_NODES, constants.NOISE * cost
        gained, nearer = improve(flat, budget, theta, work, states, use, constants.MOVES, nodes, most, noise)
        effort.count.add(constants.MOVED_CELL_SECONDS * nodes * (1 + flat.cells / max(1, states.size)))
        idle = idle + 1 if nearer == 0.0 and gained >= -constants.GAINED * cost else 0
        if idle == kinds or effort.is_spent:
            break
