"""What a run does when a metric or its state is no longer finite."""

from __future__ import annotations

from dataclasses import dataclass

from sbp.errors import ArgumentError, Problem


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
