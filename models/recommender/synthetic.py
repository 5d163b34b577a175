"""A synthetic set in the spirit of Criteo's: Zipf-distributed keys, clicks decided by a planted teacher.

    python -m models.recommender.synthetic --samples 1000000 synthetic.parquet

It shows that a model learns what is there to learn; it says nothing of the quality on real clicks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.recommender.batch import Batch, mix
from models.recommender.layout import needs_pyarrow

NAME = "synthetic clicks"

# As many features as Criteo has, tiny ones among them as there; large tables are scaled down to 20,000 rows.
CARDINALITIES = (
    *(1460, 583, 20000, 10000, 305, 24, 5000, 633, 3, 10000, 3000, 20000, 3194),
    *(27, 5000, 15000, 10, 3000, 2173, 4, 20000, 18, 15, 10000, 105, 8000),
)
DENSE = 13


def cardinalities(keys: int) -> tuple[int, ...]:
    """About so many keys in all, shared out as in `CARDINALITIES`; tiny features stay as they are.

    >>> sum(cardinalities(10**6)) // 10**5, cardinalities(10**6)[8]
    (10, 3)
    """
    large = sum(n for n in CARDINALITIES if n > 100)
    return tuple(n if n <= 100 else max(n, n * keys // large) for n in CARDINALITIES)


RANK = 4
GROUP = 1 << 17

# The standard deviations of the parts of the teacher's logit, and what makes about a quarter of the labels 1.
SCALES = {"effects": 1.0, "interactions": 2.0, "dense": 0.7, "noise": 0.3}
BIAS = -1.6


class Feature(Protocol):
    """One categorical feature of the teacher; its keys are numbered by their popularity."""

    @property
    def size(self) -> int:
        """How many keys it has."""

    def ranks(self, size: int, random: np.random.Generator) -> NDArray[np.int64]:
        """The numbers of keys that are drawn, by Zipf's law."""

    def keys(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys of these numbers: popular keys are spread over the table."""

    def effects(self, ranks: NDArray[np.int64]) -> NDArray[np.float32]:
        """What a key adds to the logit."""

    def factors(self, ranks: NDArray[np.int64]) -> NDArray[np.float32]:
        """What it has to say to other features, `[n, rank]`."""


@dataclass(frozen=True, slots=True)
class PlantedFeature:
    """A feature whose keys are all held in memory.

    Arguments:
      cumulative: the Zipf distribution over ranks of popularity, `[n]`.
      key, effect, factor: of each rank, `[n]`, `[n]` and `[n, rank]`.
    """

    cumulative: NDArray[np.float64]
    key: NDArray[np.int64]
    effect: NDArray[np.float32]
    factor: NDArray[np.float32]

    @staticmethod
    def at_random(size: int, exponent: float, rank: int, random: np.random.Generator) -> PlantedFeature:
        """A random feature with `size` keys."""
        popularity = np.arange(1, size + 1) ** -exponent
        effect, factors = random.normal(size=size), random.normal(size=(size, rank))
        return PlantedFeature(
            np.cumsum(popularity) / popularity.sum(),
            random.permutation(size),
            effect.astype(np.float32),
            factors.astype(np.float32),
        )

    @property
    def size(self) -> int:
        """As of `Feature`, like the rest."""
        return len(self.key)

    def ranks(self, size: int, random: np.random.Generator) -> NDArray[np.int64]:
        """By a search in the distribution."""
        return np.searchsorted(self.cumulative, random.random(size))

    def keys(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """By a permutation."""
        return self.key[ranks]

    def effects(self, ranks: NDArray[np.int64]) -> NDArray[np.float32]:
        """As they were drawn."""
        return self.effect[ranks]

    def factors(self, ranks: NDArray[np.int64]) -> NDArray[np.float32]:
        """As they were drawn."""
        return self.factor[ranks]


@dataclass(frozen=True, slots=True)
class HashedFeature:
    """A feature with more keys than memory holds: what a key has to say is a hash of it.

    Arguments:
      size: how many keys.
      exponent: of Zipf's law, as of `Teacher.plant`; not 1.
      rank: the width of the factors.
      seed: of the hashes.
    """

    size: int
    exponent: float
    rank: int
    seed: int

    def ranks(self, size: int, random: np.random.Generator) -> NDArray[np.int64]:
        """By the inverse of the distribution, as if ranks were real numbers."""
        power = 1 - self.exponent
        most = float(self.size + 1) ** power - 1
        found = (most * random.random(size) + 1) ** (1 / power) - 1
        return np.minimum(found.astype(np.int64), self.size - 1)

    def keys(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """By a multiplication without common divisors."""
        step = next(
            n for n in range(int(0.618 * self.size) + 1, 2 * self.size + 2) if math.gcd(n, self.size) == 1
        )
        return ranks * step % self.size

    def effects(self, ranks: NDArray[np.int64]) -> NDArray[np.float32]:
        """The first of the numbers of a key."""
        return self._normal(ranks, 0)

    def factors(self, ranks: NDArray[np.int64]) -> NDArray[np.float32]:
        """The others."""
        return np.stack([self._normal(ranks, 1 + k) for k in range(self.rank)], axis=1)

    def _normal(self, ranks: NDArray[np.int64], which: int) -> NDArray[np.float32]:
        """A number of each key: of variance 1, of the sum of eight bytes of a hash."""
        bits = mix(mix(ranks) ^ np.uint64(self.seed * 1009 + which))
        bytes_of = np.ascontiguousarray(bits).view(np.uint8).reshape(len(ranks), 8)
        return ((bytes_of.sum(axis=1, dtype=np.float32) - 1020) / 209.03).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Teacher:
    """Who decides the synthetic clicks; made by `Teacher.plant`.

    Its logit is the sum of an effect of each key, of the products of all pairs of factors (a factorization
    machine; Rendle, 2010), in which the dense features take part as one factor more, and of a linear part. A
    logistic regression finds the first and the last.
    """

    features: tuple[Feature, ...]
    dense: NDArray[np.float32]
    dense_factors: NDArray[np.float32]
    seed: int

    @staticmethod
    def plant(
        cardinalities: Sequence[int] = CARDINALITIES,
        *,
        dense: int = DENSE,
        rank: int = RANK,
        exponent: float = 1.2,
        seed: int = 0,
        hashed: bool = False,
    ) -> Teacher:
        """A random teacher; equal arguments give equal teachers.

        Arguments:
          cardinalities: the number of keys of each categorical feature.
          dense: the number of dense features.
          rank: the width of the factors.
          exponent: of Zipf's law; the k-th most popular key has a share proportional to `k ** -exponent`.
          hashed: whether nothing is held of a key, so that there may be more than memory holds.
        """
        if min(cardinalities, default=1) < 1:
            raise ValueError(f"a feature of {min(cardinalities)} keys: at least one")
        random = np.random.default_rng(seed)
        features: tuple[Feature, ...] = tuple(
            HashedFeature(size, exponent, rank, seed * 101 + i)
            if hashed
            else PlantedFeature.at_random(size, exponent, rank, random)
            for i, size in enumerate(cardinalities)
        )
        linear, factors = random.normal(size=dense), random.normal(size=(dense, rank))
        return Teacher(features, linear.astype(np.float32), factors.astype(np.float32), seed)

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """The number of keys of each feature: keys are below it, and can be rows of a table as they are."""
        return tuple(feature.size for feature in self.features)

    def batch(self, size: int, index: int) -> Batch:
        """Batch number `index`, drawn anew from `(seed, index)`."""
        return self._drawn(size, index)[0]

    def logits(self, size: int, index: int) -> NDArray[np.float32]:
        """The teacher's score of each row of `batch(size, index)`, without noise: no model can know more."""
        return self._drawn(size, index)[1]

    def _drawn(self, size: int, index: int) -> tuple[Batch, NDArray[np.float32]]:
        random = np.random.default_rng((self.seed, 1 + index))
        dense = random.normal(size=(size, len(self.dense))).astype(np.float32)
        ranks = [feature.ranks(size, random) for feature in self.features]
        logits = self._logits(dense, ranks)
        noisy = logits + SCALES["noise"] * random.normal(size=size)
        label = random.random(size) < 1 / (1 + np.exp(-noisy))
        keys = [feature.keys(rank) for feature, rank in zip(self.features, ranks, strict=True)]
        stacked = np.stack(keys, axis=1) if keys else np.empty((size, 0), np.int64)
        return Batch(label.astype(np.float32), dense, stacked), logits

    def _logits(self, dense: NDArray[np.float32], ranks: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        parts = len(self.features) + 1
        effects = np.zeros(len(dense), np.float32)
        # Of variance 1, as the factors of keys have.
        total = dense @ self.dense_factors / max(len(self.dense), 1) ** 0.5
        squares = total**2
        for feature, rank in zip(self.features, ranks, strict=True):
            factors = feature.factors(rank)
            effects += feature.effects(rank)
            total += factors
            squares += factors**2
        pairs = ((total**2 - squares) / 2).sum(axis=1)
        width = max(total.shape[1], 1)
        return (
            BIAS
            + SCALES["effects"] * effects / max(len(self.features), 1) ** 0.5
            + SCALES["interactions"] * pairs / max(parts * (parts - 1) / 2 * width, 1) ** 0.5
            + SCALES["dense"] * (dense @ self.dense) / max(len(self.dense), 1) ** 0.5
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch of a teacher, not drawn yet; without its first rows."""

    teacher: Teacher
    size: int
    index: int
    first: int = 0

    def __len__(self) -> int:
        return self.size - self.first

    def drop(self, rows: int) -> Piece:
        """The same without as many rows more."""
        return replace(self, first=self.first + rows)

    def draw(self) -> Batch:
        """The batch."""
        return self.teacher.batch(self.size, self.index).rows_between(self.first, self.size)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Synthetic clicks that are drawn as they are needed; a file that `write` makes has the same ones.

    Arguments:
      teacher: who decides them.
      samples: how many.
      start: the number of the first batch of the teacher that is taken: other batches are other clicks.
      group: rows of one batch.
    """

    teacher: Teacher
    samples: int
    start: int = 0
    group: int = GROUP

    def pieces(self) -> Iterator[Piece]:
        """The batches, one after the other."""
        for index, at in enumerate(range(0, self.samples, self.group), self.start):
            yield Piece(self.teacher, min(self.group, self.samples - at), index)


def write(path: str | Path, teacher: Teacher, samples: int, *, start: int = 0, group: int = GROUP) -> None:
    """Writes synthetic clicks as Parquet; read them with the layout `PREPARED`, or `layout(teacher)`.

    Arguments:
      samples, start, group: as of `Drawn`; a group is a row group.

    Raises:
      DataError: without pyarrow.
    """
    with needs_pyarrow():
        import pyarrow as pa
        import pyarrow.parquet

    dense = [f"I{i}" for i in range(1, len(teacher.dense) + 1)]
    keys = [f"C{i}" for i in range(1, len(teacher.features) + 1)]
    fields = [
        *[(name, pa.float32()) for name in ("label", *dense)],
        *[(name, pa.int64()) for name in keys],
    ]
    schema = pa.schema(fields, metadata={"source": NAME, "seed": str(teacher.seed)})
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        for piece in Drawn(teacher, samples, start, group).pieces():
            batch = piece.draw()
            assert not isinstance(batch.keys, tuple)
            columns = [batch.label, *batch.dense.T, *batch.keys.T]
            arrays = [pa.array(np.ascontiguousarray(column)) for column in columns]
            file.write_table(pa.Table.from_arrays(arrays, schema=schema))


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a file of synthetic clicks."""
    options = argparse.ArgumentParser(
        prog="python -m models.recommender.synthetic",
        description="Write synthetic clicks as Parquet.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("path")
    options.add_argument("--samples", type=int, default=1_000_000)
    options.add_argument("--start", type=int, default=0, help="batch of the teacher to begin with")
    options.add_argument("--seed", type=int, default=0, help="of the teacher")
    args = options.parse_args(argv)
    write(args.path, Teacher.plant(seed=args.seed), args.samples, start=args.start)
    print(f"{args.samples:,} {NAME}: {args.path}")


if __name__ == "__main__":
    main()
