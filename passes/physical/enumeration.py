"""The end game of small programs under a limit: assignments in the order of what they cost, until one fits.

What the search counts of memory (plan/memory_problem.py) is not what the evaluator finds. In a program of a
few ops the difference may be as large as all the rest, so that no limit on what is counted leads to a plan
that fits; but there all assignments can be looked at, and every way to run ops again under each of them.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.recompute import with_copies
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.clusters import RecomputedValue
from sbp.passes.plan.flat_network import all_costs
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model, boxing_of
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.program.graph import Const

ALL_BYTES = 1.0
"""A limit under which nothing is small."""


class WeighedPlan(NamedTuple):
    """What a plan takes and needs, and whether that keeps the limit."""

    seconds: float
    fits: bool


def cheapest_by_trying(
    candidates: Candidates,
    asked: Boundary,
    boxings: Boxings,
    weigh: Callable[[ChosenSignatures], WeighedPlan],
    below_seconds: float,
    bound: float,
    *,
    recomputes: bool = False,
) -> ChosenSignatures | None:
    """The cheapest assignment that fits and costs less than what is known; None if none was found, or if
    there are too many.

    Arguments:
      weigh: looks at the plan of an assignment.
      below_seconds: what the known one costs; infinite for none.
      bound: a proven lower bound on all.
      recomputes: whether ops may run again.
    """
    if math.prod(len(found) for found in candidates.strategies.values()) > constants.COMBINATIONS:
        return None
    model = Model(candidates, asked, boxings)
    network = model.build()
    if math.prod(theta.size for theta in network.unary) > constants.COMBINATIONS:
        return None
    states, costs = all_costs(network)
    order = np.argsort(costs, kind="stable")
    ways = ways_again(candidates, asked, boxings) if recomputes else []
    best: ChosenSignatures | None = None
    tried = 0
    for k in order[costs[order] < below_seconds]:
        cost = float(costs[k])
        # What runs again comes on top of what an assignment costs.
        if tried >= constants.PROGRAMS_TRIED or (best is not None and cost >= best.seconds):
            break
        plain = model.chosen(states[:, k].tolist(), cost, bound)
        tried += 1
        if weigh(plain).fits:
            best = plain
            break
        for way in ways:
            again = replace(plain, recomputed=way)
            if not is_possible(candidates, again, boxings):
                continue
            tried += 1
            seconds, fits = weigh(again)
            if fits and seconds < (below_seconds if best is None else best.seconds):
                best = replace(again, seconds=seconds)
    return None if best is None else replace(best, bound=min(bound, best.seconds))


def ways_again(candidates: Candidates, asked: Boundary, boxings: Boxings) -> list[dict[int, RecomputedValue]]:
    """Every way to run ops again, with nothing kept of what is wanted later; too many are none."""
    model = RecomputingModel(candidates, asked, boxings, ALL_BYTES)
    model.build_indexed()
    own = [[None, *(RecomputedValue(s, x.users) for s in model.silent(x.made))] for x in model.later.values()]
    if not 1 < math.prod(map(len, own)) <= constants.RECOMPUTATIONS:
        return []
    ways = (
        {v: r for v, r in zip(model.later, way, strict=True) if r is not None}
        for way in itertools.product(*own)
    )
    # What only an op that runs again wants has no users of its own.
    return [way for way in ways if any(r.users for r in way.values())]


def is_possible(candidates: Candidates, chosen: ChosenSignatures, boxings: Boxings) -> bool:
    """Whether everything can be boxed to what ops want that run again, or read what these make."""
    made = with_copies(candidates, chosen)
    graph, strategies = made.candidates.graph, made.assignment.strategies
    lies = dict(zip(graph.inputs, chosen.inputs, strict=True))
    for node in graph.nodes:
        if node.id not in strategies:  # a loop or a branch: what these have in them does not run again
            continue
        own = strategies[node.id]
        for x, nd, strict in zip(node.inputs, own.operands, own.strict, strict=True):
            if isinstance(x, Const) or x not in lies:
                continue
            value = graph.values[x]
            boxing = boxing_of(boxings, made.candidates, value.shape, value.dtype, x)
            table = boxing.strict_seconds if strict else boxing.seconds
            if math.isinf(table[boxing.index[lies[x]], boxing.index[nd]]):
                return False
        lies.update(zip(node.outputs, own.results, strict=True))
    return True
