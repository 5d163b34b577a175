"""What a call costs on the host: a program of many small arrays, against `jax.jit`.

    python -m benchmarks.calls --leaves 600

The state is donated and comes back, as in a training loop; the steps of all three interleave. A dispatch is
the time until the call returns, a step the time until its results are there, and A/A the same program of
`jit` twice: what the machine's noise makes of equal ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import sbp

WARM_UP = 20


def step(state: Any, x: Any) -> Any:
    """A step that does next to nothing."""
    return jax.tree.map(lambda a: a * 1.01, state), x + 1


def seconds_of(programs: dict[str, Any], states: dict[str, Any], x: Any, steps: int) -> dict[str, Any]:
    """Per program, the seconds of the dispatch and of the whole of each step."""
    found: dict[str, Any] = {name: [] for name in programs}
    for k in range(WARM_UP + steps):
        for name, program in programs.items():
            jax.block_until_ready(states[name])
            began = time.perf_counter()
            states[name], _ = program(states[name], x)
            returned = time.perf_counter()
            jax.block_until_ready(states[name])
            if k >= WARM_UP:
                found[name].append((returned - began, time.perf_counter() - began))
    return found


def measure(devices: int, leaves: int, steps: int) -> None:
    """Prints a line."""
    line = sbp.placement("cpu", shape=(devices,))
    whole = jax.NamedSharding(line.mesh, jax.sharding.PartitionSpec())
    programs = {
        "jit": jax.jit(step, donate_argnums=0),
        "sbp": sbp.compile(step, line, in_sbp=([sbp.B], [sbp.B]), donate_argnums=0),
        "again": jax.jit(lambda state, x: step(state, x), donate_argnums=0),
    }

    def fresh() -> Any:
        return {f"layer{i:03}": jax.device_put(jnp.ones(8), whole) for i in range(leaves)}

    x = jax.device_put(jnp.ones(8), whole)
    found = seconds_of(programs, {name: fresh() for name in programs}, x, steps)

    def ratio(name: str, which: int) -> float:
        return median(a[which] / b[which] for a, b in zip(found[name], found["jit"], strict=True))

    ms = {name: median(t[0] for t in found[name]) * 1e3 for name in ("jit", "sbp")}
    print(
        f"{devices:7}  {leaves:6}  {ms['jit']:7.2f} ms  {ms['sbp']:7.2f} ms  {ratio('sbp', 0):8.2f}"
        f"  {ratio('sbp', 1):6.2f}  {ratio('again', 0):6.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per number of devices."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--leaves", type=int, default=600, help="arrays in the state")
    options.add_argument("--devices", type=int, nargs="*", default=[1, 8])
    options.add_argument("--steps", type=int, default=300)
    args = options.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", max(args.devices))
    print("devices  leaves  jit dispatch  sbp dispatch  sbp / jit    step     A/A")
    for devices in args.devices:
        measure(devices, args.leaves, args.steps)


if __name__ == "__main__":
    main()
