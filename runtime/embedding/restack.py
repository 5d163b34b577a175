"""A state as a checkpoint has it: with the stacks that it was saved with in the place of those of today."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from sbp.compat.untyped import Leaf, PyTree, struct
from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.runtime.embedding.keys import problem
from sbp.runtime.embedding.row_access import lead_of, stack_leaves
from sbp.runtime.embedding.row_map import RowMap

Maps = Mapping[str, RowMap]
"""Of each stack, where its rows lie."""


@dataclass(frozen=True)
class SavedRows:
    """An array of a checkpoint that has rows of an array of today.

    Arguments:
      path: in the state that was saved.
      name: its keys in that state, with dots between them.
      lead: how many of its dims count rows.
      rows: where they lie.
    """

    path: str
    name: str
    lead: int
    rows: RowMap


@dataclass(frozen=True)
class Restacking:
    """How a state was saved, and how it is wanted.

    Arguments:
      like: as it is wanted.
      now, then: the stacks that it has, and those that were saved.
      shapes: of all arrays that were saved, by path.
    """

    like: PyTree
    now: Maps
    then: Maps
    shapes: Mapping[str, tuple[int, ...]]

    def saved_state(self) -> PyTree:
        """The state with the structure and shapes of what was saved."""
        items, tree = jax.tree.flatten_with_path(self.like, is_leaf=lambda x: _is_node(x, self.now))
        return jax.tree.unflatten(tree, [self._saved(keystr(path), x) for path, x in items])

    def by_rows(self) -> set[str]:
        """The paths, in what was saved, of the arrays that change places row by row."""
        return {leaf.path for leaf in stack_leaves(self.saved_state(), self.then) if leaf is not None}

    def join(self, saved: PyTree, keys: Sequence[str | int], take: Callable[..., Leaf]) -> PyTree:
        """The state as it is wanted.

        Arguments:
          saved: what was read, in the structure of `saved_state`.
          keys: that the state has in the checkpoint.
          take: `(leaf that is wanted, its rows, its sources) -> leaf`.

        Raises:
          EmbeddingError: if stacks that are joined have different numbers that are not by row.
        """
        items, tree = jax.tree.flatten_with_path(self.like, is_leaf=lambda x: _is_node(x, self.now))
        there = jax.tree.leaves(saved, is_leaf=lambda x: _is_node(x, self.then))
        done = [self._joined(p, x, y, keys, take) for (p, x), y in zip(items, there, strict=True)]
        return jax.tree.unflatten(tree, done)

    def check(self, where: object) -> None:
        """Sees that the tables are those that were saved, and that none had more rows.

        Raises:
          EmbeddingError: naming those that cannot be restored.
        """
        rows = {n: r for m in self.then.values() for n, r in zip(m.names, m.rows, strict=True)}
        wanted = {n: r for m in self.now.values() for n, r in zip(m.names, m.rows, strict=True)}
        every = {**dict.fromkeys(rows, 0), **wanted}
        raise_all(
            _other_table(where, n, r, rows) for n, r in every.items() if rows.get(n, -1) not in range(r + 1)
        )

    # -- inside

    def _sources(self, stack: str) -> list[str]:
        """The stacks that have had the tables of a stack."""
        names = {*self.now[stack].names}
        return [name for name, rows in self.then.items() if names & {*rows.names}]

    def _lead(self, path: str, stack: str) -> tuple[int, ...]:
        return lead_of(self.shapes.get(path, ()), self.then[stack])

    def _saved(self, at: str, x: PyTree) -> PyTree:
        if not _is_node(x, self.now):
            return x
        out = {name: held for name, held in x.items() if name not in self.now}
        for stack in (s for s in x if s in self.now):
            for old in self._sources(stack):

                def before(path: Any, leaf: Leaf, stack: str = stack, old: str = old) -> Leaf:
                    lead = lead_of(np.shape(leaf), self.now[stack])
                    if not lead:
                        return leaf
                    then = self._lead(f"{at}[{old!r}]{keystr(path)}", old) or self.then[old].lead
                    return struct((*then, *leaf.shape[len(lead) :]), leaf.dtype)

                out[old] = jax.tree.map_with_path(before, x[stack])
        return out

    def _joined(
        self, at: Any, x: PyTree, saved: PyTree, keys: Sequence[str | int], take: Callable[..., Leaf]
    ) -> PyTree:
        if not _is_node(x, self.now):
            return saved
        out = dict(x)
        for stack in x:
            if stack not in self.now:
                out[stack] = saved[stack]
                continue
            olds = self._sources(stack)
            others = [dict(jax.tree.leaves_with_path(saved[old])) for old in olds]

            def after(
                path: Any, leaf: Leaf, stack: str = stack, olds: Sequence[str] = olds, others: Any = others
            ) -> Leaf:
                if lead_of(np.shape(leaf), self.now[stack]):
                    return take(leaf, self.now[stack], [self._source(at, old, path, keys) for old in olds])
                values = [other[path] for other in others]
                if any(not np.array_equal(values[0], v) for v in values[1:]):
                    raise EmbeddingError(_not_alike(f"{keystr(at)}[{stack!r}]{keystr(path)}", values, olds))
                return values[0]

            out[stack] = jax.tree.map_with_path(after, x[stack])
        return out

    def _source(self, at: Any, old: str, path: Any, keys: Sequence[str | int]) -> SavedRows:
        named = [*map(str, keys), *map(_key, at), old, *map(_key, path)]
        where = f"{keystr(at)}[{old!r}]{keystr(path)}"
        return SavedRows(where, ".".join(named), len(self._lead(where, old)), self.then[old])


def _is_node(x: object, maps: Maps) -> bool:
    return isinstance(x, Mapping) and any(key in maps for key in x)


def _key(entry: Any) -> str:
    """A key of a path as orbax names it."""
    return str(next(getattr(entry, n) for n in ("key", "idx", "name") if hasattr(entry, n)))


def _other_table(where: object, name: str, rows: int, saved: Mapping[str, int]) -> Problem:
    got = f"{saved[name]:,} rows" if name in saved else "no such table"
    why = "the rows that were saved are not thrown away, and what was not saved cannot be restored"
    legal = f"{rows:,} rows or fewer" if rows else "the same table here"
    return problem(f"{where}: table {name!r}", got, legal, why, "the tables that were saved")


def _not_alike(path: str, values: Sequence[Leaf], stacks: Sequence[str]) -> Problem:
    got = ", ".join(f"{v} of {s!r}" for v, s in zip(values, stacks, strict=True))
    why = "these stacks are one stack now, which has this number once"
    fix = "tables of different optimizers apart: TableConfig(optimizer=...)"
    return problem(path, got, "equal numbers", why, fix)
