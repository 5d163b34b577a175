"""Exact reductions of a cost network, with the way back: what is left is the hard kernel."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan import constants
from sbp.passes.plan.budget import Load
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.tables import Kept, TableAlgebra

_Labels = NDArray[np.intp]


class _Step(NamedTuple):
    """A removed node: its best state is the cheapest of theta plus the columns of its neighbours' states."""

    node: int
    labels: _Labels
    theta: Table
    neighbours: tuple[tuple[int, _Labels, Table], ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """`min(original) = constant + min(kernel)`; `expand` turns kernel states into original ones.

    `nodes[k]` and `labels[k]` are the original node behind kernel node `k` and its original states. `loads`
    are the given ones in terms of the kernel; those whose bytes no longer depend on a choice have node -1.
    """

    kernel: CostNetwork
    constant: float
    nodes: tuple[int, ...]
    labels: tuple[_Labels, ...]
    size: int
    steps: tuple[_Step, ...]
    loads: tuple[Load, ...] = ()

    def expand(self, kernel_states: Sequence[int]) -> tuple[int, ...]:
        """Original states from kernel states, at the same cost (up to the constant)."""
        states = [0] * self.size
        for node, labels, state in zip(self.nodes, self.labels, kernel_states, strict=True):
            states[node] = int(labels[state])
        for step in reversed(self.steps):
            score = step.theta
            for neighbour, labels, table in step.neighbours:
                score = score + table[:, int(labels.searchsorted(states[neighbour]))]
            states[step.node] = int(step.labels[int(score.argmin())])
        return tuple(states)

    def project(self, states: Sequence[int]) -> tuple[int, ...]:
        """Kernel states nearest to the original ones: the same where left, else the cheapest alone."""
        result = []
        for node, labels, theta in zip(self.nodes, self.labels, self.kernel.unary, strict=True):
            at = int(labels.searchsorted(states[node]))
            kept = at < labels.size and labels[at] == states[node]
            result.append(at if kept else int(theta.argmin()))
        return tuple(result)

    def without(self, found: Mapping[int, int], cost: float) -> Reduction:
        """The same without whole connected parts that have no loads.

        Arguments:
          found: the states of their kernel nodes, which are the best.
          cost: of these parts.
        """
        left = [k for k in range(len(self.nodes)) if k not in found]
        place = {k: new for new, k in enumerate(left)}
        edges = tuple((place[i], place[j], table) for i, j, table in self.kernel.edges if i in place)
        kernel = CostNetwork(tuple(self.kernel.unary[k] for k in left), edges)
        steps = [_Step(self.nodes[k], self.labels[k][[s]], np.zeros(1), ()) for k, s in found.items()]
        return replace(
            self,
            kernel=kernel,
            constant=self.constant + cost,
            nodes=tuple(self.nodes[k] for k in left),
            labels=tuple(self.labels[k] for k in left),
            steps=(*self.steps, *steps),
            loads=tuple(x if x.node < 0 else x._replace(node=place[x.node]) for x in self.loads),
        )


def reduce_network(
    network: CostNetwork, effort: Effort | None = None, loads: Sequence[Load] = ()
) -> Reduction:
    """Remove whatever can be removed exactly, whatever the loads may add up to.

    Parallel edges and self loops are merged; forbidden and dominated states, nodes with one state,
    constant and separable edges, nodes of degree up to two, and nodes whose state a neighbour's state
    determines are removed. A node with loads that depend on its state goes only if it has one state, or if
    another node determines it, which then has its loads. Raises Infeasible when a node loses all its states.
    """
    return _Reducer(network, effort or Effort(), loads).run()


class _Reducer:
    """The network being reduced: table numbers in place of tables, both orientations of every edge."""

    def __init__(self, network: CostNetwork, effort: Effort, loads: Sequence[Load]) -> None:
        self.algebra = TableAlgebra()
        self.effort = effort
        effort.count.add(constants.REDUCED_EDGE_SECONDS * (len(network.unary) + len(network.edges)))
        self.constant = 0.0
        self.steps: list[_Step] = []
        store = self.algebra.store
        self.theta = [store.put_shared(theta) for theta in network.unary]
        self.size = [theta.size for theta in network.unary]
        full = {size: np.arange(size) for size in set(self.size)}
        self.labels: list[_Labels] = [full[size] for size in self.size]
        self.alive = [True] * len(self.size)
        self.edges: list[dict[int, int]] = [{} for _ in self.size]
        self.fresh: list[dict[int, None]] = [{} for _ in self.size]
        """Per node the neighbours whose table is new to it: a hub cannot look at all whenever one changes."""
        self.worklist = deque(range(len(self.size)))
        self.waiting = [True] * len(self.size)
        self.touched = set(self.worklist)
        self.loads = loads
        self.fixed: list[Load] = []
        self.carried: list[tuple[tuple[int, int], ...]] = [() for _ in self.size]
        """Per node: which of the loads, and the number of their bytes per state."""
        for k, load in enumerate(loads):
            self._carry(load.node, ((k, store.put_shared(load.bytes)),))
        for i, j, table in network.edges:
            if i == j:
                self.theta[i] = self.algebra.add(self.theta[i], store.put(table.diagonal()))
            else:
                self._connect(i, j, store.put_shared(table))

    def run(self) -> Reduction:
        self._settle()
        while self.touched and not self.effort.is_spent:
            unchecked, self.touched = sorted(self.touched), set()
            for node in unchecked:
                if self.alive[node]:
                    keep = self._undominated(node)
                    if keep is not None:
                        self._keep(node, keep)
            self._settle()
        return self._result()

    def _result(self) -> Reduction:
        nodes = tuple(node for node, alive in enumerate(self.alive) if alive)
        place = {node: kernel for kernel, node in enumerate(nodes)}
        tables = self.algebra.store.tables
        kernel = CostNetwork(
            tuple(tables[self.theta[node]] for node in nodes),
            tuple(
                (place[node], place[other], tables[number])
                for node in nodes
                for other, number in sorted(self.edges[node].items())
                if node < other
            ),
        )
        labels = tuple(self.labels[node] for node in nodes)
        loads = list(self.fixed)
        for node in nodes:
            for k, number in self.carried[node]:
                loads.append(self.loads[k]._replace(node=place[node], bytes=tables[number]))
        return Reduction(
            kernel, self.constant, nodes, labels, len(self.alive), tuple(self.steps), tuple(loads)
        )

    # When to apply which reduction.

    def _settle(self) -> None:
        """Apply the cheap reductions until none applies, the cheapest node of degree two first."""
        degree_two: list[tuple[int, int]] = []
        while True:
            while self.worklist and not self.effort.is_spent:
                node = self.worklist.popleft()
                self.waiting[node] = False
                if self.alive[node]:
                    cells = self._simplify(node)
                    if cells:
                        heapq.heappush(degree_two, (cells, node))
            if not degree_two or self.effort.is_spent:
                return
            cells, node = heapq.heappop(degree_two)
            if self.alive[node] and self._product_cells(node) == cells:
                self._contract(node)

    def _simplify(self, node: int) -> int:
        """One look at a node. Returns the work to eliminate it if it is a fit node of degree two, else 0."""
        self._drop_forbidden(node)
        near = self.edges[node]
        if self.size[node] == 1 or (len(near) <= 1 and not self.carried[node]):
            self._fold(node)
            return 0
        fresh = self.fresh[node]
        while fresh:
            other, _ = fresh.popitem()
            fits = other in near and self.size[node] <= 2 * self.size[other]
            if fits and self.algebra.determines(near[other]):
                self._absorb(*self._smaller_first(other, node))
                return 0
        return self._product_cells(node)

    def _smaller_first(self, follower: int, owner: int) -> tuple[int, int]:
        """The two; swapped if each follows from the other and the follower has more edges to hand over."""
        back = self.edges[follower]
        swap = len(back) > len(self.edges[owner]) and self.size[follower] <= 2 * self.size[owner]
        return (owner, follower) if swap and self.algebra.determines(back[owner]) else (follower, owner)

    def _product_cells(self, node: int) -> int:
        near = self.edges[node]
        if len(near) != 2 or self.carried[node]:
            return 0
        a, b = (self.size[other] for other in near)
        middle = self.size[node]
        most = max(constants.SMALL_TABLE_CELLS, constants.TABLE_GROWTH * middle * (a + b))
        if a * b > most or a * b * middle > constants.RESULT_CELLS:
            return 0
        return a * b * middle

    # The reductions.

    def _drop_forbidden(self, node: int) -> None:
        live = self.algebra.live_rows(self.theta[node])
        if live == ():
            raise Infeasible((node,))
        near = self.edges[node]
        for other in self.fresh[node]:
            rows = self.algebra.live_rows(near[other]) if other in near else None
            if rows is not None:
                live = rows if live is None else tuple(sorted({*live} & {*rows}))
                if not live:
                    raise Infeasible((min(node, other), max(node, other)))
        if live is not None:
            self._keep(node, live)

    def _undominated(self, node: int) -> Kept | None:
        near = self.edges[node]
        widest = max((self.size[other] for other in near), default=0)
        if self.size[node] * self.size[node] * widest > constants.COMPARED_CELLS:
            return None
        loads = tuple(sorted({number for _, number in self.carried[node]}))
        return self.algebra.undominated_states(self.theta[node], tuple(sorted(near.values())), loads)

    def _keep(self, node: int, keep: Kept) -> None:
        """Remove all other states of a node."""
        take = self.algebra.take
        self.theta[node] = take(self.theta[node], keep)
        self.labels[node] = self.labels[node][list(keep)]
        self.size[node] = len(keep)
        carried, self.carried[node] = self.carried[node], ()
        self._carry(node, tuple((k, take(number, keep)) for k, number in carried))
        for other, number in list(self.edges[node].items()):
            del self.edges[node][other], self.edges[other][node]
            self._connect(node, other, take(number, keep))

    def _fold(self, node: int) -> None:
        """Remove a node with one state, or with at most one neighbour."""
        near = self._remove(node, self.edges[node] if self.size[node] > 1 else {})
        theta = self.theta[node]
        if not near:
            self.constant += float(self.algebra.store.tables[theta].min())
        for share, (other, number) in enumerate(near.items()):
            self._charge(other, self.algebra.message(theta if share == 0 else None, number))

    def _contract(self, node: int) -> None:
        """Remove a node of degree two: its neighbours get the min-plus product of the two tables."""
        (a, to_a), (b, to_b) = sorted(self._remove(node, self.edges[node]).items())
        self._connect(a, b, self.algebra.product(self.theta[node], to_a, to_b))

    def _absorb(self, node: int, owner: int) -> None:
        """Remove a node whose state follows from its owner's: its costs and edges move to the owner."""
        table = self.edges[owner][node]
        near = self._remove(node, {owner: self.edges[node][owner]})
        follow = self.algebra.follow(table)
        self._carry(owner, tuple((k, self.algebra.take(number, follow)) for k, number in self.carried[node]))
        self._charge(owner, self.algebra.message(self.theta[node], near.pop(owner)))
        for other, number in near.items():
            self._connect(owner, other, self.algebra.take(number, follow))

    # Changes to the network.

    def _remove(self, node: int, deciding: dict[int, int]) -> dict[int, int]:
        """Take a node out; later its state is the best given the states of the deciding neighbours."""
        tables = self.algebra.store.tables
        neighbours = tuple((other, self.labels[other], tables[number]) for other, number in deciding.items())
        self.steps.append(_Step(node, self.labels[node], tables[self.theta[node]], neighbours))
        self.alive[node] = False
        near, self.edges[node] = self.edges[node], {}
        for other in near:
            del self.edges[other][node]
            self._touch(other)
        return near

    def _carry(self, node: int, more: tuple[tuple[int, int], ...]) -> None:
        """Give a node more loads; of each, what all states have in common is fixed."""
        for k, number in more:
            above, least = self.algebra.normal(number)
            if least:
                self.fixed.append(self.loads[k]._replace(node=-1, bytes=np.array([least])))
            if self.algebra.store.tables[above].any():
                self.carried[node] += ((k, above),)

    def _charge(self, node: int, number: int) -> None:
        """Add costs to the states of a node, the cheapest of them to the constant."""
        self.theta[node], least = self.algebra.normal(self.algebra.add(self.theta[node], number))
        if least == np.inf:
            raise Infeasible((node,))
        self.constant += least
        self._touch(node)

    def _connect(self, i: int, j: int, number: int) -> None:
        """Add a table (rows: states of i) to the edge of two nodes, which vanishes if it is separable."""
        if j in self.edges[i]:
            number = self.algebra.add(self.edges[i][j], number)
            del self.edges[i][j], self.edges[j][i]
        parts = self.algebra.separate(number)
        if parts is None:
            self.edges[i][j] = number
            self.edges[j][i] = self.algebra.transpose(number)
            self.fresh[i][j] = self.fresh[j][i] = None
            self._touch(i)
            self._touch(j)
        else:
            self._charge(i, parts[0])
            self._charge(j, parts[1])

    def _touch(self, node: int) -> None:
        self.touched.add(node)
        if not self.waiting[node]:
            self.waiting[node] = True
            self.worklist.append(node)
