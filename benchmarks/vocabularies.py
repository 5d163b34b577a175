"""What keys cost that appear while a model trains: steps of full vocabularies, and rows that are written.

    python -m benchmarks.vocabularies [--capacities 50000 5000000] [--steps 60]

A step looks 8,192 keys up, of which 1,000 are new, so that 1,000 others leave. Rows are written to a table
of 500,000 x 32 over eight devices of the CPU, with the state of Adam.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np
import optax

import sbp
from sbp.runtime import embedding as em

KEYS, NEW, FILL = 8192, 1000, 1 << 18
POLICIES = (em.LeastRecentlyUsed(), em.LeastFrequentlyUsed(), em.LeastFrequentlyUsed(half_life=50))


def step_seconds(capacity: int, policy: em.Policy, steps: int) -> list[float]:
    """The steps of a full vocabulary; the first one finds who is to leave among all."""
    words, random = em.Vocabulary(capacity, policy), np.random.default_rng(0)
    for first in range(0, capacity, FILL):
        words.lookup(np.arange(first, min(capacity, first + FILL)))
    out = []
    for i in range(steps):
        known = random.zipf(1.2, KEYS - NEW) % capacity
        keys = np.concatenate([known, 10**12 + 7919 * np.arange(NEW * i, NEW * (i + 1))])
        began = time.perf_counter()
        words.lookup(keys)
        out.append(time.perf_counter() - began)
    return out


def write_seconds(counts: list[int], rounds: int) -> dict[int, float]:
    """The median time to write so many rows with their state, in turns."""
    line = sbp.placement("cpu", shape=(8,))
    tables = em.Collection([em.FeatureConfig("f", em.TableConfig("t", 500_000, 32))])
    params = tables.init(jax.random.key(0), line)
    tx = sbp.rows(optax.adam(1e-3))
    shardings = tables.shardings(line, like=jax.eval_shape(tx.init, params))
    tree = params, jax.jit(tx.init, out_shardings=shardings)(params)
    (stack,) = params
    times: dict[int, list[float]] = {n: [] for n in counts}
    for i in range(rounds + 1):
        for n in counts:
            ids, new = np.random.default_rng(i).choice(500_000, n, replace=False), {stack: np.ones((n, 32))}
            rows = new, tx.init(new)
            began = time.perf_counter()
            tree = jax.block_until_ready(tables.write(tree, "t", ids, rows))
            times[n].append(time.perf_counter() - began)
    return {n: statistics.median(found[1:]) for n, found in times.items()}


def main() -> None:
    """Prints both tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--capacities", type=int, nargs="+", default=[50_000, 500_000, 5_000_000])
    options.add_argument("--steps", type=int, default=60)
    args = options.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"{'policy':<44}{'keys':>12}{'first ms':>10}{'median ms':>11}{'most ms':>9}")
    for policy in POLICIES:
        for capacity in args.capacities:
            first, *rest = (1e3 * t for t in step_seconds(capacity, policy, args.steps))
            print(
                f"{policy!s:<44}{capacity:>12,}{first:>10.1f}{statistics.median(rest):>11.2f}{max(rest):>9.2f}"
            )
    for n, each in write_seconds([1, 100, 1000], args.steps).items():
        print(f"{n:>5} rows written with their state: {1e3 * each:.2f} ms")


if __name__ == "__main__":
    main()
