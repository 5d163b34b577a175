"""Batches for training and evaluation: clicks, keys as rows of tables, copies to where they are wanted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from models.recommender import synthetic
from models.recommender.batch import Batch, Keys, Lists, as_lists, drop_rows, hash_keys, pad_lists, rebatch
from models.recommender.layout import PREPARED, DataError, Layout, needs_pyarrow
from models.recommender.stages import Flow, Stage
from models.recommender.synthetic import Drawn, Piece, Teacher
from sbp.errors import Problem

Cut: TypeAlias = Callable[[Iterator[Batch]], Iterator[Batch]]
"""Makes batches of what was parsed."""
Source: TypeAlias = str | Drawn
"""A file of clicks, or clicks that are drawn as they are needed."""
Copy: TypeAlias = Callable[[Batch], Batch]
"""Copies a batch to where it is wanted, and waits for it."""

NOBODY = -1
"""The label of what fills up a last batch."""
HELD_OUT = 1 << 20
"""The number of the first batch of the teacher that no training sees."""


@dataclass(frozen=True, slots=True)
class Data:
    """Clicks in files, or drawn.

    Arguments:
      name: what they are, for all output.
      train: what to train on.
      test: what to evaluate on; if there is none, what the training has left of its own.
      layout: the columns of files.
      sizes: the rows of each feature's table.
      hashing: whether keys are hashed to rows; otherwise they are rows.
      teacher: who knows the truth, of synthetic clicks.
      learned: whether keys stay keys, and vocabularies give them rows.
      hotness: the most keys of each feature in a click; none where each has one key.
      tiered: whether rows come and go, so that an id may have more than 32 bits.
    """

    name: str
    train: tuple[Source, ...]
    test: tuple[Source, ...]
    layout: Layout
    sizes: tuple[int, ...]
    hashing: bool
    teacher: Teacher | None = None
    learned: bool = False
    hotness: tuple[int, ...] = ()
    tiered: bool = False

    def refusal(
        self, got: str, legal: str, fix: str, why: str = "models are trained by batches"
    ) -> DataError:
        """What to raise when these clicks cannot be taken."""
        return DataError(Problem("data", self.name, got, legal, why, fix))

    def rows(self, batch: Batch) -> Batch:
        """The batch with int32 rows of tables in place of its keys, unless vocabularies are to give these.

        Raises:
          DataError: if a list is longer than the hotness, or if a key that is to be a row is none.
        """
        self._check_lists(batch)
        keys = as_lists(batch.keys) if self.hotness else np.asarray(batch.keys)
        if self.learned:
            return replace(batch, keys=keys)
        if self.hashing:
            keys = hash_keys(keys, self.sizes)
        else:
            self._check_range(keys)
        return replace(batch, keys=pad_lists(keys, self.hotness, np.int64 if self.tiered else np.int32))

    def _check_lists(self, batch: Batch) -> None:
        every = as_lists(batch.keys) if isinstance(batch.keys, tuple) else ()
        if self.hotness and len(self.hotness) != len(self.sizes):
            got, legal = f"{len(self.hotness)} numbers", f"{len(self.sizes)}: one for each feature"
            raise self.refusal(f"--hotness of {got}", legal, "one number for all", "each has its own bags")
        for at, (feature, most) in enumerate(zip(every, self.hotness or [1] * len(every), strict=True), 1):
            longest = int(np.diff(feature.offsets).max(initial=0))
            if longest > most or not self.hotness:
                got, legal = f"a list of {longest} keys in feature {at}", f"{most} at most"
                why = "a bag has a fixed size on the devices" if self.hotness else "each feature has one key"
                raise self.refusal(got, legal, f"--hotness {max(longest, 2)}, or more", why)

    def _check_range(self, keys: Keys) -> None:
        for at, (feature, size) in enumerate(zip(as_lists(keys), self.sizes, strict=True), 1):
            wrong = feature.values[(feature.values < 0) | (feature.values >= size)]
            if len(wrong):
                got, legal = f"key {wrong[0]} of feature {at}", f"0..{size - 1}"
                raise self.refusal(got, legal, "--rows N hashes keys", "keys are taken as rows of tables")

    def pieces(self, sources: Sequence[Source], skip: int = 0) -> Iterator[Any]:
        """What `parse_piece` makes batches of; of files, what can be read without parsing it.

        Arguments:
          skip: rows that are left out at the beginning: nobody draws or parses them.

        Raises:
          DataError: for files, without pyarrow.
        """
        for source in sources:
            if isinstance(source, Drawn):
                skip = yield from drop_rows(source.pieces(), skip)
                continue
            with needs_pyarrow():
                from models.recommender import criteo
            skip = yield from criteo.blocks(source, layout=self.layout, skip=skip)

    def batches(self, sources: Sequence[Source], size: int, stop: int) -> Iterator[Batch]:
        """The first `stop` full batches, with rows, of one thread."""
        found = rebatch(map(parse_piece, self.pieces(sources)), size, drop_last=True)
        return map(self.rows, islice(found, stop))

    def first_batch(self, size: int) -> Batch:
        """The first batch of the training.

        Raises:
          DataError: if there is no full one.
        """
        for batch in self.batches(self.train, size, 1):
            return batch
        raise self.refusal(f"fewer than {size:,} rows", "one batch or more", "a smaller --batch")


def parse_piece(piece: Any) -> Batch:
    """The batch of a piece; of several threads each may parse another one."""
    if isinstance(piece, Piece):
        return piece.draw()
    from models.recommender import criteo

    return criteo.parse(piece)


def make_data(
    samples: int, held_out: int, seed: int, rows: int | None = None, keys: int | None = None
) -> Data:
    """The synthetic set.

    Arguments:
      samples: to train on.
      held_out: to evaluate on.
      seed: of the teacher.
      rows: what keys are hashed to, at most; without it keys are rows.
      keys: about so many in all; None for those of `CARDINALITIES`.
    """
    if keys is None:
        teacher = Teacher.plant(seed=seed)
    else:
        teacher = Teacher.plant(synthetic.cardinalities(keys), seed=seed, hashed=True)
    train, test = Drawn(teacher, samples), Drawn(teacher, held_out, start=HELD_OUT)
    sizes = tuple(min(size, rows or size) for size in teacher.cardinalities)
    name = f"{synthetic.NAME} (seed {seed})"
    return Data(name, (train,), (test,), PREPARED, sizes, rows is not None, teacher)


def truth(teacher: Teacher, held_out: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Labels of the held-out synthetic clicks and their scores by the teacher, batch by batch."""
    for index, at in enumerate(range(0, held_out, synthetic.GROUP), HELD_OUT):
        size = min(synthetic.GROUP, held_out - at)
        yield teacher.batch(size, index).label, teacher.logits(size, index)


