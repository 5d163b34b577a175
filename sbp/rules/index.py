"""Gather and scatter: embeddings, label picking, and their gradients. Bodies: sbp/communication/gather.py."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from sbp.communication.gather import gather_local, scatter_local, window_dims
from sbp.rules.entry import Op, Row, Shape, row_traffic
from sbp.rules.factors import MAX, Letters, additive_row, monotone_rows, moved_rows, split_rows
from sbp.rules.registry import rule
from sbp.signature import B, P, Partial, Signature, Split

Pairs: TypeAlias = Sequence[tuple[int, int]]


def _letters(
    shapes: tuple[Shape, Shape, Shape],
    batching: Pairs,
    removed: Sequence[int],
    window: Sequence[int],
    indexed: Sequence[int],
) -> tuple[Letters, Letters, Letters]:
    """Letters of operand, indices and windows: w* dims taken whole, i* index dims, j* batching dims.

    Arguments:
      shapes: of operand, indices, and windows: the gathered result, or the updates of a scatter.
      batching: pairs of an operand dim and an index dim.
      removed: operand dims that the windows do not have.
      window: where the others stand in the windows.
      indexed: operand dims that the index vectors address.
    """
    operand, indices, windows = shapes
    one: list[str | None] = [None] * len(operand)
    two: list[str | None] = [None] * len(indices)
    for k, (d, i) in enumerate(batching):
        one[d] = two[i] = f"j{k}"
    two[:-1] = [name or f"i{i}" for i, name in enumerate(two[:-1])]
    three: list[str | None] = [None] * len(windows)
    for d, at in zip(window_dims(len(operand), removed), window, strict=True):
        if d not in indexed and operand[d] == windows[at]:
            one[d] = three[at] = f"w{d}"
    batch = iter(two[:-1])
    for at in range(len(windows)):
        if at not in window:
            three[at] = next(batch)
    return tuple(one), tuple(two), tuple(three)


def _gather_letters(op: Op) -> tuple[Letters, Letters, Letters]:
    """Letters of operand, indices and result."""
    dn = op.params["dimension_numbers"]
    batching = list(zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True))
    removed = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    shapes = op.shapes[0], op.shapes[1], op.results[0]
    return _letters(shapes, batching, removed, dn.offset_dims, dn.start_index_map)


def _lookup_dims(op: Op, index_map: Sequence[int], removed: Sequence[int]) -> list[int]:
    """Operand dims that are indexed one row at a time: they may be split, each device serving its rows."""
    return [int(d) for d in index_map if d in removed and op.shapes[0][d] > 1]


@rule(
    "gather",
    body=gather_local,
    flops=lambda op: math.prod(op.results[0]),
    traffic=row_traffic(),
)
def gather(op: Op) -> list[Row]:
    """Index, whole window and batching dims split; a looked-up one leaves a sum; sums and extrema pass."""
    dn = op.params["dimension_numbers"]
    operand, indices, result = _gather_letters(op)
    sizes = _sizes([operand, indices, result], [op.shapes[0], op.shapes[1], op.results[0]])
    rows = list(split_rows([operand, indices], [result], sizes, {}))
    rows += [Row((P, B), (P,), moves=True), *monotone_rows(2, 1, 0, increasing=True)]
    is_sum = op.dtypes[0] != bool  # of truth values that are looked up elsewhere none is true
    for d in _lookup_dims(op, dn.start_index_map, dn.collapsed_slice_dims):
        why = f"rows of dim {d} of operand 0 are looked up here, and it is split over {{axes}}"
        rows.append(Row((Split(d), B), (P if is_sum else MAX,), reason=why, owned=is_sum))
    return rows


def _sizes(letters: Sequence[Letters], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for names, shape in zip(letters, shapes, strict=True):
        out.update({n: s for n, s in zip(names, shape, strict=True) if n is not None})
    return out


def _scatter_letters(op: Op) -> tuple[Letters, Letters, Letters]:
    """Letters of operand, indices and updates."""
    dn = op.params["dimension_numbers"]
    batching = list(zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True))
    removed = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    shapes = op.shapes[0], op.shapes[1], op.shapes[2]
    return _letters(shapes, batching, removed, dn.update_window_dims, dn.scatter_dims_to_operand_dims)


def _scatter_rows(op: Op) -> list[Row]:
    """Splits that hold for every scatter: whole window dims, batching dims, and the looked-up rows."""
    dn = op.params["dimension_numbers"]
    operand, indices, updates = _scatter_letters(op)
    sizes = _sizes([operand, indices, updates], op.shapes)
    kept = {n: s for n, s in sizes.items() if n in operand}
    rows = list(split_rows([operand, indices, updates], [operand], kept, {}))
    for d in _lookup_dims(op, dn.scatter_dims_to_operand_dims, dn.inserted_window_dims):
        rows.append(Row((Split(d), B, B), (Split(d),)))
    return rows


def _split_updates(op: Op, partial: Partial, verb: str) -> list[Row]:
    """Updates split by index: every device's part meets in a partial result.

    A sum must have the operand once; to an extremum it may be given on every device.
    """
    rows: list[Row] = []
    befores: tuple[Signature, ...] = (partial,) if partial == P else (B, partial)
    _, indices, updates = _scatter_letters(op)
    for i, name in enumerate(indices):
        if name is not None and name[0] == "i" and op.shapes[1][i] > 1:
            why = f"dim {i} of the indices is {verb} here and split over {{axes}}"
            fills = (0,) if partial == P else ()
            ins = (Split(i), Split(updates.index(name)))
            rows += [Row((before, *ins), (partial,), fills, why) for before in befores]
    return rows


def _two_per_row(op: Op) -> float:
    return 2.0 * math.prod(op.shapes[2])


# What is done where updates meet stands in the names, but for "scatter".
_scattering = partial(
    rule, body=scatter_local, flops=_two_per_row, traffic=row_traffic(2), functions=("update_jaxpr",)
)


@_scattering("scatter-add")
def scatter_add(op: Op) -> list[Row]:
    """As every scatter; additive; updates split by index leave a sum."""
    return [*_scatter_rows(op), additive_row(3, 1, (0, 2)), *_split_updates(op, P, "added up")]


@_scattering("scatter-sub")
def scatter_sub(op: Op) -> list[Row]:
    """As every scatter; additive; updates split by index leave a sum."""
    return [*_scatter_rows(op), additive_row(3, 1, (0, 2)), *_split_updates(op, P, "subtracted")]


@_scattering("scatter-mul")
def scatter_mul(op: Op) -> list[Row]:
    """As every scatter; linear in the operand."""
    return [*_scatter_rows(op), Row((P, B, B), (P,), multiplies=True)]


@_scattering("scatter-min", "scatter-max")
def scatter_extremum(op: Op) -> list[Row]:
    """As every scatter; extrema of extrema pass; updates split by index leave an extremum."""
    partial = Partial(op.name.removeprefix("scatter-"))
    both: list[tuple[Signature, Signature]] = [(partial, B), (B, partial), (partial, partial)]
    rows = [Row((operand, B, updates), (partial,)) for operand, updates in both]
    return [*_scatter_rows(op), *rows, *_split_updates(op, partial, "compared")]


@_scattering("scatter")
def scatter(op: Op) -> list[Row]:
    """As every scatter; sums and extrema where no two updates meet: which of them wins is not defined.

    With a function of the user's (`x.at[i].apply(f)`) the rows that it changes are computed, not moved.
    """
    rows = _scatter_rows(op)
    moves = op.params["unique_indices"] and op.params["update_jaxpr"] is None
    return [*rows, *moved_rows(3, 1, (0, 2))] if moves else rows
