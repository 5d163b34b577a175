"""List schedules of kernels and collectives, against slow ones and against all orders of tiny programs."""

import itertools
import random
import time
from collections.abc import Sequence

import pytest

from sbp.passes.physical.streams import Stream, Task, TaskTimes, task_times

CLOSE = 1e-9


def some_tasks(rng: random.Random, n: int, both: float = 0.1) -> list[Task]:
    """Tasks of whole seconds, each after up to three others."""
    streams = [Stream.KERNELS, Stream.WIRES, Stream.BOTH]
    return [
        Task(
            float(rng.randrange(6)),
            rng.choices(streams, [0.6, 0.4 - both, both])[0],
            tuple(sorted(rng.sample(range(i), min(i, rng.randrange(4))))),
        )
        for i in range(n)
    ]


def busy(tasks: Sequence[Task], stream: Stream) -> float:
    return sum(t.seconds for t in tasks if t.stream in (stream, Stream.BOTH))


def longest_chain(tasks: Sequence[Task]) -> float:
    ends: list[float] = []
    for t in tasks:
        ends.append(max((ends[i] for i in t.after), default=0.0) + t.seconds)
    return max(ends, default=0.0)


def check(tasks: Sequence[Task], found: TaskTimes) -> None:
    """What must hold of every schedule."""
    for t, start, end in zip(tasks, found.starts, found.ends, strict=True):
        assert end == pytest.approx(start + t.seconds)
        assert all(found.ends[i] <= start + CLOSE for i in t.after)
    for stream in (Stream.KERNELS, Stream.WIRES):
        spans = sorted(
            (start, end)
            for t, start, end in zip(tasks, found.starts, found.ends, strict=True)
            if t.stream in (stream, Stream.BOTH) and t.seconds
        )
        assert all(a[1] <= b[0] + CLOSE for a, b in itertools.pairwise(spans))
    least = max(busy(tasks, Stream.KERNELS), busy(tasks, Stream.WIRES), longest_chain(tasks))
    assert least - CLOSE <= found.seconds <= sum(t.seconds for t in tasks) + CLOSE
    # Whenever no kernel runs, something is sent: kernels and what is exposed are the step.
    assert found.seconds == pytest.approx(busy(tasks, Stream.KERNELS) + sum(found.exposed))
    for t, exposed in zip(tasks, found.exposed, strict=True):
        assert 0.0 <= exposed <= t.seconds + CLOSE
        assert t.stream is Stream.WIRES or exposed == 0.0


def shortest(tasks: Sequence[Task]) -> float:
    """The least time of all orders in which tasks may begin, each as soon as it can."""
    best = float("inf")
    for order in itertools.permutations(range(len(tasks))):
        ends: dict[int, float] = {}
        free = {Stream.KERNELS: 0.0, Stream.WIRES: 0.0}
        for i in order:
            if any(j not in ends for j in tasks[i].after):
                break
            mine = [s for s in free if tasks[i].stream in (s, Stream.BOTH)]
            start = max([0.0, *(free[s] for s in mine), *(ends[j] for j in tasks[i].after)])
            ends[i] = start + tasks[i].seconds
            free.update(dict.fromkeys(mine, ends[i]))
        else:
            best = min(best, max(ends.values(), default=0.0))
    return best


def exposed_slowly(tasks: Sequence[Task], found: TaskTimes, i: int) -> float:
    """How many of a task's whole seconds no kernel shares."""
    spans = [
        (a, b)
        for t, a, b in zip(tasks, found.starts, found.ends, strict=True)
        if t.stream is not Stream.WIRES and a < b
    ]
    begin, end = round(found.starts[i]), round(found.ends[i])
    return sum(not any(a <= second < b for a, b in spans) for second in range(begin, end))


def test_every_schedule_is_one_that_can_run() -> None:
    rng = random.Random(0)
    for n in (1, 2, 5, 20, 60):
        for both in (0.0, 0.1):
            for _ in range(40):
                tasks = some_tasks(rng, n, both)
                check(tasks, task_times(tasks))


