"""The address at which a process is reached by the others, where CPU devices exchange data through gloo.

gloo takes what the host's own name stands for. That is often nothing, or an address that only the host itself
can reach (127.0.1.1 in Debian's /etc/hosts). But all processes reach process 0: so a process takes the
address from which it does; and the host of process 0 the one at which processes of other hosts do.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass

from sbp.compat.processes import KVStore

WAIT_SECONDS = 60.0
"""For the word of the others, which have joined by then."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostRoute:
    """How a process reaches process 0.

    Arguments:
      own: its own address on the way there.
      there: the address of process 0.
    """

    own: str
    there: str


def route_to(coordinator: str) -> HostRoute:
    """How this process reaches "host:port"; nothing is sent.

    Raises:
      OSError: if the host has no address, or there is no way to it.

    >>> route_to("127.0.0.1:80")
    HostRoute(own='127.0.0.1', there='127.0.0.1')
    """
    host, _, port = coordinator.rpartition(":")
    for family, kind, _, _, address in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    ):
        with suppress(OSError), socket.socket(family, kind) as s:
            s.connect(address)
            return HostRoute(str(s.getsockname()[0]), str(s.getpeername()[0]))
    raise OSError(f"there is no way to {coordinator}")


def is_loopback(address: str) -> bool:
    """Whether only the host itself reaches an address.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address(kv_store: KVStore, index: int, count: int, coordinator: str) -> str | None:
    """The address at which the others reach this process; None where nobody can tell. All processes call it.

    Arguments:
      index, count: of this process, and of all.
      coordinator: "host:port" of process 0.

    Raises:
      JaxRuntimeError: if the others do not say how they reach process 0.
    """
    route = None
    with suppress(OSError, ValueError):  # gRPC takes other addresses, too
        route = route_to(coordinator)
    there = "" if route is None else route.there
    kv_store.key_value_set_bytes(f"sbp/reached/{index}", there.encode(), allow_overwrite=True)
    if route is None:
        return None
    if not is_loopback(route.own):
        return route.own
    # On the host of process 0: who comes from another one knows what that is called from there.
    for other in range(1, count):
        key, milliseconds = f"sbp/reached/{other}", int(1000 * WAIT_SECONDS)
        there = kv_store.blocking_key_value_get_bytes(key, milliseconds).decode()
        if there and not is_loopback(there):
            return there
    return LOOPBACK
