"""Stages at the same time: order, bounds, errors, an early end."""

import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from models.recommender import criteo, stages, synthetic
from models.recommender.batch import Batch, hash_keys, rebatch
from models.recommender.layout import PREPARED
from models.recommender.stages import Flow, Stage

one = partial(Flow, size=lambda item: 1)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def meet(barrier: threading.Barrier, items: range, x: int) -> int:
    """Hands an item on; those of `items` when others are here: one after the other waits for ever."""
    if x in items:
        barrier.wait(600)
    return x


def uneven(x: int) -> int:
    """The earlier of two neighbours takes longer."""
    time.sleep(0.004 * ((x + 1) % 2))
    return 10 * x


def pairs(items: Iterator[int]) -> Iterator[tuple[int, int]]:
    for first in items:
        yield first, next(items, -1)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_order_is_kept(workers: int, depth: int, count: int) -> None:
    with one(range(count), [Stage("a", uneven, workers=workers, depth=depth), Stage("b", str)]) as flow:
        assert list(flow) == [str(10 * x) for x in range(count)]
    assert [rate.items for rate in flow.rates] == [count] * 4


def test_without_stages_the_source_is_read_ahead() -> None:
    with one("abc") as flow:
        assert list(flow) == ["a", "b", "c"]


def test_a_stage_may_change_the_number_of_items() -> None:
    with one(range(5), [Stage("pairs", stream=pairs), Stage("sum", sum, workers=2)]) as flow:
        assert list(flow) == [1, 5, 3]
    assert [rate.items for rate in flow.rates] == [5, 3, 3, 3]


def test_stages_overlap() -> None:
    """Source, two stages and consumer each hold an item at the same moment, again and again."""
    barrier = threading.Barrier(4)
    source, a, b, consumer = (partial(meet, barrier, range(k, k + 17)) for k in (3, 2, 1, 0))
    with one(map(source, range(20)), [Stage("a", a), Stage("b", b)]) as flow:
        assert [consumer(x) for x in flow] == list(range(20))
    assert all(rate.busy > 0 for rate in flow.rates)


def test_workers_share_a_slow_stage() -> None:
    """Six of them hold an item at the same moment."""
    together = partial(meet, threading.Barrier(6), range(30))
    with one(range(30), [Stage("a", together, workers=6)]) as flow:
        assert list(flow) == list(range(30))


@pytest.mark.parametrize("workers", [1, 3])
def test_queues_are_bounded(workers: int) -> None:
    """While the consumer rests, no more is read than queues and hands hold."""
    read = []
    with one(map(read.append, range(100)), [Stage("a", str, workers=workers, depth=2)], depth=1) as flow:
        next(flow)
        held = 1 + 2 + workers + 1
        while len(read) < held:  # or the test's own limit ends it
            time.sleep(0.01)
        time.sleep(0.05)
        # One is with the consumer; two wait for it; one is with each worker; one waits for them; one is read.
        assert held <= len(read) <= held + 1


def fails_at(bad: int, x: int) -> int:
    if x == bad:
        raise KeyError(f"item {x}")
    return x


def failing_source(bad: int) -> Iterator[int]:
    for x in range(20):
        yield fails_at(bad, x)


def failing_stream(bad: int, items: Iterator[int]) -> Iterator[int]:
    return (fails_at(bad, x) for x in items)


FAILING = {
    "source": lambda: one(failing_source(7), [Stage("a", uneven, workers=3)]),
    "stage": lambda: one(range(20), [Stage("a", partial(fails_at, 7), workers=3), Stage("b", uneven)]),
    "last stage": lambda: one(range(20), [Stage("a", partial(fails_at, 7), workers=3)]),
    "stream": lambda: one(range(20), [Stage("a", stream=partial(failing_stream, 7)), Stage("b", uneven)]),
    "before a stream": lambda: one(
        range(20), [Stage("a", partial(fails_at, 7)), Stage("b", stream=partial(map, uneven))]
    ),
    "size": lambda: Flow(range(20), [Stage("a", uneven)], size=lambda x: fails_at(7, x)),
}


@pytest.mark.parametrize("flow", FAILING.values(), ids=FAILING.keys())
def test_an_error_arrives_after_the_items_before_it(flow: type) -> None:
    got = []
    with pytest.raises(KeyError, match="item 7") as caught, flow() as items:
        got.extend(items)
    assert len(got) == 7
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "fails_at"


