"""A run of `sbp.fit`: steps, saves, the end, and the way back to the last good step."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax

from sbp.compat.untyped import PyTree
from sbp.errors import BatchError, CheckpointError, LeaseError, NonFiniteError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.nan_checks.state_check import Traits
from sbp.runtime.program.program import Program
from sbp.runtime.training import messages
from sbp.runtime.training.batches import BatchSource, MovesState
from sbp.runtime.training.hooks import BATCHES, Hooks
from sbp.runtime.training.interrupt import BatchInterruptedError, Interrupt
from sbp.runtime.training.progress import Progress
from sbp.runtime.training.recorder import BadStepError, Recorder
from sbp.runtime.training.restart import NonFinitePolicy, last_good, steps_of
from sbp.runtime.training.throughput import BatchSize, step_work

LOG = logging.getLogger("sbp")
State: TypeAlias = tuple[PyTree, ...]
Metrics: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class Intervals:
    """How often something is done, in steps.

    Arguments:
      steps: the number of the last one.
      save, evaluate: the last step counts always.
    """

    steps: int
    save: int
    evaluate: int


@dataclass(frozen=True)
class Trainer:
    """A step, and what it is given.

    Arguments:
      step: the program.
      takes: how many arguments are behind the state.
      own_rows: whether each process's batches are its own rows.
      evaluate: gives metrics of a state.
    """

    step: Program[..., Any]
    takes: int
    own_rows: bool
    evaluate: Callable[[State], Metrics] | None

    def arguments(self, batch: PyTree) -> tuple[PyTree, ...]:
        """What a step is given behind its state."""
        return (batch,) if self.takes == 1 else tuple(batch)

    def like(self, state: State, batch: PyTree) -> PyTree:
        """What a checkpoint is restored as: as the step wants it; without a batch to plan with, as it is."""
        if batch is None:
            return state
        self.step.plan(*state, *self.arguments(batch))
        return self.step.abstract_args[: len(state)]

    def release(self, state: State, like: PyTree) -> None:
        """Frees the arrays that the first step would have been given with their memory.

        Arguments:
          like: the state as the step wants it.
        """
        for k in self.step.parameters.donate.positions(len(state) + self.takes) & set(range(len(state))):
            for own, wanted in zip(jax.tree.leaves(state[k]), jax.tree.leaves(like[k]), strict=True):
                if isinstance(own, jax.Array) and own.sharding.is_equivalent_to(wanted.sharding, own.ndim):
                    own.delete()

    def place(self, state: State, batch: PyTree) -> tuple[State, tuple[PyTree, ...] | None]:
        """The state, and what a step is given behind it, as the step wants them; no batch stays none."""
        if batch is None:
            return state, None
        own = len(state) if self.own_rows else ()
        args = self.step.place(*state, *self.arguments(batch), own_rows=own)
        return args[: len(state)], args[len(state) :]

    @property
    def reads_ahead(self) -> bool:
        """Whether a step sends the keys of the next batch."""
        return self.step.options.exchange.prefetch

    def announce(self, state: State, batch: tuple[PyTree, ...] | None) -> None:
        """Says which batch is behind that of the next step; None if none is."""
        if batch is not None:
            self.step.read_ahead(*[None] * len(state), *batch)

    def placed_state(self, state: State, batch: tuple[PyTree, ...] | None) -> State:
        """A state as the step wants it, beside a batch that is placed."""
        return state if batch is None else self.step.place(*state, *batch)[: len(state)]

    def eval_metrics(self, state: State) -> Metrics:
        """Metrics of a state, under their names in the log."""
        found = {} if self.evaluate is None else self.evaluate(state)
        return {f"evaluate/{name}": float(x) for name, x in found.items()}


@dataclass(frozen=True)
class _NextBatch:
    """The batch behind that of a step.

    Arguments:
      state, batch: placed; None where there are no more.
      is_asked: whether somebody wants the end; then none is drawn.
      is_due: whether the step is saved.
      kept: what is saved with it, as it was before the batch was drawn; its `version` too.
      failure: why it did not come.
    """

    state: State
    batch: tuple[PyTree, ...] | None
    is_asked: bool
    is_due: bool
    kept: Mapping[str, Any]
    version: tuple[int, ...]
    failure: BatchInterruptedError | None = None


@dataclass
class TrainingRun:
    """A run from its beginning to its end.

    Arguments:
      trainer: what is done in a step.
      source: of the batches.
      runs: where it saves; None: nowhere.
      hooks: what is kept beside the state.
      policy: for what is not finite.
      recorder: of metrics.
      progress: for whoever looks.
      interrupt: whether somebody wants the end.
      every: how often something is done.
    """

    trainer: Trainer
    source: BatchSource
    runs: Checkpoints | None
    hooks: Hooks
    policy: NonFinitePolicy
    recorder: Recorder
    progress: Progress
    interrupt: Interrupt
    every: Intervals
    start_step: int = 0
    step: int = 0
    left_out: set[int] = field(default_factory=set)
    _begun: Traits = field(default_factory=dict)
    _rollbacks: int = 0
    _suspect: int = 0
    _like: PyTree | None = None
    _saved: int = 0

    def train(self, state: State) -> tuple[State, bool]:
        """Trains to the end; the last state, and whether it is not an end that was asked for.

        Raises:
          NonFiniteError: if a step is bad, and the policy does not go back.
        """
        state = self._begin(state)
        self.start_step = self.step
        while True:
            self.recorder.begin(self.step)
            try:
                return self._train(state)
            except BadStepError as bad:
                state = self._back(bad, len(state))

    # -- where it begins

    def _begin(self, state: State) -> State:
        """The state that the run goes on from; the batches are behind it."""
        if self.runs is None:
            self.source.seek(0)
            return state
        there = steps_of(self.runs)
        last = there[-1] if there else 0
        if last < self.every.steps or not there:
            self.runs.prepare()  # or the first save would be the one to say that it cannot
        self._begun = self.runs.baseline(state)
        if not there:
            if self.policy.max_rollbacks:  # there is a step to go back to
                self._save(state, 0, self.hooks.state(), is_last=True)
            self.source.seek(0)
            return state
        batch = self._peeked(last) if last < self.every.steps else None
        self._like = self.trainer.like(state, batch)
        if batch is not None:
            self.trainer.release(state, self._like)  # or this run would hold two states while it restores
        return self._restored(self._like)

    def _peeked(self, step: int) -> PyTree | None:
        try:
            return self.interrupt.draw_batch(step + 1, functools.partial(self.source.peek, step))
        except BatchInterruptedError as e:
            raise BatchError(messages.batch_awaited(step + 1, e.seconds, is_saved=False)) from None

    def _restored(self, like: PyTree) -> State:
        """The last good state, with all that was kept beside it; the batches are behind it."""
        assert self.runs is not None
        self._tried(self.runs.wait, self._saved, is_last=False)  # what is being saved is the last good one
        state, self.step, extra = last_good(self.runs, like, self._begun, self.policy.exempt)
        self.hooks.set_state(extra)
        self.source.seek(self.step, again=self.hooks.follow_batches)
        if not self.source.can_go_back:
            self.hooks.set_state(extra)  # an iterator has made the batches that were left out
        return tuple(state)

    def _back(self, bad: BadStepError, size: int) -> State:
        """The last good state, if the policy goes back to it.

        Arguments:
          size: of the state, in arguments.
        """
        self._rollbacks += 1
        is_again = bad.step <= self._suspect
        if self._rollbacks > self.policy.max_rollbacks or (is_again and not self.policy.skip_batch):
            raise bad.error from None
        if is_again:
            self.left_out.add(bad.step)
            LOG.warning("%s", messages.leaves_out(bad.step))
        self._suspect = max(self._suspect, bad.step)
        like = self.trainer.step.abstract_args[:size] if self._like is None else self._like
        state = self._restored(like)
        if jax.process_index() == 0:
            what, most = bad.error.problems[0], self.policy.max_rollbacks
            LOG.warning(
                "%s", messages.goes_back(f"{what.where}: {what.got}", self.step, self._rollbacks, most)
            )
        return state

    # -- steps

    def _train(self, state: State) -> tuple[State, bool]:
        try:
            state, batch = self.trainer.place(state, self._drawn())
        except BatchInterruptedError as e:
            return self._ended(state, e, is_saved=self.runs is not None and self.step > 0)
        self._show(state, batch)
        while batch is not None:
            number, ahead = self.step + 1, None
            state = self.source.state_for(number, state)
            if self.trainer.reads_ahead:  # the step sends the keys of the next batch
                ahead = self._drawn_behind(number, state)
                self.trainer.announce(state, ahead.batch)
            try:
                *rest, found = self.trainer.step(*state, *batch)
            except NonFiniteError as e:  # debug_nans
                raise BadStepError(number, e) from None
            state = tuple(rest)
            if ahead is None:  # the next batch goes to the devices while they compute
                ahead = self._drawn_behind(number, state)
                state, batch = ahead.state, ahead.batch
            else:
                state, batch = self.trainer.placed_state(state, ahead.batch), ahead.batch
            is_asked, is_due, kept = ahead.is_asked, ahead.is_due, ahead.kept
            if ahead.failure is not None:
                return self._interrupted(state, number, found, ahead.failure, ahead.version)
            if not self.hooks.follow_batches:  # or that batch would be kept as taken, and is not
                is_asked |= self.interrupt.is_heard
                is_due |= is_asked
            is_last = batch is None and not is_asked
            self._note(number, found, state, is_last=is_last, is_due=is_due)
            if is_last and self.runs is not None:
                self._save(state, self.step, self.hooks.state(), is_last=True)
            elif is_due:
                self._save(state, number, kept, is_last=is_asked)
            if is_asked:
                return state, number == self.every.steps
        return state, True

    def _drawn_behind(self, number: int, state: State) -> _NextBatch:
        """The batch behind that of a step, with what is kept if the step is saved.

        Arguments:
          state: that the batch is placed beside.
        """
        self.step = number
        is_asked = self.interrupt.is_asked()
        is_due = is_asked or number % self.every.save == 0 or number == self.every.steps
        kept = self.hooks.state() if is_due and self.runs is not None else {}
        drawn = _NextBatch(state, None, is_asked, is_due, kept, self.hooks.version)
        try:
            state, batch = self.trainer.place(state, None if is_asked else self._drawn())
        except BatchInterruptedError as e:
            return replace(drawn, failure=e)
        return replace(drawn, state=state, batch=batch)

    def _show(self, state: State, batch: tuple[PyTree, ...] | None) -> None:
        """Tells whoever looks what is in a batch, and what a step computes."""
        if batch is not None and self.progress.display is not None:
            self.progress.batch = BatchSize.of(batch[0])
            self.progress.work = step_work(self.trainer.step.plan(*state, *batch))

    def _drawn(self) -> PyTree | None:
        """The next batch, those that are left out apart; None behind the last step."""
        while self.step < self.every.steps:
            batch = self.interrupt.draw_batch(self.step + 1, self.source.draw)
            if batch is None or self.step + 1 not in self.left_out:
                return batch
            self.step += 1
        return None

    def _note(self, number: int, found: PyTree, state: State, *, is_last: bool, is_due: bool) -> None:
        """Notes what a step gave; looks at its state where a step up to here was bad."""
        is_evaluated = is_last or number % self.every.evaluate == 0
        evaluated = self.trainer.eval_metrics(state) if is_evaluated else {}
        self.recorder.add(number, found, evaluated, is_last)
        if is_due or is_last or number <= self._suspect:
            self.recorder.flush()
        if self.runs is not None and number <= self._suspect:
            try:
                self.runs.check(state, number, self.policy.exempt)
            except NonFiniteError as e:
                raise BadStepError(number, e) from None

    # -- saves

    def _save(self, state: State, number: int, kept: Mapping[str, Any], *, is_last: bool) -> None:
        """Saves the state of a step. What cannot be written is tried again later, but for the last."""
        if self.runs is None:
            return
        save = functools.partial(self.runs.save, state, number, dict(kept), exempt=self.policy.exempt)
        try:
            self._tried(self.runs.wait, self._saved, is_last=False)
            self._forget(kept)
            self._saved = number
            self._tried(save, number, is_last)
            if is_last:
                self.runs.wait()
                self._forget(kept)
        except NonFiniteError as e:
            raise BadStepError(number, e) from None

    def _forget(self, kept: Mapping[str, Any]) -> None:
        """Lets batches forget what no step that can be restored has, nor the one that is saved next."""
        if self.runs is not None and isinstance(self.source.batches, MovesState):
            extra = self.runs.extra
            self.source.batches.keep(steps_of(self.runs), lambda step: extra(step)[BATCHES], kept[BATCHES])

    def _tried(self, action: Callable[[], None], number: int, is_last: bool) -> None:
        """Does what might not be possible now for a step: a disk that is full might be freed."""
        try:
            action()
        except LeaseError:
            raise
        except CheckpointError as e:
            if is_last:
                raise
            if jax.process_index() == 0:
                LOG.error("%s", messages.not_saved(number, e.problems[0].got))

    # -- the end, where a batch does not come

    def _interrupted(
        self, state: State, number: int, found: PyTree, why: BatchInterruptedError, version: tuple[int, ...]
    ) -> tuple[State, bool]:
        """Saves the state of the last step, if it can. Other processes are at another step: they go on from
        what is saved; so does one whose vocabulary has taken keys of that batch already."""
        is_saved = self.runs is not None and not self.interrupt.shared and version == self.hooks.version
        if is_saved:
            self._note(number, found, state, is_last=False, is_due=True)
            self._save(state, number, self.hooks.state(), is_last=True)
        return self._ended(state, why, is_saved)

    def _ended(self, state: State, why: BatchInterruptedError, is_saved: bool) -> tuple[State, bool]:
        if why.asked and not self.interrupt.shared:
            return state, False
        raise BatchError(messages.batch_awaited(self.step + 1, why.seconds, is_saved))
