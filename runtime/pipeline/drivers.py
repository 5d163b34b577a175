"""Chooses how the placements of a pipeline are driven: by one driver, or by a thread each.

One driver overlaps stages as far as JAX starts work without waiting for it. Where JAX waits (for the host, or
for devices that are a part of it), a thread per placement overlaps them; elsewhere threads only cost time.
The results are equal bit for bit, so the first steps are run both ways and timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import jax

from sbp.compat.untyped import block_until_ready
from sbp.placement import Placement

T = TypeVar("T")

# Steps that are timed of either kind, by turns; the first one is slower than others, and does not count.
STEPS = 3
# Of one driver's time, what a step with threads must stay below: timings are noisy.
BETTER = 0.9


def may_help(placements: Sequence[Placement], scheduled: bool) -> bool:
    """Whether a thread per placement can be faster than one driver.

    XLA's CPU client runs one program of several devices at a time, whichever thread starts it.

    Arguments:
      scheduled: whether there are micro-batches.
    """
    on_cpu = any(p.platform == "cpu" for p in placements)
    return scheduled and len(placements) > 1 and not (on_cpu and any(len(p.ranks) > 1 for p in placements))


@dataclass
class Drivers:
    """The drivers of a program.

    Arguments:
      threads: whether each placement has a thread of its own; None while both are timed.
      seconds: the times of steps, with threads and with one driver.
    """

    threads: bool | None
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def run(self, step: Callable[[bool], T], given: Sequence[jax.Array]) -> T:
        """Runs one step: `step` runs it, with threads or with one driver."""
        if self.threads is not None:
            return step(self.threads)
        threads = len(self.seconds[True]) <= len(self.seconds[False])
        block_until_ready(given)
        began = time.perf_counter()
        out = block_until_ready(step(threads))
        self.note(threads, time.perf_counter() - began)
        return out

    def note(self, threads: bool, seconds: float) -> None:
        """Takes the time of a step, and decides after the last one."""
        self.seconds[threads].append(seconds)
        many, one = self.seconds[True], self.seconds[False]
        if min(len(many), len(one)) >= STEPS:
            self.threads = min(many[1:]) < BETTER * min(one[1:])
