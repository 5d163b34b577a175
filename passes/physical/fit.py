"""The cheapest plan that fits: the search under a limit, until the evaluator agrees that it is kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cost import local_bytes
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
from sbp.passes.plan.room import loads_of
from sbp.passes.plan.solve import Progress
from sbp.passes.plan.within import solve_within
from sbp.passes.program.graph import Graph

TRIES = 4
"""How often the search is asked for less, because what it found needs more than it counted."""
MARGIN = 0.99
"""Of what the next try may use."""
TRY_SECONDS = 15.0
"""For a try, where no time limit is given."""

FASTEST_SHARE = 2 / 3
"""Of a limit on time, for the search without a limit on memory, where what it finds may not fit."""


@dataclass(frozen=True)
class FittedSignatures:
    """What was found under a limit.

    Arguments:
      assignment: the cheapest that fits; None if none was found.
      least_bytes: the smallest peak of all that were looked at.
    """

    assignment: ChosenSignatures | None
    least_bytes: float


def seconds_of_fastest(graph: Graph, limit_bytes: float, left: float | None) -> float | None:
    """What of the time the search without a limit on memory may take: all, if every plan keeps the limit.

    Arguments:
      limit_bytes: per device.
      left: seconds until planning is to end; None for no limit on time.
    """
    # No plan needs more than all values whole, all at once.
    most = sum(local_bytes(v.shape, v.dtype, (), ()) for v in graph.values)
    return left if left is None or most <= limit_bytes else left * FASTEST_SHARE


def peak_bytes(
    candidates: Candidates, assignment: ChosenSignatures, boxings: Boxings, donated: Sequence[int]
) -> float:
    """What one device needs at most under an assignment."""
    physical = insert_boxing(candidates, assignment, boxings)
    return Evaluator(physical, boxings.network, donated).peak_bytes()


def fit(
    candidates: Candidates,
    asked: Boundary,
    boxings: Boxings,
    limit_bytes: float,
    donated: Sequence[int],
    time_limit_seconds: float | None,
    progress: Progress | None = None,
) -> FittedSignatures:
    """The cheapest assignment found whose plan needs at most so much memory.

    Arguments:
      donated: positions of the inputs whose memory the results may take.
      time_limit_seconds: for all tries; None for `TRY_SECONDS` each.
      progress: is told of every try.
    """
    begun = time.monotonic()
    model = Model(candidates, asked, boxings)
    model.build()
    network, loads = loads_of(model, limit_bytes)
    target, least = limit_bytes, float("inf")
    for _ in range(TRIES):
        seconds = TRY_SECONDS
        if time_limit_seconds is not None:
            # Half of what is left: another try may be needed, and the first is the most important one.
            seconds = max(0.0, time_limit_seconds - (time.monotonic() - begun)) / 2
        found = solve_within(network, Budget(loads, target), time_limit_seconds=seconds, progress=progress)
        assignment = model.chosen(found.states, found.cost, found.bound)
        peak = peak_bytes(candidates, assignment, boxings, donated)
        least = min(least, peak)
        if peak <= limit_bytes:
            return FittedSignatures(assignment, least)
        if not found.fits:
            break
        target *= MARGIN * limit_bytes / peak
    return FittedSignatures(None, least)
