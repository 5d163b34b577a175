"""The named schedules: exact orders of small cases, bubbles and peaks of all against the formulas."""

import pytest

from sbp.passes.schedule.actions import Kind
from sbp.passes.schedule.memory import peaks, units
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times, equal_times
from tests.passes.schedule.texts import cases, chunks, named, written

TRAININGS = [name for name in GENERATORS if name != "forward"]

# Written by hand from the papers' figures and descriptions.
EXPECTED = [
    ("gpipe", 3, (0, 1), ("F0:0 F0:1 F0:2 B0:0 B0:1 B0:2", "F1:0 F1:1 F1:2 B1:0 B1:1 B1:2")),
    (
        "gpipe",
        2,
        (0, 1, 1, 0),
        ("F0:0 F0:1 F3:0 F3:1 B3:0 B3:1 B0:0 B0:1", "F1:0 F2:0 F1:1 F2:1 B2:0 B1:0 B2:1 B1:1"),
    ),
    (
        "1f1b",
        4,
        (0, 1, 2),
        (
            "F0:0 F0:1 F0:2 B0:0 F0:3 B0:1 B0:2 B0:3",
            "F1:0 F1:1 B1:0 F1:2 B1:1 F1:3 B1:2 B1:3",
            "F2:0 B2:0 F2:1 B2:1 F2:2 B2:2 F2:3 B2:3",
        ),
    ),
    ("1f1b", 2, (0, 1, 2), ("F0:0 F0:1 B0:0 B0:1", "F1:0 F1:1 B1:0 B1:1", "F2:0 B2:0 F2:1 B2:1")),
    (
        "interleaved",
        4,
        (0, 1, 0, 1),
        (
            "F0:0 F0:1 F2:0 F2:1 F0:2 B2:0 F0:3 B2:1 F2:2 B0:0 F2:3 B0:1 B2:2 B2:3 B0:2 B0:3",
            "F1:0 F1:1 F3:0 B3:0 F3:1 B3:1 F1:2 B1:0 F1:3 B1:1 F3:2 B3:2 F3:3 B3:3 B1:2 B1:3",
        ),
    ),
    (
        "zb-h1",
        4,
        (0, 1, 2),
        (
            "F0:0 F0:1 F0:2 I0:0 W0:0 F0:3 I0:1 W0:1 I0:2 W0:2 I0:3 W0:3",
            "F1:0 F1:1 I1:0 F1:2 I1:1 W1:0 F1:3 I1:2 W1:1 I1:3 W1:2 W1:3",
            "F2:0 I2:0 F2:1 I2:1 F2:2 I2:2 W2:0 F2:3 I2:3 W2:1 W2:2 W2:3",
        ),
    ),
    (
        "zb-v",
        4,
        (0, 1, 1, 0),
        (
            "F0:0 F0:1 F0:2 F3:0 I3:0 W3:0 F3:1 I3:1 W3:1 F0:3 I0:0 W0:0 F3:2 I3:2 W3:2 "
            "I0:1 W0:1 F3:3 I3:3 W3:3 I0:2 W0:2 I0:3 W0:3",
            "F1:0 F2:0 F1:1 F2:1 I2:0 W2:0 F1:2 I1:0 W1:0 F2:2 I2:1 W2:1 F1:3 I1:1 W1:1 "
            "F2:3 I2:2 W2:2 I1:2 I2:3 I1:3 W1:2 W2:3 W1:3",
        ),
    ),
    (
        "dualpipe-v",
        4,
        (0, 1, 1, 0),
        (
            "F0:0 F0:1 F0:2 F3:0 I3:0 W3:0 F3:1 F0:3+B3:1 F3:2+B0:0 B3:2 F3:3+B0:1 B3:3 I0:2 W0:2 I0:3 W0:3",
            "F1:0 F2:0 F1:1 F2:1 F1:2 B2:0 F2:2+B1:0 F1:3+B2:1 F2:3+B1:1 B2:2 B1:2 I2:3 I1:3 W2:3 W1:3",
        ),
    ),
    ("forward", 3, (0, 1), ("F0:0 F0:1 F0:2", "F1:0 F1:1 F1:2")),
    (
        "forward",
        3,
        (0, 1, 0, 1),
        ("F0:0 F0:1 F2:0 F2:1 F0:2 F2:2", "F1:0 F1:1 F3:0 F3:1 F1:2 F3:2"),
    ),
]


