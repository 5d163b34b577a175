"""From which step a run goes on: the last one that is intact and good.

What a run does when a metric or its state is no longer finite.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sbp.compat.untyped import PyTree
from sbp.errors import ArgumentError, DamagedCheckpointError, Problem
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.nan_checks.state_check import Traits, verdict
from sbp.runtime.storage.agreement import agree
from sbp.runtime.training import messages


@dataclass(frozen=True)
class NonFinitePolicy:
    """What `sbp.fit` does when a metric, or a leaf of the state that it is about to save, is not finite.

    By default it stops; the last good step is saved. With `max_rollbacks` it goes back to that step and
    continues, which helps if a device has failed once. It then checks every step up to the bad one. If a step
    is bad again, its batch is the cause.

    Arguments:
      max_rollbacks: how often a run may go back; 0: it stops.
      skip_batch: whether a batch that makes the state bad a second time is left out; otherwise the run stops.
      exempt: patterns of the paths of leaves that are not checked, such as "1/*" for the whole optimizer's
        state in the state `(params, opt_state)`. Values that were not finite in the last good step, such as
        a mask with -inf, need no pattern.

    Raises:
      ArgumentError: for a number below 0.
    """

    max_rollbacks: int = 0
    skip_batch: bool = False
    exempt: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_rollbacks < 0:
            raise ArgumentError(_negative(self.max_rollbacks))


def _negative(count: int) -> Problem:
    where, why = "NonFinitePolicy(max_rollbacks=...)", "0 stops the run at once"
    return Problem("argument", where, str(count), "0 or more", why, "max_rollbacks=3")


LOG = logging.getLogger("sbp")


def steps_of(runs: Checkpoints) -> list[int]:
    """The steps of a folder, as process 0 finds them; all processes come here."""
    return list(agree("list the steps", runs.path, lambda: runs.steps))


def last_good(
    runs: Checkpoints, like: PyTree, begun: Traits, exempt: Sequence[str]
) -> tuple[PyTree, int, Mapping[str, Any]]:
    """The state of the last step that is intact and good, its number, and what was kept beside it.

    All processes come here. What is left out is warned of.

    Arguments:
      like: how the state is to lie.
      begun: what is said of the state that a run without checkpoints begins with: what was finite there is so
        in a good step.
      exempt: patterns of the paths of leaves that may be as they like.

    Raises:
      DamagedCheckpointError: if no step is.
      CheckpointError: if a step is of another state, or cannot be read now.
    """
    wrong = list[str]()
    for step in reversed(steps_of(runs)):
        why, state, extra = _tried(runs, like, step, begun, exempt)
        if not why:
            return state, step, extra
        wrong.append(f"step {step}: {why}")
        if jax.process_index() == 0:
            LOG.warning("%s", messages.step_is_skipped(step, why))
    raise DamagedCheckpointError(messages.no_good_step(runs.path, wrong))


def _tried(
    runs: Checkpoints, like: PyTree, step: int, begun: Traits, exempt: Sequence[str]
) -> tuple[str, PyTree, Mapping[str, Any]]:
    """Why a step is not gone on from, "" if it is; its state, and what was kept beside it."""
    try:
        state = runs.restore(like, step)
        extra = _extra(runs, step)
    except DamagedCheckpointError as e:
        return e.problems[0].got, None, {}
    bad = verdict(state, runs.baseline(state), begun, exempt).bad
    return ", ".join(f"{path} is {what}" for path, what in bad[: messages.MOST_SHOWN]), state, extra


def _extra(runs: Checkpoints, step: int) -> Mapping[str, Any]:
    """What was kept beside a step; damage that one process finds is found by all."""
    found = list[Any]()
    agree(f"read what is beside step {step}", runs.path, lambda: found.append(runs.extra(step)))
    return found[0] or {}
