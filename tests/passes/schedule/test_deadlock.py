"""The proof of no deadlock against an executor that just tries, over thousands of spoiled orders."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sbp.errors import ArgumentError, SbpError
from sbp.passes.schedule.actions import Action, Kind, Schedule
from sbp.passes.schedule.communication import add_transfers, check_no_deadlock, find_deadlock
from sbp.passes.schedule.dataflow import Edge, chain
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import equal_times
from tests.passes.schedule.texts import action, named, skipping, written


def runs_through(schedule: Schedule, edges: Sequence[Edge]) -> bool:
    """Does what can be done, one thing at a time, until nothing can: are all ranks at their ends?"""
    left = [list(order) for order in schedule.orders]
    values: set[tuple[str, int, int, int]] = set()  # (what, stage, micro-batch, rank that has it)

    def has(what: str, stage: int, a: Action) -> bool:
        return (what, stage, a.microbatch, schedule.rank_of[a.stage]) in values

    def can_compute(a: Action) -> bool:
        if a.kind is Kind.F:
            return all(has("value", e.source, a) for e in edges if e.target == a.stage)
        if a.kind is Kind.W:
            return has("gradient", a.stage, a)
        gradients = all(has("gradient", e.target, a) for e in edges if e.source == a.stage and e.gradient)
        return has("value", a.stage, a) and gradients

    def step() -> bool:
        for rank, order in enumerate(left):
            if not order:
                continue
            a = order[0]
            if a.computes and can_compute(a):
                if a.kind is not Kind.W:
                    what = "value" if a.kind is Kind.F else "gradient"
                    values.add((what, a.stage, a.microbatch, rank))
                order.pop(0)
                return True
            if a.kind in (Kind.SEND_F, Kind.SEND_B):
                what, other = "value" if a.kind is Kind.SEND_F else "gradient", schedule.rank_of[a.peer]
                if has(what, a.stage, a) and left[other] and left[other][0] == a.other_end:
                    values.add((what, a.stage, a.microbatch, other))
                    order.pop(0)
                    left[other].pop(0)
                    return True
        return False

    while step():
        pass
    return not any(left)


def spoiled(schedule: Schedule, dice: random.Random) -> Schedule:
    """Some actions swapped with their neighbours, moved elsewhere, or (a transfer, rarely) left out."""
    orders = [list(order) for order in schedule.orders]
    for _ in range(dice.randint(1, 3)):
        order = dice.choice(orders)
        kind = dice.random()
        if kind < 0.8:
            i = dice.randrange(len(order) - 1)
            order[i], order[i + 1] = order[i + 1], order[i]
        elif kind < 0.97:
            a = order.pop(dice.randrange(len(order)))
            order.insert(dice.randrange(len(order) + 1), a)
        else:
            transfers = [i for i, a in enumerate(order) if not a.computes]
            if transfers:
                order.pop(dice.choice(transfers))
    return replace(schedule, orders=tuple(map(tuple, orders)), pairs=frozenset())


BASES = [
    ("gpipe", 2, 3, False),
    ("gpipe", 4, 2, True),
    ("1f1b", 3, 3, False),
    ("1f1b", 4, 2, True),
    ("interleaved", 2, 2, True),
    ("zb-h1", 3, 3, False),
    ("zb-v", 2, 2, False),
    ("zb-v", 2, 3, True),
    ("dualpipe-v", 2, 4, True),
    ("forward", 3, 4, True),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "ranks", "microbatches", "skips"), BASES)
def test_the_proof_agrees_with_trying(name: str, ranks: int, microbatches: int, skips: bool) -> None:
    """400 spoiled orders of each: the proof, the executor and the simulator always say the same."""
    dice = random.Random(f"{name} {ranks} {microbatches}")
    plain = named(name, ranks, microbatches)
    edges = skipping(plain.stages) if skips else chain(plain.stages)
    good = add_transfers(plain, edges)
    assert runs_through(good, edges)
    assert find_deadlock(good, edges) is None
    outcomes = {True: 0, False: 0}
    for trial in range(400):
        schedule = spoiled(good, dice)
        through = runs_through(schedule, edges)
        found = find_deadlock(schedule, edges)
        assert (found is None) is through, f"{schedule}\n{found}"
        outcomes[through] += 1
        if trial % 4 == 0:
            assert simulated(schedule, edges) is through
        if found is not None and not found.missing_actions:
            check_cycle(schedule, found.cycle, found.reasons)
    assert min(outcomes.values()) >= 40, outcomes


def simulated(schedule: Schedule, edges: Sequence[Edge]) -> bool:
    try:
        simulate(schedule, equal_times(schedule.stages), edges, blocking=True)
    except SbpError:
        return False
    return True


def check_cycle(schedule: Schedule, cycle: Sequence[Action], reasons: Sequence[str]) -> None:
    """Every reason is true: the two are neighbours on the rank that is named, or the dataflow joins them."""
    assert 1 <= len(cycle) == len(reasons)
    for a, b, reason in zip(cycle, (*cycle[1:], cycle[0]), reasons, strict=True):
        if reason.startswith("rank"):
            _, rank, _, first, _, second = reason.split()
            words = [str(x) for x in schedule.orders[int(rank)]]
            assert words[words.index(first) + 1] == second
            assert {first, second} & {str(a), str(b), *(str(x.other_end) for x in (a, b) if not x.computes)}
        else:
            assert reason == f"{b} needs {a}"
            assert a.microbatch == b.microbatch


def test_a_deadlock_in_words() -> None:
    schedule = written(
        "cross",
        2,
        (0, 1),
        "F0:0 SF0:0>1 F0:1 SF0:1>1 RB0:0<1 B0:0 RB0:1<1 B0:1",
        "RF1:0<0 F1:0 B1:0 SB1:0>0 RF1:1<0 F1:1 B1:1 SB1:1>0",
    )
    found = find_deadlock(schedule)
    assert found is not None
    assert sorted(str(found).splitlines()) == [
        "rank 0 does SF0:1>1 before RB0:0<1",
        "rank 1 does SB1:0>0 before RF1:1<0",
    ]
    assert set(found.cycle) == {action("SF0:1>1"), action("SB1:0>0")}
    with pytest.raises(ArgumentError, match="blocking sends and receives wait for each other in a circle"):
        check_no_deadlock(schedule)


def test_a_transfer_with_one_end_is_named() -> None:
    rows = "F0:0 SF0:0>1", "F1:0"
    found = find_deadlock(written("lost", 1, (0, 1), *rows))
    assert found is not None
    assert str(found) == "never done, and waited for: RF1:0<0"
    both = find_deadlock(written("none", 1, (0, 1, 2), "F0:0 SF0:0>1", "RF1:0<0 F1:0", "F2:0"))
    assert both is not None
    assert both.missing_actions == (action("RF2:0<1"),)


def test_sends_in_another_order_than_receives() -> None:
    rows = "F0:0 F0:1 SF0:1>1 SF0:0>1", "RF1:0<0 RF1:1<0 F1:0 F1:1"
    assert find_deadlock(written("x", 2, (0, 1), *rows)) is not None
    assert simulate(written("x", 2, (0, 1), *rows), equal_times(2)).makespan == 4


def test_without_transfers_only_the_orders_are_judged() -> None:
    assert find_deadlock(named("zb-v", 4, 8)) is None
    found = find_deadlock(written("x", 1, (0, 1), "B0:0 F0:0", "F1:0 B1:0"))
    assert found is not None
    assert "rank 0 does B0:0 before F0:0" in found.reasons
