"""What it costs that devices are in several processes: the same step on 1 x 8 CPU devices and on 2 x 4.

    python -m benchmarks.processes [--width 512] [--layers 4] [--steps 30] [--rounds 3] [--json FILE]

In every set-up steps of `jax.jit` with NamedShardings, of sbp, and of a second copy of the first (A/A: what
the machine's noise makes of equal programs) interleave, in an order that all processes know. The set-ups take
turns, each started `--rounds` times, since two at once would take each other's cores. A step is timed until
its results are there, on process 0; what is shown are medians over the rounds of the medians of a round.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from sbp import B, S

DEVICES = 8
SET_UPS = (1, 2)
"""How many processes have the devices."""
WARM_UP = 3
NAMES = ("jit", "sbp", "jit again")


def train_step(params: Any, state: Any, batch: Any) -> Any:
    """A step of an MLP with Adam, data parallel."""

    def loss(params: Any) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optax.adam(1e-3).update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def programs(params: Any, state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The three programs, the state that each begins with, and the batch; all on the devices."""
    placement = sbp.placement("cpu", shape=(DEVICES,))
    whole = NamedSharding(placement.mesh, PartitionSpec())
    rows = NamedSharding(placement.mesh, PartitionSpec("x"))
    ours = sbp.compile(train_step, placement, in_sbp=([B], [B], [S(0)]), donate_argnums=(0, 1))

    def jitted() -> Any:
        shardings = (whole, whole, rows), (whole, whole, whole)
        return jax.jit(
            train_step, in_shardings=shardings[0], out_shardings=shardings[1], donate_argnums=(0, 1)
        )

    made = {"jit": jitted(), "sbp": ours, "jit again": jitted()}
    *_, placed = ours.place(params, state, batch)
    states = {name: ours.place(params, state, batch)[:2] for name in made}
    return made, states, placed


def measured(width: int, layers: int, steps: int) -> dict[str, float]:
    """The median seconds of a step of each program, here."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(width, width)).astype(np.float32) / width**0.5 for _ in range(layers)]
    state = jax.tree.map(np.asarray, optax.adam(1e-3).init(params))
    batch = rng.normal(size=(64, width)).astype(np.float32)
    made, states, placed = programs(params, state, batch)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    order = random.Random(0)
    for i in range(WARM_UP + steps):
        for name in order.sample(NAMES, len(NAMES)):
            began = time.perf_counter()
            *states[name], value = made[name](*states[name], placed)
            jax.block_until_ready((states[name], value))
            if i >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return {name: median(x) for name, x in seconds.items()}


def run_round(processes: int, options: argparse.Namespace) -> dict[str, float]:
    """One start of a set-up, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        sizes = [f"--{name}={getattr(options, name)}" for name in ("width", "layers", "steps")]
        launch = ["launch", "--processes", str(processes), "--devices", str(DEVICES // processes)]
        command = [sys.executable, "-m", "sbp", *launch, "-m", "benchmarks.processes", *sizes]
        subprocess.run([*command, "--write", str(file)], check=True, capture_output=True)
        return dict(json.loads(file.read_text()))


def table(rounds: dict[int, list[dict[str, float]]]) -> str:
    """What was found, in words."""
    found = {n: {name: median(r[name] for r in rs) for name in NAMES} for n, rs in rounds.items()}
    lines = [f"{'devices':<8}{'jit':>10}{'sbp':>10}{'sbp/jit':>9}{'A/A':>7}"]
    for n, ms in found.items():
        ratios = f"{ms['sbp'] / ms['jit']:>9.2f}{ms['jit again'] / ms['jit']:>7.2f}"
        lines.append(f"{n} x {DEVICES // n:<4}{1e3 * ms['jit']:>7.1f} ms{1e3 * ms['sbp']:>7.1f} ms{ratios}")
    one, two = (found[n] for n in SET_UPS)
    lines.append(f"{'2/1':<8}{two['jit'] / one['jit']:>10.2f}{two['sbp'] / one['sbp']:>10.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures both set-ups in turn; or, in a process of one of them, this one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all rounds there")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.write:
        found = measured(options.width, options.layers, options.steps)
        if jax.process_index() == 0:
            Path(options.write).write_text(json.dumps(found))
        return
    rounds: dict[int, list[dict[str, float]]] = {n: [] for n in SET_UPS}
    for _ in range(options.rounds):
        for n in SET_UPS:
            rounds[n].append(run_round(n, options))
    print(table(rounds))
    if options.json:
        Path(options.json).write_text(json.dumps(rounds))


if __name__ == "__main__":
    main()
