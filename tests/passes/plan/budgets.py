"""Small networks with a budget, at random."""

from __future__ import annotations

import math

import numpy as np

from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from tests.passes.plan.brute import brute_force


def problem(seed: int, tightness: float) -> tuple[CostNetwork, Budget]:
    """Three to seven nodes; where a state is cheap it tends to be large."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 5, int(rng.integers(3, 8)))]
    unary, loads = [], []
    for node, size in enumerate(sizes):
        heavy = rng.integers(0, 9, size).astype(float)
        unary.append(np.round(9.0 - heavy + 3.0 * rng.random(size), 3))
        for _ in range(int(rng.integers(0, 3))):
            start = int(rng.integers(0, 8))
            loads.append(Load(node, start, start + int(rng.integers(0, 6)), heavy + rng.integers(0, 2, size)))
    edges = []
    for _ in range(int(rng.integers(0, 2 * len(sizes)))):
        i, j = (int(node) for node in rng.integers(len(sizes), size=2))
        table: Table = np.round(6.0 * rng.random((sizes[i], sizes[j])), 3)
        table[rng.random(table.shape) < 0.15] = np.inf
        edges.append((i, j, table))
    network = CostNetwork(tuple(unary), tuple(edges))
    most = Budget(tuple(loads), 0.0).peak_bytes([0] * len(sizes))
    return network, Budget(tuple(loads), math.floor(tightness * max(most, 4.0)))


def feasible_problems(tightness: float, number: int) -> list[tuple[CostNetwork, Budget]]:
    found = []
    for seed in range(number):
        network, budget = problem(seed, tightness)
        try:
            brute_force(network)
        except Infeasible:
            continue
        found.append((network, budget))
    return found
