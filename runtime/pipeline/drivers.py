"""Who drives the placements of a pipeline: one driver, or a thread for each, whichever is faster.

One driver overlaps stages as far as JAX starts work without waiting for it. Where it waits (for the host, or
for devices that are a part of it), a thread for each placement overlaps them; where it does not, threads cost
more than they give. Results are the same bit for bit, so the first steps are run both ways and timed.
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
    """Whether a thread for each placement can be faster than one driver.

    XLA's CPU client runs one program of several devices at a time, whoever starts it.

    Arguments:
      scheduled: whether there are micro-batches.
    """
    on_cpu = any(p.platform == "cpu" for p in placements)
    return scheduled and len(placements) > 1 and not (on_cpu and any(len(p.ranks) > 1 for p in placements))


@dataclass
class Drivers:
    """How a program is driven.

    Arguments:
      threads: whether each placement has a thread of its own; None while that is being found out.
      seconds: the times of steps, with threads and with one driver.
    """

    threads: bool | None
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def run(self, step: Callable[[bool], T], given: Sequence[jax.Array]) -> T:
        """One step: `step` runs it, with threads or with one driver, on what is given."""
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
