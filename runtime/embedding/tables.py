"""The configuration of tables and features, in the names of keras-rs: `TableConfig` and `FeatureConfig`."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sbp.compat.untyped import DType
from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.runtime.embedding.keys import KEY_BITS, LIMITS, problem
from sbp.runtime.embedding.pooling import check_combiner

MOST_IDS = 1 << KEY_BITS
"""Of a table."""

Initializer: TypeAlias = Callable[[jax.Array, tuple[int, ...], DType], jax.Array]
"""`(key, shape, dtype) -> values`, as in `jax.nn.initializers`."""

# Standard deviation 1 / sqrt(embedding_dim), as in keras-rs.
_SCALED: Initializer = jax.nn.initializers.variance_scaling(1.0, "fan_out", "truncated_normal")


@dataclass(frozen=True, slots=True)
class RowWise:
    """The rows of a stack of tables are split over the devices; lookups exchange keys and vectors."""


@dataclass(frozen=True, slots=True)
class ColumnWise:
    """Each device holds some columns of every row; lookups gather the keys and exchange pieces of vectors."""


@dataclass(frozen=True, slots=True)
class TableWise:
    """Each device holds whole tables; lookups exchange only pooled vectors.

    Arguments:
      groups: the number of groups of tables, a multiple of the number of devices. Tables are packed into
        groups so that the largest group is small; the groups are split over the devices.
    """

    groups: int


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every device holds the whole table; for small tables."""


TableLayout: TypeAlias = RowWise | ColumnWise | TableWise | Replicated


class Compression(Protocol):
    """How embeddings of a vocabulary are computed from fewer or smaller stored rows."""

    def parts(self, size: int) -> dict[str, int]:
        """The tables that are stored for a vocabulary of some size, and the number of their rows."""

    def ids(self, ids: jax.Array) -> tuple[jax.Array, ...]:
        """The row of each stored table that an id reads."""

    def join(self, rows: Sequence[jax.Array]) -> jax.Array:
        """The embedding, from one row of each stored table; zero if all of them are zero."""

    def initial(self, part: str, values: jax.Array) -> jax.Array:
        """The initial rows of a stored table, from the initializer's values."""


@dataclass(frozen=True, slots=True)
class Uncompressed:
    """One row per id."""

    def parts(self, size: int) -> dict[str, int]:
        """One table of the same size."""
        return {"": size}

    def ids(self, ids: jax.Array) -> tuple[jax.Array, ...]:
        """The id."""
        return (ids,)

    def join(self, rows: Sequence[jax.Array]) -> jax.Array:
        """The row."""
        return rows[0]

    def initial(self, part: str, values: jax.Array) -> jax.Array:
        """The initializer's values."""
        return values


OPERATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"mult": jnp.multiply, "add": jnp.add}


