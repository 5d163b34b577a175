"""Measurements of one step of a pipeline."""

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from sbp.passes.schedule import actions
from sbp.passes.schedule.actions import Action
from sbp.passes.schedule.spans import Span, Timeline


@dataclass
class Record:
    """Measurements of one step.

    Arguments:
      spans: per rank, when each action ran, in seconds; each was waited for. With one driver transfers were
        waited for too, and have spans of their own.
      live: per rank, the most micro-batches of a stage that held arrays for a backward pass after an action.
      live_bytes: per rank, the most bytes that one device kept for micro-batches after an action.
      residuals: per rank, the arrays that the forward pass of a stage left of a micro-batch; they may be
        deleted by now. An array that another stage reads too counts for a stage until its own backward pass
        is done.
    """

    spans: list[list[Span]]
    live: list[int]
    live_bytes: list[int]
    residuals: list[dict[tuple[int, int], list[weakref.ref[jax.Array]]]]

    def count(
        self, place: int, action: Action, left: Sequence[jax.Array], shared: Sequence[jax.Array]
    ) -> None:
        """Counts the arrays that are still held after an action.

        Arguments:
          left: the arrays that a forward action has left for the backward pass.
          shared: arrays that other stages of the placement still read, if this was the last action of its
            stage.
        """
        held, unit = self.residuals[place], (action.stage, action.microbatch)
        if left:
            held[unit] = list(map(weakref.ref, left))
        others = set(map(id, shared))
        held[unit] = [ref for ref in held.get(unit, ()) if id(ref()) not in others]
        for key in [k for k, refs in held.items() if not any(map(_is_held, refs))]:
            del held[key]
        self.live[place] = max(self.live[place], len(held))

    def way(self, place: int, action: Action, peer: int, left: float) -> float:
        """Notes when a transfer was complete, and how long it took."""
        kind = actions.Kind.SEND_F if action.kind is actions.Kind.F else actions.Kind.SEND_B
        send = Action(kind, action.stage, action.microbatch, peer)
        self.spans[place].append(Span(place, send, left, come := time.perf_counter()))
        return come - left

    def timeline(self, name: str) -> Timeline:
        """The step as a timeline."""
        return Timeline(name, tuple(map(tuple, self.spans)))


def _is_held(ref: weakref.ref[jax.Array]) -> bool:
    """Whether an array is referenced and has its memory."""
    array = ref()
    return array is not None and not array.is_deleted()
