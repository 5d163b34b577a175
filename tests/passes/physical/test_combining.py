"""What is sent as one."""

import random

from sbp.passes.physical.schedule_nodes import COMBINED_BYTES, combining_groups, units_in_order

HALF = COMBINED_BYTES / 2


def test_as_many_bytes_as_fit() -> None:
    sent = dict.fromkeys(range(5), ("x", HALF))
    assert combining_groups([[]] * 5, sent) == [(0, 1), (2, 3)]


def test_only_of_one_kind() -> None:
    assert combining_groups([[]] * 4, {0: ("x", 1.0), 1: ("y", 1.0), 2: ("x", 1.0), 3: ("y", 1.0)}) == [
        (0, 2),
        (1, 3),
    ]


def test_not_what_waits_for_another_even_by_way_of_others() -> None:
    assert combining_groups([[], [0], [1], []], {0: ("x", 1.0), 2: ("x", 1.0), 3: ("x", 1.0)}) == [(2, 3)]


def test_a_large_one_alone() -> None:
    assert combining_groups([[]] * 2, {0: ("x", 2 * COMBINED_BYTES), 1: ("x", 1.0)}) == []


def test_sets_that_wait_for_each_other_are_taken_apart() -> None:
    """0 and 3 of one set, 1 and 2 of another: 1 waits for 0, and 3 for 2."""
    makers: list[list[int]] = [[], [0], [], [2]]
    assert units_in_order(makers, [(0, 3), (1, 2)]) == [(0,), (1,), (2,), (3,)]


def test_in_an_order_that_can_run() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n = 12
        makers = [sorted(rng.sample(range(i), min(i, rng.randrange(3)))) for i in range(n)]
        sent = {i: (rng.randrange(2), HALF / 2) for i in range(n) if rng.random() < 0.6}
        units = units_in_order(makers, combining_groups(makers, sent))
        assert sorted(i for unit in units for i in unit) == list(range(n))
        done = set[int]()
        for unit in units:
            assert all(m in done for i in unit for m in makers[i])
            done.update(unit)
