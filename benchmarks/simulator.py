"""Simulated steps of a GPT on GPUs that are not here, beside what XLA's own scheduler reckons they take.

    python -m benchmarks.simulator sbp:data:8 jit:data:8 sbp:tensor:8 jit:tensor:8 sbp:2d:2x4 jit:2d:2x4

A row is WHO:ANNOTATION:PLACEMENT. It is compiled for H100 with JAX's CUDA plugin (the extra gpu-target; no
GPU and no driver), 20 to 60 s each. "XLA" is the end of the schedule that its latency-hiding scheduler has
planned with its speed-of-light estimator, and the cycles that it says are wasted waiting.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import sbp
from models import gpt
from sbp.notation.resolve import resolve, to_partition_spec
from sbp.rates.chips import CHIPS
from sbp.runtime.target.devices import absent_mesh
from sbp.runtime.target.events import Simulation
from sbp.runtime.target.simulation import simulate

HEADER = """\
| row | step ms | kernels | exposed | collectives | MFU | XLA: step | exposed |
|---|---|---|---|---|---|---|---|"""


def abstract_case(
    choice: str, shape: Sequence[int], config: gpt.Config, batch: int
) -> tuple[Any, tuple[Any, ...], Any]:
    """A train step, its arguments as shapes, and their signatures."""
    optimizer = optax.adamw(1e-3)
    params = jax.eval_shape(partial(gpt.init, config=config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, config.sequence + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(1))
    args = params, jax.eval_shape(optimizer.init, params), tokens, key
    return gpt.make_train_step(config, optimizer), args, gpt.signatures(choice, shape, config, optimizer)


def lowered(who: str, choice: str, placement: sbp.Placement, config: gpt.Config, batch: int) -> Any:
    """The step of a row, by this compiler or by jit with the same shardings."""
    step, args, in_sbp = abstract_case(choice, placement.shape, config, batch)
    if who == "sbp":
        return sbp.compile(step, placement, in_sbp=in_sbp, donate_argnums=(0, 1)).lower(*args)
    flat, tree = jax.tree.flatten(args)
    sbps, problems = resolve(in_sbp, args, ["argument"] * len(flat), placement, "in_sbp")
    assert not problems, problems
    whole, mesh = (sbp.B,) * placement.ndim, absent_mesh(placement)
    specs = [to_partition_spec(nd or whole, x.ndim, placement) for nd, x in zip(sbps, flat, strict=True)]
    named = jax.tree.unflatten(tree, [NamedSharding(mesh, spec) for spec in specs])
    peer = jax.jit(step, in_shardings=named, out_shardings=(*named[:2], None), donate_argnums=(0, 1))
    return peer.trace(*args).lower(lowering_platforms=("cuda",))


def counted_flops(config: gpt.Config, batch: int) -> float:
    """FLOPs of a step as XLA counts them before it partitions or optimises anything."""
    step, args, _ = abstract_case("data", (1,), config, batch)
    counted: Any = jax.jit(step).lower(*args).cost_analysis()
    return float(counted["flops"])


def compiled(program: Any) -> tuple[str, float, float]:
    """The text of the executable, and XLA's own seconds of a step and of waiting."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_latency_hiding_schedule": True,
            "xla_gpu_enable_analytical_sol_latency_estimator": True,
        }
        text = program.compile(compiler_options=options).as_text()
        found = "".join(path.read_text() for path in Path(folder).glob("*.schedule.txt"))
    # Loops have schedules of their own, with no trips; the entry's is the last.
    totals = [[float(n) for n in re.findall(rf"{key}: ([\d.e+]+)", found)] for key in STATISTICS]
    return text, *(numbers[-1] * 1e-6 if numbers else float("nan") for numbers in totals)


STATISTICS = (r"\btotal_cycles", r"\btotal_wasted_cycles")


def line(row: str, found: Simulation, xla: Sequence[float]) -> str:
    ms = [found.seconds, found.kernel_seconds, found.exposed_seconds, sum(found.network_seconds.values())]
    cells = [*(f"{s * 1e3:.2f}" for s in ms), f"{found.mfu:.1%}", *(f"{s * 1e3:.2f}" for s in xla)]
    return f"| {row} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulator")
    parser.add_argument("rows", nargs="+", help="such as sbp:2d:2x4 or jit:data:8")
    parser.add_argument("--chip", default="h100", choices=list(CHIPS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=51200)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args(argv)
    heads = options.width // 64
    sizes = options.layers, options.width, heads, options.vocabulary, options.sequence
    config = gpt.Config(*sizes, dropout=0.0)
    print(HEADER)
    for row in options.rows:
        who, choice, sizes_ = row.split(":")
        placement = sbp.placement(options.chip, shape=tuple(map(int, sizes_.split("x"))))
        text, *xla = compiled(lowered(who, choice, placement, config, options.batch))
        found = simulate(text, CHIPS[options.chip])
        print(line(row, found, xla), flush=True)
    flops, counted = found.flops * placement.size, counted_flops(config, options.batch)
    print(f"\nFLOPs of the last row's products {flops:.4g}, of XLA's count {counted:.4g}")


if __name__ == "__main__":
    main()
