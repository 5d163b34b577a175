"""Llama 3 70B on many H100s: what the planner chooses beside published layouts, priced by one evaluator.

    python -m benchmarks.layouts [--devices 128,1024] [--batch 1024] [--microbatches 4] [--seconds 150]
        [--tables planned,stages]

Bfloat16, sequences of 8,192 tokens, layers in a scan and computed twice, attention as one kernel. Of each
plan: the step with overlap, the share of the peak that is (MFU: 6 FLOPs per parameter and token, and
attention without its masked half), the memory of a device, and the seconds that planning took. Layouts by
hand say where weights, state and batch lie: MaxText's table on one axis (its recipe for 128 H100s) and on
two, and Megatron's (Shoeybi et al., 2019): widths within a host, copies across. What they leave open is
planned. AUTO has rows of what `sbp.search` looks at as well: scans that keep some of what their layers would
compute twice, with one sequence on a device at a time, and scans that are cut into stages.
Layouts with stages by hand follow in a table of their own (benchmarks/pipelined.py).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sbp
from benchmarks import maxtext, pipelined
from models import llama
from sbp.hardware.catalogue import hardware_for
from sbp.options import PipelineOptions
from sbp.rates.chips import CHIPS

CONFIG = replace(llama.PRESETS["70b"], attention="cudnn")
OPTIMIZER = optax.adamw(1e-3)
HOST = 8
STAGES = 4
KEPT = 0.4
"""Queries, keys, values and what attention makes of them: of all products those with the fewest bytes."""
COPY = 64
"""Devices that hold a copy of the weights. Of more, what crosses hosts takes longer the more there are; and
XLA's scheduler takes eight groups of 128 to have one card in each host, so that a gather is six times as long
to it as it is (`believed_collective_seconds`): all kernels there are stand beside the first, the others wait.
"""
PEAK_FLOPS = CHIPS["h100"].matrix_flops["bf16"]


@dataclass(frozen=True)
class LayoutRow:
    """A layout's plan; None with the reason why there is none."""

    name: str
    plan: sbp.Plan | None
    seconds: float
    trouble: str = ""


@dataclass(frozen=True)
class AskedLayout:
    """A layout to be planned.

    Arguments:
      shape: the hierarchy; stages lie along its first axis.
      microbatches: None for the usual number.
      kept: the share of what scans could keep that they do keep.
    """

    name: str
    shape: tuple[int, ...]
    in_sbp: Any = sbp.AUTO
    microbatches: int | None = None
    kept: float = 0.0
    stages: int | None = None

    @property
    def text(self) -> str:
        """The name with all that is asked."""
        said = [f"{self.name}:{'x'.join(map(str, self.shape))}"]
        for n, of in ((self.stages, "stages"), (self.microbatches, "micro-batches")):
            said += [] if n is None else [f"{n} {of}"]
        return ", ".join([*said, f"{self.kept:.0%} kept"] if self.kept else said)

    @property
    def options(self) -> sbp.Options:
        """Options without a limit."""
        pipeline = PipelineOptions(stages=self.stages)
        return sbp.Options(cache=False, scan_kept=self.kept, pipeline=pipeline)


