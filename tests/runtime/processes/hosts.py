"""Two hosts on one machine: network namespaces with names and addresses of their own, and a cable between.

They live as long as a process that sleeps in each: nothing is left when the tests end, however that is.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ADDRESSES = ("10.78.0.1", "10.78.0.2")
MOST_SECONDS = 300
DELAY = Path(__file__).with_name("delay.py")


def shell(*command: str) -> None:
    """Runs a command to its end."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@functools.cache
def why_not() -> str:
    """Why there are no namespaces here; "" where there are."""
    try:
        shell("unshare", "--net", "--uts", *"ip link add eth0 type veth peer name eth1".split())
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", "") or str(e)
        return f"no network namespaces of its own for this user: {said.strip()}"
    return ""


@dataclass
class Hosts:
    """Two hosts.

    Arguments:
      holders: a process that sleeps in each.
      running: what was started there.
    """

    holders: tuple[subprocess.Popen[bytes], ...]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def within(self, host: int, *command: str) -> tuple[str, ...]:
        """A command as it is run on a host."""
        return ("nsenter", "-t", str(self.holders[host].pid), "--net", "--uts", *command)

    def ip(self, host: int, *args: str) -> None:
        """Changes the network of a host."""
        shell(*self.within(host, "ip", *args))

    def start(self, host: int, command: Sequence[str], to: IO[str]) -> subprocess.Popen[str]:
        """Starts a command on a host.

        Arguments:
          to: where both its streams go.
        """
        started = subprocess.Popen(self.within(host, *command), stdout=to, stderr=to, text=True)
        self.running.append(started)
        return started


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, not connected yet."""
    sleep = ("sh", "-c", 'hostname "$0" && echo up && exec sleep "$1"')
    holders = tuple(
        subprocess.Popen(
            ["unshare", "--net", "--uts", *sleep, f"host{i}", str(MOST_SECONDS)], stdout=subprocess.PIPE
        )
        for i in range(2)
    )
    hosts = Hosts(holders)
    try:
        for i, holder in enumerate(holders):
            assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
            hosts.ip(i, "link", "set", "lo", "up")
        yield hosts
    finally:
        for process in (*hosts.running, *holders):
            process.kill()
            process.wait()
        for holder in holders:
            assert holder.stdout is not None
            holder.stdout.close()


def connect(hosts: Hosts) -> None:
    """A cable."""
    other = str(hosts.holders[1].pid)
    hosts.ip(0, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
    for i, address in enumerate(ADDRESSES):
        hosts.ip(i, "address", "add", f"{address}/24", "dev", "eth0")
        hosts.ip(i, "link", "set", "eth0", "up")


@contextmanager
def connected_slowly(hosts: Hosts, seconds: float) -> Iterator[None]:
    """A cable on which every packet takes so long: a program takes them from one host, and gives them to the
    other one later."""
    names = tuple(f"sbp{hosts.holders[0].pid}{end}"[-15:] for end in "ab")
    command = [sys.executable, str(DELAY), str(seconds), *names]
    forwarder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert forwarder.stdout is not None and forwarder.stdout.readline() == "up\n"
        for i, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            shell("ip", "link", "set", name, "netns", str(hosts.holders[i].pid))
            peer = ADDRESSES[1 - i]
            hosts.ip(i, "address", "add", address, "peer", peer, "dev", name)
            hosts.ip(i, "link", "set", name, "up")
        yield
    finally:
        forwarder.kill()
        forwarder.communicate()
