"""Stages that work at the same time, with bounded queues between them: read, parse, copy, train.

    stages = [Stage("parse", parse, workers=2), Stage("batch", stream=cut), Stage("copy", jax.device_put)]
    with Flow(blocks(path), stages) as flow:
        for batch in flow:
            ...  # train
    print(flow)

Workers are threads. What takes long has to release Python's lock, as NumPy, Arrow, JAX and reading a file do.
`jax.device_put` comes back before the copy is made; `jax.block_until_ready` around it shows the copy's rate.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


class Stopped(BaseException):
    """Nobody wants more items; no `Exception`, as `GeneratorExit` is none, so that no stage catches it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What is done to each item, by several workers; or to the whole stream, by one.

    Arguments:
      name: for the table of rates.
      each: item -> item.
      stream: iterator of items -> iterator of items, as a generator that cuts batches; instead of `each`.
      workers: threads that call `each`.
      depth: finished items that may wait for the next stage. Memory holds `depth + workers` of them at most.
    """

    name: str
    each: Callable[[Any], Any] | None = None
    stream: Callable[[Iterator[Any]], Iterable[Any]] | None = None
    workers: int = 1
    depth: int = 2

    def __post_init__(self) -> None:
        if (self.each is None) == (self.stream is None):
            raise ValueError(f"stage {self.name}: either each or stream")
        if self.workers < 1 or self.depth < 1 or (self.stream is not None and self.workers > 1):
            raise ValueError(
                f"stage {self.name}, workers {self.workers}, depth {self.depth}: at least one of each, "
                "and a stream has one worker"
            )


@dataclass(slots=True)
class Rate:
    """How one stage fared; the seconds are summed over its workers.

    Attributes:
      items: that it gave.
      samples: in them.
      busy: seconds of work.
      starved_seconds: seconds it waited for the stage before it.
      blocked_seconds: seconds it waited for its turn, or for room in the queue behind it.
    """

    name: str
    workers: int
    items: int = 0
    samples: int = 0
    busy: float = 0.0
    starved_seconds: float = 0.0
    blocked_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What a stage raised, on its way to the consumer; all items before it arrive."""

    error: BaseException


@dataclass(slots=True)
class Queue:
    """A bounded queue that keeps the order of numbered items, and that can be stopped.

    Several threads take items and get their numbers with them; they put results under the same numbers, each
    when its turn has come.
    """

    depth: int
    items: deque[Any] = field(default_factory=deque)
    next_in: int = 0
    next_out: int = 0
    ended: bool = False
    stopped: bool = False
    condition: threading.Condition = field(default_factory=threading.Condition)

    def put(self, number: int, item: Any) -> None:
        """Waits for turn and room."""
        with self.condition:
            self.condition.wait_for(
                lambda: self.stopped or (self.next_in == number and len(self.items) < self.depth)
            )
            if self.stopped:
                raise Stopped
            self.items.append(item)
            self.next_in += 1
            self.condition.notify_all()

    def end(self, number: int) -> None:
        """There are `number` items and no more."""
        with self.condition:
            self.condition.wait_for(lambda: self.stopped or self.next_in == number)
            self.ended = True
            self.condition.notify_all()

    def get(self) -> tuple[int, Any]:
        """The next item and its number.

        Raises:
          StopIteration: after the last item.
          Stopped: if nobody wants more.
        """
        with self.condition:
            self.condition.wait_for(lambda: self.stopped or self.ended or self.items)
            if self.stopped:
                raise Stopped
            if not self.items:
                raise StopIteration
            self.next_out += 1
            item = self.items.popleft()
            self.condition.notify_all()
            return self.next_out - 1, item

    def stop(self) -> None:
        """Wakes whoever waits."""
        with self.condition:
            self.stopped = True
            self.items.clear()
            self.condition.notify_all()


