"""The slow, evident cost of a plan's boxing: the cheapest tree of versions, the oracle of share variables.

The search boxes a value to one version, and takes all that its uses want from there. A physical program may
make any version from any other one; what that takes at least is a Steiner tree in the table of boxing times.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np

from sbp.passes.plan.model import Model
from sbp.passes.plan.network import Table

MAX_COMBINATIONS = 300_000


def tree_seconds(loose: Table, strict: Table, supply: int, wanted: Iterable[tuple[int, bool]]) -> float:
    """The least time to make all versions that are wanted (Dreyfus and Wagner, 1972).

    Arguments:
      loose, strict: seconds from each signature to each other; strict ones fill no zeros in.
      supply: the signature that the value is made in.
      wanted: signatures, each with whether its user takes no sum that was filled.

    >>> table = np.array([[0.0, 5.0, 5.0], [9.0, 0.0, 1.0], [9.0, 9.0, 0.0]])
    >>> tree_seconds(table, table, 0, [(1, True), (2, True)])
    6.0
    """
    ends = sorted({(w, s) for w, s in wanted if w != supply})
    if not ends:
        return 0.0
    # least[mask][u]: to make the versions of `mask` from u.
    least = np.full((1 << len(ends), len(loose)), np.inf)
    for i, (w, is_strict) in enumerate(ends):
        least[1 << i] = (strict if is_strict else loose)[:, w]
    for mask in range(1, 1 << len(ends)):
        part = (mask - 1) & mask
        if not part:
            continue
        branched = np.full(len(loose), np.inf)
        while part:
            branched = np.minimum(branched, least[part] + least[mask ^ part])
            part = (part - 1) & mask
        least[mask] = (strict + branched).min(axis=1)
    return float(least[-1][supply])


def least_seconds(model: Model) -> float:
    """The least time of any physical program, by enumeration of all signatures.

    Raises:
      ValueError: above 300,000 combinations.
    """
    network = model.build()
    shares = set(model.shares.values())
    chosen = [i for i in range(len(network.unary)) if i not in shares]
    sizes = [network.unary[i].size for i in chosen]
    if math.prod(sizes) > MAX_COMBINATIONS:
        raise ValueError(f"{math.prod(sizes)} combinations; at most {MAX_COMBINATIONS}: use choose")
    values = [(model.boxing(v), model.supply[v], uses) for v, uses in model.demand.items()]
    known: dict[tuple[int, int, frozenset[tuple[int, bool]]], float] = {}
    best = math.inf
    for states in itertools.product(*map(range, sizes)):
        at = dict(zip(chosen, states, strict=True))
        cost = math.fsum(float(network.unary[i][a]) for i, a in at.items())
        for boxing, supply, uses in values:
            if cost >= best:
                break
            made = boxing.index[supply.needs[at[supply.variable]]]
            wanted = frozenset(
                (boxing.index[u.needs[at[u.variable]]], u.strict[at[u.variable]]) for u in uses
            )
            key = id(boxing), made, wanted
            if key not in known:
                known[key] = tree_seconds(boxing.seconds, boxing.strict_seconds, made, wanted)
            cost += known[key]
        best = min(best, cost)
    return best