@pytest.mark.parametrize(("name", "microbatches", "rank_of", "rows"), EXPECTED)
def test_the_orders_are_those_of_the_literature(
    name: str, microbatches: int, rank_of: tuple[int, ...], rows: tuple[str, ...]
) -> None:
    assert make(name, rank_of, microbatches) == written(name, microbatches, rank_of, *rows)


def test_every_schedule_has_an_expected_order() -> None:
    assert {name for name, *_ in EXPECTED} == set(GENERATORS)


def bubble(name: str, p: int, m: int, f: int, i: int, w: int) -> int:
    """The bubble of each rank by its formula; of V schedules in the range of times where there is one."""
    match name:
        case "zb-h1":
            return (p - 1) * max(f, i, f + i - w)
        case "zb-v":
            if m < 2 * p - 1:  # the first micro-batches come back late, whatever is done meanwhile
                assert f == i == w
                return f * max(p - 1, 2 * (p - 1) - 2 * (m - p))
            assert i >= f and i >= w
            return (p - 1) * max(i, 2 * (i - w))
        case "dualpipe-v":
            assert i <= f
            return (p - 1) * (2 * f + max(0, i - w))
        case "forward":
            return (p - 1) * f
        case _:
            return (p - 1) * (f + i + w)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), list(cases()))
def test_bubbles(name: str, ranks: int, microbatches: int) -> None:
    """In integers, so exactly."""
    schedule = named(name, ranks, microbatches)
    later = {"zb-v": [(3, 5, 2), (4, 5, 5)], "dualpipe-v": [(5, 3, 2), (5, 4, 6)]}
    distinct = later.get(name, [(4, 5, 3), (2, 3, 7), (7, 2, 3)])
    if name == "zb-v" and microbatches < 2 * ranks - 1:
        distinct = [(3, 3, 3)]
    for times in [(1, 1, 1), *distinct]:
        timeline = simulate(schedule, equal_times(schedule.stages, *times))
        work = microbatches * chunks(name) * (times[0] if name == "forward" else sum(times))
        assert timeline.busy == (work,) * ranks
        assert timeline.bubble == (bubble(name, ranks, microbatches, *times),) * ranks, times


def peak(name: str, p: int, v: int, m: int, r: int) -> int:
    match name:
        case "gpipe":
            return m * v
        case "1f1b":
            return min(m, p - r)
        case "interleaved":
            return min(m * v, p * v + p - 1 - 2 * r)
        case "zb-h1":
            return min(m, p)
        case "zb-v":
            return min(2 * p, m + r + 1)
        case "dualpipe-v":
            return 2 * p + 1
        case _:
            return 0


