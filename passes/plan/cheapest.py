"""The cheapest assignment of a program, by the solver; and a bound that holds however versions are made."""

import time

from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.indexed import IndexedNetwork
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
from sbp.passes.plan.narrow import solve_indexed
from sbp.passes.plan.solve import Progress

SOLVER_SHARE = 0.25
"""Of what building the model takes, for the solver at least: a plan of less is not worth the model."""


def relaxed_bound(
    candidates: Candidates, boundary: Boundary, boxings: Boxings, time_limit_seconds: float | None
) -> float:
    """What no plan can be cheaper than, whatever versions of a value others are made from; not tight."""
    model = Model(candidates, boundary, boxings, relaxed=True)
    network = model.build_indexed()
    ends = {x for x in (*model.inputs, *model.outputs) if x is not None}
    sent = sum(float(model.unary[x].max()) for x in ends)
    return solve_indexed(network, time_limit_seconds=time_limit_seconds).bound - sent


def choose(
    candidates: Candidates,
    boundary: Boundary,
    boxings: Boxings,
    time_limit_seconds: float | None,
    progress: Progress | None = None,
) -> ChosenSignatures:
    """The cheapest assignment that the solver finds, with its proven bound.

    Arguments:
      time_limit_seconds: for the model and the solver; None for no limit. The solver has some time even where
        the model has taken all.

    Raises:
      Infeasible: if the pins exclude each other.
    """
    model = Model(candidates, boundary, boxings)
    network, seconds = built(model, time_limit_seconds)
    return cheapest(model, network, seconds, progress)


def built(model: Model, time_limit_seconds: float | None) -> tuple[IndexedNetwork, float | None]:
    """The network of a model, and what building it leaves of the time: some even where it took all."""
    begun = time.monotonic()
    network = model.build_indexed()
    if time_limit_seconds is None:
        return network, None
    taken = time.monotonic() - begun
    return network, max(time_limit_seconds - taken, SOLVER_SHARE * taken)


def cheapest(
    model: Model, network: IndexedNetwork, time_limit_seconds: float | None, progress: Progress | None = None
) -> ChosenSignatures:
    """The same of a model that is built.

    Raises:
      Infeasible: if the pins exclude each other.
    """
    solution = solve_indexed(network, time_limit_seconds=time_limit_seconds, progress=progress)
    return model.chosen(solution.states, solution.cost, solution.bound)
