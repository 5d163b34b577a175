"""A schedule checks itself, and prints as a table."""

from dataclasses import replace

import pytest

from sbp.errors import ArgumentError
from sbp.passes.schedule.actions import Action, Kind, Schedule, actions_text
from tests.errors.messages import kinds
from tests.passes.schedule.texts import action, named, order, written


@pytest.mark.parametrize(
    "text", ["F0:3", "B12:0", "I1:2", "W1:2", "SF0:1>3", "RF3:1<0", "SB3:1>0", "RB0:1<3"]
)
def test_actions_print_as_they_are_written(text: str) -> None:
    assert str(action(text)) == text


def test_a_send_and_its_receive_are_two_ends() -> None:
    send = Action(Kind.SEND_F, 0, 5, 3)
    assert send.other_end == Action(Kind.RECV_F, 3, 5, 0)
    assert send.other_end.other_end == send
    assert action("SB3:1>0").other_end == action("RB0:1<3")


def test_a_schedule_prints_as_a_table() -> None:
    assert str(named("dualpipe-v", 1, 2)) == (
        "dualpipe-v: 2 stages on 1 ranks, 2 micro-batches\n"
        "rank 0  F0:0 F1:0 F0:1 B1:0 F1:1+B0:0 B1:1 I0:1 W0:1"
    )
    lines = str(named("1f1b", 2, 3)).splitlines()
    assert lines[1:] == [
        "rank 0  F0:0 F0:1 B0:0 F0:2 B0:1 B0:2",
        "rank 1  F1:0 B1:0 F1:1 B1:1 F1:2 B1:2",
    ]


def test_long_lists_are_cut() -> None:
    assert actions_text(order("F1:1 F0:1 F0:0")) == "F0:0, F0:1, F1:1"
    assert actions_text(order("F0:5 F0:4 F0:3 F0:2 F0:1 F0:0")) == "F0:0, F0:1, F0:2, F0:3 and 2 more"


def test_steps_join_pairs() -> None:
    schedule = written("x", 2, (0,), "F0:0 F0:1+B0:0 B0:1")
    assert [len(step) for step in schedule.steps(0)] == [1, 2, 1]
    assert (schedule.stages, schedule.ranks, schedule.trains, schedule.has_transfers) == (1, 1, True, False)


WRONG = {
    "a forward is missing": (1, (0, 1), ("F0:0 B0:0", "B1:0"), "no F1:0"),
    "a forward twice": (1, (0,), ("F0:0 F0:0 B0:0",), "F0:0 more than once"),
    "a backward is missing": (2, (0,), ("F0:0 F0:1 B0:0",), "the backward of B0:1 is not whole"),
    "half a backward": (1, (0,), ("F0:0 I0:0",), "the backward of B0:0 is not whole"),
    "a backward and a half": (1, (0,), ("F0:0 B0:0 W0:0",), "the backward of B0:0 is not whole"),
    "both": (1, (0,), ("F0:0 B0:0 I0:0 W0:0",), "the backward of B0:0 is not whole"),
    "weights of an evaluation": (1, (0,), ("F0:0 W0:0",), "the backward of W0:0 is not whole"),
    "another rank's": (1, (0, 1), ("F0:0 F1:0", ""), "F1:0 on rank 0"),
    "no such stage": (1, (0,), ("F0:0 F1:0",), "F1:0 on rank 0"),
    "no such micro-batch": (1, (0,), ("F0:0 F0:1",), "F0:1 on rank 0"),
    "a transfer on one rank": (1, (0, 0), ("F0:0 SF0:0>1 RF1:0<0 F1:0",), "SF0:0>1, RF1:0<0 on rank 0"),
    "a transfer back in time": (1, (0, 1), ("F0:0 RF0:0<1", "F1:0 SF1:0>0"), "RF0:0<1 on rank 0"),
    "a transfer to nowhere": (1, (0,), ("F0:0 SF0:0>7",), "SF0:0>7 on rank 0"),
    "a gradient of an evaluation": (1, (0, 1), ("F0:0 RB0:0<1", "F1:0 SB1:0>0"), "RB0:0<1 on rank 0"),
    "a pair of one micro-batch": (1, (0,), ("F0:0+B0:0",), "the pair F0:0+B0:0"),
    "a pair of two forwards": (2, (0,), ("F0:0+F0:1 B0:0 B0:1",), "the pair F0:0+F0:1"),
    "nothing": (0, (0,), ("",), "0 micro-batches"),
    "a rank without a stage": (1, (0, 2), ("F0:0", "", "F1:0"), "3 orders, and stages on ranks [0, 2]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_schedule_that_is_wrong_says_so(case: str) -> None:
    microbatches, rank_of, rows, got = WRONG[case]
    with pytest.raises(ArgumentError) as caught:
        written("mine", microbatches, rank_of, *rows)
    assert got in [p.got for p in caught.value.problems], str(caught.value)
    assert all(p.where == "schedule 'mine'" and p.legal and p.why for p in caught.value.problems)


def test_problems_are_not_endless() -> None:
    good = named("zb-v", 4, 16)
    found = kinds(lambda: replace(good, orders=tuple(reversed(good.orders))))
    assert 1 <= len(found) <= 6


def test_an_action_without_its_peer_is_refused() -> None:
    lone = Action(Kind.SEND_F, 0, 0)
    with pytest.raises(ArgumentError, match="SF0:0 on rank 0"):
        Schedule("x", 1, (0, 1), ((action("F0:0"), lone), (action("F1:0"),)))
