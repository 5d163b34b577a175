"""A cable that delays, as a program: python delay.py SECONDS NAME NAME

It makes two network interfaces, and gives what is sent into one to the other one, so many seconds later.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import sys
import threading
import time

_SET_INTERFACE = 0x400454CA
"""TUNSETIFF in linux/if_tun.h."""
_TUN, _NO_HEADER = 0x0001, 0x1000
MOST_BYTES = 65536


def interface(name: str) -> int:
    """A descriptor whose packets go to, and come from, a new interface."""
    opened = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(opened, _SET_INTERFACE, struct.pack("16sH14x", name.encode(), _TUN | _NO_HEADER))
    return opened


def forward(here: int, there: int, seconds: float) -> None:
    """Gives all packets of one interface to another one, later."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def give() -> None:
        while True:
            due, packet = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                os.write(there, packet)
            except OSError:  # that interface is not up yet: as on a cable, the packet is lost
                continue

    threading.Thread(target=give, daemon=True).start()
    while True:
        try:
            packet = os.read(here, MOST_BYTES)
        except OSError:  # not up yet
            time.sleep(0.05)
            continue
        waiting.put((time.monotonic() + seconds, packet))


def main(seconds: float, *names: str) -> None:
    """Forwards both ways until it is killed."""
    one, other = (interface(name) for name in names)
    print("up", flush=True)
    threading.Thread(target=forward, args=(one, other, seconds), daemon=True).start()
    forward(other, one, seconds)


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