@dataclass(frozen=True, slots=True)
class Workers:
    """How many threads parse, and how many hash keys and copy to the devices."""

    parse: int
    copy: int


def flow(
    data: Data,
    sources: Sequence[Source],
    size: int,
    cut: Cut,
    copy: Copy,
    workers: Workers,
    name: str,
    skip: int = 0,
) -> Flow:
    """Clicks to batches on devices, in stages that work at the same time.

    Arguments:
      sources: of the clicks.
      size: of every batch; what fills a smaller one up has the label `NOBODY`.
      name: what is done with the batches, for the table of rates.
      skip: how many batches are left out at the beginning.
    """
    stages = [
        Stage("parse", parse_piece, workers=workers.parse),
        Stage("batch", stream=cut),
        Stage("hash, copy", lambda batch: copy(fill_batch(data.rows(batch), size)), workers=workers.copy),
    ]
    return Flow(data.pieces(sources, skip * size), stages, names=("read", name))


Begun = TypeVar("Begun")
"""A flow, or what is made of one."""


@dataclass
class Feed(Generic[Begun]):
    """The batches of a training as `sbp.fit` takes them: a run that goes on has no work with those before.

    Arguments:
      begin_flow: number of batches -> the flow of those behind them.
      flow: what training took its batches from, the last time.
    """

    begin_flow: Callable[[int], Begun]
    flow: Begun | None = None

    def batches_from(self, step: int) -> Begun:
        """The batches behind the first ones; left, it has stopped all its threads."""
        self.flow = self.begin_flow(step)
        return self.flow


def as_it_is(batch: Batch) -> Batch:
    """The batch on the host."""
    return batch


def copy_batch(batch: Batch) -> Batch:
    """The batch on one device."""
    return jax.block_until_ready(jax.device_put(batch))


def copy_to(wanted: Batch) -> Copy:
    """What copies batches to where they are wanted, and waits for it.

    Arguments:
      wanted: a batch of shardings.
    """

    def part(held: NDArray[Any], sharding: jax.sharding.NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(held.shape, sharding, lambda at: held[at])

    def copy(batch: Batch) -> Batch:
        if jax.process_count() == 1:
            return jax.block_until_ready(jax.device_put(batch, wanted))
        # Of an array that is the same in all processes each takes its part. `device_put` would compare them
        # first, which is a collective: no thread may begin one beside those of the steps.
        return jax.block_until_ready(jax.tree.map(part, batch, wanted))

    return copy


def full(size: int, stop: int) -> Cut:
    """Cuts the first `stop` full batches."""
    return lambda parsed: islice(rebatch(parsed, size, drop_last=True), stop)


def rest(size: int, samples: int) -> Cut:
    """Cuts all there is, the last batch too, `samples` rows at most."""

    def cut(parsed: Iterator[Batch]) -> Iterator[Batch]:
        left = samples
        for batch in rebatch(parsed, size):
            own = batch.rows_between(0, min(left, len(batch)))
            left -= len(own)
            yield own
            if not left:
                return

    return cut


def fill_batch(batch: Batch, size: int) -> Batch:
    """A batch with rows of nobody up to a size."""
    missing = size - len(batch)
    if not missing:
        return batch

    def longer(keys: Any) -> Any:
        if isinstance(keys, Lists):
            return replace(keys, offsets=np.pad(keys.offsets, (0, missing), mode="edge"))
        return np.pad(keys, ((0, missing), (0, 0)))

    keys = batch.keys
    return Batch(
        np.pad(batch.label, (0, missing), constant_values=NOBODY),
        np.pad(batch.dense, ((0, missing), (0, 0))),
        tuple(map(longer, keys)) if isinstance(keys, tuple) else longer(keys),
    )


def score(
    clicks: Flow, scorer: Callable[[Batch], jax.Array], first: Batch
) -> Iterator[tuple[Batch, jax.Array]]:
    """Batches and their scores.

    Arguments:
      scorer: batch -> `[batch]`.
      first: a batch that it is compiled with, before the clock starts.
    """
    jax.block_until_ready(scorer(first))
    with clicks as batches:
        for batch in batches:
            yield batch, scorer(batch)


def no_batches(_: int) -> Flow:
    """The batches of a feed that nobody draws from."""
    return Flow(())