def test_after_an_error_there_is_nothing_more() -> None:
    with one(range(20), [Stage("a", partial(fails_at, 0))]) as flow:
        with pytest.raises(KeyError):
            next(flow)
        assert list(flow) == []


def test_a_stop_iteration_of_a_stage_ends_no_loop_in_silence() -> None:
    def exhausted(x: int) -> int:
        return next(iter(()))

    with (
        pytest.raises(RuntimeError, match="stage a raised StopIteration"),
        one([1], [Stage("a", exhausted)]) as flow,
    ):
        list(flow)


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_consumer_may_stop_early(error: type[Exception] | None) -> None:
    """All threads end (see the fixture), and the source's `finally` runs."""
    closed = []

    def endless() -> Iterator[int]:
        try:
            x = 0
            while True:
                yield x
                x += 1
        finally:
            closed.append(threading.current_thread().name)

    def leave() -> None:
        with one(endless(), [Stage("a", uneven, workers=3), Stage("pairs", stream=pairs)]) as flow:
            assert next(flow) == (0, 10)
            if error:
                raise error

    if error:
        with pytest.raises(error):
            leave()
    else:
        leave()
    assert closed == ["read-0"]


def test_a_stream_may_stop_early() -> None:
    def first(items: Iterator[int]) -> Iterator[int]:
        yield next(items)

    with one(range(1000), [Stage("a", uneven), Stage("b", stream=first)]) as flow:
        assert list(flow) == [0]


def test_a_flow_runs_once_and_inside_with() -> None:
    flow = one(range(3))
    with pytest.raises(RuntimeError, match="inside `with`"):
        next(flow)
    with flow:
        assert list(flow) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="inside `with`"):
        next(flow)
    with pytest.raises(RuntimeError, match="a flow runs once"), flow:
        pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"each": str, "stream": iter},
        {"each": str, "workers": 0},
        {"each": str, "depth": 0},
        {"stream": iter, "workers": 2},
    ],
    ids=str,
)
def test_stages_that_cannot_be_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="stage parse"):
        Stage("parse", **options)


def test_the_table_shows_who_waited() -> None:
    def slow(batch: list[int]) -> list[int]:
        time.sleep(0.02)
        return batch

    with Flow([[1, 2], [3]] * 5, [Stage("slow", slow), Stage("fast", list)]) as flow:
        for _ in flow:
            pass
    read, slow_one, fast, train = flow.rates
    assert [rate.samples for rate in flow.rates] == [15] * 4
    assert slow_one.busy >= 10 * 0.02
    assert all(waited > 0 for waited in (fast.starved_seconds, read.blocked_seconds, train.starved_seconds))
    shown = str(flow).splitlines()
    assert [line.split()[0] for line in shown] == ["stage", "read", "slow", "fast", "train", "15"]
    assert shown[-1].startswith("15 samples in ")


def test_a_file_goes_through_all_stages_to_the_device(tmp_path: Path) -> None:
    teacher = synthetic.Teacher.plant((50, 7), dense=2)
    names = PREPARED.__class__("label", ("I1", "I2"), ("C1", "C2"), PREPARED.scale)
    synthetic.write(tmp_path / "synthetic.parquet", teacher, 250, group=60)

    def rows(batch: Batch) -> Batch:
        return Batch(batch.label, batch.dense, hash_keys(batch.keys, (50, 7)))

    work = [
        stages.Stage("parse", criteo.parse, workers=2),
        stages.Stage("batch", stream=partial(rebatch, size=100)),
        stages.Stage("rows", rows),
        stages.Stage("copy", jax.device_put),
    ]
    with Flow(criteo.blocks(tmp_path / "synthetic.parquet", layout=names), work) as flow:
        got = list(flow)
    plain = list(criteo.batches(tmp_path / "synthetic.parquet", 100, layout=names))
    assert [len(batch) for batch in got] == [100, 100, 50]
    assert all(isinstance(batch.keys, jax.Array) for batch in got)
    for batch, expected in zip(got, plain, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, rows(expected))
    assert [rate.samples for rate in flow.rates] == [250] * 6