class Flow:
    """Items from a source through all stages, in order; iterate over it inside `with`, once.

    What a stage raises is raised here, with its traceback, after the items before it. Leaving `with` stops
    all threads, waits until each has finished the item it is at, and closes the source if it is a generator.

    Arguments:
      source: the items, taken by a thread of its own.
      stages: what is done to them.
      size: how many samples an item has.
      names: of the source and of the consumer, for the table of rates.
      depth: items that may wait for the first stage.
    """

    def __init__(
        self,
        source: Iterable[Any],
        stages: Sequence[Stage] = (),
        *,
        size: Callable[[Any], int] = len,
        names: tuple[str, str] = ("read", "train"),
        depth: int = 2,
    ) -> None:
        first = Stage(names[0], stream=lambda _: source, depth=depth)
        self._stages = (first, *stages)
        self._queues = [Queue(stage.depth) for stage in self._stages]
        self._size = size
        self.rates = [Rate(stage.name, stage.workers) for stage in self._stages]
        self.rates.append(Rate(names[1], 1))
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._began = self._ended = 0.0
        self._at: float | None = None

    def __enter__(self) -> Flow:
        if self._threads:
            raise RuntimeError("a flow runs once")
        self._began = time.perf_counter()
        for at, stage in enumerate(self._stages):
            work = self._stream if stage.stream is not None else self._each
            for worker in range(stage.workers):
                name = f"{stage.name}-{worker}"
                self._threads.append(threading.Thread(target=work, args=(at,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        for thread in self._threads:
            thread.join()
        self._ended = time.perf_counter()

    def _stop(self) -> None:
        self._leave()
        for queue in self._queues:
            queue.stop()

    def _leave(self) -> None:
        """The consumer is done with the item that it had."""
        if self._at is not None:
            self.rates[-1].busy += time.perf_counter() - self._at
        self._at = None

    def __iter__(self) -> Flow:
        return self

    def __next__(self) -> Any:
        if not self._threads or self._ended:
            raise RuntimeError("iterate over a flow inside `with`")
        self._leave()
        rate, began = self.rates[-1], time.perf_counter()
        try:
            _, item = self._queues[-1].get()
        except Stopped:
            raise StopIteration from None  # after a failure there is nothing more
        finally:
            rate.starved_seconds += time.perf_counter() - began
        if isinstance(item, Failure):
            self._stop()
            raise item.error
        rate.items += 1
        rate.samples += self._size(item)
        self._at = time.perf_counter()
        return item

    def _each(self, at: int) -> None:
        """One worker of a stage that maps items."""
        before, behind = self._queues[at - 1], self._queues[at]
        with suppress(Stopped):
            while True:
                began = time.perf_counter()
                try:
                    number, item = before.get()
                except StopIteration:
                    behind.end(before.next_out)
                    return
                taken = time.perf_counter()
                result, samples = self._worked(at, item)
                worked = time.perf_counter()
                behind.put(number, result)
                self._note(at, samples, worked - taken, taken - began, time.perf_counter() - worked)

    def _worked(self, at: int, item: Any) -> tuple[Any, int]:
        """An item after a stage, and the samples in it."""
        if isinstance(item, Failure):
            return item, 0
        each = self._stages[at].each
        assert each is not None
        try:
            result = each(item)
            return result, self._size(result)
        except StopIteration as error:
            # Raised again as it is, it would end the consumer's loop in silence.
            wrong = RuntimeError(f"stage {self._stages[at].name} raised StopIteration")
            wrong.__cause__ = error
            return Failure(wrong), 0
        except BaseException as error:
            return Failure(error), 0

    def _stream(self, at: int) -> None:
        """The worker of a stage that maps the stream; the source is one."""
        stream, waited = self._stages[at].stream, [0.0]
        assert stream is not None
        behind = self._queues[at]
        items: Iterator[Any] = iter(())
        with suppress(Stopped):
            try:
                items = iter(stream(self._inputs(at - 1, waited) if at else items))
                began = time.perf_counter()
                for item in items:
                    samples, worked = self._size(item), time.perf_counter()
                    behind.put(behind.next_in, item)
                    now = time.perf_counter()
                    self._note(at, samples, worked - began - waited[0], waited[0], now - worked)
                    began, waited[0] = now, 0.0
            except Stopped:
                raise
            except BaseException as error:
                behind.put(behind.next_in, Failure(error))
            else:
                behind.end(behind.next_in)
            finally:
                if isinstance(items, Generator):
                    items.close()

    def _inputs(self, at: int, waited: list[float]) -> Iterator[Any]:
        """The items of a queue for a stage that maps the stream; adds up how long it waited."""
        while True:
            began = time.perf_counter()
            try:
                _, item = self._queues[at].get()
            except StopIteration:
                return
            waited[0] += time.perf_counter() - began
            if isinstance(item, Failure):
                raise item.error
            yield item

    def _note(self, at: int, samples: int, busy: float, starved: float, blocked: float) -> None:
        rate = self.rates[at]
        with self._lock:
            rate.items += 1
            rate.samples += samples
            rate.busy += busy
            rate.starved_seconds += starved
            rate.blocked_seconds += blocked

    def __str__(self) -> str:
        """A table: what each stage could do if it never waited (samples/s), and where its time went."""
        seconds = (self._ended or time.perf_counter()) - self._began
        head = f"{'stage':<12}{'workers':>8}{'samples':>14}{'samples/s':>16}"
        rows = [head + "".join(f"{name:>9}" for name in ("busy", "starved", "blocked"))]
        for rate in self.rates:
            shares = [
                part / (seconds * rate.workers)
                for part in (rate.busy, rate.starved_seconds, rate.blocked_seconds)
            ]
            alone = rate.workers * rate.samples / rate.busy if rate.busy else 0.0
            row = f"{rate.name:<12}{rate.workers:>8}{rate.samples:>14,}{alone:>16,.0f}"
            rows.append(row + "".join(f"{share:>9.0%}" for share in shares))
        samples = self.rates[-1].samples
        rows.append(f"{samples:,} samples in {seconds:.1f} s: {samples / seconds:,.0f} samples/s")
        return "\n".join(rows)
