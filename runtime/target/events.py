"""What a simulation gives: a step, and what ran in it on which resource.

A simulated step as a trace that Perfetto and Chrome open: one track per resource.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbp.passes.face import Plan
from sbp.rates.tables import Evidence
from sbp.runtime.hlo.meter import HasText
from sbp.runtime.hlo.origins import origins_of, rows_of

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
      kernels: the kernels that ran between its start and its done, in the first execution.
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
    kernels: tuple[str, ...] = ()
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


TRACKS = (LOOPS, KERNELS, NVLINK, NETWORK, HOST)


def trace_json(
    simulation: Simulation,
    rows: Mapping[str, str] | None = None,
    paths: Mapping[str, str] | None = None,
    name: str = "simulated step",
) -> str:
    """JSON in the trace event format, times in microseconds.

    A loop shows its first trip, under a bar that is as long as all of them.

    Arguments:
      rows: instruction -> what the plan says of it, such as "row12 all-reduce of layer0.w"; its event is
        called so.
      paths: instruction -> the user's path to it, such as "jvp(layer0)/dot_general"; the name of what has no
        row.
      name: of the process in the trace.

    >>> from sbp.runtime.target.events import Event, Simulation
    >>> step = Simulation(1e-3, 1e-3, {}, 0.0, 0.0, 0.0, (Event("fusion.1", "fusion", "kernels", 0.0, 1e-3),))
    >>> [e["name"] for e in json.loads(trace_json(step, paths={"fusion.1": "layer0/add"}))["traceEvents"]]
    ['process_name', 'thread_name', 'layer0/add']
    """
    rows, paths = rows or {}, paths or {}
    used = [track for track in TRACKS if any(e.resource == track for e in simulation.events)]
    title = f"{name}, {simulation.seconds * 1e3:.3f} ms, {simulation.exposed_seconds * 1e3:.3f} ms exposed"
    events = [
        _label("process_name", 0, title),
        *(_label("thread_name", tid, track) for tid, track in enumerate(used)),
    ]
    for e in simulation.events:
        called = rows.get(e.instruction) or paths.get(e.instruction) or e.instruction
        events.append(_complete(e, called, used.index(e.resource)))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0)


def names_of(compiled: HasText, plan: Plan | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """The `rows` and the `paths` of a trace.

    Arguments:
      compiled: what `program.lower(*args).compile()` gives.
      plan: `program.plan(*args)`; None for a program without one.
    """
    meant = rows_of(compiled, plan) if plan else {}
    rows = {
        name: ", ".join(f"{row.name} {row.kind} of {row.tensor}" for row in found)
        for name, found in meant.items()
        if found
    }
    return rows, {name: origin.path for name, origin in origins_of(compiled).items() if origin.path}


def _label(what: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": tid, "args": {"name": name}}


def _complete(e: Event, name: str, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"instruction": e.instruction, "opcode": e.opcode, "times": e.times}
    if e.resource != LOOPS:
        args |= {"bytes": e.bytes, "flops": e.flops, "time is": e.source}
    if e.resource not in (LOOPS, KERNELS):
        args |= {"exposed_us": e.exposed_seconds * 1e6, "during": list(e.kernels)}
    start, length = e.start_seconds * 1e6, (e.end_seconds - e.start_seconds) * 1e6
    shared = {"name": name, "cat": e.resource, "ph": "X", "pid": 1, "tid": tid}
    return {**shared, "ts": start, "dur": length, "args": args}
