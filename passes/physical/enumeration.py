"""The end game of small programs under a limit: all assignments, the shortest step first.

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
from numpy.typing import NDArray

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.recompute import with_copies
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.clusters import RecomputedValue
from sbp.passes.plan.cost import Shards, kernel_seconds_of
from sbp.passes.plan.flat_network import all_costs
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model, boxing_of
from sbp.passes.plan.network import Table
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.program.graph import Const

ALL_BYTES = 1.0
"""A limit under which nothing is small."""


class WeighedPlan(NamedTuple):
    """What a plan takes, its step and one thing after the other, and whether it keeps the limit."""

    step_seconds: float
    seconds: float
    fits: bool


def shortest_by_trying(
    candidates: Candidates,
    asked: Boundary,
    boxings: Boxings,
    weigh: Callable[[ChosenSignatures], WeighedPlan],
    below_seconds: float,
    bound: float,
) -> ChosenSignatures | None:
    """The assignment with the shortest step that fits, shorter than what is known; None if none was found, or
    if there are too many.

    Arguments:
      weigh: looks at the plan of an assignment.
      below_seconds: the step of the known one; infinite for none.
      bound: a proven lower bound on what all cost.
    """
    if math.prod(len(found) for found in candidates.strategies.values()) > constants.COMBINATIONS:
        return None
    model = Model(candidates, asked, boxings)
    network = model.build()
    if math.prod(theta.size for theta in network.unary) > constants.COMBINATIONS:
        return None
    states, costs = all_costs(network)
    kernels = kernel_seconds(model, boxings, states)
    steps = np.maximum(kernels, constants.SENT_PART * (costs - kernels))
    order, ways = np.lexsort((costs, steps)), ways_again(candidates, asked, boxings)
    best, least, left = None, below_seconds, list[tuple[float, ChosenSignatures]]()
    plain = (
        (steps[k], model.chosen_signatures(states[:, k].tolist(), float(costs[k]), bound))
        for k in order[costs[order] < math.inf]
    )
    # What runs again comes on top of what an assignment costs, and may be all that fits.
    again = ((step, replace(x, recomputed=way)) for step, x in left for way in ways)
    possible = ((step, x) for step, x in again if is_possible(candidates, x, boxings))
    for tries in (plain, possible):
        for tried, (step, x) in enumerate(tries):
            if tried >= constants.PROGRAMS_TRIED[math.isinf(least)] or step >= least:
                break
            found = weigh(x)
            if not (found.fits or x.recomputed):
                left.append((step, x))
            elif found.fits and found.step_seconds < least:
                best, least = replace(x, seconds=found.seconds), found.step_seconds
    return None if best is None else replace(best, bound=min(bound, best.seconds))


def kernel_seconds(model: Model, boxings: Boxings, states: NDArray[np.intp]) -> Table:
    """What the kernels of each assignment take: no step is shorter."""
    c, total = model.c, np.zeros(states.shape[1])
    nodes = {node.id: node for node in c.graph.walk()}
    for i, x in model.nodes.items():
        asked = c.graph, nodes[i], c.strategies[i], boxings.network, c.traffic.get(i), Shards()
        total += np.array(kernel_seconds_of(*asked))[states[x]]
    return total


def ways_again(candidates: Candidates, asked: Boundary, boxings: Boxings) -> list[dict[int, RecomputedValue]]:
    """Every way to run ops again, with nothing kept of what is wanted later; too many are none."""
    model = RecomputingModel(candidates, asked, boxings, ALL_BYTES)
    model.build_indexed()
    own = [
        [None, *(RecomputedValue(s, x.users) for s in model.silent(x.maker))] for x in model.later.values()
    ]
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
