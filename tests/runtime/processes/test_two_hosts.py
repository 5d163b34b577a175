"""Processes on two hosts, each with a name and an address of its own; what is between them fails.

gloo would listen at what the host's name stands for, which is nothing here. Who is not heard is named before
JAX ends all, on both hosts: the log of one of them may be all that is left.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.processes.hosts import (
    ADDRESSES,
    Hosts,
    connect,
    connected_slowly,
    two_hosts,
    why_not,
)
from tests.runtime.processes.test_two_processes import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "no reason"),
]
PORT = 4711
SCRIPT = """
import sys, time
import jax, numpy as np, sbp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
sbp.initialize(sys.argv[1], 2, int(sys.argv[2]))
total = sbp.compile(lambda x: x.sum(), sbp.placement("cpu", shape=(4,)), in_sbp=([sbp.S(0)],))
for i in range(int(sys.argv[3])):
    assert float(total(np.full(4, i, np.float32))) == 4 * i
    print("step", i, flush=True)
    time.sleep(0.02)
print("done", flush=True)
"""


class Pair:
    """One process on each host, and what they say.

    Arguments:
      hosts: where they run.
      folder: for the script and the logs.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "script.py").write_text(SCRIPT)

    def start(self, steps: int) -> None:
        """Starts both."""
        for i in range(2):
            command = ["env", f"PYTHONPATH={ROOT}", sys.executable, str(self.folder / "script.py")]
            with self.log(i).open("w") as log:
                self.hosts.start(i, [*command, f"{ADDRESSES[0]}:{PORT}", str(i), str(steps)], log)

    def log(self, host: int) -> Path:
        """Where a process writes."""
        return self.folder / f"host{host}.log"

    def said(self, host: int) -> str:
        """What it has written."""
        return self.log(host).read_text()

    def await_steps(self, steps: int) -> None:
        """Waits until both have come so far."""
        while not all(f"step {steps}\n" in self.said(i) for i in range(2)):
            assert all(p.poll() is None for p in self.hosts.running), self.said(1)
            time.sleep(0.05)

    def codes(self) -> list[int | None]:
        """How both have ended."""
        for process in self.hosts.running:
            process.wait()
        return [p.returncode for p in self.hosts.running]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with two_hosts() as hosts:
        yield Pair(hosts, tmp_path)


def cut(hosts: Hosts) -> None:
    hosts.ip(1, "link", "set", "eth0", "down")


def swallow(hosts: Hosts) -> None:
    hosts.ip(1, "route", "add", "blackhole", ADDRESSES[0])


def swallow_answers(hosts: Hosts) -> None:
    hosts.ip(0, "route", "add", "blackhole", ADDRESSES[1])


@pytest.mark.parametrize(
    "fails",
    [
        cut,
        pytest.param(swallow, marks=pytest.mark.slow),
        pytest.param(swallow_answers, marks=pytest.mark.slow),
    ],
)
def test_who_is_cut_off_is_named_on_both_hosts_and_both_end(
    fails: Callable[[Hosts], None], pair: Pair
) -> None:
    connect(pair.hosts)
    pair.start(100_000)
    pair.await_steps(10)
    fails(pair.hosts)
    assert 0 not in pair.codes()
    assert re.search(r"process 0 has heard nothing of process 1 for 4 s: .* or the network", pair.said(0))
    assert f"process 1 has not reached process 0 at {ADDRESSES[0]}:{PORT} for 4 s: " in pair.said(1)


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no /dev/net/tun")
def test_where_every_packet_takes_200_ms_they_come_to_the_end(pair: Pair) -> None:
    with connected_slowly(pair.hosts, 0.2):
        pair.start(5)
        assert pair.codes() == [0, 0]
    assert all("done\n" in pair.said(i) for i in range(2))
    assert not any("has heard nothing" in pair.said(i) or "not reached" in pair.said(i) for i in range(2))


@pytest.mark.slow
def test_a_cable_that_is_out_for_a_moment_is_no_reason_to_end(pair: Pair) -> None:
    connect(pair.hosts)
    pair.start(300)
    pair.await_steps(10)
    cut(pair.hosts)
    time.sleep(2.0)
    pair.hosts.ip(1, "link", "set", "eth0", "up")
    assert pair.codes() == [0, 0]
