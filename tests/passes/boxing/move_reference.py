"""What every move does, in NumPy and without any layout arithmetic.

A device's shard is pasted onto a canvas of the logical shape; cells that the device does not hold are NaN.
A move combines the canvases of a group and cuts each device's new part out again.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sbp.passes.boxing.moves import Move, find_permutation
from sbp.signature import NdSbp, Partial
from sbp.view import Shards, coordinates
from tests.sbp.slicer import HOLE, rows_of

Canvas = np.ndarray[Any, Any]  # float64, NaN: not held here


def _of_bits(join: np.ufunc) -> Callable[[Sequence[Canvas]], Canvas]:
    """A reduction of the bits of integers."""
    return lambda group: np.where(
        np.isnan(group).any(axis=0), np.nan, join.reduce(np.nan_to_num(np.stack(group)).astype(np.int64))
    )


REDUCE: dict[str, Callable[[Sequence[Canvas]], Canvas]] = {
    "sum": np.add.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "prod": np.multiply.reduce,
    "and": _of_bits(np.bitwise_and),
    "or": _of_bits(np.bitwise_or),
    "xor": _of_bits(np.bitwise_xor),
}


def paste(
    shard: np.ndarray, shape: Sequence[int], nd: NdSbp, hierarchy: Sequence[int], at: tuple[int, ...]
) -> Canvas:
    """The canvas of the device at `at`."""
    rows = [rows_of(n, d, nd, hierarchy, at) for d, n in enumerate(shape)]
    canvas = np.full(shape, np.nan)
    real = [[i for i, r in enumerate(row) if r != HOLE] for row in rows]
    canvas[np.ix_(*([r for r in row if r != HOLE] for row in rows))] = shard[np.ix_(*real)]
    return canvas


def cut(canvas: Canvas, nd: NdSbp, hierarchy: Sequence[int], at: tuple[int, ...]) -> Canvas:
    """The shard of the device at `at`, NaN in its padding."""
    for d, n in enumerate(canvas.shape):
        rows = rows_of(n, d, nd, hierarchy, at)
        padded = np.concatenate([canvas, np.full((*canvas.shape[:d], 1, *canvas.shape[d + 1 :]), np.nan)], d)
        canvas = np.take(padded, rows, axis=d)  # HOLE is -1: the row of NaN just added
    return canvas


def identity(op: str, dtype: Any) -> float:
    """What `embed` puts where a device holds nothing."""
    exact = {"sum": 0.0, "prod": 1.0, "or": 0.0, "xor": 0.0, "and": 1.0 if dtype == np.bool_ else -1.0}
    if op in exact:
        return exact[op]
    if dtype == np.bool_:
        return float(op == "min")
    low, high = (-np.inf, np.inf) if np.dtype(dtype).kind not in "iu" else _range(dtype)
    return low if op == "max" else high


def _range(dtype: Any) -> tuple[float, float]:
    info = np.iinfo(dtype)
    return float(info.min), float(info.max)


def interpret(
    move: Move, shards: Shards, shape: Sequence[int], hierarchy: Sequence[int], dtype: Any = np.float32
) -> Shards:
    """All shards after one move."""
    where = coordinates(hierarchy)
    held = {c: paste(np.asarray(shards[c], np.float64), shape, move.before, hierarchy, c) for c in where}
    out = {}
    for at in where:
        spans = [range(n) if a in move.axes else (at[a],) for a, n in enumerate(hierarchy)]
        group = [held[c] for c in itertools.product(*spans)]
        match move.kind:
            case "all_reduce" | "reduce_scatter" | "all_to_all" | "all_gather" if isinstance(
                move.old, Partial
            ):
                canvas = REDUCE[move.old.op](group)
            case "all_gather" | "all_to_all":
                canvas = np.fmax.reduce(group)  # each cell is held by one of the group; fmax passes NaN over
            case "slice" | "keep":
                canvas = held[at]
            case "permute" if 0 in shape:
                canvas = held[at]
            case "fill":
                assert isinstance(move.new, Partial)
                nothing = np.where(np.isnan(held[at]), np.nan, identity(move.new.op, dtype))
                canvas = held[at] if at[move.axes[0]] == 0 else nothing
            case "embed":
                assert isinstance(move.new, Partial)
                canvas = np.where(np.isnan(held[at]), identity(move.new.op, dtype), held[at])
            case "permute":
                way = find_permutation(shape, move.before, move.after, hierarchy)
                assert way is not None
                ((source, _),) = [pair for pair in way.pairs if pair[1] == where.index(at)]
                canvas = held[where[source]]
            case kind:
                raise AssertionError(kind)
        out[at] = cut(canvas, move.after, hierarchy, at)
    return out
