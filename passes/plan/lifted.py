"""Sweeps over equal layers at once.

Nodes that look alike get alike messages. So sweeps visit one node of each class first, which reads what the
others would send from those of their classes, and what it has put on its edges is where sweeps over the whole
network begin. Whatever messages these begin with, what they bound is true.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp.passes.plan.flat import Indices
from sbp.passes.plan.fold import Colours, mixed
from sbp.passes.plan.network import Table
from sbp.passes.plan.wide import Wide, starts_of


@dataclass(frozen=True)
class Lifted:
    """One node of each class of a network, as a network for the sweeps alone: an edge may lead from the node
    of a class to another class while the edge back leads elsewhere.

    Arguments:
      wide: of these nodes.
      stands: `[classes]`, where these are among all nodes.
      nodes: `[n]`, per node of the whole the one here that stands for it.
      entries: `[2 m]`, likewise per entry.
    """

    wide: Wide
    stands: Indices
    nodes: Indices
    entries: Indices


def lifted(wide: Wide, kinds: Colours, hops: int) -> Lifted:
    """The nodes that do not look alike so many hops far.

    Arguments:
      kinds: a number per node, the same for equal costs of states.
    """
    sizes = np.diff(wide.first)
    node = np.repeat(np.arange(sizes.size), sizes)
    edges = _kinds_of_entries(wide, node)
    before = colours = mixed(kinds)
    for _ in range(hops):
        before = colours
        around = np.zeros_like(colours)
        # A sum does not depend on the order of the edges; 64 bits of it do not meet by chance.
        np.add.at(around, node, mixed(edges + before[wide.other] * np.uint64(3)))
        colours = mixed(before * np.uint64(11) + around)
    _, first, nodes = np.unique(colours, return_index=True, return_inverse=True)
    # Nodes of a class have entries of the same kinds to the same colours: sorted, one stands for another.
    ordered = np.lexsort((before[wide.other], edges, node))
    rank = np.empty(ordered.size, dtype=np.int64)
    rank[ordered] = np.arange(ordered.size) - wide.first[node]
    along = np.argsort(first, kind="stable")
    place = np.empty(along.size, dtype=np.int64)
    place[along] = np.arange(along.size)
    stands, nodes = first[along], place[nodes]
    alike = ordered[wide.first[stands[nodes[node]]] + rank]
    return _chosen(wide, stands, nodes, alike)


def _kinds_of_entries(wide: Wide, node: Indices) -> Colours:
    """A number per entry, by its table and by whether it leads ahead."""
    ahead = np.arange(node.size) >= wide.turn[node]
    parts = np.stack([wide.core, wide.classes, wide.classes[wide.twin], ahead.astype(np.int64)], axis=1)
    _, kinds = np.unique(parts, axis=0, return_inverse=True)
    return mixed(kinds.reshape(-1).astype(np.uint64))


def _chosen(wide: Wide, stands: Indices, nodes: Indices, alike: Indices) -> Lifted:
    """The network of the nodes that stand for all; `alike` has per entry the one that stands for it."""
    states, counts = np.diff(wide.offsets)[stands], np.diff(wide.first)[stands]
    kept = ranges(wide.first[stands], counts)
    at = np.full(wide.other.size, -1, dtype=np.int64)
    at[kept] = np.arange(kept.size)
    first = starts_of(counts)
    small = wide._replace(
        offsets=starts_of(states),
        first=first,
        turn=first[:-1] + (wide.turn - wide.first[:-1])[stands],
        other=nodes[wide.other[kept]],
        twin=at[alike[wide.twin[kept]]],
        message=starts_of(np.diff(wide.message)[kept]),
        classes=wide.classes[kept],
        width=wide.width[kept],
        core=wide.core[kept],
    )
    return Lifted(small, stands, nodes, at[alike])


def gathered(found: Lifted, wide: Wide, theta: Table, messages: Table) -> tuple[Table, Table]:
    """The costs of nodes and the messages of those that stand for all."""
    entries = ranges(wide.first[found.stands], np.diff(found.wide.first))
    return (
        theta[ranges(wide.offsets[found.stands], np.diff(found.wide.offsets))],
        messages[ranges(wide.message[entries], np.diff(found.wide.message))],
    )


def spread(found: Lifted, wide: Wide, theta: Table, messages: Table) -> tuple[Table, Table]:
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
