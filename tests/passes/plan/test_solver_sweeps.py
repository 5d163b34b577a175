"""The compiled loops of the solver against the same in plain NumPy, node by node."""

from __future__ import annotations

import numpy as np
import pytest

from sbp.passes.plan import sweeps
from sbp.passes.plan.flat_network import FlatNetwork, flat_network
from sbp.passes.plan.network import CostNetwork, Table

SEEDS = range(60)


def random_network(seed: int, forbidden: float = 0.0) -> CostNetwork:
    """Three to nine nodes, some pairs joined, some tables shared."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, int(rng.integers(3, 10)))
    shared: dict[tuple[int, int], Table] = {}
    edges = []
    for i in range(len(sizes)):
        for j in range(i + 1, len(sizes)):
            if rng.random() < 0.5:
                low, high = (i, j) if rng.random() < 0.5 else (j, i)
                shape = int(sizes[low]), int(sizes[high])
                table = rng.normal(size=shape)
                table[rng.random(shape) < forbidden] = np.inf
                edges.append((low, high, shared.setdefault(shape, table)))
    return CostNetwork(tuple(rng.normal(size=size) for size in sizes), tuple(edges))


def entries(flat: FlatNetwork, node: int) -> list[tuple[int, int, Table]]:
    """Of a node: each entry, its other node and its table, rows of the other node."""
    sizes = flat.sizes
    found = []
    for entry in range(flat.first[node], flat.first[node + 1]):
        other = int(flat.other[entry])
        cells = flat.pool[flat.table[entry] :][: sizes[other] * sizes[node]]
        found.append((entry, other, cells.reshape(sizes[other], sizes[node])))
    return found


def plain_sweep(flat: FlatNetwork, theta: list[Table], put: list[Table], forward: bool) -> float:
    bound = 0.0
    nodes = range(len(theta))
    for node in nodes if forward else reversed(nodes):
        back = [e for e in entries(flat, node) if (e[1] < node) == forward]
        ahead = [e for e in entries(flat, node) if (e[1] < node) != forward]
        for entry, _, table in back:
            least = (table + put[flat.twin[entry]][:, None]).min(axis=0)
            theta[node] += put[entry] + least
            put[entry] = -least
        share = 1.0 / max(len(back), len(ahead), 1)
        for entry, _, _ in ahead:
            put[entry] += share * theta[node]
        theta[node] *= 1.0 - share * len(ahead)
        bound += theta[node].min()
    return bound


def test_an_edge_is_entered_at_both_ends() -> None:
    for seed in SEEDS:
        network = random_network(seed)
        flat = flat_network(network)
        found = {(o, n, t.tobytes()) for n in range(len(network.unary)) for _, o, t in entries(flat, n)}
        wanted = {(i, j, t.tobytes()) for i, j, t in network.edges}
        wanted |= {(j, i, t.T.tobytes()) for i, j, t in network.edges}
        assert found == wanted
        for entry, twin in enumerate(flat.twin):
            assert flat.twin[twin] == entry
        for node in range(len(network.unary)):
            ahead = [entry for entry, other, _ in entries(flat, node) if other > node]
            assert ahead == list(range(flat.turn[node], flat.first[node + 1]))
        assert flat.pool.size == 2 * sum({id(t): t.size for _, _, t in network.edges}.values())


def test_forbidden_entries_are_filled_table_by_table() -> None:
    table, theta = np.array([[1.0, np.inf], [-2.0, 0.0]]), np.array([np.inf, 5.0])
    flat = flat_network(CostNetwork((theta, np.zeros(2)), ((0, 1, table),)), 10.0)
    assert flat.theta.tolist() == [15.0, 5.0, 0.0, 0.0]
    assert flat.pool.tolist() == [1.0, 8.0, -2.0, 0.0, 1.0, -2.0, 8.0, 0.0]


def test_sweeps() -> None:
    for seed in SEEDS:
        flat = flat_network(random_network(seed))
        theta, messages = flat.theta.copy(), np.zeros(int(flat.message[-1]))
        plain = [part.copy() for part in flat.split(theta)]
        put = [part.copy() for part in np.split(messages, flat.message[1:-1])]
        for forward in (True, False, True):
            bound = sweeps.sweep(flat, theta, messages, np.zeros(0), forward)
            assert bound == pytest.approx(plain_sweep(flat, plain, put, forward), abs=1e-12)
            np.testing.assert_allclose(theta, np.concatenate(plain), atol=1e-12)
            if messages.size:
                np.testing.assert_allclose(messages, np.concatenate(put), atol=1e-12)
        edges = [
            (table + put[flat.twin[entry]][:, None] + put[entry]).min()
            for node in range(len(plain))
            for entry, other, table in entries(flat, node)
            if other < node
        ]
        least = [*edges, *(part.min() for part in plain)]
        total, size = sweeps.minima(flat, theta, messages)
        assert total == pytest.approx(sum(least), abs=1e-12)
        assert size == pytest.approx(sum(map(abs, least)), abs=1e-12)


@pytest.mark.parametrize("forward", [True, False])
def test_decode(forward: bool) -> None:
    for seed in SEEDS:
        flat = flat_network(random_network(seed))
        rng = np.random.default_rng(seed)
        messages = rng.normal(size=int(flat.message[-1]))
        states = np.zeros(flat.turn.size, dtype=np.int64)
        sweeps.decode(flat, flat.theta, messages, forward, states)
        put = np.split(messages, flat.message[1:-1])
        plain = [0] * len(states)
        for node in range(len(states)) if forward else reversed(range(len(states))):
            score = flat.split(flat.theta)[node].copy()
            for entry, other, table in entries(flat, node):
                if (other < node) == forward:
                    score += put[entry] + table[plain[other]]
            plain[node] = int(score.argmin())
        assert states.tolist() == plain


def test_costs() -> None:
    for seed in SEEDS:
        network = random_network(seed, 0.1)
        rng = np.random.default_rng(seed)
        states = np.array([rng.integers(theta.size) for theta in network.unary])
        total = sweeps.total_cost(flat_network(network), states)
        assert total == pytest.approx(network.cost(states.tolist()))


def test_products_and_replacements() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows, a, b = (int(n) for n in rng.integers(1, 7, 3))
        left, right = rng.normal(size=(rows, a)), rng.normal(size=(rows, b))
        left[rng.random(left.shape) < 0.3] = np.inf
        right[rng.random(right.shape) < 0.3] = np.inf
        product = (left[:, :, None] + right[:, None, :]).min(axis=0)
        np.testing.assert_array_equal(sweeps.min_plus(left, right), product)
        found = sweeps.replacement(left)
        for x in range(rows):
            for y in range(rows):
                costs = [float(left[y, c] - left[x, c]) for c in range(a) if left[x, c] < np.inf]
                assert found[x, y] == max(costs, default=-np.inf)