@dataclass(frozen=True, slots=True)
class QuotientRemainder:
    """Compositional embeddings: `q[id // buckets]` times or plus `r[id % buckets]` (Shi et al., 2020).

    `vocabulary_size` ids take `ceil(vocabulary_size / buckets) + buckets` rows, and no two ids share both.
    With "mult" the remainders start at one plus the initializer's values, so that the products start at the
    scale of the initializer.

    Arguments:
      buckets: the number of remainder rows.
      operation: `"mult"` or `"add"`, the names in DLRM.
    """

    buckets: int
    operation: str = "mult"

    def __post_init__(self) -> None:
        if self.buckets < 1 or self.operation not in OPERATIONS:
            why = "an id is split into a quotient and a remainder, whose rows are multiplied or added"
            legal = "1 bucket or more, and " + " or ".join(map(repr, OPERATIONS))
            fix = "buckets near the root of the vocabulary size takes the fewest rows"
            raise EmbeddingError(problem("QuotientRemainder(...)", f"{self}", legal, why, fix))

    def parts(self, size: int) -> dict[str, int]:
        """Quotients and remainders."""
        return {".quotient": -(-size // self.buckets), ".remainder": self.buckets}

    def ids(self, ids: jax.Array) -> tuple[jax.Array, ...]:
        """Quotient and remainder."""
        buckets = np.asarray(self.buckets, ids.dtype)
        return jax.lax.div(ids, buckets), jax.lax.rem(ids, buckets)

    def join(self, rows: Sequence[jax.Array]) -> jax.Array:
        """Their product or sum."""
        return OPERATIONS[self.operation](*rows)

    def initial(self, part: str, values: jax.Array) -> jax.Array:
        """Values near zero for quotients; near one for remainders that multiply."""
        return 1 + values if (part, self.operation) == (".remainder", "mult") else values


@dataclass(frozen=True, slots=True)
class TableConfig:
    """One embedding table, for one feature or several.

    Arguments:
      name: of the table.
      vocabulary_size: the number of ids; a `Collection` takes those that an int32 can name, `Tiered` all.
      embedding_dim: the width of a row.
      initializer: as in `jax.nn.initializers`; default: truncated normal of deviation `embedding_dim **
        -0.5`.
      optimizer: any hashable value that the training loop uses; tables with different values are not
        stacked together.
      combiner: `"sum"`, `"mean"`, `"sqrtn"`, or None to keep the rows of a bag.
      placement: `RowWise()`, `ColumnWise()`, `TableWise(groups)` or `Replicated()`.
      compression: `Uncompressed()`, `QuotientRemainder(buckets)`, or another `Compression`.
      dtype: of the rows.

    Raises:
      EmbeddingError: if an argument is invalid or contradicts another.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Initializer = _SCALED
    optimizer: Hashable = None
    combiner: str | None = "mean"
    placement: TableLayout = RowWise()
    compression: Compression = Uncompressed()
    dtype: Any = np.float32  # what means a dtype; a `np.dtype` once it is made

    def __post_init__(self) -> None:
        where = f"TableConfig({self.name!r})"
        check_combiner(self.combiner, where)
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        found: list[Problem] = []
        if not 1 <= self.vocabulary_size <= MOST_IDS or self.embedding_dim < 1:
            got = f"{self.vocabulary_size} ids of width {self.embedding_dim}"
            legal, why = f"1..{MOST_IDS} ids, width 1 or more", f"an id has {KEY_BITS} bits at most"
            found.append(problem(where, got, legal, why, "map keys to fewer ids with a Vocabulary"))
        if not isinstance(self.placement, TableLayout):
            legal = "RowWise(), ColumnWise(), TableWise(groups) or Replicated()"
            why = "the placement says how a table is split over devices"
            fix = "RowWise() for large tables, Replicated() for tiny ones"
            found.append(problem(where, f"placement={self.placement!r}", legal, why, fix))
        if isinstance(self.placement, TableWise):
            found += self._table_wise(where, self.placement)
        raise_all(found)

    def _table_wise(self, where: str, placement: TableWise) -> list[Problem]:
        """A whole table lies in one group, and what leaves it is one vector per bag."""
        pooled, grouped = (
            "of whole tables only pooled vectors are exchanged",
            "groups are dealt out to devices",
        )
        wrong = (
            (self.combiner is None, "combiner=None", "'sum', 'mean' or 'sqrtn'", pooled),
            (self.compression != Uncompressed(), f"{self.compression}", "Uncompressed()", pooled),
            (placement.groups < 1, "no groups", "1 group or more", grouped),
        )
        return [
            problem(where, f"{got} with {placement}", legal, why, "placement=RowWise()")
            for is_wrong, got, legal, why in wrong
            if is_wrong
        ]


@dataclass(frozen=True, slots=True)
class FeatureConfig:
    """One feature, and the table that it looks up.

    Arguments:
      name: of the feature.
      table: the table of its ids.
      input_shape: `(batch,)` or `(batch, hotness)`; None as a size, or as the whole, accepts any.
      output_shape: of the result, likewise; it is only checked.

    Raises:
      EmbeddingError: if the input shape has another rank.
    """

    name: str
    table: TableConfig
    input_shape: tuple[int | None, ...] | None = None
    output_shape: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.input_shape is not None and len(self.input_shape) not in (1, 2):
            where = f"FeatureConfig({self.name!r})"
            why = "a feature has one bag of ids per example"
            got, legal = f"input_shape={self.input_shape}", "(batch,) or (batch, hotness)"
            raise EmbeddingError(problem(where, got, legal, why, "merge dims, or use several features"))

    def check_shape(self, what: str, shape: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> None:
        """Raises if a shape differs from the configured one.

        Raises:
          EmbeddingError: if a size differs.
        """
        if wanted is None:
            return
        if len(shape) != len(wanted) or any(w not in (None, n) for n, w in zip(shape, wanted, strict=True)):
            why = f"the feature was given with {what}_shape={wanted}"
            fix = "None in place of a size leaves it open"
            where = f"feature {self.name!r}, {what}"
            raise EmbeddingError(problem(where, f"shape {shape}", f"{wanted}", why, fix))


def unique_tables(features: Sequence[FeatureConfig]) -> tuple[TableConfig, ...]:
    """The tables of some features, in the order of first use.

    Raises:
      EmbeddingError: if there is no feature, two share a name, or two different tables share one.
    """
    where = "Collection(features)"
    if not features:
        why = "a collection looks features up"
        raise EmbeddingError(problem(where, "no features", "one or more FeatureConfigs", why, "add one"))
    found: list[Problem] = []
    names = [f.name for f in features]
    tables: dict[str, TableConfig] = {}
    for name in sorted({n for n in names if names.count(n) > 1}):
        why, fix = "inputs and results are named by feature", "give each its own name"
        found.append(problem(where, f"{names.count(name)} features {name!r}", "one", why, fix))
    for feature in features:
        table = feature.table
        if tables.setdefault(table.name, table) != table:
            why, fix = "a shared table has one configuration", "pass the same TableConfig, or another name"
            found.append(problem(where, f"different tables {table.name!r}", "one", why, fix))
    raise_all(found)
    return tuple(tables.values())


def check_sizes(tables: Sequence[TableConfig]) -> None:
    """Raises for tables with more rows than a device can count.

    Raises:
      EmbeddingError: naming them.
    """
    why, legal = "ids are int32 on a device", f"at most {LIMITS.max} ids"
    fix = "map keys to fewer ids with a Vocabulary; or Tiered, for tables larger than memory"
    raise_all(
        problem(f"table {t.name!r}", f"{t.vocabulary_size} ids", legal, why, fix)
        for t in tables
        if t.vocabulary_size > LIMITS.max
    )