def test_against_all_orders_of_tiny_programs() -> None:
    """Never better than the best order, seldom worse: it is greedy."""
    rng, ratios = random.Random(1), []
    for _ in range(150):
        tasks = some_tasks(rng, 6)
        found, best = task_times(tasks).seconds, shortest(tasks)
        assert best <= found + CLOSE
        if best:
            ratios.append(found / best)
    assert max(ratios) < 1.6 and sum(ratios) / len(ratios) < 1.1


def test_what_is_exposed_second_by_second() -> None:
    rng = random.Random(2)
    for _ in range(100):
        tasks = some_tasks(rng, 15)
        found = task_times(tasks)
        for i, t in enumerate(tasks):
            if t.stream is Stream.WIRES:
                assert found.exposed[i] == exposed_slowly(tasks, found, i)


def test_what_nobody_waits_for_fills_the_time_of_a_collective() -> None:
    """The gradient of a weight, the first in the program, runs beside the collective of the input's."""
    forward, weight, data = Task(1.0), Task(3.0, after=(0,)), Task(1.0, after=(0,))
    sent, on = Task(3.0, Stream.WIRES, after=(2,)), Task(1.0, after=(3,))
    found = task_times([forward, weight, data, sent, on])
    assert found.seconds == 6.0 and found.exposed[3] == 0.0
    assert found.starts[1] == found.starts[3]


def test_one_collective_at_a_time() -> None:
    found = task_times([Task(2.0, Stream.WIRES), Task(3.0, Stream.WIRES), Task(1.0)])
    assert found.seconds == 5.0 and sum(found.exposed) == 4.0


def test_nothing_is_sent_beside_a_loop_that_sends() -> None:
    found = task_times([Task(2.0, Stream.WIRES), Task(3.0, Stream.BOTH), Task(3.0, Stream.KERNELS)])
    assert found.seconds == 6.0 and found.exposed == [0.0, 0.0, 0.0]
    assert found.starts[0] >= found.ends[1] or found.ends[0] <= found.starts[1]


def test_the_scheduler_may_be_wrong() -> None:
    """It gives all kernels to a collective that it believes to be long, and none are left for the other."""
    right = [
        Task(2.0, Stream.WIRES),
        Task(2.0, Stream.WIRES, (0,)),
        Task(2.0),
        Task(2.0),
        Task(1.0, after=(1, 2, 3)),
    ]
    wrong = [*right[:1], Task(2.0, Stream.WIRES, (0,), believed_seconds=4.0), *right[2:]]
    assert task_times(right).seconds == 5.0
    assert task_times(wrong).seconds == 7.0
    assert [task_times(wrong).exposed[i] for i in (0, 1)] == [2.0, 0.0]


def test_nothing_takes_nothing() -> None:
    assert task_times([]).seconds == 0.0
    assert task_times([Task(0.0), Task(0.0, Stream.WIRES, (0,))]).seconds == 0.0


def test_as_fast_as_sorting() -> None:
    """A step of hundreds of layers; the time of this thread, as the machine may have other work."""
    rng = random.Random(3)
    tasks = [
        Task(
            rng.random(),
            Stream.WIRES if i % 7 == 0 else Stream.KERNELS,
            tuple({max(0, i - rng.randrange(1, 50)), i - 1}) if i else (),
        )
        for i in range(30_000)
    ]
    start = time.thread_time()
    found = task_times(tasks)
    assert time.thread_time() - start < 1.0
    assert found.seconds >= max(busy(tasks, Stream.KERNELS), longest_chain(tasks)) - CLOSE


def test_of_two_collectives_for_one_kernel_the_longer_one_is_sent_last() -> None:
    """XLA goes backwards, and takes the one with most on the wires first: the shorter one is sent before."""
    made, short, long = Task(1.0), Task(1.0, Stream.WIRES, (0,)), Task(3.0, Stream.WIRES, (0,))
    found = task_times([made, long, short, Task(1.0, after=(1, 2))])
    assert found.starts[2] < found.starts[1]


def test_what_takes_no_time_is_one_with_who_reads_it() -> None:
    """A view of what is sent, first in the program: kernels that are ready do not come between."""
    view = Task(0.0, after=(1,))
    tasks = [Task(1.0), Task(2.0, Stream.WIRES, (0,)), view, Task(2.0), Task(1.0, after=(2,))]
    assert task_times(tasks).exposed[1] == 0.0
