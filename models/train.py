"""What every model's command shares: options, devices, the loop, the plan, the curve, the comparison."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import sbp
from models.curves import loss_svg
from models.pipeline import WHOLE, Pipeline
from sbp.placement import Placement, parse_placement

PyTree: TypeAlias = Any
Step: TypeAlias = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[PyTree, PyTree, jax.Array]]


@dataclass(frozen=True, slots=True)
class Job:
    """One training run of one model.

    Arguments:
      title: one line that says what is trained, on what.
      step: `(params, opt_state, batch, key) -> (params, opt_state, loss)`, for a single device.
      init: key -> parameters.
      optimizer: makes the state of the parameters.
      batch: number of the step -> batch, as host arrays.
      in_sbp: the signatures of the four arguments of `step`.
      options: of the compilation.
    """

    title: str
    step: Step
    init: Callable[[jax.Array], PyTree]
    optimizer: optax.GradientTransformation
    batch: Callable[[int], PyTree]
    in_sbp: PyTree
    options: sbp.Options = field(default_factory=sbp.Options)


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest differences of two runs: of the losses relative to the loss, of the parameters absolute."""

    losses: float
    params: float

    def __str__(self) -> str:
        return f"losses {self.losses:.1e} (relative), parameters {self.params:.1e} (absolute)"


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves: host parameters, the loss of each step, the plan, and the distance to one device."""

    params: PyTree
    losses: list[float]
    plan: Any
    difference: Difference | None


def parser(
    prog: str, description: str, *, parallel: Sequence[str], **defaults: str | float
) -> argparse.ArgumentParser:
    """The options that all models have.

    Arguments:
      parallel: the legal choices of `--parallel`, the default first.
      defaults: of `steps`, `batch`, `lr`, and of any other option that has another default here.
    """
    options = argparse.ArgumentParser(
        prog=f"python -m {prog}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--placement", default="cpu:2x4", help="KIND:AxBxC; CPU devices are made as needed")
    options.add_argument(
        "--parallel", choices=parallel, default=parallel[0], help="how batch and weights lie along the axes"
    )
    options.add_argument("--steps", type=int, help="of training")
    options.add_argument("--batch", type=int, help="examples per step, over all devices")
    options.add_argument("--lr", type=float, help="learning rate")
    options.add_argument("--seed", type=int, default=0, help="of parameters, batches and dropout")
    options.add_argument(
        "--x64", action=argparse.BooleanOptionalAction, default=False, help="compute in float64"
    )
    options.add_argument("--out", default="out", metavar="DIR", help="where loss.svg and plan.html go")
    options.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="repeat the run on one device and compare",
    )
    options.set_defaults(**defaults)
    return options


def prepare(args: argparse.Namespace) -> Placement:
    """The placement of the command line, with the CPU devices that it needs; call it before JAX is used.

    Raises:
      sbp.errors.PlacementError: if the placement cannot be read.
    """
    placement = parse_placement(args.placement)
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: at least one")
    if placement.platform == "cpu" and not jax.distributed.is_initialized():  # each of several has its own
        # Once JAX has been used their number is fixed. If it is too small, the program says so.
        with suppress(RuntimeError):
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", max(placement.ranks) + 1)
    return placement


def gradient_step(
    loss: Callable[[PyTree, PyTree, jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
    pipeline: Pipeline = WHOLE,
) -> Step:
    """The train step of `loss(params, batch, key)`: a function for one giant device.

    Arguments:
      pipeline: says into how many micro-batches a batch is cut; each has a key of its own.
    """
    gradients = pipeline.cut(jax.value_and_grad(loss), (1, 2))

    def train_step(
        params: PyTree, opt_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[PyTree, PyTree, jax.Array]:
        value, grads = gradients(params, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step


def example(
    init: Callable[[jax.Array], PyTree], optimizer: optax.GradientTransformation, batch: PyTree
) -> tuple[PyTree, PyTree, PyTree, jax.ShapeDtypeStruct]:
    """The shapes of the four arguments of a train step, for `python -m sbp plan`; no device is used.

    Arguments:
      batch: `jax.ShapeDtypeStruct`s.
    """
    key = jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(init, key)
    return params, jax.eval_shape(optimizer.init, params), batch, key


def run(job: Job, placement: Placement, args: argparse.Namespace) -> Result:
    """Plans, trains, draws the losses and (with `--check`) repeats it all on one device."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    print(f"{job.title}\non {placement}, --parallel {args.parallel}\n")
    with jax.enable_x64(args.x64):
        step = sbp.compile(job.step, placement, in_sbp=job.in_sbp, donate_argnums=(0, 1), options=job.options)
        plan = step.plan(*_start(job, args), job.batch(0), _key(args, 0))
        plan.save(str(out / "plan.html"))
        print(plan, end="\n\n")

        began = time.perf_counter()
        params, losses = _loop(step, job, args, "training")
        seconds = time.perf_counter() - began
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {seconds:.1f} s with compilation")

        curves, difference = {str(placement): losses}, None
        if args.check:
            one_device = jax.jit(job.step, donate_argnums=(0, 1))
            one_params, curves["one device"] = _loop(one_device, job, args, "one device")
            difference = compare(params, losses, one_params, curves["one device"])
            rounding = "" if args.x64 else "; rounding grows with the steps, under --x64 hardly"
            print(f"largest difference to one device: {difference}{rounding}")
    _draw(curves, job.title, out / "loss.svg")
    return Result(params, losses, plan, difference)


def compare(params: PyTree, losses: list[float], one_params: PyTree, one_losses: list[float]) -> Difference:
    """How far a run is from the same run on one device."""
    relative = np.abs(np.subtract(losses, one_losses)) / np.abs(one_losses)
    absolute = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0), params, one_params)
    return Difference(float(relative.max()), float(max(jax.tree.leaves(absolute))))


def _key(args: argparse.Namespace, step: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(args.seed), step)


def _start(job: Job, args: argparse.Namespace) -> tuple[PyTree, PyTree]:
    """The first parameters and optimizer state as host arrays, which a program places as it wants them."""
    params = jax.jit(job.init)(jax.random.key(args.seed))
    return jax.device_get((params, jax.jit(job.optimizer.init)(params)))


def _loop(step: Step, job: Job, args: argparse.Namespace, title: str) -> tuple[PyTree, list[float]]:
    """Runs all steps from the start; the parameters come back as host arrays."""
    params, opt_state = _start(job, args)
    losses: list[float] = []
    with _progress(title, args.steps) as show:
        for index in range(args.steps):
            params, opt_state, loss = step(params, opt_state, job.batch(index), _key(args, index))
            losses.append(float(loss))
            show(losses[-1])
    return jax.device_get(params), losses


@contextmanager
def _progress(title: str, steps: int) -> Iterator[Callable[[float], None]]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(TextColumn(f"{title:<12}"), *columns) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


def _draw(curves: dict[str, list[float]], title: str, path: Path) -> None:
    """The loss curves as a picture, if matplotlib is there."""
    try:
        picture = loss_svg(curves, title)
    except ImportError:
        print("no loss curve: matplotlib is missing (pip install 'sbp-jax[examples]')")
        return
    path.write_text(picture, encoding="utf-8")
    print(f"loss curve: {path}")
