"""Steps divided: whatever runs beside whatever, the parts add up to the whole."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.runtime.profile.trace import OpEvent, TracedStep
from sbp.runtime.profile.trace_attribution import KERNEL, SENDING, WAITING, StepAttribution, account


def parts(found: StepAttribution) -> float:
    claimed = math.fsum(s for kind in found.by_cause for s in kind.values())
    return claimed + found.idle_before + found.idle_between + found.idle_after


def test_kernels_come_before_what_is_sent_beside_them() -> None:
    step = TracedStep(
        0.0,
        10.0,
        (OpEvent(0, "k", 1.0, 4.0), OpEvent(0, "all-reduce", 2.0, 6.0), OpEvent(0, "l", 7.0, 8.0)),
    )
    found = account(step, {"all-reduce": ((0,),)})
    assert found.by_cause[KERNEL] == {"k": 3.0, "l": 1.0}
    assert found.by_cause[SENDING] == {"all-reduce": 2.0} and found.collectives == {"all-reduce": 4.0}
    assert (found.idle_before, found.idle_between, found.idle_after) == (1.0, 1.0, 2.0)
    assert parts(found) == 10.0


def test_waiting_ends_when_the_last_of_the_group_comes() -> None:
    """Devices 0 and 1 are a group, 2 and 3 another one: these do not wait for those."""
    starts = {0: 1.0, 1: 5.0, 2: 2.0, 3: 2.0}
    step = TracedStep(0.0, 8.0, tuple(OpEvent(d, "send", s, 7.0) for d, s in starts.items()))
    found = account(step, {"send": ((0, 1), (2, 3))})
    assert found.collectives["send"] == pytest.approx((2.0 + 2.0 + 5.0 + 5.0) / 4)
    assert found.by_cause[WAITING]["send"] == pytest.approx(4.0 / 4)
    assert found.times["send"] == 1 and parts(found) == pytest.approx(8.0)


def test_nobody_is_said_to_wait_where_an_execution_was_not_seen() -> None:
    events = OpEvent(0, "send", 1.0, 2.0), OpEvent(0, "send", 3.0, 4.0), OpEvent(1, "send", 3.5, 4.0)
    found = account(TracedStep(0.0, 5.0, events), {"send": ((0, 1),)})
    assert not found.by_cause[WAITING]["send"] and parts(found) == pytest.approx(5.0)


def test_two_kernels_share_an_instant_and_loops_only_surround() -> None:
    events = OpEvent(0, "while", 0.0, 9.0), OpEvent(0, "a", 1.0, 5.0), OpEvent(0, "b", 3.0, 5.0)
    found = account(TracedStep(0.0, 10.0, events), {}, ["while"])
    assert found.by_cause[KERNEL] == {"a": 3.0, "b": 1.0}
    assert found.idle_before == 1.0 and found.idle_after == 5.0


def test_an_op_that_is_noted_late_ends_with_its_step() -> None:
    """Who waits for the results may see them before the thread that made them has written down when."""
    late = OpEvent(0, "a", 1.0, 6.0), OpEvent(0, "b", 4.5, 5.0)
    step = TracedStep(0.0, 4.0, late)
    assert step.within == TracedStep(0.0, 4.0, (OpEvent(0, "a", 1.0, 4.0),))
    assert account(step.within, {}).by_cause == account(step, {}).by_cause


def test_a_device_on_which_nothing_ran() -> None:
    found = account(TracedStep(0.0, 4.0, (OpEvent(0, "a", 0.0, 4.0),)), {}, devices=(0, 1))
    assert found.by_cause[KERNEL] == {"a": 2.0} and found.idle_before == 2.0


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("abxy"), st.integers(-2, 12), st.integers(0, 6)),
    max_size=12,
)


@pytest.mark.full
@given(EVENTS)
def test_the_parts_add_up(events: list[tuple[int, str, int, int]]) -> None:
    made = tuple(OpEvent(d, name, float(a), float(a + n)) for d, name, a, n in events if a >= 0)
    found = account(TracedStep(0.0, 10.0, made), {"x": ((0, 1), (2,)), "y": ((0, 1, 2),)})
    assert parts(found) == pytest.approx(10.0 if made else 0.0)
