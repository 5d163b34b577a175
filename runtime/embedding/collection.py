"""A collection of features: tables of one width and kind become one array, with one lookup per array."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from numpy.typing import NDArray

from sbp.compat.untyped import DType, PyTree, TreeDef, struct
from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.notation.resolve import to_partition_spec
from sbp.placement import Placement, as_placement
from sbp.runtime.embedding.initial import (
    Stack,
    initial_stacks,
    stack_array,
    stacks_of,
    table_arrays,
    uneven,
)
from sbp.runtime.embedding.inputs import Entry, GivenIds, check_inputs, entries
from sbp.runtime.embedding.keys import check_ids, problem
from sbp.runtime.embedding.row_access import as_stack, read_rows, stack_leaves, write_rows
from sbp.runtime.embedding.row_map import RowMap
from sbp.runtime.embedding.tables import (
    FeatureConfig,
    TableConfig,
    check_sizes,
    unique_tables,
)
from sbp.signature import B, Signature, Split

Params: TypeAlias = Mapping[str, jax.Array]
"""Stack -> its array."""

MAX_MULTIPLE = 1 << 15


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Where a table is.

    Arguments:
      table, stack: its name, and that of the stack that it is in.
      signature: how the stack lies along each axis of the placement.
      features: that look it up.
    """

    table: str
    stack: str
    signature: tuple[Signature, ...]
    features: tuple[str, ...]

    def __str__(self) -> str:
        lies = ", ".join(map(str, self.signature))
        return f"{self.table} in {self.stack} [{lies}], looked up by {', '.join(self.features)}"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Collection:
    """Embedding tables and the features that look them up; holds no arrays.

    Tables that agree in width, dtype, optimizer and placement are stacked into one array, so that all their
    features share one lookup and one exchange. An id out of range, and -1, has no row: its vector is zero,
    "mean" does not count it, and it has no gradient. It never reads a row of another table.

    Arguments:
      features: their names become the names of the inputs and of the results.
      spread: deal neighbouring ids of row-wise stacks out to different devices, so that ids sorted by
        frequency do not overload one device. This moves rows; lookups give the same vectors.
      multiple: the rows of a stack are rounded up to a multiple of this. Use a multiple of the number of
        devices.

    Raises:
      EmbeddingError: if features or tables contradict each other, or a stack has too many rows.
    """

    features: tuple[FeatureConfig, ...]
    spread: bool = True
    multiple: int = 256
    tables: tuple[TableConfig, ...] = field(init=False, repr=False)
    stacks: Mapping[str, Stack] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))
        if not 1 <= self.multiple <= MAX_MULTIPLE:
            why = "positions are spread over so many chunks in int32 arithmetic"
            got, legal = f"multiple={self.multiple}", f"1..{MAX_MULTIPLE}"
            fix = "a multiple of the number of devices, such as 256"
            raise EmbeddingError(problem("Collection(...)", got, legal, why, fix))
        object.__setattr__(self, "tables", unique_tables(self.features))
        check_sizes(self.tables)
        object.__setattr__(self, "stacks", stacks_of(self.tables, self.spread, self.multiple))

    def init(
        self,
        key: jax.Array,
        placement: Placement | jax.sharding.Mesh | None = None,
        axes: Sequence[str] | None = None,
    ) -> dict[str, jax.Array]:
        """Initial parameters, one array per stack; each device makes its own rows.

        A row depends only on the key, the table's name and its id, not on other tables, stacks or devices: an
        initializer is called for one row, with shape `(1, embedding_dim)` and a key of that row.

        Arguments:
          placement, axes: as of `in_sbp`; None for whole arrays on one device, which may be traced.

        Raises:
          EmbeddingError: as `in_sbp`, or if an initializer does not make one row.
        """
        return initial_stacks(
            self.stacks, key, None if placement is None else self.shardings(placement, axes)
        )

    def stack(self, tables: Mapping[str, jax.Array], dtype: DType | None = None) -> dict[str, jax.Array]:
        """Parameters from one array per table, `{table: [vocabulary_size, dim]}`: the inverse of `unstack`.

        It also stacks an optimizer's state, such as one number per row: `[vocabulary_size]`.

        Arguments:
          dtype: of the arrays; None keeps the dtype of each table.

        Raises:
          EmbeddingError: if a table is missing, has another number of rows, or if the rows of one stack
            differ in shape.
        """
        found = []
        for stack in self.stacks.values():
            shapes = {p.name: np.shape(tables[p.name]) for p in stack.parts if p.name in tables}
            # A state may have one number per row; of the first table it is seen which this is.
            whole, each = stack.shape[-1:], next((s[1:] for s in shapes.values()), None)
            rest = each if each in ((), (1,)) else whole
            for part in stack.parts:
                shape = shapes.get(part.name)
                if shape != (part.rows, *rest):
                    got = "nothing" if shape is None else f"shape {shape}"
                    legal, why = f"({', '.join(map(str, (part.rows, *rest)))})", "every table has its rows"
                    fix = "as unstack(params) gives it"
                    found.append(problem(f"table {part.name!r}", got, legal, why, fix))
        raise_all(found)
        return {name: stack_array(stack, tables, dtype) for name, stack in self.stacks.items()}

    def unstack(self, params: Params) -> dict[str, jax.Array]:
        """Splits parameters into one array per table, with row `i` for id `i`, whole on every device.

        It takes any tree with one array per stack whose first axis is the rows, such as an optimizer's state.
        A quotient-remainder table gives two arrays, `name.quotient` and `name.remainder`. `read` gives some
        rows of tables that no device could hold.
        """
        self._check(params, rows_alone=True)
        return {n: rows for s in self.stacks.values() for n, rows in table_arrays(s, params[s.name]).items()}

    def check(self, inputs: Mapping[str, GivenIds]) -> Mapping[str, GivenIds]:
        """Checks every id and weight of a batch on the host, and gives the ids as int32.

        Raises:
          EmbeddingError: names every feature that is missing, has an id out of range, a weight that is not
            finite, wrong offsets or a wrong type.
        """
        return check_inputs(self.features, inputs)

    def rows(self, inputs: Mapping[str, GivenIds]) -> dict[str, jax.Array]:
        """The rows that a batch looks up, per stack; traceable.

        Returns:
          int32 `[batch, hotness of all features]` (flat for ragged features); for table-wise stacks
          `[groups, slots, batch, hotness]`. A place without an id holds a row that is out of bounds.
        """
        found = entries(self.features, inputs)
        return {name: stack.rows(_of(stack, found)) for name, stack in self.stacks.items()}

    def __call__(self, params: Params, inputs: Mapping[str, GivenIds]) -> dict[str, jax.Array]:
        """The pooled embeddings of a batch; traceable and differentiable.

        Arguments:
          params: as `init` gave them.
          inputs: of each feature, ids `[batch]` or `[batch, hotness]` with -1 for no id, `PaddedBags` or
            `Bags`.

        Returns:
          `{feature: [batch, dim]}`; with combiner None `[batch, hotness, dim]`, of ragged bags `[capacity,
          dim]`.

        Raises:
          EmbeddingError: if parameters or inputs have other names, types or shapes.
        """
        self._check(params)
        found = entries(self.features, inputs)
        out: dict[str, jax.Array] = {}
        for name, stack in self.stacks.items():
            own = _of(stack, found)
            out |= stack.pool(stack.gather(params[name], stack.rows(own)), own)
        return {f.name: out[f.name] for f in self.features}

    def read(self, tree: PyTree, table: str, ids: ArrayLike) -> PyTree:
        """Some rows of one table, of every array that has a line per row.

        Arguments:
          tree: parameters, an optimizer's state, or both: what has the name of a stack in its path and as
            many lines is that stack's.
          table: a table's name, or `name.quotient`, `name.remainder`.
          ids: `[n]`, on the host.

        Returns:
          the tree with `[n, ...]` for arrays of the table's stack, and None for all other leaves.

        Raises:
          EmbeddingError: if there is no such table, or an id is out of range.
        """
        where = f"read(..., {table!r}, ids)"
        return read_rows(tree, self.row_maps, self.stack_of(table), self._rows_at(where, table, ids))

    def write(self, tree: PyTree, table: str, ids: ArrayLike, rows: PyTree) -> PyTree:
        """Replaces some rows of one table, such as those that a `Vocabulary` gave to new keys; others stay.

        The arrays are donated: a large table is changed in place, and the old tree must not be used again.

        Arguments:
          tree, table: as of `read`.
          ids: `[n]`, on the host, none twice.
          rows: lines `[n, ...]`, or what broadcasts to them, in a tree like that of `read`; what it lacks
            stays. An array alone stands for the only one.

        Raises:
          EmbeddingError: if there is no such table, an id is out of range or there twice, or rows have
            another shape or place.
        """
        where = f"write(..., {table!r}, ids)"
        at = self._rows_at(where, table, ids)
        if np.unique(at).size < at.size:
            why, fix = "of two rows for one id it is not defined which one stays", "each id once"
            got = f"{at.size - np.unique(at).size} ids more than once"
            raise EmbeddingError(problem(where, got, "distinct ids", why, fix))
        return write_rows(tree, self.row_maps, self.stack_of(table), at, rows)

    @property
    def row_maps(self) -> dict[str, RowMap]:
        """In which row of each stack an id is."""
        return {name: stack.row_map for name, stack in self.stacks.items()}

    def in_sbp(
        self,
        placement: Placement | jax.sharding.Mesh,
        axes: Sequence[str] | None = None,
        like: PyTree = None,
    ) -> PyTree:
        """The signatures of the parameters, for `sbp.compile(..., in_sbp=...)`.

        Arguments:
          placement: the devices, as a `Placement` or a `Mesh`.
          axes: the mesh axes that split the tables (default: all); along the others the tables are copied.
          like: a tree of arrays, such as an optimizer's state, whose signatures are wanted instead: what has
            the name of a stack in its path and a line per row lies as the stack, all else is copied.

        Raises:
          EmbeddingError: if there is no such axis, or if a table does not divide evenly over the devices:
            each device would then hold all of it.
        """
        placement = as_placement(placement, "in_sbp(placement)")
        wanted = placement.axes if axes is None else tuple(axes)
        found: list[Problem] = []
        for axis in sorted(set(wanted) - set(placement.axes)):
            why = "tables are split over axes of the placement"
            got, legal = f"axis {axis!r}", ", ".join(map(repr, placement.axes))
            found.append(problem("in_sbp(...)", got, legal, why, "name axes of the placement"))
        parts = int(np.prod([n for n, a in zip(placement.shape, placement.axes, strict=True) if a in wanted]))
        out: dict[str, list[Signature]] = {}
        for name, stack in self.stacks.items():
            split: Signature = Split(stack.split_dims[0]) if stack.split_dims else B
            out[name] = [split if axis in wanted else B for axis in placement.axes]
            found += [uneven(stack, d, parts) for d in stack.split_dims if stack.shape[d] % parts]
        raise_all(found)
        if like is None:
            return out
        leaves, tree = jax.tree.flatten(like)
        whole: list[Signature] = [B] * placement.ndim
        lies = [
            whole
            if leaf is None
            else [as_stack(s, leaf, np.shape(x), self.stacks[leaf.stack].shape) for s in out[leaf.stack]]
            for leaf, x in zip(stack_leaves(like, self.row_maps), leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, lies)

    def shardings(
        self,
        placement: Placement | jax.sharding.Mesh,
        axes: Sequence[str] | None = None,
        like: PyTree = None,
    ) -> PyTree:
        """The same as shardings of JAX."""
        placed = as_placement(placement, "shardings(placement)")
        shapes = {n: struct(s.shape, s.tables[0].dtype) for n, s in self.stacks.items()}
        of = shapes if like is None else like
        tree: TreeDef = jax.tree.structure(of)
        lies = tree.flatten_up_to(self.in_sbp(placed, axes, like))
        specs = [
            to_partition_spec(nd, np.ndim(x), placed) for nd, x in zip(lies, jax.tree.leaves(of), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(of), [NamedSharding(placed.mesh, s) for s in specs])

    def places(
        self, placement: Placement | jax.sharding.Mesh, axes: Sequence[str] | None = None
    ) -> tuple[TablePlace, ...]:
        """Where each table is, and what looks it up; `print` shows one line for each.

        Arguments:
          placement, axes: as of `in_sbp`.

        Raises:
          EmbeddingError: as `in_sbp`.
        """
        lies = self.in_sbp(placement, axes)
        found = [(stack, table) for stack in self.stacks.values() for table in stack.tables]
        return tuple(
            TablePlace(
                table.name,
                stack.name,
                tuple(lies[stack.name]),
                tuple(f.name for f in self.features if f.table == table),
            )
            for stack, table in found
        )

    def stack_of(self, table: str) -> str:
        """The name of the stack that a table is in.

        Raises:
          EmbeddingError: if there is no such table.
        """
        known = {n: stack for stack, rows in self.row_maps.items() for n in rows.names}
        if table not in known:
            legal, why = ", ".join(map(repr, known)), "a collection has the tables of its features"
            fix = "the name in its TableConfig"
            raise EmbeddingError(problem("Collection", f"table {table!r}", legal, why, fix))
        return known[table]

    def rows_of(self, table: str) -> int:
        """How many rows are stored of a table.

        Raises:
          EmbeddingError: if there is no such table.
        """
        rows = self.stacks[self.stack_of(table)].row_map
        return rows.rows[rows.names.index(table)]

    def _rows_at(self, where: str, table: str, ids: ArrayLike) -> NDArray[np.int32]:
        """The rows of some ids of a table in its stack."""
        rows = self.stacks[self.stack_of(table)].row_map
        checked = check_ids(ids, self.rows_of(table), where).astype(np.int32).reshape(-1)
        return np.asarray(rows.row(table, jnp.asarray(checked)))

    def _check(self, params: Params, rows_alone: bool = False) -> None:
        """Refuses parameters of another collection.

        Arguments:
          rows_alone: whether arrays need only begin with the stack's rows, in one dim or in two.
        """
        found = []
        for name, stack in self.stacks.items():
            shape = np.shape(params[name]) if name in params else None
            if shape != stack.shape and not (rows_alone and shape and _begins(shape, stack.shape[:-1])):
                got = f"{', '.join(map(repr, params)) or 'nothing'}" if shape is None else f"shape {shape}"
                why = "these are the parameters of another collection, or of another spread or multiple"
                fix = "params from init(key); tables of another collection go through unstack and stack"
                found.append(problem(f"params[{name!r}]", got, f"{stack.shape}", why, fix))
        raise_all(found)


def _begins(shape: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether an array begins with the rows of a stack; those of groups may be one after the other."""
    return tuple(shape[: len(rows)]) == tuple(rows) or shape[0] == math.prod(rows)


def _of(stack: Stack, found: Mapping[str, Entry]) -> list[Entry]:
    """The features of a stack."""
    return [e for e in found.values() if e.feature.table in stack.tables]
