"""Who is named when a run has failed, and which lines are held back; nothing is run here."""

from __future__ import annotations

import itertools
import signal

import pytest

from sbp.runtime.processes.failure_cause import FOLLOWS, Death, TraceFold, first_cause, left_out

ABORTED = -signal.SIGABRT


def lost(index: int, at: float) -> Death:
    return Death(index, ABORTED, at, has_lost_others=True)


ORDERS: dict[str, tuple[list[Death], str]] = {
    "killed, and the others lose it before that is seen": (
        [lost(0, 1.0), Death(1, -9, 1.1), Death(2, FOLLOWS, 1.2)],
        "process 1 of 3 was killed by SIGKILL",
    ),
    "killed in process 0, which has the coordination service": (
        [Death(0, -9, 1.0), lost(1, 1.0), lost(2, 1.0)],
        "process 0 of 3 was killed by SIGKILL",
    ),
    "killed by a signal that nobody thinks of": (
        [Death(0, 1, 3.0), Death(1, -signal.SIGXCPU, 1.0)],
        "process 1 of 2 was killed by SIGXCPU",
    ),
    "raised, and waited until the others had heard": (
        [Death(0, FOLLOWS, 1.0), Death(1, 1, 3.0), Death(2, FOLLOWS, 1.0)],
        "process 1 of 3 ended with code 1",
    ),
    "ended by itself without a word, in process 0": (
        [Death(0, 7, 1.0), lost(1, 1.1), Death(2, FOLLOWS, 3.0)],
        "process 0 of 3 ended with code 7",
    ),
    "aborted of its own": (
        [Death(0, FOLLOWS, 3.0), Death(1, ABORTED, 1.0), lost(2, 1.1)],
        "process 1 of 3 was killed by SIGABRT",
    ),
    "ended with a code, and who lost it with another one": (
        [Death(0, 1, 3.0), Death(1, 7, 1.0)],
        "process 1 of 2 ended with code 7",
    ),
    "left early with success": (
        [Death(0, FOLLOWS, 3.0), Death(1, 0, 1.0), lost(2, 2.0)],
        "process 1 of 3 ended with code 0, while others still ran",
    ),
    "came to its end afterwards": (
        [Death(0, FOLLOWS, 1.0), Death(1, 0, 1.5)],
        "process 0 of 2 has lost another process, and nothing says which",
    ),
    "is stopped": (
        [lost(0, 1.0), Death(1, None, 9.0), lost(2, 1.0)],
        "process 1 of 3 was stopped, and did not answer",
    ),
    "was stopped for a while": (
        [lost(0, 1.0), Death(1, ABORTED, 5.0, has_lost_others=True, is_unheard=True), lost(2, 1.0)],
        "process 1 of 3 was not heard of: its heartbeats were missed",
    ),
    "killed, which is missed as a heartbeat too": (
        [lost(0, 1.0), Death(1, -9, 0.5, is_unheard=True)],
        "process 1 of 2 was killed by SIGKILL",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_culprit_is_named_in_whatever_order_they_end(name: str) -> None:
    deaths, said = ORDERS[name]
    for order in itertools.permutations(deaths):
        assert first_cause(order).text(len(deaths)) == said


LOST = """\
E1125 08:29:26.235357   11338 coordination_service.cc:1518] [3209] Use error polling to propagate the \
following error to all tasks: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
1
12
The tasks have crashed. Check the task logs. [type.googleapis.com/tensorflow.CoordinationServiceError='']
=== Source Location Trace: ===
external/xla+/xla/pjrt/distributed/coordination/coordination_service.cc:232

E1125 08:29:26.235822   11349 coordination_service_agent.cc:288] Polled an error from coordination service
F1125 08:29:26.235973   11349 client.h:86] Terminating process because the JAX distributed service detected \
fatal errors. This most likely indicates that another task died; see the other task logs for more details.
1
The tasks have crashed. Check the task logs for an earlier error.

RPC: /xla.coordination.CoordinationService/PollForError [type.googleapis.com/tensorflow.Coordination='']
Additional GRPC error information from remote target coordination_service while calling /xla:
:UNAVAILABLE:Stream removed (Socket closed)
*** Check failure stack trace: ***
    @     0x7fa0ea8f81b4  absl::lts_20260526::log_internal::LogMessage::SendToLog()
    @     0x7fa0f26a71f5  (unknown)
"""
"""What jaxlib 0.12 writes, somewhat shortened."""
OWN = """\
step 1: 12 examples

12
    @ home
E1125 08:29:26.235357   11338 gpu_executor.cc:12] out of memory
terminate called after throwing an instance of 'gloo::EnforceNotMet'
"""


def test_pages_of_the_runtime_are_held_back_and_read() -> None:
    fold = TraceFold()
    shown = [line for line in (OWN + LOST + OWN).splitlines(keepends=True) if fold.shows(line)]
    assert "".join(shown) == OWN + OWN
    assert fold.has_lost_others and fold.unheard == {1, 12}
    assert len(fold.held_lines) == len(LOST.splitlines())
    expected = (
        f"left out: {2 * len(fold.held_lines)} lines of the C++ runtime of processes 0, 3, which have lost"
    )
    assert str(left_out([(0, fold), (1, TraceFold()), (3, fold)])).startswith(expected)


def test_lines_of_the_user_between_pages_are_shown() -> None:
    fold, lines = TraceFold(), LOST.splitlines(keepends=True)
    shown = [
        line for pair in zip(lines, ["mine\n"] * len(lines), strict=True) for line in pair if fold.shows(line)
    ]
    assert shown.count("mine\n") == len(lines)
    assert not any("absl::" in line or "Polled" in line for line in shown)
