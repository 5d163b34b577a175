"""The search: never worse than a named schedule, within the memory, without bubbles where it can be."""

import random
from collections.abc import Sequence

import pytest

from sbp.errors import ArgumentError, MemoryLimitError, SbpError
from sbp.passes.schedule.actions import Kind
from sbp.passes.schedule.communication import find_deadlock
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.greedy import GreedyPolicy, OrderTask, list_schedule
from sbp.passes.schedule.improve import improve, least_seconds
from sbp.passes.schedule.memory import Footprint, peaks, units
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.passes.schedule.requirements import LOOP, V
from sbp.passes.schedule.search import ScheduleChoice, search
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times, equal_times
from tests.errors.messages import check_message
from tests.passes.schedule.texts import skipping, written

FREE = float("inf")


def best_named(
    rank_of: tuple[int, ...],
    microbatches: int,
    times: Times,
    footprint: Footprint,
    limits: Sequence[float],
    edges: Sequence[Edge] | None = None,
) -> float:
    """The makespan of the best named schedule that fits; infinite if none does."""
    spans = [FREE]
    for name in set(GENERATORS) - {"forward"}:
        try:
            schedule = make(name, rank_of, microbatches)
        except SbpError:
            continue
        held = peaks(schedule, footprint)
        if all(h <= limit for h, limit in zip(held, limits, strict=True)):
            spans.append(simulate(schedule, times, edges).makespan)
    return min(spans)


def check(
    choice: ScheduleChoice, footprint: Footprint, limits: Sequence[float], edges: Sequence[Edge] | None
) -> None:
    """What holds of every result."""
    held = peaks(choice.schedule, footprint)
    assert all(h <= limit for h, limit in zip(held, limits, strict=True))
    assert find_deadlock(choice.schedule, edges) is None
    taken = [c for c in choice.candidates if c.schedule is choice.schedule]
    assert [c.peak_bytes for c in taken] == [held]
    fitting = [c.seconds for c in choice.candidates if not c.reason]
    assert taken[0].seconds == min(fitting)
    for c in choice.candidates:
        over = c.schedule is not None and any(h > x for h, x in zip(c.peak_bytes, limits, strict=True))
        assert bool(c.reason) is (c.schedule is None or over)


@pytest.mark.parametrize("seed", range(24))
def test_never_worse_than_a_named_schedule_that_fits(seed: int) -> None:
    """Random times, sizes, limits, maps and skips."""
    dice = random.Random(seed)
    ranks, per_rank, microbatches = dice.randint(2, 4), dice.choice((1, 2)), dice.randint(2, 8)
    rank_of = dice.choice((LOOP, V)).example(ranks, per_rank)
    stages = len(rank_of)

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(dice.randint(low, high) for _ in range(stages))

    times = Times(draw(2, 6), draw(2, 6), draw(1, 6), transfer=dice.choice((0, 1)))
    footprint = Footprint(draw(2, 5), dice.choice(((), draw(1, 6))), dice.choice(((), draw(0, 3))))
    limits = tuple(dice.choice((20, 30, 60, FREE)) for _ in range(ranks))
    edges = dice.choice((None, skipping(stages)))
    choice = search(rank_of, microbatches, times, footprint, limits, edges, tries=40)
    check(choice, footprint, limits, edges)
    assert choice.timeline.makespan <= best_named(rank_of, microbatches, times, footprint, limits, edges)


@pytest.mark.parametrize(("ranks", "times"), [(2, (1, 1, 1)), (4, (1, 1, 1)), (4, (4, 5, 3)), (8, (2, 2, 2))])
def test_zero_bubble_where_memory_allows(ranks: int, times: tuple[int, int, int]) -> None:
    """With 2p - 1 activations the last rank never waits once it has begun: no schedule can be faster."""
    microbatches = 2 * ranks if ranks == 8 else 4 * ranks
    stages = equal_times(ranks, *times)
    limits = (2 * ranks - 1,) * ranks
    choice = search(tuple(range(ranks)), microbatches, stages, units(ranks), limits)
    assert choice.timeline.makespan == microbatches * sum(times) + (ranks - 1) * times[0]
    named = best_named(tuple(range(ranks)), microbatches, stages, units(ranks), limits)
    assert (choice.timeline.makespan < named) is (times == (4, 5, 3))


def test_without_a_barrier_no_rank_waits_at_all() -> None:
    """With equal times and 2p - 1 activations steps follow on each other without a gap; ZB-H1 has gaps."""
    rank_of, times = (0, 1, 2, 3), equal_times(4)
    free = search(rank_of, 12, times, units(4), (7,) * 4, barrier=False)
    assert free.timeline.idle == (0, 0, 0, 0)
    assert free.timeline.period == 36
    assert max(simulate(make("zb-h1", rank_of, 12), times).idle) == 3


def test_the_v_needs_two_stages_per_rank_and_no_more_memory_than_1f1b() -> None:
    choice = search(V.example(4, 2), 8, equal_times(8), units(8), (8,) * 4)
    assert choice.timeline.idle == (0, 0, 0, 0)


