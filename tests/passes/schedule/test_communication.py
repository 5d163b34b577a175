"""Transfers for any dataflow: complete, free of deadlock, and without a bubble of their own."""

from itertools import pairwise

import pytest

from sbp.errors import ArgumentError
from sbp.passes.schedule.actions import SENDS, Action, Kind, Schedule
from sbp.passes.schedule.communication import add_transfers, find_deadlock, issue_order
from sbp.passes.schedule.dataflow import Edge, chain
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times, equal_times
from tests.passes.schedule.texts import cases, chunks, named, skipping, written


def without_transfers(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(a for a in order if a.computes) for order in schedule.orders)


def test_1f1b_by_hand() -> None:
    """The values go out at once, and come in between the actions that run meanwhile."""
    assert add_transfers(named("1f1b", 2, 3)) == written(
        "1f1b",
        3,
        (0, 1),
        "F0:0 SF0:0>1 F0:1 SF0:1>1 RB0:0<1 B0:0 F0:2 SF0:2>1 RB0:1<1 B0:1 RB0:2<1 B0:2",
        "RF1:0<0 F1:0 RF1:1<0 B1:0 SB1:0>0 F1:1 B1:1 RF1:2<0 SB1:1>0 F1:2 B1:2 SB1:2>0",
    )


def test_a_skip_by_hand() -> None:
    """A U-net's: stage 0 feeds 1 and 2; stage 2's gradient goes to both."""
    edges = (*chain(3), Edge(0, 2))
    assert add_transfers(named("gpipe", 3, 1), edges) == written(
        "gpipe",
        1,
        (0, 1, 2),
        "F0:0 SF0:0>1 SF0:0>2 RB0:0<2 RB0:0<1 B0:0",
        "RF1:0<0 F1:0 SF1:0>2 RB1:0<2 B1:0 SB1:0>0",
        "RF2:0<0 RF2:0<1 F2:0 B2:0 SB2:0>0 SB2:0>1",
    )


def test_stages_of_one_rank_send_nothing_to_each_other() -> None:
    """At the turn of a V, and for a skip from the first stage of a rank to its last."""
    schedule = add_transfers(make("zb-v", (0, 1, 1, 0), 4), (*chain(4), Edge(0, 3)))
    ends = {(a.stage, a.peer) for order in schedule.orders for a in order if a.kind in SENDS}
    assert ends == {(0, 1), (2, 3), (1, 0), (3, 2)}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [c for c in cases() if c[1] * c[2] <= 128])
def test_all_schedules_with_skips(name: str, ranks: int, microbatches: int) -> None:
    """Proven for blocking sends, and run with them; no later than values that travel by themselves."""
    plain = named(name, ranks, microbatches)
    edges = skipping(plain.stages)
    times = Times(
        tuple(2 + s % 3 for s in range(plain.stages)),
        (3,) * plain.stages,
        tuple(1 + s % 2 for s in range(plain.stages)),
        transfer=2,
    )
    schedule = add_transfers(plain, edges)
    assert without_transfers(schedule) == plain.orders
    assert schedule.pairs == plain.pairs
    assert find_deadlock(schedule, edges) is None
    blocked = simulate(schedule, times, edges, blocking=True)
    assert sum(map(len, blocked.spans)) == sum(map(len, schedule.orders))
    assert simulate(schedule, times, edges).makespan == simulate(plain, times, edges).makespan


@pytest.mark.parametrize("name", list(GENERATORS))
def test_transfers_are_what_the_edges_say(name: str) -> None:
    plain = named(name, 4, 8)
    edges, rank_of = skipping(plain.stages), plain.rank_of
    schedule = add_transfers(plain, edges)
    across = [e for e in edges if rank_of[e.source] != rank_of[e.target]]
    wanted = {Action(Kind.SEND_F, e.source, mb, e.target) for e in across for mb in range(8)}
    if name != "forward":
        wanted |= {
            Action(Kind.SEND_B, e.target, mb, e.source) for e in across if e.gradient for mb in range(8)
        }
    found = [a for order in schedule.orders for a in order if not a.computes]
    assert {a for a in found if a.kind in SENDS} == wanted
    assert {a for a in found if a.kind not in SENDS} == {a.other_end for a in wanted}


@pytest.mark.parametrize("name", list(GENERATORS))
def test_sends_follow_at_once(name: str) -> None:
    """Between an action and the sends of its value there are other transfers at most."""
    for order in add_transfers(named(name, 4, 8), skipping(4 * chunks(name))).orders:
        for i, a in enumerate(order):
            if a.kind in SENDS:
                behind = [b for b in order[:i] if b.computes][-2:]
                assert (a.stage, a.microbatch) in [(b.stage, b.microbatch) for b in behind]
                assert (behind[-1].stage, behind[-1].microbatch) == (a.stage, a.microbatch) or (
                    behind[0] in add_transfers(named(name, 4, 8)).pairs
                )


@pytest.mark.parametrize("name", list(GENERATORS))
@pytest.mark.parametrize("transfers", [False, True])
def test_the_issue_order_keeps_everything(name: str, transfers: bool) -> None:
    plain = named(name, 4, 8)
    edges = skipping(plain.stages)
    schedule = add_transfers(plain, edges) if transfers else plain
    order = issue_order(schedule, edges)
    for rank, own in enumerate(schedule.orders):
        assert tuple(a for a in order if plain.rank_of[a.stage] == rank) == own
    place = {a: i for i, a in enumerate(order)}
    backward = {(a.stage, a.microbatch): place[a] for a in order if a.kind in (Kind.B, Kind.I)}
    for e in edges:
        for mb in range(8):
            assert place[Action(Kind.F, e.source, mb)] < place[Action(Kind.F, e.target, mb)]
            if e.gradient and backward:
                assert backward[e.target, mb] < backward[e.source, mb]
    for a, b in pairwise(order):
        assert a.kind not in SENDS or b == a.other_end
        assert a not in schedule.pairs or b.kind is Kind.B


def test_the_issue_order_goes_by_time() -> None:
    schedule = named("1f1b", 4, 8)
    starts = {s.action: s.start for spans in simulate(schedule, equal_times(4)).spans for s in spans}
    found = [starts[a] for a in issue_order(schedule)]
    assert found == sorted(found)


def test_transfers_are_added_once() -> None:
    with pytest.raises(ArgumentError, match="each value must travel once"):
        add_transfers(add_transfers(named("gpipe", 2, 2)))


def test_a_stuck_schedule_gets_no_order() -> None:
    stuck = written("stuck", 1, (0, 1), "B0:0 F0:0", "F1:0 B1:0")
    for function in (add_transfers, issue_order):
        with pytest.raises(ArgumentError, match="stuck"):
            function(stuck)
