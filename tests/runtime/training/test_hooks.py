"""What is kept in a step beside the state, and is there again when a run goes on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import ArgumentError, CheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.embedding.eviction import LeastRecentlyUsed
from sbp.runtime.embedding.vocabulary import Vocabulary
from sbp.runtime.training.hooks import vocabularies_in
from tests.runtime.training import small
from tests.runtime.training.small import batch_of, fitted

ROWS = 6


class Counter:
    """Something with a state: how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


def test_what_is_named_is_kept(tmp_path: Path) -> None:
    def given(epoch: int) -> Any:
        return {"counter": Counter(), "epoch": epoch, "key": jax.random.key(epoch), "seen": np.arange(epoch)}

    first = given(3)

    def batches(i: int) -> Any:
        first["counter"].count += 1
        first["epoch"] = 10 + i
        return batch_of(i)

    fitted(batches, steps=4, checkpoint=tmp_path, save_every=2, extra=first)
    then = given(0)
    fitted(steps=4, checkpoint=tmp_path, extra=then)
    assert then["counter"].count == 4 and then["epoch"] == 13 and then["seen"].tolist() == [0, 1, 2]
    assert (jax.random.key_data(then["key"]) == jax.random.key_data(jax.random.key(3))).all()
    assert Checkpoints(tmp_path).extra(2)["counter"] == {"count": 2}  # not of the batch that was made ahead


def test_it_goes_back_with_the_state(tmp_path: Path) -> None:
    kept, bad = {"counter": Counter()}, [True]

    def batches(i: int) -> Any:
        kept["counter"].count += 1
        if i == 4 and bad.pop() if bad else False:
            return np.full(small.SIZE, np.nan, np.float32)
        return batch_of(i)

    policy = sbp.training.NonFinitePolicy(max_rollbacks=1)
    fitted(batches, checkpoint=tmp_path, save_every=2, extra=kept, on_nonfinite=policy)
    assert kept["counter"].count == 8


# -- vocabularies


def table_program() -> Any:
    """A table of rows that are trained; those of new keys are set to zero first."""

    def step(table: Any, batch: Any) -> Any:
        rows, new = batch
        table = table.at[new].set(0.0, mode="drop")
        return table.at[rows].add(1.0), table[rows].sum()

    return sbp.compile(step, sbp.placement("cpu", shape=(2,)), in_sbp=([sbp.S(0)], sbp.AUTO))


program = functools.cache(table_program)


def keys_of(i: int) -> Any:
    return np.random.default_rng(i).integers(0, 20, 3)


def rows_of(vocabulary: Vocabulary, i: int) -> Any:
    found = vocabulary.lookup(keys_of(i))
    new = np.full(3, ROWS, np.int32)
    new[: found.new_rows.size] = found.new_rows
    return found.rows, new


def closure(vocabulary: Vocabulary) -> Any:
    return lambda i: rows_of(vocabulary, i)


def partial(vocabulary: Vocabulary) -> Any:
    return functools.partial(rows_of, vocabulary)


