"""The simulator by hand: waits, transfers, blocking, stuck ranks, and memory."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby

import pytest

from sbp.errors import ArgumentError
from sbp.passes.schedule.communication import add_transfers
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.memory import Footprint, peaks, units
from sbp.passes.schedule.orders import GENERATORS
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import Span, Timeline
from sbp.passes.schedule.times import Times, equal_times
from tests.errors.messages import check_message
from tests.passes.schedule.texts import action, named, written


def at(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(s.action): (s.start, s.end) for spans in timeline.spans for s in spans}


TWO = written("two", 1, (0, 1), "F0:0 B0:0", "F1:0 B1:0")
SENT = written(
    "sent", 1, (0, 1), "F0:0 SF0:0>1 RB0:0<1 B0:0", "RF1:0<0 F1:0 B1:0 SB1:0>0"
)  # fmt: skip


@pytest.mark.parametrize("schedule", [TWO, SENT])
def test_values_travel(schedule: object) -> None:
    times = Times((2, 3), (1, 4), (5, 6), transfers={(0, 1): 10}, transfer=20)
    found = at(simulate(schedule, times))
    assert found["F0:0"] == (0, 2)
    assert found["F1:0"] == (12, 15)
    assert found["B1:0"] == (15, 25)
    assert found["B0:0"] == (45, 51)
    if schedule is SENT:
        assert found["SF0:0>1"] == found["RF1:0<0"] == (2, 12)
        assert found["SB1:0>0"] == found["RB0:0<1"] == (25, 45)


def test_a_half_sets_the_other_ranks_free() -> None:
    """The gradient of a split backward leaves after `I`."""
    whole = written("w", 1, (0, 1), "F0:0 B0:0", "F1:0 B1:0")
    split = written("s", 1, (0, 1), "F0:0 B0:0", "F1:0 I1:0 W1:0")
    times = equal_times(2)
    assert (simulate(whole, times).makespan, simulate(split, times).makespan) == (6, 5)


def test_a_skip_needs_both_values() -> None:
    schedule = written("skip", 1, (0, 1, 2), "F0:0", "F1:0", "F2:0")
    times = Times((1, 1, 1), (0,) * 3, (0,) * 3, transfers={(0, 2): 9})
    edges = (Edge(0, 1), Edge(1, 2), Edge(0, 2))
    assert at(simulate(schedule, times))["F2:0"] == (2, 3)
    assert at(simulate(schedule, times, edges))["F2:0"] == (10, 11)


def test_an_edge_without_gradient_holds_no_backward() -> None:
    schedule = written("x", 1, (0, 1), "F0:0 B0:0", "F1:0 B1:0")
    assert at(simulate(schedule, equal_times(2), (Edge(0, 1),)))["B0:0"] == (4, 6)
    assert at(simulate(schedule, equal_times(2), (Edge(0, 1, gradient=False),)))["B0:0"] == (1, 3)


def test_blocking_holds_both_ranks() -> None:
    """Rank 1 is busy when the second value comes, so rank 0 waits with it; its next forward is late."""
    rows = "F0:0 SF0:0>1 F0:1 SF0:1>1 F0:2 SF0:2>1", "RF1:0<0 F1:0 RF1:1<0 F1:1 RF1:2<0 F1:2"
    schedule = written("x", 3, (0, 1), *rows)
    times = Times((1, 5), (0, 0), (0, 0), transfer=1)
    free, blocked = at(simulate(schedule, times)), at(simulate(schedule, times, blocking=True))
    assert [free[f"F0:{k}"][0] for k in range(3)] == [0, 1, 2]
    assert [free[f"F1:{k}"][0] for k in range(3)] == [2, 7, 12]
    assert [blocked[f"F0:{k}"][0] for k in range(3)] == [0, 2, 8]
    assert [blocked[f"F1:{k}"][0] for k in range(3)] == [2, 8, 14]
    assert blocked["SF0:1>1"] == blocked["RF1:1<0"] == (7, 8)


def test_what_blocks_only_blocking_sends() -> None:
    """Both ranks send first: with room on the way all goes well, else nobody receives."""
    rows = (
        "F0:0 F0:1 SF0:0>1 SF0:1>1 RB0:0<1 B0:0 RB0:1<1 B0:1",
        ("RF1:0<0 F1:0 B1:0 SB1:0>0 RF1:1<0 F1:1 B1:1 SB1:1>0"),
    )
    schedule = written("mine", 2, (0, 1), *rows)
    assert simulate(schedule, equal_times(2)).makespan == 10
    check_message(
        lambda: simulate(schedule, equal_times(2), blocking=True),
        ArgumentError,
        "schedule 'mine'",
        "rank 0 stuck at SF0:1>1, which waits for RF1:1<0 of rank 1; "
        "rank 1 stuck at SB1:0>0, which waits for RB0:0<1 of rank 0",
        "orders in which each action comes after what it needs, on both ranks of a transfer",
        "no rank can go on",
        "`deadlock.find_deadlock` shows the circle; `communication.add_transfers` makes orders without one",
    )


def test_every_stuck_rank_is_named() -> None:
    """A 1F1B in which the last rank starts with a backward."""
    good = named("1f1b", 3, 3)
    rows = [" ".join(map(str, order)) for order in good.orders]
    rows[2] = "B2:0 F2:0 F2:1 B2:1 F2:2 B2:2"
    with pytest.raises(ArgumentError) as caught:
        simulate(written("bad", 3, good.rank_of, *rows), equal_times(3))
    assert caught.value.problems[0].got == (
        "rank 0 stuck at B0:0, which waits for I1:0 of rank 1; "
        "rank 1 stuck at B1:0, which waits for I2:0 of rank 2; "
        "rank 2 stuck at B2:0, which waits for F2:0 of rank 2"
    )


def test_a_receive_after_its_use_is_stuck() -> None:
    rows = "F0:0 SF0:0>1", "F1:0 RF1:0<0"
    with pytest.raises(ArgumentError, match=r"rank 1 stuck at F1:0, which waits for RF1:0<0 of rank 1"):
        simulate(written("late", 1, (0, 1), *rows), equal_times(2))


def test_a_pair_waits_for_both_and_takes_its_own_time() -> None:
    schedule = written("pair", 2, (0, 1), "F0:0 F0:1+B0:0 B0:1", "F1:0 B1:0 F1:1 B1:1")
    found = at(simulate(schedule, Times((1, 1), (1, 1), (1, 1), pairs={(0, 0): 2})))
    assert found["F0:1"] == found["B0:0"] == (4, 6)
    timeline = simulate(schedule, Times((1, 1), (1, 1), (1, 1), pairs={(0, 0): 2}))
    assert timeline.busy == (1 + 2 + 2, 6)
    assert at(simulate(schedule, equal_times(2)))["F0:1"] == (4, 7)


def test_fractions_stay_exact() -> None:
    third = Fraction(1, 3)
    timeline = simulate(named("zb-h1", 4, 8), equal_times(4, third, third, third, transfer=0))
    assert timeline.bubble == (Fraction(1),) * 4
    assert timeline.bubble_fraction == Fraction(1, 9)


def test_measured_spans_make_a_timeline() -> None:
    """Clocks start anywhere, and actions may overlap."""
    spans = (Span(0, action("F0:0"), 100.0, 102.0), Span(0, action("B0:0"), 101.0, 104.0))
    other = (Span(1, action("F1:0"), 102.0, 103.0), Span(1, action("SB1:0>0"), 103.0, 110.0))
    timeline = Timeline("measured", (spans, other))
    assert (timeline.start, timeline.makespan) == (100.0, 10.0)
    assert timeline.busy == (4.0, 1.0)
    assert timeline.bubble == (6.0, 9.0)
    assert timeline.idle == (0.0, 0.0)
    assert timeline.bubble_fraction == 0.75
    assert Timeline("nothing", ((),)).bubble_fraction == 0


@pytest.mark.parametrize(
    ("times", "where"),
    [
        (Times((1,), (1, 1), (1, 1)), "times.forward"),
        (Times((1, 1), (1, 1), (1, 1), recompute=(1,)), "times.recompute"),
        (Times((1, -1), (1, 1), (1, 1)), "times"),
        (Times((1, 1), (1, 1), (1, 1), transfers={(0, 1): float("nan")}), "times"),
    ],
)
def test_times_that_do_not_fit(times: Times, where: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        simulate(TWO, times)
    assert [p.where for p in caught.value.problems] == [where]


@pytest.mark.parametrize("edge", [Edge(1, 0), Edge(0, 2), Edge(0, 0)])
def test_edges_that_do_not_fit(edge: Edge) -> None:
    with pytest.raises(ArgumentError, match=f"edge {edge.source} -> {edge.target}"):
        simulate(TWO, equal_times(2), (edge,))


def test_an_edge_twice_is_refused() -> None:
    with pytest.raises(ArgumentError, match="each pair of stages once"):
        simulate(TWO, equal_times(2), (Edge(0, 1), Edge(0, 1, gradient=False)))


def over_time(timeline: Timeline, footprint: Footprint) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Of each rank, (time, what it holds from then on), wherever that changes; for a training."""
    return tuple(tuple(_levels(timeline.compute_spans(rank), footprint)) for rank in range(timeline.ranks))


