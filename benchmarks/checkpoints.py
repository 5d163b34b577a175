"""How long training stands still for a checkpoint: the time inside `save`, beyond the copy to the host.

    python -m benchmarks.checkpoints [--megabytes 64,256] [--saves 5]

While steps run, every tenth is saved. The copy to the host is measured by itself, of arrays that nobody has
read yet; what `save` takes beyond it may be 0.3 s or a tenth of a step, whichever is longer. What is written
goes on in a thread, and has its time until the next save; one that comes too early waits for the one before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import sbp

EVERY = 10
LEAVES = 16
MOST_SECONDS, MOST_SHARE = 0.3, 0.1


@dataclass(frozen=True)
class Held:
    """Medians of one size of state, in seconds.

    Arguments:
      save: inside `save`.
      copy: of the state to the host alone.
      step: of a training step.
    """

    megabytes: int
    save: float
    copy: float
    step: float

    @property
    def beyond(self) -> float:
        """What a save takes beyond the copy."""
        return max(0.0, self.save - self.copy)

    @property
    def most(self) -> float:
        """What that may be."""
        return max(MOST_SECONDS, MOST_SHARE * self.step)


def held(megabytes: int, saves: int) -> Held:
    """Trains and saves on eight CPU devices."""
    placement = sbp.placement("cpu", shape=(8,))

    def step(state: Any) -> Any:
        return [x * 0.999 + jnp.tanh(x) * 1e-3 for x in state]

    program = sbp.compile(step, placement, in_sbp=([sbp.S(0)],))
    size = megabytes * 2**20 // 4 // LEAVES // 1024
    (state,) = program.place([jnp.ones((size, 1024)) * i for i in range(LEAVES)])
    state = jax.block_until_ready(program(state))
    inside: list[float] = []
    copies: list[float] = []
    steps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = sbp.Checkpoints(folder, keep=1)
        for i in range(saves + 1):
            for _ in range(EVERY):
                began = time.perf_counter()
                state = jax.block_until_ready(program(state))
                steps.append(time.perf_counter() - began)
            runs.wait()  # steps here are short: elsewhere it is on disk long before
            began = time.perf_counter()
            runs.save(state, step=i)
            inside.append(time.perf_counter() - began)
            state = jax.block_until_ready(program(state))  # arrays that nobody has copied yet
            began = time.perf_counter()
            jax.device_get(state)
            copies.append(time.perf_counter() - began)
        runs.close()
    # The first one makes the folder, and orbax's threads.
    return Held(megabytes, median(inside[1:]), median(copies[1:]), median(steps))


def main(argv: Sequence[str] | None = None) -> list[Held]:
    """Prints a line per size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--megabytes", default="64,256", help="sizes of the state")
    parser.add_argument("--saves", type=int, default=5)
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"{'state':<10}{'step':>9}{'save':>9}{'copy':>9}{'beyond':>9}{'at most':>9}")
    found = [held(int(m), options.saves) for m in options.megabytes.split(",")]
    for h in found:
        times = "".join(f"{x:>7.3f} s" for x in (h.step, h.save, h.copy, h.beyond, h.most))
        print(f"{f'{h.megabytes} MB':<10}{times}")
    return found


if __name__ == "__main__":
    main()
