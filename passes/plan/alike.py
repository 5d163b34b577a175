"""Equal parts of an indexed network as one: a tenth of the network, with nearly the same bound and answer.

What its edges are sent by sweeps is a place to begin for the whole network, each part with an even share: the
bound there is the same. Its answer is one of the whole network in which equal parts choose alike.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbp.passes.plan import constants
from sbp.passes.plan.descent import classes_of
from sbp.passes.plan.network import IndexedNetwork, Indices


@dataclass(frozen=True)
class AlikeNetwork:
    """An indexed network that stands for a larger one.

    Arguments:
      network: one node per class of nodes.
      classes: per node of the larger one, its node here.
      edges: per edge of the larger one, its edge here; -1 where it joins a class to itself, and is left out.
      counts: per edge here, how many it stands for.
    """

    network: IndexedNetwork
    classes: tuple[int, ...]
    edges: Indices
    counts: Indices

    def expand(self, states: Sequence[int]) -> tuple[int, ...]:
        """States of the larger network."""
        return tuple(states[k] for k in self.classes)


def alike_network(network: IndexedNetwork) -> AlikeNetwork | None:
    """The network with equal parts as one, what they cost added up; None where few are equal."""
    tables = list({id(table): table for _, _, table in network.edges}.values())
    number = {id(table): k for k, table in enumerate(tables)}
    kinds = np.array([number[id(table)] for _, _, table in network.edges], np.uint64)
    classes = classes_of(network.unary, network.edges, kinds, constants.ALIKE_HOPS)
    members, one = Counter(classes), dict(zip(classes, network.unary, strict=True))
    if len(members) > constants.ALIKE_PART * len(classes):
        return None
    keys = [(classes[i], classes[j], number[id(table)]) for i, j, table in network.edges]
    counts = Counter(key for key in keys if key[0] != key[1])
    place = {key: k for k, key in enumerate(counts)}
    added = {(k, n): replace(tables[k], scale=n * tables[k].scale) for (_, _, k), n in counts.items()}
    folded = IndexedNetwork(
        tuple(members[k] * one[k] for k in range(len(members))),
        tuple((i, j, added[k, n]) for (i, j, k), n in counts.items()),
        np.array(list(dict.fromkeys(classes[node] for node in network.order.tolist())), np.int64),
    )
    edges, repeats = [place.get(key, -1) for key in keys], list(counts.values())
    return AlikeNetwork(folded, classes, np.array(edges, np.int64), np.array(repeats, np.int64))
