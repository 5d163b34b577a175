"""What a run does when a metric or its state is no longer finite."""

from __future__ import annotations

from dataclasses import dataclass

from sbp.errors import ArgumentError, Problem


@dataclass(frozen=True)
class NonFinitePolicy:
    """What `sbp.fit` does when a metric, or a leaf of the state that it is about to save, is not finite.

    By default it stops, and the last good step is there. With `max_rollbacks` it goes back to that step and
    trains on from there, which is the end of it where a device has failed once. It looks at every step up to
    the one that was bad then; if one is bad again it is the batch that makes it so.

    Arguments:
      max_rollbacks: how often a run goes back at the most; 0: it stops.
      skip_batch: whether a batch that makes the state bad a second time is left out; else the run stops.
      exempt: patterns of the paths of leaves that may be as they like, such as "1/*": of the state `(params,
        opt_state)` all of the optimizer's. What was not finite in the last good step, such as a mask with
        -inf, may stay so without.

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
