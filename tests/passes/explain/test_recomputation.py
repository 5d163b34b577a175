"""What is said of ops that run again."""

from dataclasses import replace

from sbp.passes.explain.notes import recomputed_lines, recomputed_notes
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.program import Compute
from sbp.passes.plan.clusters import op_count
from tests.passes.physical.test_recompute import GIVEN, GRAPH, PLAIN, SOFTMAX, later


def test_each_line_says_what_it_frees_and_takes() -> None:
    candidates, _, boxings = GIVEN
    chosen = replace(PLAIN, recomputed=later(SOFTMAX))
    physical = insert_boxing(candidates, chosen, boxings)
    lines = recomputed_lines(candidates, chosen, physical, boxings.network)
    takes, makers, first = Evaluator(physical, boxings.network), GRAPH.producers(), op_count(GRAPH)
    own = {first + makers[v].id for v in chosen.recomputed}
    again = [s for s in physical.steps if isinstance(s, Compute) and s.node.id in own]
    moved = {s.node.id for s in physical.steps if isinstance(s, Compute)}
    taken = sum(takes.seconds_of(s) for s in again if s.node.id - first in moved)
    assert sum(x.ops for x in lines.values()) == len(again) > 0
    assert abs(sum(x.seconds for x in lines.values()) - taken) <= 1e-9 * taken
    freed = [x.freed_bytes for x in lines.values()]
    assert freed == sorted(freed, reverse=True) and freed[0] > 0
    head, *each = recomputed_notes(candidates, chosen, physical, boxings.network)
    assert f"{len(again)} ops run again" in head and "since memory is short" in head
    assert each[0].startswith("test_recompute.py:") and " ops run again, which frees " in each[0]


def test_nothing_is_said_of_nothing() -> None:
    candidates, _, boxings = GIVEN
    assert (
        recomputed_notes(candidates, PLAIN, insert_boxing(candidates, PLAIN, boxings), boxings.network) == ()
    )


def test_nothing_is_said_of_ops_that_free_nothing() -> None:
    """What has no use before has only moved."""
    candidates, _, boxings = GIVEN
    chosen = replace(PLAIN, recomputed=later(SOFTMAX))
    physical = insert_boxing(candidates, chosen, boxings)
    assert recomputed_notes(replace(candidates, lives=()), chosen, physical, boxings.network) == ()
