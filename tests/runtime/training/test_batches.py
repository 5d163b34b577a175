"""Where batches begin, and go back to: functions, lists, iterators, feeds, and what knows where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sbp.runtime.training.batches import BatchSource

COUNT = 9


class Feed:
    """Batches by number, of which it is told where to begin."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def batches_from(self, step: int) -> Iterator[Any]:
        self.said.append(f"from {step}")
        try:
            yield iter(range(step, COUNT))
        finally:
            self.said.append("left")


class Knowing:
    """An iterator that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == COUNT:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


def function(i: int) -> int:
    return i


MAKERS: dict[str, Any] = {
    "function": lambda: function,
    "list": lambda: [*range(COUNT)],
    "iterator": lambda: iter(range(COUNT)),
    "feed": Feed,
    "knowing": Knowing,
}


def drawn(source: BatchSource, count: int) -> list[int]:
    return [source.draw() for _ in range(count)]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("looked", [None, 0, 4])
def test_it_begins_where_it_is_told(kind: str, looked: int | None) -> None:
    """Also where somebody has looked at a batch before, and whether or not that was the right one."""
    for step in (0, 1, 4):
        given = MAKERS[kind]()
        source = BatchSource(given)
        if looked is not None:
            source.peek(looked)
        if isinstance(given, Knowing):
            given.set_state(step)
        source.seek(step, again=isinstance(given, Knowing))
        assert drawn(source, 3) == [step, step + 1, step + 2], (kind, looked, step)


@pytest.mark.parametrize("kind", MAKERS)
def test_it_goes_back_where_it_can(kind: str) -> None:
    given = MAKERS[kind]()
    source = BatchSource(given)
    assert source.can_go_back == (kind != "iterator")
    source.seek(0)
    drawn(source, 5)
    if source.can_go_back:
        if isinstance(given, Knowing):
            given.set_state(2)
        source.seek(2)
        assert drawn(source, 2) == [2, 3]


def test_the_end() -> None:
    source = BatchSource([0, 1])
    source.seek(1)
    assert drawn(source, 3) == [1, None, None]
    assert BatchSource([0, 1]).peek(2) is None


def test_a_batch_that_was_looked_at_is_made_once() -> None:
    """Unless what it is made from has changed since."""
    made: list[int] = []

    def batches(i: int) -> int:
        made.append(i)
        return i

    source = BatchSource(batches)
    source.peek(3)
    source.seek(3)
    assert drawn(source, 2) == [3, 4] and made == [3, 4]
    source.peek(3)
    source.seek(3, again=True)
    assert drawn(source, 1) == [3] and made == [3, 4, 3, 3]


def test_a_feed_is_left_before_it_begins_anew() -> None:
    feed = Feed()
    source = BatchSource(feed)
    source.peek(4)
    source.seek(4)
    assert feed.said == ["from 4"]
    source.seek(2)
    source.close()
    assert feed.said == ["from 4", "left", "from 2", "left"]
