"""What a training with tiers takes of devices and host, as it is measured, and rows that keep to it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from sbp.compat.untyped import live_arrays
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.tiers import messages
from sbp.text.units import bytes_text

MOST_PROBES = 4
"""Compiled steps that are looked at for rows that fit."""
MARGIN = 0.02
"""Of a limit, that is aimed below it: what a step takes is no smooth function of its rows."""


@dataclass(frozen=True)
class MemoryNow:
    """What is taken now.

    Arguments:
      device: the most bytes of arrays on one device of this process.
      host: anonymous bytes of the process; arrays of devices whose memory is the host's are not counted.
      mapped_bytes: bytes of files that are mapped and in memory; the system takes them back when it needs to.
    """

    device: int
    host: int
    mapped_bytes: int

    def most(self, other: MemoryNow) -> MemoryNow:
        """The larger of each."""
        return MemoryNow(*(max(x, y) for x, y in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __str__(self) -> str:
        mapped = f"{bytes_text(self.mapped_bytes)} of files mapped"
        return f"{bytes_text(self.device)} on a device, {bytes_text(self.host)} on the host, {mapped}"


def memory_now() -> MemoryNow:
    """What is taken now; zeros for the host where the system does not say it."""
    devices = dict[Any, int]()
    for x in live_arrays():
        if x.is_deleted():
            continue
        part = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for device in x.sharding.addressable_devices:
            devices[device] = devices.get(device, 0) + part
    held = sum(n for d, n in devices.items() if d.platform == "cpu")
    anonymous, mapped = _resident("RssAnon"), _resident("RssFile")
    return MemoryNow(max(devices.values(), default=0), max(0, anonymous - held), mapped)


def step_bytes(compiled: jax.stages.Compiled) -> int:
    """What a device holds while a step runs: arguments, results and temporaries; 0 if nobody knows."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    return int(
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )


def rows_within(limit: float, least: float, needed: Callable[[float], float]) -> float:
    """The budget of the rows of a pass with which a step keeps to a limit of each device.

    Arguments:
      limit: bytes of a device.
      least: the smallest budget, such as that of one batch.
      needed: budget of the rows -> bytes of a device while a step runs, as of `step_bytes`.

    Raises:
      EmbeddingError: if a step does not keep to the limit with the smallest budget.

    >>> rows_within(100.0, 8.0, lambda rows: 20 + 1.5 * rows)
    52.0
    """
    rows, before = least, needed(least)
    if before > limit:
        raise EmbeddingError(messages.step_too_large(limit, before, least))
    tried = 2 * least
    for _ in range(MOST_PROBES):
        more = needed(tried)
        slope = max((more - before) / (tried - rows), 1.0)
        if more <= limit:
            rows, before = tried, more
            if more >= (1 - 2 * MARGIN) * limit:
                break
        tried = min(limit, rows + ((1 - MARGIN) * limit - before) / slope)
        if tried <= rows:
            break
    return rows


# -- inside


def _resident(name: str) -> int:
    """A line of what the system says of this process, in bytes."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
