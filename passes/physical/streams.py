"""List schedules of two streams: kernels one after another, and collectives one after another beside them.

XLA:GPU's latency-hiding scheduler goes backwards through a computation: what nobody waits for comes last, a
collective begins as late as it can and still be hidden, and kernels fill its time. So does this one, in
O(n log n). Then its order is run forwards, by what tasks really take: the scheduler may believe otherwise,
and all kernels behind a `-done` wait for it.

XLA lets one collective be under way at a time, inside a host or between hosts
(`xla_gpu_experimental_parallel_collective_overlap_limit` is 1), and so there is one stream of them.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

NO_SECONDS = 1e-9
"""Kernels that take less are none: views, and what is merged into who reads it."""


class Stream(IntEnum):
    """What does the work of a task."""

    KERNELS = 0
    WIRES = 1
    BOTH = 2


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes time.

    Arguments:
      stream: what it takes; a loop that sends takes both.
      after: the tasks that it waits for, by position; all come before it.
      believed_seconds: what the scheduler takes it to be, if not `seconds`.
    """

    seconds: float
    stream: Stream = Stream.KERNELS
    after: Sequence[int] = ()
    believed_seconds: float | None = None

    @property
    def planned_seconds(self) -> float:
        """The time by which it is ordered."""
        return self.seconds if self.believed_seconds is None else self.believed_seconds


@dataclass(frozen=True)
class TaskTimes:
    """When tasks run.

    Arguments:
      seconds: until all have ended.
      starts, ends: of each task.
      exposed: of each task on wires, the seconds in which no kernel runs beside it; 0.0 of all others.
    """

    seconds: float
    starts: Sequence[float]
    ends: Sequence[float]
    exposed: Sequence[float]


def task_times(tasks: Sequence[Task]) -> TaskTimes:
    """Runs tasks as XLA:GPU orders them.

    >>> product, gradient, sent = Task(3.0), Task(2.0, after=(0,)), Task(4.0, Stream.WIRES, after=(0,))
    >>> found = task_times([product, gradient, sent, Task(1.0, after=(2,))])
    >>> found.seconds, found.exposed[2]
    (8.0, 2.0)
    """
    backwards = _Backwards(tasks, _depth(tasks))
    backwards.run()
    return _forwards(tasks, backwards.events[::-1])


def _depth(tasks: Sequence[Task]) -> list[float]:
    """Of each task, the seconds on wires until it has ended: its own and those of what it waits for, one by
    one ("async depth": `HloScheduleGraph::InitializeGraphAnalysis` in XLA)."""
    depth: list[float] = []
    for t in tasks:
        own = t.planned_seconds if t.stream is Stream.WIRES else 0.0
        depth.append(max((depth[i] for i in t.after), default=0.0) + own)
    return depth


Launch: TypeAlias = tuple[bool, int]
"""That a task begins, or that kernels wait for the end of a collective."""
BEGINS, AWAITED = True, False


@dataclass(slots=True)
class _Backwards:
    """Places tasks from the end: one is ready when all that wait for it have had their time."""

    tasks: Sequence[Task]
    depth: Sequence[float]
    events: list[Launch] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    kernels: list[tuple[float, int]] = field(default_factory=list)
    wires: list[tuple[float, int]] = field(default_factory=list)
    idle: list[bool] = field(default_factory=lambda: [True, True])
    running: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> None:
        """Places all of them, each when its stream is free."""
        self.waiting = [0] * len(self.tasks)
        for task in self.tasks:
            for i in task.after:
                self.waiting[i] += 1
        for i, users in enumerate(self.waiting):
            if not users:
                self._is_ready(i)
        self._place(0.0)
        while self.running:
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                self._done(heapq.heappop(self.running)[1])
            self._place(now)

    def _is_ready(self, i: int) -> None:
        # What takes no time is one with who reads it, and has its turn with that. Of all else the one comes
        # first behind which most is sent, one after another ("kAsyncDepth"), then the last in the program.
        ready = [i]
        while ready:
            i = ready.pop()
            if self.tasks[i].stream is Stream.WIRES:
                heapq.heappush(self.wires, (-self.depth[i], -i))
            elif self.tasks[i].stream is Stream.KERNELS and self.tasks[i].planned_seconds < NO_SECONDS:
                self.events.append((BEGINS, i))
                ready.extend(self._released(i))
            else:
                heapq.heappush(self.kernels, (-self.depth[i], -i))

    def _released(self, i: int) -> Iterator[int]:
        """What nobody waits for any more, once a task is placed."""
        for j in self.tasks[i].after:
            self.waiting[j] -= 1
            if not self.waiting[j]:
                yield j

    def _place(self, now: float) -> None:
        if self.idle[0] and self.kernels and self.tasks[-self.kernels[0][1]].stream is Stream.BOTH:
            if self.idle[1]:  # else it waits for that, and nothing else is sent
                self._occupy(-heapq.heappop(self.kernels)[1], now, (0, 1), BEGINS)
            return
        # Collectives first: so a kernel that is placed at the same time runs beside it.
        if self.idle[1] and self.wires:
            self._occupy(-heapq.heappop(self.wires)[1], now, (1,), AWAITED)
        if self.idle[0] and self.kernels:
            self._occupy(-heapq.heappop(self.kernels)[1], now, (0,), BEGINS)

    def _occupy(self, i: int, now: float, streams: tuple[int, ...], event: bool) -> None:
        for stream in streams:
            self.idle[stream] = False
        self.events.append((event, i))
        heapq.heappush(self.running, (now + self.tasks[i].planned_seconds, i))

    def _done(self, i: int) -> None:
        task = self.tasks[i]
        if task.stream is Stream.WIRES:
            self.events.append((BEGINS, i))
        else:
            self.idle[0] = True
        if task.stream is not Stream.KERNELS:
            self.idle[1] = True
        for j in self._released(i):
            self._is_ready(j)


def _forwards(tasks: Sequence[Task], events: Sequence[Launch]) -> TaskTimes:
    """Runs the events in their order, as a device does."""
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    kernels, wires = 0.0, 0.0  # when each is free
    for event, i in events:
        stream, seconds = tasks[i].stream, tasks[i].seconds
        if event is AWAITED:
            kernels = max(kernels, ends[i])
            continue
        starts[i] = kernels if stream is Stream.KERNELS else max(kernels, wires)
        ends[i] = starts[i] + seconds
        if stream is not Stream.WIRES:
            kernels = ends[i]
        if stream is not Stream.KERNELS:
            wires = ends[i]
    order = [i for event, i in events if event is BEGINS]
    return TaskTimes(max(kernels, wires), starts, ends, _exposed(tasks, order, starts, ends))


def _exposed(
    tasks: Sequence[Task], order: Sequence[int], starts: Sequence[float], ends: Sequence[float]
) -> list[float]:
    """Of each task on wires, the time in which no kernel runs; on each stream `order` is that of time."""
    out = [0.0] * len(tasks)
    busy = [(starts[i], ends[i]) for i in order if tasks[i].stream is not Stream.WIRES and tasks[i].seconds]
    k = 0
    for i in order:
        if tasks[i].stream is not Stream.WIRES:
            continue
        alone, now = 0.0, starts[i]
        while k < len(busy) and busy[k][1] <= now:
            k += 1
        j = k
        while now < ends[i]:
            if j == len(busy) or busy[j][0] >= ends[i]:
                alone += ends[i] - now
                break
            alone += max(0.0, busy[j][0] - now)
            now = max(now, busy[j][1])
            j += 1
        out[i] = alone
    return out
