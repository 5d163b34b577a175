"""Shortest paths by relaxing rows, against Dijkstra's from each source."""

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from sbp.passes.boxing.paths import shortest_seconds


def test_against_dijkstra() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 14))
        ends = np.array([(i, j) for i in range(n) for j in range(n) if i != j and rng.random() < 0.3])
        ends = ends.reshape(-1, 2).astype(np.int64)
        seconds = rng.random(len(ends)) + 1e-3
        fills = rng.random(len(ends)) < 0.2
        local = fills | (rng.random(len(ends)) < 0.3)
        used = [(i, j, s) for (i, j), s, f in zip(ends, seconds, fills, strict=True) if not f]
        after = [(i, j + n, s) for (i, j), s, f in zip(ends, seconds, fills, strict=True) if f]
        after += [(i + n, j + n, s) for (i, j), s, f in zip(ends, seconds, local, strict=True) if f]
        both = []
        for moves in (used + after, used):
            at = np.array([(i, j) for i, j, _ in moves], dtype=np.int64).reshape(-1, 2)
            graph = csr_matrix(([s for *_, s in moves], (at[:, 0], at[:, 1])), shape=(2 * n, 2 * n))
            cost = dijkstra(graph, indices=np.arange(n))
            both.append(np.minimum(cost[:, :n], cost[:, n:]))
        assert np.array_equal(shortest_seconds(n, ends, seconds, fills, local), np.hstack(both)), seed
