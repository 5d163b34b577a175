"""Plans under a limit on memory against all plans there are, for small random programs.

    python -m tests.passes.physical.limits --count 500

Every assignment of signatures that could have the shortest step is made a physical program, and the evaluator
says what its step takes and whether it keeps the limit. No step is shorter than its kernels, nor than what is
sent. A limit lies halfway between the peak of the fastest plan and the least peak of some assignments. In one
program of ten a value is read again after products; there every way to run ops again is tried under every
assignment that does not keep the limit.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sbp.layout import rest_signatures
from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain.plan import SAME
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.recompute import with_copies
from sbp.passes.plan.bounds import least_kernel_seconds
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.clusters import RecomputedValue
from sbp.passes.plan.cost import Shards, kernel_seconds_of
from sbp.passes.plan.flat_network import all_costs
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model, boxing_of
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.program.trace import trace
from sbp.passes.search.limited_space import LimitedProblem
from tests.passes.plan.cheapest import choose
from tests.passes.plan.test_optimal import PLACEMENTS, problem, program
from tests.passes.search.test_search import searched

MAX_COMBINATIONS = 60_000
SAMPLED = 300
"""Assignments among which the least peak is looked for."""
SAMPLED_AGAIN = 60
"""Of these, those under which every way to run ops again is tried."""
SENT_PART = 0.9
"""What collectives take at least of what the search counts: some are sent as one."""
AGAIN_EVERY = 10
"""One program of so many reads a value again."""
MAX_WAYS = 64
"""Ways to run ops again."""

Given = tuple[Candidates, Boundary, Boxings]


@dataclass(frozen=True)
class Outcome:
    """What a program's planning under a limit gave.

    Arguments:
      seed: of the program.
      limit_bytes, best_seconds: the limit, and the shortest step of all plans that keep it.
      seconds: of the step that the planner found; infinite if it found none.
      bound: what it says that no step is below.
      again, best_again: ways to run ops again, and whether the best of all plans has one.
    """

    seed: int
    limit_bytes: float
    best_seconds: float
    seconds: float
    bound: float
    again: int = 0
    best_again: bool = False

    @property
    def kind(self) -> str:
        """In a word."""
        if self.bound > self.best_seconds * (1 + SAME):
            return "bound above the best"
        if math.isinf(self.seconds):
            return "none found"
        return "equal" if self.seconds <= self.best_seconds * (1 + SAME) else "dearer"


def physical(given: Given, chosen: ChosenSignatures) -> tuple[float, float]:
    """The step and the peak of an assignment's program."""
    evaluator = Evaluator(insert_boxing(given[0], chosen, given[2]), given[2].network)
    return evaluator.schedule.seconds, evaluator.peak_bytes()


def kernel_seconds(given: Given, model: Model, states: NDArray[np.intp]) -> NDArray[np.float64]:
    """What the kernels of each assignment take."""
    c, total, nodes = given[0], np.zeros(states.shape[1]), {n.id: n for n in given[0].graph.nodes}
    for i, x in model.nodes.items():
        asked = c.graph, nodes[i], c.strategies[i], given[2].network, c.traffic.get(i), Shards()
        total += np.array(kernel_seconds_of(*asked))[states[x]]
    return total


def read_again(seed: int) -> Callable[..., Any]:
    """A random program that reads a value again after products."""

    def f(a: Any, b: Any) -> Any:
        rng = np.random.default_rng(seed)
        x, w, *others = ((a, b)[i] for i in rng.integers(0, 2, 4))
        first = x @ w
        if rng.random() < 0.2:
            first = jnp.tanh(first)
        y = first
        for other in others[: 1 + int(rng.random() < 0.8)]:
            y = y @ other
        out = y * first if rng.random() < 0.5 else y + first
        return out.sum() if rng.random() < 0.2 else out

    return f


