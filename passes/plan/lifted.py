"""Sweeps over equal layers at once.

Nodes that look alike get alike messages. So sweeps visit one node of each class first, which reads what the
others would send from those of their classes, and what it has put on its edges is where sweeps over the whole
network begin. Whatever messages these begin with, what they bound is true.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from sbp.passes.plan.flat import FlatNetwork, Indices
from sbp.passes.plan.fold import Colours, mixed
from sbp.passes.plan.network import Table
from sbp.passes.plan.wide import Wide, starts_of

Swept = TypeVar("Swept", Wide, FlatNetwork)
"""A network as sweeps go through it."""


@dataclass(frozen=True)
class Lifted(Generic[Swept]):
    """One node of each class of a network, as a network for the sweeps alone: an edge may lead from the node
    of a class to another class while the edge back leads elsewhere.

    Arguments:
      wide: of these nodes.
      stands: `[classes]`, where these are among all nodes.
      nodes: `[n]`, per node of the whole the one here that stands for it.
      entries: `[2 m]`, likewise per entry.
    """

    wide: Swept
    stands: Indices
    nodes: Indices
    entries: Indices


@dataclass(frozen=True)
class _Alike:
    """Which nodes look alike: `stands` and `nodes` as of `Lifted`; per entry of the whole `alike` is the one
    that stands for it, and `at` has where those that stand are among themselves."""

    stands: Indices
    nodes: Indices
    kept: Indices
    alike: Indices
    at: Indices


def lifted(wide: Wide, kinds: Colours, hops: int) -> Lifted[Wide]:
    """The nodes that do not look alike so many hops far.

    Arguments:
      kinds: a number per node, the same for equal costs of states.
    """
    found = _alike(wide, (wide.core, wide.classes, wide.classes[wide.twin]), kinds, hops)
    kept = found.kept
    small = wide._replace(classes=wide.classes[kept], width=wide.width[kept], core=wide.core[kept])
    return _chosen(wide, small, found)


def lifted_flat(flat: FlatNetwork, kinds: Colours, hops: int) -> Lifted[FlatNetwork]:
    """The same of a network whose tables are written down; those of equal edges must be one object there.

    >>> from sbp.passes.plan.flat import flat_network
    >>> from sbp.passes.plan.network import CostNetwork
    >>> line = tuple((k, k + 1, np.array([[0.0, 1.0], [2.0, 0.0]])) for k in range(9))
    >>> flat = flat_network(CostNetwork((np.zeros(2),) * 10, tuple((i, j, line[0][2]) for i, j, _ in line)))
    >>> lifted_flat(flat, np.zeros(10, dtype=np.uint64), 2).stands
    array([0, 1, 2, 8, 9])
    """
    found = _alike(flat, (flat.table,), kinds, hops)
    return _chosen(flat, flat._replace(table=flat.table[found.kept]), found)


def _alike(whole: Swept, tables: tuple[Indices, ...], kinds: Colours, hops: int) -> _Alike:
    """The nodes that do not look alike; `tables` say per entry which table it has."""
    sizes = np.diff(whole.first)
    node = np.repeat(np.arange(sizes.size), sizes)
    ahead = np.arange(node.size) >= whole.turn[node]
    _, numbers = np.unique(np.stack([*tables, ahead.astype(np.int64)], axis=1), axis=0, return_inverse=True)
    edges = mixed(numbers.reshape(-1).astype(np.uint64))
    before = colours = mixed(kinds)
    for _ in range(hops):
        before = colours
        around = np.zeros_like(colours)
        # A sum does not depend on the order of the edges; 64 bits of it do not meet by chance.
        np.add.at(around, node, mixed(edges + before[whole.other] * np.uint64(3)))
        colours = mixed(before * np.uint64(11) + around)
    _, first, nodes = np.unique(colours, return_index=True, return_inverse=True)
    # Nodes of a class have entries of the same kinds to the same colours: sorted, one stands for another.
    ordered = np.lexsort((before[whole.other], edges, node))
    rank = np.empty(ordered.size, dtype=np.int64)
    rank[ordered] = np.arange(ordered.size) - whole.first[node]
    along = np.argsort(first, kind="stable")
    place = np.empty(along.size, dtype=np.int64)
    place[along] = np.arange(along.size)
    stands, nodes = first[along], place[nodes]
    alike = ordered[whole.first[stands[nodes[node]]] + rank]
    kept = ranges(whole.first[stands], sizes[stands])
    at = np.full(whole.other.size, -1, dtype=np.int64)
    at[kept] = np.arange(kept.size)
    return _Alike(stands, nodes, kept, alike, at)


def _chosen(whole: Swept, small: Swept, found: _Alike) -> Lifted[Swept]:
    """The network of the nodes that stand for all; `small` has what its entries alone say."""
    stands, kept = found.stands, found.kept
    first = starts_of(np.diff(whole.first)[stands])
    small = small._replace(
        offsets=starts_of(np.diff(whole.offsets)[stands]),
        first=first,
        turn=first[:-1] + (whole.turn - whole.first[:-1])[stands],
        other=found.nodes[whole.other[kept]],
        twin=found.at[found.alike[whole.twin[kept]]],
        message=starts_of(np.diff(whole.message)[kept]),
    )
    return Lifted(small, stands, found.nodes, found.at[found.alike])


def gathered(found: Lifted[Swept], wide: Swept, theta: Table, messages: Table) -> tuple[Table, Table]:
    """The costs of nodes and the messages of those that stand for all."""
    entries = ranges(wide.first[found.stands], np.diff(found.wide.first))
    return (
        theta[ranges(wide.offsets[found.stands], np.diff(found.wide.offsets))],
        messages[ranges(wide.message[entries], np.diff(found.wide.message))],
    )


def spread(found: Lifted[Swept], wide: Swept, theta: Table, messages: Table) -> tuple[Table, Table]:
    """The costs of nodes and the messages of the whole network, as those of its classes are."""
    lengths = np.diff(wide.message)
    states = np.diff(wide.offsets)
    return (
        theta[ranges(found.wide.offsets[found.nodes], states)],
        messages[ranges(found.wide.message[found.entries], lengths)],
    )


def ranges(starts: Indices, lengths: Indices) -> Indices:
    """`start`, `start + 1`, ... of each, one after the other.

    >>> ranges(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    before = np.cumsum(lengths) - lengths
    found: Indices = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return found
