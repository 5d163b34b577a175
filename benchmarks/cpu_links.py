"""What collectives and arithmetic cost on forced CPU devices: the source of the catalogue's "cpu" entry.

python -m benchmarks.cpu_links
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import sbp

REPEATS = 10  # operations in one program, so that its launch does not count
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "all-reduce": lambda v: lax.psum(v, "x") * 0.1,
    "reduce-scatter + all-gather": lambda v: lax.all_gather(
        lax.psum_scatter(v, "x", tiled=True), "x", tiled=True
    ),
    "all-to-all": lambda v: lax.all_to_all(v, "x", 0, 0, tiled=True) * 1.1,
    "multiply": lambda v: v * 1.1 + 0.1,
    "sine": lambda v: jnp.sin(v) * 1.1,
}


def seconds(f: Callable[[Any], Any], x: Any, runs: int = 20) -> float:
    """The median time of one operation."""
    jax.block_until_ready(f(x))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(x))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / REPEATS


def repeated(operation: Callable[[Any], Any], mesh: Any) -> Callable[[Any], Any]:
    """A program on all devices that applies an operation again and again."""
    spec = PartitionSpec()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(v: Any) -> Any:
        for _ in range(REPEATS):
            v = operation(v)
        return v

    return run


def main() -> None:
    """Prints a table."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = sbp.placement("cpu", shape=(8,)).mesh
    for name, operation in OPERATIONS.items():
        for n in (1 << 10, 1 << 14, 1 << 17, 1 << 20):
            t = seconds(repeated(operation, mesh), jnp.ones(n, jnp.float32))
            print(f"{name:28s} {4 * n:9d} bytes {t * 1e6:9.1f} us {4 * n / t / 1e9:7.3f} GB/s")
    for n in (128, 512):
        t = seconds(repeated(lambda v: v @ v * 1e-3, mesh), jnp.ones((n, n), jnp.float32))
        print(f"matrix product {n:4d} {t * 1e6:9.1f} us {2 * n**3 / t / 1e9:7.2f} GFLOP/s per device")


if __name__ == "__main__":
    main()
