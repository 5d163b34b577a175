"""What cannot be scheduled is an error that says what to do, before anything runs."""

import pytest

from sbp.errors import ArgumentError
from sbp.passes.schedule.orders import GENERATORS, make
from tests.errors.messages import Messages, check_message

MESSAGES: Messages = {
    "name": (
        lambda: make("1fb1", (0, 1), 4),
        ArgumentError,
        "schedule",
        "'1fb1'",
        "'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-v', 'dualpipe-v', 'forward'",
        "there is none of that name",
        "'1f1b'",
    ),
    "too few for dualpipe-v": (
        lambda: make("dualpipe-v", (0, 1, 2, 2, 1, 0), 5),
        ArgumentError,
        "schedule 'dualpipe-v'",
        "5 micro-batches on 3 ranks",
        "6 or more",
        "both directions of its V must be full before forwards and backwards can overlap",
        "6 smaller micro-batches, or 'zb-v', which takes any number on the same ranks",
    ),
    "rounds of interleaved": (
        lambda: make("interleaved", (0, 1, 2, 3) * 2, 11),
        ArgumentError,
        "schedule 'interleaved'",
        "11 micro-batches on 4 ranks",
        "equal rounds of 4 or more: for instance 10 or 12",
        "each stage of a rank takes a whole round of micro-batches in turn",
        "10 or 12 micro-batches, best a multiple of 4",
    ),
    "stages per rank": (
        lambda: make("1f1b", (0, 1, 0, 1), 4),
        ArgumentError,
        "schedule '1f1b'",
        "4 stages on 2 ranks",
        "1 per rank",
        "its order is made for that many, the same on each rank",
        "cut the model into 2 stages, or 'gpipe', which takes any number",
    ),
    "one stage per rank for interleaved": (
        lambda: make("interleaved", (0, 1, 2), 6),
        ArgumentError,
        "schedule 'interleaved'",
        "3 stages on 3 ranks",
        "2 or more per rank",
        "its order is made for that many, the same on each rank",
        "a multiple of 3 stages, 6 or more, or 'gpipe', which takes any number",
    ),
    "uneven stages": (
        lambda: make("zb-v", (0, 1, 1), 4),
        ArgumentError,
        "schedule 'zb-v'",
        "3 stages on 2 ranks",
        "2 per rank",
        "its order is made for that many, the same on each rank",
        "cut the model into 4 stages, or 'gpipe', which takes any number",
    ),
    "a loop where a V is needed": (
        lambda: make("zb-v", (0, 1, 0, 1), 4),
        ArgumentError,
        "schedule 'zb-v'",
        "stages on ranks [0, 1, 0, 1]",
        "a V: [0, 1, 1, 0], or the same renumbered",
        "its order counts on that path of a micro-batch through the ranks",
        "place the stages so, or take 'gpipe', which takes any placement",
    ),
    "a rank without a stage": (
        lambda: make("gpipe", (0, 2), 4),
        ArgumentError,
        "schedule 'gpipe'",
        "stages on ranks [0, 2]",
        "ranks 0, 1, ... without a hole, each with a stage",
        "ranks are counted from 0",
        "number the groups of devices in the order of their stages",
    ),
    "no micro-batch": (
        lambda: make("forward", (0, 1), 0),
        ArgumentError,
        "schedule 'forward'",
        "0 micro-batches",
        "1 or more",
        "there is nothing to do",
        "set the number of micro-batches",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case: str) -> None:
    check_message(*MESSAGES[case])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_micro_batches_are_taken_or_refused_as_said(ranks: int) -> None:
    """What the message offers instead is taken."""
    loop, v = tuple(range(ranks)) * 2, (*range(ranks), *reversed(range(ranks)))
    for m in range(1, 6 * ranks):
        if m % max(1, m // ranks) == 0:
            assert make("interleaved", loop, m).microbatches == m
        else:
            with pytest.raises(ArgumentError) as caught:
                make("interleaved", loop, m)
            offered = caught.value.problems[0].fix.split(" micro-batches")[0].split(" or ")
            assert all(make("interleaved", loop, int(n)).microbatches == int(n) for n in offered)
            assert int(offered[0]) < m < int(offered[1])
        if m < 2 * ranks:
            with pytest.raises(ArgumentError):
                make("dualpipe-v", v, m)
        else:
            make("dualpipe-v", v, m)


def test_what_is_asked_is_said_in_words() -> None:
    asks = {name: g.asks for name, g in GENERATORS.items()}
    assert [asks[n].chunks_text for n in ("gpipe", "1f1b", "interleaved", "zb-v")] == [
        "1 or more", "1", "2 or more", "2",
    ]  # fmt: skip
    assert asks["dualpipe-v"].microbatches_text == "m >= 2p"
    assert asks["gpipe"].microbatches_text == "any"
    assert asks["interleaved"].map.words == "loop"
