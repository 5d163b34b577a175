"""A training loop that is short: placing, checkpoints, metrics, evaluation, and an end when asked for one.

A loop of your own does as well: this one has nothing that a user of the library does not have.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from sbp.errors import NonFiniteError, Problem
from sbp.runtime.batches import Batches, behind
from sbp.runtime.checkpoint.folder import Checkpoints
from sbp.runtime.execute import Program
from sbp.runtime.metrics import Logs, written
from sbp.untyped import PyTree

State: TypeAlias = tuple[PyTree, ...]
Metrics: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class FitResult:
    """What training has left.

    Arguments:
      state: the last one, as the step takes it.
      step: how many steps it has seen.
      history: the metrics of each step of this run, with its number as "step".
      is_done: False where it was asked to end before the last step or batch, and has saved.
    """

    state: State
    step: int
    history: list[dict[str, float]] = field(repr=False)
    is_done: bool = True


def fit(
    step: Program[..., Any],
    state: State,
    batches: Batches,
    *,
    steps: int,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    save_every: int = 1000,
    evaluate: Callable[[State], Metrics] | None = None,
    evaluate_every: int = 1000,
    log: Logs = (),
    own_rows: bool = False,
) -> FitResult:
    """Trains to a number of steps; from the last checkpoint, where there is one.

    Arguments:
      step: `step(*state, batch) -> (*state, metrics)`, where metrics is a number or a dict of numbers; a
        step with more parameters behind its state, such as a key, is given a tuple of as many: `*batch`.
      state: where training begins without a checkpoint: parameters, optimizer's state, key, what you like.
      batches: number of the step -> batch; or batches in a row, of which a run that goes on skips the first;
        or what has a method `batches_from(step)`: a context manager of the batches behind that step, which is
        left when the loop ends. What lies as the step wants it is not copied again.
      steps: the number of the last one; training ends before it where there are no more batches.
      checkpoint: a folder; SIGTERM saves there too, and ends the loop.
      save_every, evaluate_every: in steps; the last step counts always.
      evaluate: gives metrics of a state, which get "evaluate/" before their names.
      log: where the metrics of every step go, or several: a .csv file, a folder for TensorBoard (the extra
        `tensorboard`), of which what is there of steps that are done again is dropped; or a function of the
        metrics, with the step's number as "step". All in process 0.
      own_rows: whether each process's batches are its own rows of the whole ones; of a tuple, its first.

    Raises:
      NonFiniteError: if a metric of a step is NaN or infinite; the checkpoints before it are there.
      MemoryLimitError: if a step runs out of memory.
      CheckpointError: as `Checkpoints` does; before the first step where nothing can be saved.
      ArgumentError: for logs of which there are no others, and where TensorBoard's library is missing.

    >>> import jax.numpy as jnp
    >>> from sbp.placement import placement
    >>> from sbp.runtime.execute import compile
    >>> half = compile(lambda w, x: (w - 0.5 * (w - x), abs(w - x).sum()), placement("cpu", shape=(1,)))
    >>> done = fit(half, (jnp.zeros(1),), lambda i: jnp.ones(1), steps=3)
    >>> done.state[0].tolist(), [m["loss"] for m in done.history]
    ([0.875], [1.0, 0.5, 0.25])
    """
    runs = checkpoint if isinstance(checkpoint, Checkpoints | None) else Checkpoints(checkpoint)
    first = at = runs.steps[-1] if runs is not None and runs.steps else 0
    loop, history = _Loop(step, evaluate, own_rows, _takes(step, len(state))), list[dict[str, float]]()
    with ExitStack() as stack:
        if runs is not None:
            stack.callback(runs.wait)
            if first < steps:
                runs.prepare()  # or the first save would be the one to say that it cannot
        asked = stack.enter_context(_asked_to_end())
        write = stack.enter_context(written(log, history, first, steps))
        coming = iter(stack.enter_context(behind(batches, first)))
        batch = next(coming, None) if at < steps else None
        if runs is not None and first:
            state = runs.restore(loop.like(state, batch))
        state, batch = loop.placed(state, batch)
        while batch is not None:
            *rest, found = step(*state, *batch)
            state, at = tuple(rest), at + 1
            # The next batch goes to the devices while they compute.
            state, batch = loop.placed(state, next(coming, None) if at < steps else None)
            is_last = batch is None
            write(at, loop.metrics(at, found, state if is_last or at % evaluate_every == 0 else None))
            is_asked = asked(at)
            if runs is not None and (is_asked or is_last or at % save_every == 0):
                runs.save(state, at)
            if is_asked:
                break
    return FitResult(state, at, history, is_done=batch is None)


@dataclass(frozen=True)
class _Loop:
    """What every step needs.

    Arguments:
      takes: how many arguments are behind the state.
    """

    step: Program[..., Any]
    evaluate: Callable[[State], Metrics] | None
    own_rows: bool
    takes: int

    def arguments(self, batch: PyTree) -> tuple[PyTree, ...]:
        """What a step is given behind its state."""
        return (batch,) if self.takes == 1 else tuple(batch)

    def like(self, state: State, batch: PyTree) -> PyTree:
        """What a checkpoint is restored as: as the step wants it; without a batch to plan with, as it is."""
        if batch is None:
            return state
        self.step.plan(*state, *self.arguments(batch))
        return self.step.abstract_args[: len(state)]

    def placed(self, state: State, batch: PyTree) -> tuple[State, tuple[PyTree, ...] | None]:
        """The state, and what a step is given behind it, as the step wants them; no batch stays none."""
        if batch is None:
            return state, None
        own = len(state) if self.own_rows else ()
        args = self.step.place(*state, *self.arguments(batch), own_rows=own)
        return args[: len(state)], args[len(state) :]

    def metrics(self, at: int, found: PyTree, state: State | None) -> dict[str, float]:
        """The metrics of a step on the host, with those of its state, where it is evaluated."""
        named = found if isinstance(found, Mapping) else {"loss": found}
        try:
            out = {name: float(np.asarray(x)) for name, x in named.items()}
        except RuntimeError as e:  # the step ran while the host went on: its errors come with its results
            self.step.raise_known(e)
            raise
        if bad := [f"{name} is {x}" for name, x in out.items() if not math.isfinite(x)]:
            raise NonFiniteError(_not_finite(at, bad))
        if state is not None and self.evaluate is not None:
            out.update({f"evaluate/{name}": float(x) for name, x in self.evaluate(state).items()})
        return out


def _takes(step: Program[..., Any], state: int) -> int:
    """How many arguments a step has behind its state; one where its parameters do not say."""
    names = step.parameters.positional
    return 1 if names is None else max(1, len(names) - state)


@contextmanager
def _asked_to_end() -> Iterator[Callable[[int], bool]]:
    """Whether somebody has asked for the end, with SIGTERM: all processes hear of it at the same step."""
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    try:
        before = signal.signal(signal.SIGTERM, hear)
    except ValueError:  # not the main thread, which alone may do it
        yield lambda at: False
        return
    try:
        yield lambda at: bool(heard)
    finally:
        signal.signal(signal.SIGTERM, before)


def _not_finite(at: int, bad: list[str]) -> Problem:
    return Problem(
        "nonfinite",
        f"step {at} of sbp.fit",
        "; ".join(bad),
        "finite metrics",
        "what comes after NaN is NaN",
        "Options(debug_nans=True) names the op that made it; or a smaller learning rate",
    )