def test_less_memory_is_slower_but_fits() -> None:
    spans = []
    for limit in (1, 2, 3, 4, 7):
        choice = search((0, 1, 2, 3), 12, equal_times(4, 4, 5, 3), units(4), (limit,) * 4)
        check(choice, units(4), (limit,) * 4, None)
        spans.append(choice.timeline.makespan)
    assert spans == sorted(spans, reverse=True)
    assert len(set(spans)) >= 4


def test_local_improvement_fills_gaps() -> None:
    """A 1F1B with split backwards whose weight gradients come right after: they move into the gaps."""
    rows = (
        "F0:0 F0:1 F0:2 I0:0 W0:0 F0:3 I0:1 W0:1 I0:2 W0:2 I0:3 W0:3",
        "F1:0 F1:1 I1:0 W1:0 F1:2 I1:1 W1:1 F1:3 I1:2 W1:2 I1:3 W1:3",
        "F2:0 I2:0 W2:0 F2:1 I2:1 W2:1 F2:2 I2:2 W2:2 F2:3 I2:3 W2:3",
    )
    start = written("start", 4, (0, 1, 2), *rows)
    task = OrderTask((0, 1, 2), 4, equal_times(3), units(3), (3,) * 3, None, True)
    before = simulate(start, task.times).makespan
    better = improve(task, start, 200)
    assert simulate(better, task.times).makespan < before
    assert max(peaks(better, units(3))) <= 3
    assert improve(task, start, 0) is start


def test_a_policy_that_ends_nowhere_gives_nothing() -> None:
    """First forwards fill the rank, and the second stage of none of them fits."""
    task = OrderTask((0, 1, 1, 0), 6, equal_times(4, 1, 9, 1), units(4), (2, 6), None, True)
    greedy = GreedyPolicy(split=True, deep=True, reserve=False, patience=0.0)
    assert list_schedule(task, greedy) is None
    careful = GreedyPolicy(split=True, deep=True, reserve=True, patience=0.0)
    found = list_schedule(task, careful)
    assert found is not None
    assert peaks(found, units(4))[0] == 2


def test_without_split_backwards() -> None:
    choice = search((0, 1, 2), 6, equal_times(3), units(3), (6,) * 3, split=False)
    kinds = {a.kind for order in choice.schedule.orders for a in order}
    assert kinds == {Kind.F, Kind.B}
    assert "splits backwards" in {c.reason for c in choice.candidates if c.name == "zb-h1"}


def test_the_table_gives_reasons() -> None:
    times = equal_times(4, 1e-3, 1e-3, 1e-3)
    choice = search((0, 1, 2, 3), 8, times, Footprint((1e9,) * 4), (4e9,) * 4)
    lines = str(choice).splitlines()
    assert lines[0].split() == ["schedule", "time", "peak"]
    rows = {line.split()[0]: line for line in lines}
    assert rows["zb-h1"].endswith("27.0 ms  4.00 GB  taken")
    assert rows["gpipe"].endswith("33.0 ms  8.00 GB  rank 0 needs 8.00 GB")
    assert rows["zb-v"].endswith("4 stages on 4 ranks, not 2 per rank")
    assert len(lines) == 1 + len(choice.candidates)


def test_if_nothing_fits_the_least_is_said() -> None:
    footprint = Footprint((3e9, 4e9, 5e9, 6e9), (), (1e9,) * 4)

    def call(first: float) -> ScheduleChoice:
        return search((0, 1, 1, 0), 4, equal_times(4), footprint, (first, 20e9))

    check_message(
        lambda: call(9.9e9),
        MemoryLimitError,
        "search for a schedule of 4 stages on 2 ranks",
        "limits of 9.90 GB (rank 0)",
        "at least 10.0 GB (rank 0)",
        "one micro-batch at a time holds that much",
        "smaller micro-batches, checkpoints inside the stages, or stages on more ranks",
    )
    assert peaks(call(10e9).schedule, footprint)[0] == 10e9


@pytest.mark.parametrize(
    ("limits", "footprint", "where"),
    [((9,), units(2), "limit_bytes"), ((9, 9), units(3), "footprint.residuals")],
)
def test_arguments_that_do_not_fit(limits: tuple[float, ...], footprint: Footprint, where: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        search((0, 1), 4, equal_times(2), footprint, limits)
    assert caught.value.problems[0].where == where


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_holds(seed: int) -> None:
    """No schedule is faster than the bound at which local improvement stops."""
    dice = random.Random(seed)
    rank_of = V.example(3, 2)
    times = Times(*(tuple(dice.randint(1, 6) for _ in rank_of) for _ in range(4)))
    for barrier in (True, False):
        task = OrderTask(rank_of, 6, times, units(6), (FREE,) * 3, None, barrier)
        found = search(rank_of, 6, times, units(6), (FREE,) * 3, barrier=barrier, tries=60)
        fastest = min(c.seconds for c in found.candidates if c.schedule is not None)
        assert least_seconds(task) <= fastest <= 1.25 * least_seconds(task)
