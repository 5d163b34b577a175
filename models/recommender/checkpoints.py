"""Checkpoints of a recommender: it goes on with its tables split otherwise, and on other devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

import sbp
from models.recommender.learner import Learner, collection_of
from sbp.lazy import by_row
from sbp.runtime.embedding import Collection

PyTree: TypeAlias = Any
Moves: TypeAlias = Mapping[str, tuple[str, NDArray[np.int64]]]
"""Of each stack, the old one, and its row for every row of the new one; -1 for rows of nobody."""

TABLES = "tables"


@dataclass(frozen=True, slots=True)
class Stacking:
    """What the stacks of a run are made of: their shapes, and in which row an id is.

    Arguments:
      layout: one of `--table`.
      devices: over how many they are split.
    """

    layout: str
    devices: int

    def tables(self, learner: Learner) -> Collection:
        """The tables of a learner, stacked so."""
        sizes = [table.vocabulary_size for table in learner.tables.tables]
        return collection_of(sizes, learner.inputs.width, self.layout, self.devices)


class TableCheckpoints(sbp.Checkpoints):
    """The checkpoints of a run: `(parameters, state of the optimizers)` of a learner, step by step.

    Stacks are saved as they lie, which costs nothing, with a word of how they are stacked. Where a run that
    goes on stacks its tables otherwise, their rows change places on the host.

    Arguments:
      path: of the folder.
      learner: whose parameters they are.
      stacking: how its tables are stacked.
    """

    def __init__(self, path: str | os.PathLike[str], learner: Learner, stacking: Stacking) -> None:
        super().__init__(path)
        self.learner, self.stacking = learner, stacking

    def save(self, state: PyTree, step: int, extra: PyTree = None, *, exempt: Sequence[str] = ()) -> None:
        """As `Checkpoints.save`."""
        lies = {"layout": self.stacking.layout, "devices": self.stacking.devices}
        super().save(state, step, {**(extra or {}), TABLES: lies}, exempt=exempt)

    def restore(self, like: PyTree, step: int | None = None, *, check: bool = True, **part: Any) -> PyTree:
        """As `Checkpoints.restore`; tables that were stacked otherwise come to the host."""
        if part.get("only") is not None:
            return super().restore(like, step, check=check, **part)
        self.wait()
        lay = self.extra(step).get(TABLES)  # none: something else was saved, which is refused below
        old = replace(self.learner, tables=(Stacking(**lay) if lay else self.stacking).tables(self.learner))
        moves = moves_of(old.tables, self.learner.tables)
        if moves is None:
            return super().restore(like, step, check=check, **part)
        params = jax.eval_shape(old.init, jax.random.key(0))
        saved = params, jax.eval_shape(old.init_state, params)
        asked = tuple({**now, TABLES: then[TABLES]} for now, then in zip(like, saved, strict=True))
        params, state = super().restore(asked, step, check=check, **part)
        return moved(params, state, self.learner.tables, moves)


def moves_of(old: Collection, new: Collection) -> Moves | None:
    """Where the rows of the same tables were; None if they are where they were."""
    if list(old.stacks) == list(new.stacks):  # a name says what lies where
        return None
    then, now, out = _places(old), _places(new), {}
    for was, name in zip(old.stacks, new.stacks, strict=True):
        rows = np.full(np.prod(new.stacks[name].shape[:-1]), -1)
        rows[now[name]] = then[was]
        out[name] = was, rows
    return out


def _places(tables: Collection) -> dict[str, NDArray[np.int64]]:
    """Of each stack, the row of every id of every table, in the order of the tables."""
    out = {}
    for name, stack in tables.stacks.items():
        out[name] = np.concatenate([np.asarray(stack.row_map.every(n)) for n in sorted(stack.row_map.names)])
    return out


def moved(params: PyTree, state: PyTree, tables: Collection, moves: Moves) -> tuple[PyTree, PyTree]:
    """Parameters and state with the rows of their tables in their new places.

    Rows of nobody are zero, also in the state: nothing looks them up.

    Arguments:
      params, state: as saved, the tables on the host; of the state each leaf with a line per row moves.
      tables: as they are to be stacked.
    """
    stacks, states = {}, {}
    for name, stack in tables.stacks.items():
        was, move = moves[name]
        rows = params[TABLES][was].reshape(-1, stack.shape[-1])
        stacks[name] = _taken(rows, move).reshape(stack.shape)

        def lying(leaf: Any, rows: NDArray[Any] = rows, move: NDArray[np.int64] = move) -> Any:
            return _taken(leaf, move) if by_row(leaf.shape, rows.shape) else leaf

        states[name] = jax.tree.map(lying, state[TABLES][was])
    return {**params, TABLES: stacks}, {**state, TABLES: states}


def _taken(rows: NDArray[Any], move: NDArray[np.int64]) -> NDArray[Any]:
    out = np.zeros((len(move), *rows.shape[1:]), rows.dtype)
    out[move >= 0] = rows[move[move >= 0]]
    return out
