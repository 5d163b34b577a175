"""How well stages overlap: a pipeline whose stages sleep, against its simulated timeline.

    python -m benchmarks.pipeline_overlap --stages 4 --microbatches 8

Every stage's forward sleeps for one unit and its backward for two, on the host, whatever the machine computes
meanwhile: what is measured is how the runtime orders and overlaps stages, not how fast devices are. "Apart"
is the most that any action starts or ends before or after where the simulated timeline has it, of the loop's
time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.options import PipelineOptions
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import largest_difference
from sbp.passes.schedule.times import Times

SIZE = 4


def asleep(seconds: float) -> Any:
    """A function of an array that sleeps, and gives the array back."""

    def sleep(x: Any) -> Any:
        time.sleep(seconds)
        return np.asarray(x)

    return lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def sleepy(forward_seconds: float, backward_seconds: float) -> Any:
    """A layer that sleeps in both directions."""
    forward, backward = asleep(forward_seconds), asleep(backward_seconds)

    @jax.custom_vjp
    def layer(x: Any, w: Any) -> Any:
        return forward(x) * w

    def undo(kept: Any, g: Any) -> Any:
        x, w = kept
        g = backward(g)
        return g * w, jnp.sum(g * x, 0)

    layer.defvjp(lambda x, w: (layer(x, w), (x, w)), undo)
    return layer


def stages_of(schedule: str, ranks: int) -> tuple[int, ...]:
    """Where the stages of a schedule live."""
    asks = GENERATORS[schedule].asks
    return asks.map.example(ranks, max(1, asks.least_chunks))


def step_of(schedule: str, ranks: int, microbatches: int, unit_seconds: float) -> tuple[Any, Any, Any]:
    """A training step, its placement and its arguments."""
    whole = sbp.placement("cpu", shape=(ranks, 1), axes=("stage", "data"))
    parts, stages = whole.split("stage"), stages_of(schedule, ranks)
    layer = sleepy(unit_seconds, 2 * unit_seconds)

    def loss(w: Any, x: Any) -> Any:
        for i, rank in enumerate(stages):
            with sbp.on(parts[rank]):
                x = layer(x, w[i])
        with sbp.on(parts[stages[-1]]):
            return jnp.mean(x**2)

    step = sbp.microbatch(jax.value_and_grad(loss), microbatches, batch_args=1)
    return step, whole, (jnp.ones((len(stages), SIZE)), jnp.ones((microbatches, SIZE)))


def seconds_of(program: Any, args: Sequence[Any], repeats: int) -> float:
    """The shortest time of a step."""
    jax.block_until_ready(program(*args))
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(program(*args))
        found.append(time.perf_counter() - began)
    return min(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per schedule."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--stages", type=int, default=4, help="placements, of one device each")
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--milliseconds", type=float, default=20.0, help="that a forward sleeps")
    options.add_argument("--schedules", nargs="*", default=["gpipe", "1f1b", "zb-v"])
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", args.stages)
    unit = args.milliseconds / 1000
    print(
        f"{args.stages} placements, {args.microbatches} micro-batches, a forward sleeps {unit * 1000:.0f} ms"
    )
    print("schedule      driver   one at a time   simulated   measured   speed-up   of the simulated   apart")
    for name in args.schedules:
        stages = stages_of(name, args.stages)
        alone = 3 * unit * len(stages) * args.microbatches
        n = len(stages)
        # What sleeps is the gradient of the inputs, but the first stage has none of them to send.
        back = (2 * unit,) * (n - 1)
        times = Times((unit,) * n, (0.0, *back), (2 * unit, *(0.0 for _ in back)))
        timeline = simulate(make(name, stages, args.microbatches), times)
        ideal = float(timeline.makespan)
        step, whole, given = step_of(name, args.stages, args.microbatches, unit)
        for threads in (False, True):
            program = sbp.compile(
                step, whole, options=sbp.Options(pipeline=PipelineOptions(schedule=name, threads=threads))
            )
            found = seconds_of(program, program.place(*given), args.repeats)
            # A profile waits for every action, with a thread per placement.
            off = f"{largest_difference(program.profile(*given).timeline, timeline):7.1%}" if threads else ""
            print(
                f"{name:12}  {'threads' if threads else 'one':7}  {alone:11.3f} s  {ideal:8.3f} s"
                f"  {found:7.3f} s  {alone / found:7.2f} x  {alone / found / (alone / ideal):18.0%}  {off:>7}"
            )


if __name__ == "__main__":
    main()
