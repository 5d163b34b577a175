"""A trace by JAX's profiler: the ops of each device, step by step.

For forced CPU devices XLA records every op in the lines of its threads, with its module and its device. An op
that leaves work to other threads is recorded twice: when it starts, and by an event "end: ..." of the same
context. That event may be late, since a reader of the op may run before it is written: so an op has ended at
the latest when something that reads it starts.

For GPUs each device has a plane with a line per stream, whose events are kernels. The op is one of their
statistics: the innermost annotation that XLA had open when it launched the kernel. A loop copies its
condition to the host under its own name, so on GPUs a loop has events of its own, which surround nothing.
"""

from __future__ import annotations

import bisect
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

STEP = "sbp.profile.step"
"""The name of the event around a step."""
END = "end: "
HOST_PLANE = "/host:CPU"
GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
STREAM = "Stream"
NANO = 1e-9


class TraceEvent(Protocol):
    """The part of an event of `jax.profiler.ProfileData` that is read."""

    name: str
    start_ns: float
    duration_ns: float
    stats: Iterable[tuple[str, Any]]


class TraceLine(Protocol):
    """A thread, or a stream."""

    name: str
    events: Iterable[TraceEvent]


class TracePlane(Protocol):
    """A host, or a device."""

    name: str
    lines: Iterable[TraceLine]


class HasPlanes(Protocol):
    """A `jax.profiler.ProfileData`."""

    planes: Iterable[TracePlane]


@dataclass(frozen=True, slots=True)
class OpEvent:
    """An op that ran on a device, by the clock of the trace, in seconds.

    Arguments:
      device: its number among the devices of the process.
      instruction: of the compiled program; "" for a kernel of none.
      kernel: its name in the profile, on GPUs.
    """

    device: int
    instruction: str
    start: float
    end: float
    kernel: str = ""


@dataclass(frozen=True)
class TracedStep:
    """A step as the caller saw it, and the ops that ran in it.

    Arguments:
      surrounds: whether loops and calls have events that surround those of others, as on CPUs.
    """

    start: float
    end: float
    events: tuple[OpEvent, ...]
    surrounds: bool = True

    @property
    def seconds(self) -> float:
        """From the call until all results were there."""
        return self.end - self.start

    @property
    def within(self) -> TracedStep:
        """Limits ends to the end of the step: a thread may be paused between its last op and its record."""
        begun = (e for e in self.events if e.start < self.end)
        return replace(self, events=tuple(replace(e, end=min(e.end, self.end)) for e in begun))


@dataclass
class _Host:
    """The part of the lines of a host that is read."""

    begun: list[tuple[OpEvent, object]] = field(default_factory=list)
    ended: dict[object, float] = field(default_factory=dict)
    windows: list[tuple[float, float]] = field(default_factory=list)

    def read(self, event: TraceEvent, module: str) -> None:
        start = event.start_ns * NANO
        end = start + event.duration_ns * NANO
        if event.name == STEP:
            self.windows.append((start, end))
            return
        said = _stats(event)
        if event.name.startswith(END):
            self.ended[said.get("_c")] = start
        elif said.get("hlo_module") == module and "device_ordinal" in said:
            op = OpEvent(int(said["device_ordinal"]), str(said["hlo_op"]), start, end)
            self.begun.append((op, said.get("_p")))


def traced_steps(
    profile: HasPlanes, module: str, readers: Mapping[str, Iterable[str]] | None = None
) -> list[TracedStep]:
    """The steps of a trace, with the ops of each.

    Arguments:
      module: the name of the compiled program; ops of others are left out.
      readers: per instruction, the instructions that read its result.
    """
    host, on_gpu = _Host(), list[OpEvent]()
    with warnings.catch_warnings():
        # Python 3.12 warns of the type of the statistics, which jaxlib has made.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            gpu = GPU_PLANE.match(plane.name)
            for line in plane.lines:
                if gpu is not None and line.name.startswith(STREAM):
                    on_gpu += _kernels(line, int(gpu[1]), module)
                elif plane.name.startswith(HOST_PLANE):
                    for event in line.events:
                        host.read(event, module)
    found = on_gpu or list(_until_read(host, readers or {}))
    found.sort(key=lambda e: e.start)
    starts = [e.start for e in found]
    return [
        TracedStep(
            a,
            b,
            tuple(found[bisect.bisect_left(starts, a) : bisect.bisect_left(starts, b)]),
            surrounds=not on_gpu,
        )
        for a, b in sorted(host.windows)
    ]


def _stats(event: TraceEvent) -> dict[str, Any]:
    return dict(event.stats)


def _kernels(line: TraceLine, device: int, module: str) -> Iterator[OpEvent]:
    """The kernels and copies of a stream; those of other programs have no instruction."""
    for event in line.events:
        said, start = _stats(event), event.start_ns * NANO
        own = said.get("hlo_module", module) == module
        name = str(said.get("hlo_op", "")) if own else ""
        yield OpEvent(device, name, start, start + event.duration_ns * NANO, event.name)


def _until_read(host: _Host, readers: Mapping[str, Iterable[str]]) -> Iterator[OpEvent]:
    """The ops of a host; work in other threads ends when it is read."""
    starts: dict[tuple[int, str], list[float]] = defaultdict(list)
    for op, _ in host.begun:
        starts[op.device, op.instruction].append(op.start)
    for found in starts.values():
        found.sort()
    for op, context in host.begun:
        ended = host.ended.get(context, op.end)
        if ended <= op.end:
            yield op
            continue
        for name in (op.instruction, *readers.get(op.instruction, ())):
            own = starts.get((op.device, name), [])
            at = bisect.bisect_left(own, op.end) if name != op.instruction else bisect.bisect(own, op.start)
            ended = min(ended, own[at]) if at < len(own) else ended
        yield replace(op, end=max(op.end, ended))