def layouts(devices: int, batch: int) -> Iterator[AskedLayout]:
    """Those of so many devices and sequences."""
    line, grid = (devices,), (devices // HOST, HOST)
    one_each = max(1, batch // devices)
    staged = (STAGES, devices // HOST // STAGES, HOST)
    yield AskedLayout("AUTO", line)
    yield AskedLayout("AUTO", grid)
    yield AskedLayout("AUTO", grid, microbatches=one_each, kept=KEPT)
    if devices > 2 * COPY:
        yield AskedLayout("AUTO", (devices // COPY, COPY), microbatches=one_each, kept=KEPT)
    yield AskedLayout("AUTO", staged, microbatches=batch // staged[1], kept=1.0, stages=STAGES)
    yield AskedLayout("MaxText, FSDP", line, maxtext.signatures(line, CONFIG, OPTIMIZER))
    yield AskedLayout("MaxText, FSDP x tensor", grid, maxtext.signatures(grid, CONFIG, OPTIMIZER))
    yield AskedLayout("Megatron, data x tensor", grid, llama.signatures("2d", grid, CONFIG, OPTIMIZER))
    heads = llama.signatures("fsdp", grid, CONFIG, OPTIMIZER)
    yield AskedLayout("FSDP x tensor, heads and widths", grid, heads)


def train_step(microbatches: int) -> Any:
    """The step that adds up the gradients of so many parts of the batch."""
    gradients = jax.value_and_grad(partial(llama.loss, config=CONFIG))
    if microbatches > 1:
        gradients = sbp.microbatch(gradients, microbatches, batch_args=(1, 2))

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        value, grads = gradients(params, batch, key)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments(batch: int) -> tuple[Any, ...]:
    """Shapes."""
    key = jax.eval_shape(partial(jax.random.key, 0))
    params = jax.eval_shape(partial(llama.init, config=CONFIG), key)
    tokens = jax.ShapeDtypeStruct((batch, CONFIG.sequence + 1), jnp.int32)
    return params, jax.eval_shape(OPTIMIZER.init, params), tokens, key


def model_flops(args: Sequence[Any]) -> float:
    """Of a step, all devices together, without what is computed twice."""
    batch, length = args[2].shape[0], CONFIG.sequence
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(args[0]))
    lookups = math.prod(args[0]["embedding"].shape)
    attention = 6 * CONFIG.layers * CONFIG.width * length
    return batch * length * (6.0 * (weights - lookups) + attention)


def planned(row: AskedLayout, microbatches: int, args: Any, seconds: float | None = None) -> LayoutRow:
    """The plan of a layout.

    Arguments:
      microbatches: where the layout does not say how many.
    """
    begun = time.perf_counter()
    program = sbp.compile(
        train_step(row.microbatches or microbatches),
        sbp.placement("h100", shape=row.shape),
        in_sbp=row.in_sbp,
        donate_argnums=(0, 1),
        options=replace(row.options, time_limit=seconds),
    )
    try:
        plan = program.plan(*args)
    except sbp.SbpError as e:
        (problem, *_) = e.problems
        trouble = f"{problem.got}; {problem.why}"[:120]
        return LayoutRow(row.text, None, time.perf_counter() - begun, trouble)
    return LayoutRow(row.text, plan, time.perf_counter() - begun, "" if plan.fits else "does not fit")


def line(row: LayoutRow, devices: int, flops: float) -> str:
    """A line of the table."""
    if row.plan is None:
        return f"| {row.name} | | | | | | {row.seconds:.0f} | {row.trouble} |"
    p = row.plan
    mfu = flops / p.step_seconds / devices / PEAK_FLOPS
    return (
        f"| {row.name} | {p.step_seconds:.2f} | {mfu:.3f} | {p.exposed_seconds:.2f} "
        f"| {p.memory_bytes / 1e9:.1f} | {p.wire_bytes / 1e9:.0f} | {row.seconds:.0f} | {row.trouble} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.layouts", description=__doc__)
    parser.add_argument("--devices", default="128,1024")
    parser.add_argument("--batch", type=int, default=1024, help="sequences")
    parser.add_argument("--microbatches", type=int, default=4, help="of 128 devices; fewer of more devices")
    parser.add_argument("--seconds", type=float, help="for each plan; else as long as it takes")
    parser.add_argument("--tables", default="planned,stages", help="what to print")
    given = parser.parse_args(argv)
    args = arguments(given.batch)
    for devices in map(int, given.devices.split(",")):
        count = max(1, given.microbatches * 128 // devices)
        if "planned" in given.tables:
            print_planned(devices, count, args, given.seconds)
        if "stages" in given.tables:
            print_stages(devices, count, args)


def print_planned(devices: int, count: int, args: Any, seconds: float | None) -> None:
    """The table of plans, with so many micro-batches."""
    print(f"\n{devices} x h100, {args[2].shape[0]} sequences, {count} micro-batches\n")
    print("| layout | step s | MFU | exposed s | GB | GB sent | planned in s | |")
    print("|---|---|---|---|---|---|---|---|")
    for row in layouts(devices, args[2].shape[0]):
        print(line(planned(row, count, args, seconds), devices, model_flops(args)), flush=True)


def print_stages(devices: int, count: int, args: Any) -> None:
    """The table of layouts with stages."""
    batch, flops = args[2].shape[0], model_flops(args) / devices
    print(f"\n{devices} x h100, {batch} sequences, layouts by hand as benchmarks.published prices them\n")
    print("| layout | step s | MFU | bubble s | about GB | |")
    print("|---|---|---|---|---|---|")
    for row in pipelined.rows(CONFIG, devices, batch, count, hardware_for("h100")):
        print(row.line(flops, PEAK_FLOPS), flush=True)


if __name__ == "__main__":
    main()
