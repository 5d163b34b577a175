"""The end game of small programs under a limit: assignments in the order of what they cost, until one fits.

What the search counts of memory (plan/room.py) is not what the evaluator finds. In a program of a few ops the
difference may be as large as all the rest, so that no limit on what is counted leads to a plan that fits; but
there all assignments can be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.brute import all_costs
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model

MOST_COMBINATIONS = 1 << 16
"""Of states, up to which all are written down."""
MOST_TRIED = 10_000
"""Assignments whose programs are looked at."""


def cheapest_by_trying(
    candidates: Candidates,
    asked: Boundary,
    boxings: Boxings,
    fits: Callable[[ChosenSignatures], bool],
    below_seconds: float,
    bound: float,
) -> ChosenSignatures | None:
    """The cheapest assignment that fits and costs less than what is known; None if none was found, or if
    there are too many.

    Arguments:
      fits: whether the plan of an assignment keeps the limit.
      below_seconds: what the known one costs; infinite for none.
      bound: a proven lower bound on all.
    """
    if math.prod(len(found) for found in candidates.strategies.values()) > MOST_COMBINATIONS:
        return None
    model = Model(candidates, asked, boxings)
    network = model.build()
    if math.prod(theta.size for theta in network.unary) > MOST_COMBINATIONS:
        return None
    states, costs = all_costs(network)
    order = np.argsort(costs, kind="stable")
    for k in order[costs[order] < below_seconds][:MOST_TRIED]:
        cost = float(costs[k])
        assignment = model.chosen(states[:, k].tolist(), cost, bound)
        if fits(assignment):
            return replace(assignment, bound=min(bound, assignment.seconds))
    return None