class Reader:
    """An object whose method makes the batches."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.parts = {"words": [vocabulary]}

    def batch(self, i: int) -> Any:
        return rows_of(self.parts["words"][0], i)


def method(vocabulary: Vocabulary) -> Any:
    return Reader(vocabulary).batch


def generator(vocabulary: Vocabulary) -> Iterator[Any]:
    for i in range(12):
        yield rows_of(vocabulary, i)


def mapped(vocabulary: Vocabulary) -> Any:
    return map(functools.partial(rows_of, vocabulary), range(12))


GLOBAL = [Vocabulary(ROWS)]


def of_a_global(i: int) -> Any:
    return rows_of(GLOBAL[0], i)


def by_global(vocabulary: Vocabulary) -> Any:
    GLOBAL[0] = vocabulary
    return of_a_global


MAKERS = [closure, partial, method, generator, mapped, by_global]


def run(make: Any, steps: int, **given: Any) -> Any:
    words = Vocabulary(ROWS, LeastRecentlyUsed())
    table = (np.zeros((ROWS, 2), np.float32),)
    return sbp.fit(program(), table, make(words), steps=steps, progress=False, **given), words


@pytest.mark.parametrize("make", MAKERS)
def test_a_vocabulary_that_batches_use_is_kept(make: Any, tmp_path: Path) -> None:
    """Rows, evictions and all: the run that was cut in two is the run that was not."""
    whole, words = run(make, 9)
    run(make, 4, checkpoint=tmp_path, save_every=3)
    done, again = run(make, 9, checkpoint=tmp_path)
    assert done.start_step == 4 and len(words) == ROWS
    np.testing.assert_array_equal(done.state[0], whole.state[0])
    assert [r["loss"] for r in done.history] == [r["loss"] for r in whole.history[4:]]
    for name, value in words.get_state().items():
        np.testing.assert_array_equal(again.get_state()[name], value)


def test_a_vocabulary_that_is_named_is_kept_once(tmp_path: Path) -> None:
    words = Vocabulary(ROWS)
    table = (np.zeros((ROWS, 2), np.float32),)
    given = {"checkpoint": tmp_path, "progress": False, "extra": {"words": words}}
    sbp.fit(program(), table, lambda i: rows_of(words, i % 2), steps=2, **given)
    assert set(Checkpoints(tmp_path).extra()) == {"words"}


def test_vocabularies_are_found_wherever_they_are() -> None:
    for make in MAKERS:
        words = Vocabulary(3)
        assert vocabularies_in(make(words)) == (words,), make
    assert vocabularies_in(batch_of) == ()


class Feed:
    """Batches that are made by a thread, maybe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @contextmanager
    def batches_from(self, step: int) -> Iterator[Any]:
        yield (rows_of(self.vocabulary, i) for i in range(step, 9))


def test_a_feed_with_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """It may read ahead; whoever names it says that it does not."""
    with pytest.raises(ArgumentError, match="a feed may read ahead"):
        run(Feed, 4, checkpoint=tmp_path)
    words = Vocabulary(ROWS)
    table = (np.zeros((ROWS, 2), np.float32),)
    given = {"checkpoint": tmp_path, "progress": False, "extra": {"words": words}}
    done = sbp.fit(program(), table, Feed(words), steps=2, **given)
    assert done.is_done and Checkpoints(tmp_path).extra()["words"]["batches"] == 2


def test_other_batches_than_it_was_trained_with(tmp_path: Path) -> None:
    run(closure, 2, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="0 vocabularies in the batches, 1 in the step"):
        sbp.fit(
            program(),
            (np.zeros((ROWS, 2), np.float32),),
            lambda i: (keys_of(i) % ROWS, np.full(3, ROWS)),
            steps=4,
            checkpoint=tmp_path,
            progress=False,
        )


class Shuffled:
    """An iterator that knows where it is, as those of grain do."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.at += 1
        return batch_of(self.at - 1)

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


def test_an_iterator_that_knows_where_it_is(tmp_path: Path) -> None:
    whole = fitted()
    fitted(Shuffled(), steps=4, checkpoint=tmp_path, save_every=3)
    batches = Shuffled()
    done = fitted(batches, checkpoint=tmp_path)
    assert done.start_step == 4 and batches.at == 8
    assert [r["loss"] for r in done.history] == [r["loss"] for r in whole.history[4:]]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ([1], "a list"),
        ({3: 1}, "a dict by names"),
        ({"fit.batches": 1}, "the loop keeps something of its own under it"),
    ],
)
def test_what_cannot_be_named(extra: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        fitted(extra=extra)


def test_what_cannot_be_kept_is_said_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra\['f'\]"):
        fitted(checkpoint=tmp_path, extra={"f": jnp.sum})