@pytest.mark.parametrize(("name", "ranks", "microbatches"), list(cases()))
def test_peaks(name: str, ranks: int, microbatches: int) -> None:
    schedule = named(name, ranks, microbatches)
    v = chunks(name)
    found = peaks(schedule, units(schedule.stages))
    assert found == tuple(peak(name, ranks, v, microbatches, r) for r in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("per_rank", [2, 3, 4])
def test_interleaving_divides_the_bubble_of_a_rank(ranks: int, per_rank: int) -> None:
    """Stages of 1 / v of the work: the bubble is 1 / v too, and a rank holds p + (p - 1) / v at most."""
    schedule = named("interleaved", ranks, 2 * ranks, per_rank)
    assert simulate(schedule, equal_times(schedule.stages)).bubble == (3 * (ranks - 1),) * ranks
    assert max(peaks(schedule, units(schedule.stages))) == ranks * per_rank + ranks - 1


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_the_overlap_of_a_pair_shortens_dualpipe_v(ranks: int) -> None:
    """The paper's (p - 1)(F&B + B - 3W), where a pair takes less than both; on the last rank at all times."""
    schedule = named("dualpipe-v", ranks, 2 * ranks)
    for f, w, both in ((4, 4, 12), (4, 4, 10), (4, 3, 8)):
        pairs = {(s, 2 * ranks - 1 - s): both for s in range(2 * ranks)}
        times = Times((f,) * 2 * ranks, (f,) * 2 * ranks, (w,) * 2 * ranks, pairs=pairs)
        timeline = simulate(schedule, times)
        assert timeline.bubble[-1] == (ranks - 1) * (both + f + w - 3 * w)
        assert len(schedule.pairs) > ranks


def test_zero_bubble_without_a_barrier() -> None:
    """ZB-V with equal times: no rank waits between its own first and last action, so steps can follow on."""
    timeline = simulate(named("zb-v", 4, 8), equal_times(8))
    assert timeline.idle == (0, 0, 0, 0)
    assert (timeline.period, timeline.makespan) == (48, 51)
    assert max(simulate(named("1f1b", 4, 8), equal_times(4)).idle) > 0


@pytest.mark.parametrize("name", [n for n in TRAININGS if n != "dualpipe-v"] + ["forward"])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_fewer_micro_batches_than_ranks(name: str, ranks: int) -> None:
    for microbatches in range(1, ranks + 1):
        schedule = named(name, ranks, microbatches)
        timeline = simulate(schedule, equal_times(schedule.stages))
        assert sum(len(spans) for spans in timeline.spans) == sum(map(len, schedule.orders))
        if name in ("gpipe", "1f1b", "forward"):
            assert (
                timeline.bubble == (bubble(name, ranks, microbatches, 1, 1, 1) * (chunks(name) or 1),) * ranks
            )


@pytest.mark.parametrize("name", list(GENERATORS))
def test_one_rank_has_no_bubble(name: str) -> None:
    schedule = named(name, 1, 4)
    assert simulate(schedule, equal_times(schedule.stages)).bubble == (0,)


@pytest.mark.parametrize("name", list(GENERATORS))
def test_ranks_may_have_any_numbers(name: str) -> None:
    """The model's placements number the ranks; the schedule goes by the path of a micro-batch."""
    plain = named(name, 4, 8)
    numbers = (2, 0, 3, 1)
    turned = make(name, tuple(numbers[r] for r in plain.rank_of), 8)
    assert all(turned.orders[numbers[r]] == plain.orders[r] for r in range(4))
    assert turned.pairs == plain.pairs


@pytest.mark.parametrize("rank_of", [(0, 0, 1, 1, 2), (0, 1, 0, 2), (1, 0, 0, 0, 1)])
def test_gpipe_and_forward_take_any_placement(rank_of: tuple[int, ...]) -> None:
    for name in ("gpipe", "forward"):
        schedule = make(name, rank_of, 3)
        simulate(schedule, equal_times(len(rank_of)))
        forwards = [a for order in schedule.orders for a in order if a.kind is Kind.F]
        assert len(forwards) == 3 * len(rank_of)


def test_recomputation_is_part_of_the_backward() -> None:
    """GPipe with checkpoints: each backward first repeats its forward."""
    f, i, w = 2, 3, 4
    times = Times((f,) * 4, (i,) * 4, (w,) * 4, recompute=(f,) * 4)
    timeline = simulate(named("gpipe", 4, 8), times)
    assert timeline.makespan == (8 + 3) * (f + f + i + w)
    assert timeline.bubble == (3 * (f + f + i + w),) * 4
