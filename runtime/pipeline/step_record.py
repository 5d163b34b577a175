"""What is measured of one step of a pipeline."""

from __future__ import annotations

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
    """What was measured of one step.

    Arguments:
      spans: per rank, when each action ran, in seconds; each was waited for. With one driver what is sent
        was waited for too, and has spans of its own.
      live: per rank, of the most micro-batches of a stage something was held for a backward pass, after an
        action: arrays that anybody still had, and whose memory was not given away.
      live_bytes: per rank, the most bytes that one device kept for micro-batches after an action.
      held: per rank, what the forward pass of a stage has left of a micro-batch; it may be gone by now. What
        another stage there reads too counts for a stage until its own backward pass is done.
    """

    spans: list[list[Span]]
    live: list[int]
    live_bytes: list[int]
    held: list[dict[tuple[int, int], list[weakref.ref[jax.Array]]]]

    def count(
        self, place: int, action: Action, left: Sequence[jax.Array], shared: Sequence[jax.Array]
    ) -> None:
        """Notes what is still held after an action.

        Arguments:
          left: what the action has left for a backward pass, if it is a forward one.
          shared: what other stages of the placement still read, if this one was the last of its stage.
        """
        held, unit = self.held[place], (action.stage, action.microbatch)
        if left:
            held[unit] = list(map(weakref.ref, left))
        others = set(map(id, shared))
        held[unit] = [ref for ref in held.get(unit, ()) if id(ref()) not in others]
        for key in [k for k, refs in held.items() if not any(map(_is_held, refs))]:
            del held[key]
        self.live[place] = max(self.live[place], len(held))

    def way(self, place: int, action: Action, peer: int, left: float) -> float:
        """Notes when something that was sent has come, and how long that took."""
        kind = actions.Kind.SEND_F if action.kind is actions.Kind.F else actions.Kind.SEND_B
        send = Action(kind, action.stage, action.microbatch, peer)
        self.spans[place].append(Span(place, send, left, come := time.perf_counter()))
        return come - left

    def timeline(self, name: str) -> Timeline:
        """The step as a timeline."""
        return Timeline(name, tuple(map(tuple, self.spans)))


def _is_held(ref: weakref.ref[jax.Array]) -> bool:
    """Whether somebody has an array, and the array its memory."""
    array = ref()
    return array is not None and not array.is_deleted()
