"""The estimated costs of a stage and of a placement of a pipeline, as a plan holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage; bytes are those of one device.

    Arguments:
      place: the position of its placement.
      forward_seconds, input_seconds, weight_seconds: of a micro-batch's forward, of the gradients that other
        stages wait for, and of the rest of the backward pass.
      residual_bytes: what a micro-batch leaves from its forward to the end of its backward.
      for_weights_bytes: what of that, and of what the gradients for others made, the rest of the backward
        pass still needs.
      weight_bytes: what the forward reads whole for every micro-batch.
      forward_working_bytes, input_working_bytes, weight_working_bytes: the most that each of these takes
        besides while it runs.
    """

    place: int
    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    residual_bytes: float
    for_weights_bytes: float
    weight_bytes: float
    forward_working_bytes: float = 0.0
    input_working_bytes: float = 0.0
    weight_working_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """One placement; bytes are those of one device.

    Arguments:
      rest_bytes: arguments, sums over micro-batches, and what was received for all of these.
      working_bytes: what one piece needs besides while it runs, the one that needs most.
      outside_bytes: the peak before and after the loop over micro-batches.
    """

    rest_bytes: float
    working_bytes: float
    outside_bytes: float

    @property
    def steady_bytes(self) -> float:
        """All but what micro-batches hold."""
        return self.rest_bytes + self.working_bytes
