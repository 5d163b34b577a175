"""What the search under a limit does not count."""

from __future__ import annotations

import numpy as np

from sbp.passes.physical.evaluate import HOLES, Evaluator
from sbp.passes.physical.missed import missed_load, time_of_peak
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.solve import solve
from tests.passes.physical.test_recompute import GIVEN, PLAIN, insert_boxing

MODEL = RecomputingModel(*GIVEN, 1e6, (), HOLES)
NETWORK = MODEL.build()
STATES = solve(NETWORK).states
EVALUATOR = Evaluator(insert_boxing(GIVEN[0], PLAIN, GIVEN[2]), GIVEN[2].network)


def test_the_time_of_the_peak_is_when_the_last_is_made_of_what_is_there() -> None:
    at = time_of_peak(EVALUATOR, MODEL)
    assert at is not None and 0 <= at <= MODEL.end
    graph = EVALUATOR.physical.graph
    # Results have spaces of their own all the time.
    makers = {v: n for v, n in graph.producers().items() if v not in graph.outputs}
    made = [makers[x.version[0]] for x in EVALUATOR.at_peak if x.version[0] in makers]
    assert at == max(MODEL.times[n.id][0] for n in made if n.id in MODEL.times)


def test_what_is_not_counted_is_added_around_that_time() -> None:
    at = time_of_peak(EVALUATOR, MODEL)
    assert at is not None
    nothing = Budget((), 1.0)
    missed = missed_load(EVALUATOR, MODEL, nothing, STATES)
    assert missed is not None and missed.node == -1 and missed.start < at < missed.end
    assert missed.bytes[0] == EVALUATOR.peak_bytes()
    # With it the count is what the evaluator finds, and nothing is missed any more.
    assert Budget((missed,), 1.0).peak_bytes(STATES) == EVALUATOR.peak_bytes()
    assert missed_load(EVALUATOR, MODEL, Budget((missed,), 1.0), STATES) is None
    # What is alive at other times only does not count.
    other = Load(-1, missed.end, missed.end + 5, np.array([1e9]))
    again = missed_load(EVALUATOR, MODEL, Budget((other,), 1.0), STATES)
    assert again is not None and again.bytes[0] == missed.bytes[0]
