"""A training loop that is short: placing, checkpoints, metrics, evaluation, and an end when asked for one.

A loop of your own does as well: this one has nothing that a user of the library does not have.
"""

import os
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax

from sbp.errors import raise_all
from sbp.passes.explain.internal_errors import under_mesh
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.program.program import Program
from sbp.runtime.training import messages
from sbp.runtime.training.batches import Batches, BatchSource, MovesState
from sbp.runtime.training.hooks import hooks_of
from sbp.runtime.training.interrupt import interruptible
from sbp.runtime.training.loop import Intervals, Metrics, State, Trainer, TrainingRun
from sbp.runtime.training.metrics import Logs, sinks
from sbp.runtime.training.progress import Progress, display_of, metrics_text
from sbp.runtime.training.recorder import Recorder
from sbp.runtime.training.restart import NonFinitePolicy


@dataclass(frozen=True, repr=False)
class FitResult:
    """The result of a run; it prints in one line.

    Arguments:
      state: the last state, as the step takes it.
      step: the number of steps that it has seen.
      history: the recorded metrics of the last 10,000 steps of this run, with their numbers as "step".
      is_done: False if the run was asked to end early, and has saved.
      start_step: the step that this run continued from; 0 for a new run.
      left_out: the steps whose batches were left out because they made the state bad.
    """

    state: State
    step: int
    history: list[dict[str, float]] = field(repr=False)
    is_done: bool = True
    start_step: int = 0
    left_out: tuple[int, ...] = ()

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.state)
        size = sum(getattr(x, "nbytes", 0) for x in leaves) / 1e6
        last = f", {metrics_text(self.history[-1])}" if self.history else ""
        more = "" if self.is_done else ", asked to end"
        return f"<FitResult of step {self.step}{last}{more}: {len(leaves)} arrays of {size:.3g} MB>"


