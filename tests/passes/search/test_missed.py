"""What the search under a limit does not count."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sbp import P, S
from sbp.passes.physical.evaluate import HOLES, Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.memory import Live
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.solve import solve
from sbp.passes.search.limited import missed_loads, time_of_peak, unsent_loads
from tests.passes.physical.test_recompute import GIVEN, PLAIN

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
    found = missed_loads(EVALUATOR, MODEL, nothing, STATES)
    *waiting, missed = found
    assert missed.node == -1 and missed.start < at < missed.end
    assert all(x.node >= 0 for x in waiting)
    # With it the count is what the evaluator finds, and nothing is missed any more.
    counted = Budget(found, 1.0).peak_bytes(STATES, missed.start, missed.end)
    assert counted == pytest.approx(EVALUATOR.peak_bytes()) and missed.bytes[0] > 0.0
    left = missed_loads(EVALUATOR, MODEL, Budget(found, 1.0), STATES)
    assert sum(float(x.bytes.max()) for x in left) < 1e-6
    # What is alive at other times only does not count.
    other = Load(-1, missed.end, missed.end + 5, np.array([1e9]))
    again = missed_loads(EVALUATOR, MODEL, Budget((other,), 1.0), STATES)
    assert again[-1].bytes[0] == missed.bytes[0]


def test_what_waits_until_it_is_sent_with_others_is_counted_for_all_of_its_kind() -> None:
    """Gradients of layers that are alike: of one it is seen, and to send the other would free no more."""
    kinds = dict[Any, list[int]]()
    for v, once in MODEL.boxed_once.items():
        if (P,) in once.supply.needs and (S(0),) in MODEL.states[once.copy]:
            kinds.setdefault(MODEL.graph.values[v].shape, []).append(v)
    seen, other = next(own for own in kinds.values() if len(own) > 1)[:2]
    states = list(STATES)

    def choose(v: int, is_sent: bool) -> None:
        once = MODEL.boxed_once[v]
        lies = MODEL.states[once.copy]
        states[once.supply.variable] = once.supply.needs.index((P,))
        states[once.copy] = lies.index((S(0),)) + (0 if is_sent else len(lies) // 2)

    evaluator: Any = SimpleNamespace(at_peak=[Live((seen, (P,)), 1.0)])
    end = MODEL.end

    def waiting(loads: Sequence[Load]) -> dict[int, Load]:
        found = unsent_loads(evaluator, MODEL, Budget(tuple(loads), 1.0), states, end)
        alike = {MODEL.boxed_once[v].copy for v in (seen, other)}
        return {x.node: x for x in found if x.node in alike}

    choose(seen, True)
    choose(other, False)
    found = waiting(MODEL.loads)
    for v in (seen, other):
        once, load = MODEL.boxed_once[v], found[MODEL.boxed_once[v].copy]
        half = load.bytes.size // 2
        assert (load.start, load.end) == (once.at + 1, end)
        assert set(load.bytes[:half]) == set(MODEL.held(v, ((P,),))) and not load.bytes[half:].any()
    # It is counted once, and not for what was sent and is gone.
    assert waiting([*MODEL.loads, *found.values()]) == {}
    choose(other, True)
    assert set(waiting(MODEL.loads)) == {MODEL.boxed_once[seen].copy}
    choose(seen, False)
    assert waiting(MODEL.loads) == {}
