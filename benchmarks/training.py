"""What `sbp.fit` adds to a step on the host, beside a loop that places the same batches and reads no metric.

    python -m benchmarks.training [--steps 1000] [--rounds 3]

Both run the same program in turns, a step so small that the host is what takes the time. A step lasts
from one batch that is asked for to the next; a row says the median of all steps of all rounds, and what the
loop takes beside itself (A/A). `fit` may add 50 us.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp

MOST_ADDED_SECONDS = 50e-6
WARM_STEPS = 50


def program() -> Any:
    """A step of a few numbers."""

    def step(w: Any, batch: Any) -> Any:
        return w + 0.1 * (batch - w), jnp.sum((batch - w) ** 2)

    return sbp.compile(step, sbp.placement("cpu", shape=(1,)), donate_argnums=0)


class Clock:
    """Batches, and when each was asked for.

    Arguments:
      steps: how many there are.
    """

    def __init__(self, steps: int) -> None:
        self.batch, self.steps = np.ones(8, np.float32), steps
        self.walls, self.works = list[float](), list[float]()

    def __call__(self, i: int) -> Any:
        self.walls.append(time.perf_counter())
        self.works.append(time.thread_time())
        return self.batch

    def step_seconds(self) -> tuple[list[float], list[float]]:
        """Of every step but the first ones: by the wall, and by the CPU time of the loop's thread."""
        return tuple(list(np.diff(x[WARM_STEPS:])) for x in (self.walls, self.works))  # type: ignore[return-value]


def plain(step: Any, clock: Clock) -> None:
    """Places and steps."""
    state, batch = step.place(jnp.zeros(8), clock(0))
    for i in range(1, clock.steps + 1):
        state, _ = step(state, batch)
        state, batch = step.place(state, clock(i))
    jax.block_until_ready(state)


def fitted(step: Any, clock: Clock) -> None:
    """The same by `fit`."""
    sbp.fit(step, (jnp.zeros(8),), clock, steps=clock.steps + 1, progress=False)


def fitted_and_shown(step: Any, clock: Clock) -> None:
    """The same by `fit`, with lines on stderr."""
    sbp.fit(step, (jnp.zeros(8),), clock, steps=clock.steps + 1)


LOOPS: dict[str, Callable[[Any, Clock], None]] = {
    "loop": plain,
    "loop again": plain,
    "fit": fitted,
    "fit, shown": fitted_and_shown,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row per loop; 1 if `fit` adds more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    step = program()
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in LOOPS}
    for _ in range(args.rounds + 1):
        for name, run in LOOPS.items():
            clock = Clock(args.steps + WARM_STEPS)
            run(step, clock)
            for kept, found in zip(seconds[name], clock.step_seconds(), strict=True):
                kept += found
        if _ == 0:  # compiles
            seconds = {name: ([], []) for name in LOOPS}
    print(f"{'':<12}{'step us':>9}{'ratio':>7}{'CPU us':>9}{'ratio':>7}{'added us':>10}")
    base = [median(x) for x in seconds["loop"]]
    added = dict[str, float]()
    for name, kept in seconds.items():
        wall, work = (median(x) for x in kept)
        added[name] = wall - base[0]
        row = f"{1e6 * wall:9.1f}{wall / base[0]:7.2f}{1e6 * work:9.1f}{work / base[1]:7.2f}"
        print(f"{name:<12}{row}{1e6 * added[name]:10.1f}")
    met = added["fit"] <= MOST_ADDED_SECONDS
    verdict = "ok" if met else "MISSED"
    print(f"fit adds {1e6 * added['fit']:.1f} us a step: at most {1e6 * MOST_ADDED_SECONDS:.0f}, {verdict}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