def _levels(spans: Sequence[Span], footprint: Footprint) -> Iterator[tuple[float, float]]:
    changes = [(s.start, footprint.before(s.action)) for s in spans]
    changes += [(s.end, -footprint.after(s.action)) for s in spans]
    held: float = 0
    for time, same in groupby(sorted(changes, key=lambda c: c[0]), key=lambda c: c[0]):
        change = sum(c for _, c in same)
        held += change
        if change:
            yield time, held


def test_memory_by_hand() -> None:
    schedule = written("m", 2, (0,), "F0:0 F0:1 I0:0 W0:0 B0:1")
    assert peaks(schedule, units(1)) == (2,)
    assert peaks(schedule, Footprint((10,), (4,), (3,))) == (23,)
    levels = over_time(simulate(schedule, equal_times(1)), Footprint((10,), (4,), (3,)))
    assert levels == (((0, 10), (1, 20), (2, 23), (3, 14), (4, 13), (6, 0)),)


def test_stages_of_different_size() -> None:
    """The first of the two stages of a rank is three times as large."""
    schedule = named("zb-v", 2, 4)
    large, small = peaks(schedule, Footprint((3, 1, 1, 1))), peaks(schedule, units(4))
    assert small == (4, 4)
    assert (large[0] > small[0], large[1]) == (True, 4)


@pytest.mark.parametrize("name", [n for n in GENERATORS if n != "forward"])
def test_memory_over_time_has_the_peak_of_the_orders(name: str) -> None:
    schedule = named(name, 4, 8)
    stages = schedule.stages
    footprint = Footprint(tuple(range(5, 5 + stages)), (2,) * stages, (7,) * stages)
    levels = over_time(simulate(add_transfers(schedule), equal_times(stages, 2, 3, 1, 1)), footprint)
    assert tuple(max(held for _, held in rank) for rank in levels) == peaks(schedule, footprint)
    assert all(rank[-1][1] == 0 for rank in levels)


def test_a_footprint_that_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"footprint\.working_bytes"):
        peaks(TWO, Footprint((1, 1), (), (1,)))
    with pytest.raises(ArgumentError, match=r"footprint\.residuals"):
        peaks(TWO, Footprint(()))
