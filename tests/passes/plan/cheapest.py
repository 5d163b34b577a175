"""The cheapest plan one thing after the other, with its proven bound: what the search begins with."""

from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.bounds import solve_indexed
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
from sbp.passes.plan.network import IndexedNetwork


def choose(candidates: Candidates, boundary: Boundary, boxings: Boxings) -> ChosenSignatures:
    """The cheapest assignment of a program."""
    model = Model(candidates, boundary, boxings)
    return cheapest(model, model.build_indexed())


def cheapest(model: Model, network: IndexedNetwork) -> ChosenSignatures:
    """The same of a model that is built."""
    solution = solve_indexed(network)
    return model.chosen_signatures(solution.states, solution.cost, solution.bound)