def example(seed: int) -> Given:
    """A random program of one axis, or of two; its gradient, if the seed is odd."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    if seed % AGAIN_EVERY == AGAIN_EVERY - 1:
        candidates, asked, boxings = problem(trace(read_again(seed), (x, x), {}).graph, PLACEMENTS[0])
        rests = rest_signatures(x.shape, np.float32, PLACEMENTS[0])
        # Both arguments lie somehow, so that all ways to run ops again can be tried beside all else.
        return candidates, replace(asked, inputs=(asked.inputs[0], rests[seed % len(rests)])), boxings
    which = seed % 2 * (seed % 3 == 0)
    forward = program(seed, 1 + seed // 2 % (2 if which else 4))

    def backward(a: Any, b: Any) -> Any:
        return jax.grad(lambda a, b: jnp.sum(forward(a, b)), argnums=(0, 1))(a, b)

    return problem(trace(backward if seed % 2 else forward, (x, x), {}).graph, PLACEMENTS[which])


def ways_again(given: Given) -> list[dict[int, RecomputedValue]]:
    """Every way to run ops again, nothing left out of what is wanted later; too many are none."""
    model = RecomputingModel(*given, 1.0)
    model.build()
    choices = []
    for v, x in model.later.items():
        choices.append([None, *((v, RecomputedValue(s, x.users)) for s in model.silent(x.maker))])
    if not 1 < math.prod(map(len, choices)) <= MAX_WAYS:
        return []
    ways = (dict(x for x in way if x is not None) for way in itertools.product(*choices))
    # What only an op that runs again wants has no users of its own.
    return [way for way in ways if any(r.users for r in way.values())]


def run_again(given: Given, plain: ChosenSignatures, way: dict[int, RecomputedValue]) -> tuple[float, float]:
    """The step and the peak of an assignment's program with ops that run again; infinite where something
    cannot be boxed to what a user wants."""
    candidates, chosen = given[0], replace(plain, recomputed=way)
    made = with_copies(candidates, chosen)
    graph, strategies = made.candidates.graph, made.assignment.strategies
    lies = dict(zip(graph.inputs, plain.inputs, strict=True))
    for node in graph.nodes:
        own = strategies[node.id]
        for x, nd, strict in zip(node.inputs, own.operands, own.strict, strict=True):
            if isinstance(x, int):
                value = graph.values[x]
                boxing = boxing_of(given[2], made.candidates, value.shape, value.dtype, x)
                table = boxing.strict_seconds if strict else boxing.seconds
                if math.isinf(table[boxing.index[lies[x]], boxing.index[nd]]):
                    return math.inf, math.inf
        lies.update(zip(node.outputs, own.results, strict=True))
    return physical(given, chosen)


def outcome(seed: int) -> Outcome | None:
    """The planner beside all plans; None where these are too many, or all need as much memory."""
    given = example(seed)
    model = Model(*given)
    network = model.build()
    if math.prod(theta.size for theta in network.unary) > MAX_COMBINATIONS:
        return None
    states, costs = all_costs(network)
    kernels = kernel_seconds(given, model, states)
    least_steps = np.maximum(kernels, SENT_PART * (costs - kernels))
    order = np.argsort(costs, kind="stable")
    order = order[np.isfinite(costs[order])]
    ways = ways_again(given)

    def chosen(k: int) -> ChosenSignatures:
        return model.chosen_signatures([int(s) for s in states[:, k]], costs[k], costs[k])

    sample = np.random.default_rng(seed).permutation(order)[:SAMPLED]
    least = min(physical(given, chosen(k))[1] for k in sample)
    fastest = choose(*given)
    seconds, most = physical(given, fastest)
    if least >= most or not seconds:
        return None
    limit, best, best_again = (least + most) / 2, math.inf, False
    again = (run_again(given, chosen(k), way)[1] for k in sample[:SAMPLED_AGAIN] for way in ways)
    if (smallest := min(again, default=least)) < least:
        limit = (smallest + least) / 2  # what fits runs something again, as far as the sample shows
    for k in order[np.argsort(least_steps[order], kind="stable")]:
        if least_steps[k] > best:
            break
        plain = chosen(k)
        taken, peak = physical(given, plain)
        if peak <= limit and taken < best:
            best, best_again = taken, False
        for way in ways if peak > limit and taken < best else ():
            taken, peak = run_again(given, plain, way)
            if peak <= limit and taken < best:
                best, best_again = taken, True
    found = searched(LimitedProblem(*given, (), limit), limit)
    if found.smallest is not None:
        return Outcome(seed, limit, best, math.inf, 0.0, len(ways), best_again)
    seconds, bound = physical(given, found.assignment)[0], least_kernel_seconds(given[0], given[2])
    return Outcome(seed, limit, best, seconds, bound, len(ways), best_again)


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
    kinds, again = Counter[str](), Counter[str]()
    for found in outcomes(parser.parse_args().count):
        kinds[found.kind] += 1
        again["with ops that may run again"] += found.again > 0
        again["the best runs some again"] += found.best_again
        if found.kind != "equal":
            print(f"seed {found.seed}: {found.kind}, {found.seconds / found.best_seconds:.4f} of the best")
    print(dict(kinds), dict(again))


if __name__ == "__main__":
    main()
