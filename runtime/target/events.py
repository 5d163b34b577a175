"""What a simulation gives: a step, and what ran in it on which resource."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sbp.rates.tables import Evidence

KERNELS, NVLINK, NETWORK, HOST, LOOPS = "kernels", "nvlink", "network", "host", "loops"


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction of a step on one resource.

    Arguments:
      instruction: its name; opcode: what it is.
      resource: "kernels", "nvlink", "network" or "host"; "loops" for the time that a whole loop takes.
      start_seconds, end_seconds: of its first execution.
      times: executions per step.
      exposed_seconds: in which the kernels wait for it, all executions together.
      during: the kernels that ran between its start and its done, in the first execution.
      bytes: read from and written to memory, or of a collective's tensor; flops: of its matrix products.
      source: how its time is known.
    """

    instruction: str
    opcode: str
    resource: str
    start_seconds: float
    end_seconds: float
    times: float = 1
    exposed_seconds: float = 0.0
    during: tuple[str, ...] = ()
    bytes: float = 0.0
    flops: float = 0.0
    source: Evidence = "formula"

    @property
    def seconds(self) -> float:
        """On its resource, all executions together."""
        return (self.end_seconds - self.start_seconds) * self.times


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step of one device, simulated.

    Arguments:
      seconds: of the step.
      kernel_seconds: in which kernels run.
      network_seconds: in which collectives run, by resource.
      exposed_seconds: in which kernels wait for a collective, or for a copy to or from the host.
      flops: of matrix products, as many as the model has; each counts once, however precise it is made.
      mfu: the share of the step that they would take at the dense peak of their operand types.
      events: in the order of their first execution.
      unknown_trip_counts: loops whose trips the text does not say, counted as one.
      unknown_kernels: calls of libraries of which only the bytes are counted.
    """

    seconds: float
    kernel_seconds: float
    network_seconds: Mapping[str, float]
    exposed_seconds: float
    flops: float
    mfu: float
    events: tuple[Event, ...]
    unknown_trip_counts: tuple[str, ...] = ()
    unknown_kernels: tuple[str, ...] = ()
