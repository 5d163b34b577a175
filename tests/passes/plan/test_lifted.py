"""Sweeps over one node of each class: where they lead, the whole network is bounded, and well."""

from __future__ import annotations

import numpy as np
import pytest

from sbp.passes.plan.flat import flat_network
from sbp.passes.plan.fold import numbers_of
from sbp.passes.plan.indexed import IndexedNetwork, IndexedTable
from sbp.passes.plan.lifted import gathered, lifted, lifted_flat, spread
from sbp.passes.plan.narrow import Narrowing
from sbp.passes.plan.solve import solve


def layers(n: int, width: int = 4, states: int = 5, seed: int = 0) -> IndexedNetwork:
    """A stack of equal rings, each bound to the next; the last node stands apart."""
    rng = np.random.default_rng(seed)
    unary = [rng.random(states) for _ in range(width)]
    places = [np.arange(states), rng.permutation(states)]
    cores = [rng.random((states, states)) for _ in range(width + 1)]
    tables = [IndexedTable(core, places[k % 2], places[0], 1.5) for k, core in enumerate(cores)]
    edges = [
        (k * width + i, k * width + (i + 1) % width, tables[i]) for k in range(n) for i in range(width)
    ] + [(k * width, (k + 1) * width, tables[width]) for k in range(n - 1)]
    costs = [unary[i] for _ in range(n) for i in range(width)]
    return IndexedNetwork((*costs[:-1], rng.random(states)), tuple(edges), np.arange(n * width))


def kinds(network: IndexedNetwork) -> np.ndarray:
    return numbers_of([network.unary[node] for node in network.order])


def test_layers_are_one() -> None:
    small, large = (
        lifted(Narrowing(network, np.float64).wide, kinds(network), 4) for network in (layers(20), layers(60))
    )
    assert small.stands.size == large.stands.size < 50


def test_an_entry_stands_for_entries_of_its_kind() -> None:
    network = layers(15)
    whole = Narrowing(network, np.float64).wide
    found = lifted(whole, kinds(network), 3)
    for field in ("core", "classes", "width"):
        assert (getattr(found.wide, field)[found.entries] == getattr(whole, field)).all()
    sizes = np.diff(whole.first)
    assert (np.diff(found.wide.first)[found.nodes] == sizes).all()
    node = np.repeat(found.nodes, sizes)
    assert (found.wide.first[node] <= found.entries).all()
    assert (found.entries < found.wide.first[node + 1]).all()
    assert len({*zip(np.repeat(np.arange(sizes.size), sizes), found.entries, strict=True)}) == node.size


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_true_and_about_as_good(seed: int) -> None:
    network = layers(12, seed=seed)
    best = solve(network.dense()).cost
    alike, usual = Narrowing(network, np.float64), Narrowing(network, np.float64)
    alike.begin_alike()
    # What nodes have put on their edges and what they have left is what they cost.
    left = np.concatenate([network.unary[node] for node in network.order])
    wide = alike.wide
    for node in range(left.size // 5):
        own = alike.messages[wide.message[wide.first[node]] : wide.message[wide.first[node + 1]]]
        given = own.reshape(-1, 5).sum(axis=0) if own.size else 0.0
        assert alike.theta[5 * node : 5 * node + 5] + given == pytest.approx(left[5 * node : 5 * node + 5])
    for _ in range(3):
        alike.sweep()
    for _ in range(10):
        usual.sweep()
    assert usual.bound - 1e-2 * abs(best) <= alike.bound <= best * (1 + 1e-12)


def test_what_is_spread_is_gathered_again() -> None:
    """So sweeps over more classes go on where those over fewer have ended."""
    network, rng = layers(12), np.random.default_rng(0)
    whole = Narrowing(network, np.float64)
    few, more = (lifted(whole.wide, kinds(network), hops) for hops in (1, 4))
    assert few.stands.size < more.stands.size
    theta, messages = rng.random(few.wide.offsets[-1]), rng.random(few.wide.message[-1])
    given = spread(few, whole.wide, theta, messages)
    again = spread(more, whole.wide, *gathered(more, whole.wide, *given))
    assert all((a == b).all() for a, b in zip(again, given, strict=True))
    back = gathered(few, whole.wide, *given)
    assert (back[0] == theta).all() and (back[1] == messages).all()


def test_tables_that_are_written_down_are_lifted_too() -> None:
    network = layers(30)
    flat = flat_network(network.dense())
    found = lifted_flat(flat, numbers_of(network.unary), 3)
    assert found.stands.size < 0.5 * flat.turn.size
    assert (found.wide.table[found.entries] == flat.table).all()
    assert (np.diff(found.wide.message)[found.entries] == np.diff(flat.message)).all()
    theta, messages = np.arange(flat.theta.size, dtype=float), np.zeros(int(flat.message[-1]))
    own, _ = gathered(found, flat, theta, messages)
    assert (own == np.concatenate([theta[5 * k : 5 * k + 5] for k in found.stands])).all()
