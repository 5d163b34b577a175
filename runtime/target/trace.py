"""A simulated step as a trace that Perfetto and Chrome open: one track per resource."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sbp.passes.face import Plan
from sbp.runtime.hlo.meter import HasText
from sbp.runtime.hlo.origins import origins_of, rows_of
from sbp.runtime.target.events import HOST, KERNELS, LOOPS, NETWORK, NVLINK, Event, Simulation

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
    events = [_label("process_name", 0, title)]
    events += [_label("thread_name", tid, track) for tid, track in enumerate(used)]
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
        args |= {"exposed_us": e.exposed_seconds * 1e6, "during": list(e.during)}
    start, length = e.start_seconds * 1e6, (e.end_seconds - e.start_seconds) * 1e6
    shared = {"name": name, "cat": e.resource, "ph": "X", "pid": 1, "tid": tid}
    return {**shared, "ts": start, "dur": length, "args": args}
