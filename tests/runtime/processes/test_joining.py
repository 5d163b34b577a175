"""How processes find each other, and what is said of those that are not heard; one process plays all."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from typing import Any

import jax
import pytest

from sbp.runtime.processes import initialize
from sbp.runtime.processes.call_order import explain_error
from sbp.runtime.processes.initialize import HostRoute, join_watch, missing_processes, own_address
from sbp.runtime.processes.liveness import ENDED, QUIET_LOOKS, LivenessWatch
from tests.runtime.processes.test_call_order import LAST, STEP, Dict, called
from tests.runtime.processes.test_two_processes import ROOT

WAITS = """
import sys, time
from sbp.runtime.processes.initialize import join_watch
with join_watch(lambda: (int(sys.argv[1]), 2, sys.argv[2]), most_seconds=1.5, said_again_seconds=0.4):
    time.sleep(60)
"""


def waited(index: int, coordinator: str) -> str:
    """What a process says that joins others which do not come."""
    command = [sys.executable, "-c", WAITS, str(index), coordinator]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    return found.stderr


def test_who_does_not_reach_process_0_says_so_and_ends() -> None:
    said = waited(1, "127.0.0.1:1")
    assert said.startswith("process 1, joining process 0 at 127.0.0.1:1: Connection refused, for 0 s\n")
    assert "sbp: process 1 ends: ProcessError: process 1, joining process 0 at 127.0.0.1:1\n" in said
    assert "  legal  an address of process 0 that this host reaches\n" in said
    assert "all processes meet at process 0, which listens there once it has begun" in said


def test_a_name_that_nobody_knows_is_said() -> None:
    said = missing_processes(2, 4, "no-such-host.invalid:1234", 30.0)
    assert said.where == "process 2, joining process 0 at no-such-host.invalid:1234"
    assert said.got.endswith(", for 30 s") and "refused" not in said.got


def test_who_waits_for_others_says_so_and_ends() -> None:
    said = waited(0, "127.0.0.1:1")
    assert "process 0, waiting at 127.0.0.1:1 for all 2 processes\n" in said
    assert "not all of them have joined in 1 s" in said or "joined in 2 s" in said
    assert "no process begins before all have come" in said


def test_where_process_0_answers_it_is_others_that_are_missing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = missing_processes(1, 3, f"127.0.0.1:{server.getsockname()[1]}", 60.0)
    assert said.got == "not all of them have joined in 60 s"


def test_who_has_joined_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with join_watch(lambda: (1, 2, "127.0.0.1:1"), said_again_seconds=0.05):
        pass
    assert not [t for t in threading.enumerate() if t.name == "sbp joining" and t.join(2.0)]
    assert not caplog.messages


ROUTES: dict[str, tuple[list[HostRoute], list[str]]] = {
    "all on one host": ([HostRoute("127.0.0.1", "127.0.0.1")] * 3, ["127.0.0.1"] * 3),
    "two hosts": (
        [HostRoute("10.0.0.1", "10.0.0.1"), HostRoute("10.0.0.2", "10.0.0.1")],
        ["10.0.0.1", "10.0.0.2"],
    ),
    "a host that takes its own name for its loopback": (
        [
            HostRoute("127.0.0.1", "127.0.1.1"),
            HostRoute("127.0.0.1", "127.0.1.1"),
            HostRoute("10.0.0.2", "10.0.0.1"),
        ],
        ["10.0.0.1", "10.0.0.1", "10.0.0.2"],
    ),
    "IPv6": ([HostRoute("::1", "::1"), HostRoute("fd00::2", "fd00::1")], ["fd00::1", "fd00::2"]),
}


@pytest.mark.parametrize("name", ROUTES)
def test_an_address_is_one_that_other_hosts_reach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    routes, expected = ROUTES[name]
    kv_store: Any = Dict()
    found = {}
    for index in [*range(1, len(routes)), 0, *range(len(routes))]:  # again, when all have left their words
        monkeypatch.setattr(initialize, "route_to", lambda _, route=routes[index]: route)
        try:
            found[index] = own_address(kv_store, index, len(routes), "host:1")
        except jax.errors.JaxRuntimeError:  # it would wait
            continue
    assert [found[i] for i in range(len(routes))] == expected


def test_where_nobody_can_tell_the_runtime_decides() -> None:
    kv_store: Any = Dict()
    assert own_address(kv_store, 1, 2, "unix:/tmp/socket") is None
    assert own_address(kv_store, 0, 2, "127.0.0.1:1") == "127.0.0.1"


def test_who_is_not_heard_is_named_once_until_it_is_heard_again() -> None:
    kv_store: Any = Dict()
    silence = LivenessWatch(kv_store, 0, "host:1", 10.0)

    def look(*beats: tuple[int, bytes]) -> list[str]:
        silence.looks += 1
        silence.hear([(f"sbp/beats/{i}", beat) for i, beat in beats])
        return [silence.text(i) for i in silence.silent()]

    assert not any(look((1, b"%d" % i), (2, b"same")) for i in range(QUIET_LOOKS))
    (said,) = look((1, b"8"), (2, b"same"))
    assert said.startswith("process 0 has heard nothing of process 2 for 4 s: ")
    assert not look((1, b"9"), (2, b"same"))
    assert not look((1, b"10"), (2, b"other"))
    assert not any(look((1, b"11"), (2, ENDED)) for _ in range(QUIET_LOOKS))
    (said,) = look((1, b"11"), (2, ENDED))
    assert "process 1" in said


def test_who_does_not_reach_process_0_names_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its beat waits, as one does on a cable that is cut."""
    cut, done = threading.Event(), threading.Event()

    class Cut(Dict):
        def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
            if value == b"3":
                cut.wait(20)

    kv_store: Any = Cut()
    threads = LivenessWatch(kv_store, 1, "10.0.0.1:4711", 1.0).watch(done)
    with caplog.at_level(logging.WARNING):
        end = threading.Event()
        for _ in range(100):
            if caplog.messages or end.wait(0.05):
                break
    cut.set()
    done.set()
    for thread in threads:
        thread.join()
    assert caplog.messages[0].startswith("process 1 has not reached process 0 at 10.0.0.1:4711 for 0 s: ")


def test_an_error_of_a_program_that_runs_at_once_is_explained_too() -> None:
    """JAX raises what a program has found as a ValueError, where it is run while it is called."""
    kv_store: Any = Dict()
    called(LAST).say(kv_store, 0)
    error = ValueError("UNKNOWN: Gloo all-reduce failed: received data size doesn't match")
    assert "step(batch: float32[13, 64]) in process 0" in str(
        explain_error(error, kv_store, 1, 2, called(STEP))
    )
