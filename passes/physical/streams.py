"""List schedules of two streams: kernels one after another, and collectives one after another beside them.

XLA:GPU's latency-hiding scheduler goes backwards through a computation: what nobody waits for comes last, a
collective begins as late as it can and still be hidden, and kernels fill its time. So does this one, in
O(n log n). It lets one collective be under way at a time, inside a host or between hosts
(`xla_gpu_experimental_parallel_collective_overlap_limit` is 1), and so there is one stream of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


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
    """

    seconds: float
    stream: Stream = Stream.KERNELS
    after: Sequence[int] = ()


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
    return _run(tasks, _orders(tasks))


def _orders(tasks: Sequence[Task]) -> tuple[list[int], list[int]]:
    """The order of the tasks of each stream; those that take both are in both."""
    backwards = _Backwards(tasks, _depth(tasks))
    backwards.run()
    kernels, wires = backwards.begun
    return kernels[::-1], wires[::-1]


def _depth(tasks: Sequence[Task]) -> list[float]:
    """Of each task, the seconds on wires of what it waits for, one after another (XLA's "async depth")."""
    depth: list[float] = []
    for t in tasks:
        sent = (depth[i] + (tasks[i].seconds if tasks[i].stream is Stream.WIRES else 0.0) for i in t.after)
        depth.append(max(sent, default=0.0))
    return depth


@dataclass(slots=True)
class _Backwards:
    """Begins tasks from the end: a task is ready when all that wait for it are done."""

    tasks: Sequence[Task]
    depth: Sequence[float]
    waiting: list[int] = field(default_factory=list)
    ready: tuple[list[tuple[float, int]], list[tuple[float, int]]] = field(default_factory=lambda: ([], []))
    idle: list[bool] = field(default_factory=lambda: [True, True])
    running: list[tuple[float, int]] = field(default_factory=list)
    begun: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def run(self) -> None:
        """Begins all of them, whenever a stream is free."""
        self.waiting = [0] * len(self.tasks)
        for task in self.tasks:
            for i in task.after:
                self.waiting[i] += 1
        for i, users in enumerate(self.waiting):
            if not users:
                self._is_ready(i)
        now = 0.0
        self._begin(now)
        while self.running:
            now, at = heapq.heappop(self.running)
            self._done(at)
            while self.running and self.running[0][0] == now:
                self._done(heapq.heappop(self.running)[1])
            self._begin(now)

    def _is_ready(self, i: int) -> None:
        # The last in the order of the program first, wherever nothing is to be gained by another order; of
        # collectives the one first that has most to be sent before it.
        if self.tasks[i].stream is Stream.WIRES:
            heapq.heappush(self.ready[1], (-self.depth[i], -i))
        else:
            heapq.heappush(self.ready[0], (-i, i))

    def _begin(self, now: float) -> None:
        kernels, wires = self.ready
        if self.idle[0] and kernels:
            i = kernels[0][1]
            if self.tasks[i].stream is Stream.BOTH:
                if self.idle[1]:
                    heapq.heappop(kernels)
                    self.begun[1].append(i)
                    self.idle[1] = False
                    self._run(i, 0, now)
                return  # until the wires are free
            heapq.heappop(kernels)
            self._run(i, 0, now)
        if self.idle[1] and wires:
            self._run(-heapq.heappop(wires)[1], 1, now)

    def _run(self, i: int, stream: int, now: float) -> None:
        self.idle[stream] = False
        self.begun[stream].append(i)
        heapq.heappush(self.running, (now + self.tasks[i].seconds, i))

    def _done(self, i: int) -> None:
        task = self.tasks[i]
        if task.stream is not Stream.WIRES:
            self.idle[0] = True
        if task.stream is not Stream.KERNELS:
            self.idle[1] = True
        for j in task.after:
            self.waiting[j] -= 1
            if not self.waiting[j]:
                self._is_ready(j)


def _run(tasks: Sequence[Task], orders: tuple[Sequence[int], Sequence[int]]) -> TaskTimes:
    """Runs the tasks of each stream in an order, each as soon as it can."""
    starts, ends = [0.0] * len(tasks), [-1.0] * len(tasks)
    kernels, wires = orders
    at, free = [0, 0], [0.0, 0.0]

    def advance(stream: int, i: int, both: bool) -> bool:
        ready = max((ends[j] for j in tasks[i].after), default=0.0)
        if any(ends[j] < 0 for j in tasks[i].after):
            return False
        starts[i] = max(ready, *free) if both else max(ready, free[stream])
        ends[i] = starts[i] + tasks[i].seconds
        for s in (0, 1) if both else (stream,):
            free[s] = ends[i]
            at[s] += 1
        return True

    moved = True
    while moved:
        moved = False
        while at[1] < len(wires) and tasks[wires[at[1]]].stream is Stream.WIRES:
            if not advance(1, wires[at[1]], False):
                break
            moved = True
        while at[0] < len(kernels):
            i = kernels[at[0]]
            both = tasks[i].stream is Stream.BOTH
            if (both and (at[1] == len(wires) or wires[at[1]] != i)) or not advance(0, i, both):
                break
            moved = True
    return TaskTimes(max(free), starts, ends, _exposed(tasks, orders, starts, ends))


def _exposed(
    tasks: Sequence[Task],
    orders: tuple[Sequence[int], Sequence[int]],
    starts: Sequence[float],
    ends: Sequence[float],
) -> list[float]:
    """Of each task on wires, the time in which no kernel runs; both streams are in the order of time."""
    out = [0.0] * len(tasks)
    busy, k = [(starts[i], ends[i]) for i in orders[0] if tasks[i].seconds], 0
    for i in orders[1]:
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
