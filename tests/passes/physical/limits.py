"""Plans under a limit on memory against all plans there are, for small random programs.

    python -m tests.passes.physical.limits --count 500

Every assignment of signatures is made a physical program, in the order of what the search takes it to cost,
and the evaluator says what it takes and whether it keeps the limit. A limit lies halfway between the peak of
the fastest plan and the least peak of some assignments.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain.plan import SAME
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.fit import LimitedProblem
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.plan.brute import all_costs
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cheapest import choose
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
from sbp.passes.program.trace import trace
from tests.passes.plan.test_optimal import PLACEMENTS, problem, program

MAX_COMBINATIONS = 60_000
SAMPLED = 300
"""Assignments among which the least peak is looked for."""
CHEAPER = 1.1
"""By how much a physical program may be cheaper than the search takes its assignment to be."""

Given = tuple[Candidates, Boundary, Boxings]


@dataclass(frozen=True)
class Outcome:
    """What a program's planning under a limit gave.

    Arguments:
      seed: of the program.
      limit_bytes, best_seconds: the limit, and what the best of all plans that keep it takes.
      seconds, bound: what the planner found, and what it says that none is below; infinite if it found none.
    """

    seed: int
    limit_bytes: float
    best_seconds: float
    seconds: float
    bound: float

    @property
    def kind(self) -> str:
        """In a word."""
        if self.bound > self.best_seconds * (1 + SAME):
            return "bound above the best"
        if math.isinf(self.seconds):
            return "none found"
        return "equal" if self.seconds <= self.best_seconds * (1 + SAME) else "dearer"


def physical(given: Given, chosen: ChosenSignatures) -> tuple[float, float]:
    """The time and the peak of an assignment's program."""
    evaluator = Evaluator(insert_boxing(given[0], chosen, given[2]), given[2].network)
    return evaluator.seconds(), evaluator.peak_bytes()


def example(seed: int) -> Given:
    """A random program of one axis, or of two; its gradient, if the seed is odd."""
    which = seed % 2 * (seed % 3 == 0)
    forward = program(seed, 1 + seed // 2 % (2 if which else 4))

    def backward(a: Any, b: Any) -> Any:
        return jax.grad(lambda a, b: jnp.sum(forward(a, b)), argnums=(0, 1))(a, b)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return problem(trace(backward if seed % 2 else forward, (x, x), {}).graph, PLACEMENTS[which])


def outcome(seed: int) -> Outcome | None:
    """The planner beside all plans; None where these are too many, or all need as much memory."""
    given = example(seed)
    model = Model(*given)
    network = model.build()
    if math.prod(theta.size for theta in network.unary) > MAX_COMBINATIONS:
        return None
    states, costs = all_costs(network)
    order = np.argsort(costs, kind="stable")
    order = order[np.isfinite(costs[order])]

    def made(k: int) -> tuple[float, float]:
        return physical(given, model.chosen([int(s) for s in states[:, k]], costs[k], costs[k]))

    sample = np.random.default_rng(seed).permutation(order)[:SAMPLED]
    least = min(made(k)[1] for k in sample)
    fastest = choose(*given, None)
    seconds, most = physical(given, fastest)
    if least >= most or not seconds:
        return None
    limit, best = (least + most) / 2, math.inf
    for k in order:
        if costs[k] > best * CHEAPER:
            break
        taken, peak = made(k)
        if peak <= limit:
            best = min(best, taken)
    found = LimitedProblem(*given, (), limit).keep_limit(fastest)
    if found.smallest is not None:
        return Outcome(seed, limit, best, math.inf, 0.0)
    return Outcome(seed, limit, best, physical(given, found.assignment)[0], found.assignment.bound)


def outcomes(count: int) -> Iterator[Outcome]:
    """So many of programs that a limit means something to."""
    seed = 0
    while count:
        found = outcome(seed)
        seed += 1
        if found is not None:
            count -= 1
            yield found


def main() -> None:
    """Prints how many are equal, and each that is not."""
    parser = argparse.ArgumentParser(prog="tests.passes.physical.limits", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    kinds = Counter[str]()
    for found in outcomes(parser.parse_args().count):
        kinds[found.kind] += 1
        if found.kind != "equal":
            print(f"seed {found.seed}: {found.kind}, {found.seconds / found.best_seconds:.4f} of the best")
    print(dict(kinds))


if __name__ == "__main__":
    main()