@under_mesh
def fit(
    step: Program[..., Any],
    state: State,
    batches: Batches,
    *,
    steps: int,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    save_every: int = 1000,
    extra: MutableMapping[str, Any] | None = None,
    on_nonfinite: NonFinitePolicy | None = None,
    evaluate: Callable[[State], Metrics] | None = None,
    evaluate_every: int = 1000,
    log: Logs = (),
    log_every: int = 1,
    progress: bool = True,
    own_rows: bool = False,
    batch_seconds: float | None = 1800.0,
) -> FitResult:
    """Trains to a number of steps, from the last saved step if there is one.

    Arguments:
      step: `step(*state, batch) -> (*state, metrics)`, where metrics is a number or a dict of numbers. If the
        step has more parameters than the state and one batch, a batch is a tuple: `*batch`.
      state: the first state: parameters, optimizer's state, keys and so on, as a tuple. What the step donates
        of it is freed, also where the run continues from a saved state.
      batches: a function from the number of the step to a batch; or an iterable of batches, of which a
        continued run skips the first; or an object with a method `batches_from(step)`, a context manager
        of the batches after that step, which is left when the loop ends. Batches that have the step's
        shardings are not copied again. An iterator with `get_state` and `set_state` is saved with the state;
        so are vocabularies that the batches use.
      steps: the number of the last step; training ends earlier if there are no more batches.
      checkpoint: a folder. The run continues from its last step that is intact and good. On SIGTERM and
        Ctrl-C the loop saves there and ends; a second signal ends it at once.
      save_every, evaluate_every: in steps; the last step is always included.
      extra: a dict of what is saved with the state: objects with `get_state` and `set_state`, or trees of
        JSON values, arrays and keys. When the run continues, objects are set and trees are put into the dict.
      on_nonfinite: what to do about NaN and infinities in metrics or in a state: stop (the default), or go
        back. A state is checked before it is saved; a bad one is not saved.
      evaluate: a function from a state to metrics, which get "evaluate/" before their names.
      log: where metrics go, one or several: a .csv file; a folder for TensorBoard (the extra `tensorboard`);
        or a function of the metrics, with the step's number as "step". Rows of steps that are done again are
        replaced. Only process 0 writes.
      log_every: record the metrics of every nth step. Metrics are read one step late.
      progress: whether to show progress: a bar on a terminal, otherwise a line on stderr now and then.
      own_rows: whether each process's batches are only its own rows; of a tuple, only the first.
      batch_seconds: the longest wait for a batch, in seconds; None for no limit. After a signal it is ten.

    Raises:
      NonFiniteError: if a metric or the state of a step is not finite; the steps before it are saved.
      BatchError: if a batch does not come; the state is saved.
      MemoryLimitError: if a step runs out of memory.
      CheckpointError: before the first step if nothing can be saved, and if the last save fails. Other saves
        that fail are tried again at the next one.
      ArgumentError: for unknown kinds of logs, if TensorBoard's library is missing, for intervals below 1,
        for an `extra` that cannot be saved, and for batches that cannot start again at an earlier step.

    >>> import jax.numpy as jnp
    >>> from sbp.placement import placement
    >>> from sbp.runtime.program.compile import compile
    >>> half = compile(lambda w, x: (w - 0.5 * (w - x), abs(w - x).sum()), placement("cpu", shape=(1,)))
    >>> done = fit(half, (jnp.zeros(1),), lambda i: jnp.ones(1), steps=3, progress=False)
    >>> done.state[0].tolist(), [m["loss"] for m in done.history]
    ([0.875], [1.0, 0.5, 0.25])
    >>> done
    <FitResult of step 3, loss 0.25: 1 arrays of 4e-06 MB>
    """
    policy = NonFinitePolicy() if on_nonfinite is None else on_nonfinite
    every, source = Intervals(steps, save_every, evaluate_every), BatchSource(batches)
    _check(every, log_every, policy, source, checkpoint is not None)
    hooks = hooks_of(extra, batches)
    trainer = Trainer(step, _takes(step, len(state)), own_rows, evaluate)
    leads = jax.process_index() == 0
    with ExitStack() as stack:
        runs = _entered(stack, checkpoint)
        stack.callback(source.close)
        interrupt = stack.enter_context(interruptible(batch_seconds))
        shown = Progress(steps, stack.enter_context(display_of(steps, progress)))
        if isinstance(batches, MovesState):
            shown.more = batches.__str__
        files = sinks(log) if leads else []
        for file in files:
            stack.callback(file.close)
        recorder = Recorder([*files, shown], log_every, step.raise_known)
        run = TrainingRun(trainer, source, runs, hooks, policy, recorder, shown, interrupt, every)
        last, is_done = run.train(state)
    left_out = tuple(sorted(run.left_out))
    return FitResult(last, run.step, list(recorder.history), is_done, run.start_step, left_out)


def _entered(stack: ExitStack, checkpoint: str | os.PathLike[str] | Checkpoints | None) -> Checkpoints | None:
    """Where the run saves; a folder of its own is given up at the end."""
    if isinstance(checkpoint, Checkpoints):
        stack.callback(checkpoint.wait)
        return checkpoint
    return None if checkpoint is None else stack.enter_context(Checkpoints(checkpoint))


def _check(
    every: Intervals, log_every: int, policy: NonFinitePolicy, source: BatchSource, has_folder: bool
) -> None:
    """Raises for arguments that do not go together, all of them at once."""
    counts = {"save_every": every.save, "evaluate_every": every.evaluate, "log_every": log_every}
    wrong = [messages.too_few(name, count) for name, count in counts.items() if count < 1]
    if policy.max_rollbacks and not has_folder:
        wrong.append(messages.nothing_to_go_back_to())
    if policy.max_rollbacks and not source.can_go_back:
        wrong.append(messages.no_way_back(type(source.batches).__name__))
    raise_all(wrong)


def _takes(step: Program[..., Any], state: int) -> int:
    """How many arguments a step has behind its state; one where its parameters do not say."""
    names = step.parameters.positional
    return 1 if names is None else max(1, len(names) - state)
