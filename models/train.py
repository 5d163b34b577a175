"""What every model's command shares: options, devices, the loop, the plan, the curve, the comparison."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
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
from sbp.runtime.training.metrics import Log

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
    """What a run leaves.

    Arguments:
      params: on the host.
      losses: of the steps of this run.
      first: the step behind which it began: that of a checkpoint, or 0.
      difference: to one device, where the run came to its end and was checked.
    """

    params: PyTree
    losses: list[float]
    plan: Any
    difference: Difference | None
    first: int = 0


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
    options.add_argument(
        "--out", default="out", metavar="DIR", help="where plan.html, loss.svg and metrics.csv go"
    )
    add_long_run_options(options)
    options.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="repeat the run on one device and compare",
    )
    options.set_defaults(**defaults)
    return options


def add_long_run_options(options: argparse.ArgumentParser) -> None:
    """The options of a run that saves, goes on, and notes its metrics: what `checkpoints` and `logs` read."""
    options.add_argument(
        "--checkpoint", metavar="DIR", help="save there, with --resume by default in OUT/checkpoint"
    )
    options.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint, if there is one, wherever it ran",
    )
    options.add_argument("--save-every", type=int, default=100, metavar="N", help="steps")
    options.add_argument("--tensorboard", metavar="DIR", help="metrics for TensorBoard, too")


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
    """Plans, trains, draws the losses and (with `--check`) repeats it all on one device.

    Of several processes all do the same; process 0 prints, and writes what goes to `--out`.

    Raises:
      ValueError: if the folder of `--checkpoint` has some already, and `--resume` is not given.
    """
    say = speaker()
    out, runs = Path(args.out), checkpoints(args)
    out.mkdir(parents=True, exist_ok=True)
    say(f"{job.title}\non {placement}, --parallel {args.parallel}\n")
    with jax.enable_x64(args.x64):
        step = sbp.compile(job.step, placement, in_sbp=job.in_sbp, donate_argnums=(0, 1), options=job.options)
        state = _start(job, args)
        plan = step.plan(*state, *_batch(job, args, 0))
        if jax.process_index() == 0:
            plan.save(str(out / "plan.html"))
        say(plan, end="\n\n")

        began = time.perf_counter()
        done = sbp.fit(
            step,
            state,
            partial(_batch, job, args),
            steps=args.steps,
            checkpoint=runs,
            save_every=args.save_every,
            log=logs(args),
        )
        seconds = time.perf_counter() - began
        losses, first = [row["loss"] for row in done.history], done.step - len(done.history)
        result = Result(sbp.to_host(done.state[0]), losses, plan, None, first)
        if not losses:
            say(f"nothing to do: the checkpoint is of step {done.step}, and --steps {args.steps}")
            return result
        since = f"steps {done.start_step + 1} to {done.step}: " if done.start_step or not done.is_done else ""
        say(f"{since}loss {losses[0]:.4f} -> {losses[-1]:.4f} in {seconds:.1f} s with compilation")
        if not done.is_done:
            say("asked to end; --resume goes on")
            return result

        curves = {str(placement): losses}
        if args.check:
            one_params, every = _one_device(job, args)
            curves["one device"] = every[first:]
            difference = compare(result.params, losses, one_params, curves["one device"])
            result = replace(result, difference=difference)
            rounding = "" if args.x64 else "; rounding grows with the steps, under --x64 hardly"
            say(f"largest difference to one device: {difference}{rounding}")
    if jax.process_index() == 0:
        _draw(curves, job.title, out / "loss.svg", first)
    return result


def speaker() -> Callable[..., None]:
    """`print` in process 0; in the others, what says nothing."""
    return print if jax.process_index() == 0 else lambda *words, **how: None


def logs(args: argparse.Namespace) -> list[Log]:
    """Where the metrics of a run go."""
    return [Path(args.out) / "metrics.csv", *([args.tensorboard] if args.tensorboard else [])]


def checkpoints(
    args: argparse.Namespace, of: Callable[[str | Path], sbp.Checkpoints] = sbp.Checkpoints
) -> sbp.Checkpoints | None:
    """Where a run saves, and goes on from; None where nothing was asked for.

    Arguments:
      of: folder -> its checkpoints.

    Raises:
      ValueError: if some are there, and nobody has said that the run is to go on from them.
    """
    if args.checkpoint is None and not args.resume:
        return None
    runs = of(args.checkpoint or Path(args.out) / "checkpoint")
    if runs.steps and not args.resume:
        raise ValueError(
            f"--checkpoint {args.checkpoint}: has step {runs.steps[-1]} of a run: --resume goes on from "
            "there; or another folder"
        )
    return runs


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


def _batch(job: Job, args: argparse.Namespace, step: int) -> tuple[PyTree, jax.Array]:
    """What a step is given behind its state: both are told by its number, so that a run can go on."""
    return job.batch(step), _key(args, step)


def _one_device(job: Job, args: argparse.Namespace) -> tuple[PyTree, list[float]]:
    """All steps from the start on one device, in a plain loop; the parameters come back as host arrays."""
    step = jax.jit(job.step, donate_argnums=(0, 1))
    params, opt_state = _start(job, args)
    losses: list[float] = []
    with _progress("one device", args.steps) as show:
        for index in range(args.steps):
            params, opt_state, loss = step(params, opt_state, *_batch(job, args, index))
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
    with Progress(TextColumn(f"{title:<12}"), *columns, disable=jax.process_index() > 0) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


def _draw(curves: dict[str, list[float]], title: str, path: Path, first: int = 0) -> None:
    """The loss curves as a picture, if matplotlib is there."""
    try:
        picture = loss_svg(curves, title, first)
    except ImportError:
        print("no loss curve: matplotlib is missing (pip install 'sbp-jax[examples]')")
        return
    path.write_text(picture, encoding="utf-8")
    print(f"loss curve: {path}")
