"""Slices, paddings, concatenations and reversals: they move rows along a dim, which may be split.

The bodies, and which rows travel, are in sbp/communication/shift.py.
"""

from collections.abc import Iterable

from sbp.communication import shift
from sbp.communication.extents import Extent
from sbp.communication.route import find_route, route_pays
from sbp.communication.route_sides import Side
from sbp.compat import core
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule
from sbp.signature import B, P, Signature, Split

MOVED = "dims whose rows move with an exchange"


def _letters(kept: Iterable[bool]) -> Letters:
    """A letter for every dim whose rows stay where they are."""
    return tuple(f"d{d}" if keep else None for d, keep in enumerate(kept))


def _on_an_axis(op: Op, size: int) -> Extent:
    """A dim that one axis splits, as that axis sees it."""
    return Extent(size, (0,), (op.group,))


def _whole(op: Op, size: int) -> Extent:
    """A dim that the axis does not split."""
    return Extent(size, (), (op.group,))


def _worth(op: Op, dim: int, operands: tuple[Side, ...], results: tuple[Side, ...]) -> bool:
    """Whether rows may be exchanged along `dim`.

    An inner axis does not see which part of the tensor it has; there the cost of the exchange decides alone.
    """
    if any(core.is_key(t) for t in op.dtypes):
        return False
    inner = any(s[dim] != n[dim] for s, n in zip(op.shapes, op.logical, strict=True) if s)
    return inner or route_pays(find_route(operands, results), operands, results)


def _taken_out(dim: int) -> str:
    return f"rows of dim {dim} of operand 0 are sliced out here, and it is split over {{axes}}"


@rule("slice", body=shift.slice_local, communication=shift.slice_communication, fused=True, note=MOVED)
def slice_(op: Op) -> list[Row]:
    """Every dim; a few rows of a split dim may leave a sum instead."""
    (shape,), (out,) = op.shapes, op.results
    logical, strides = op.logical[0], op.params["strides"] or (1,) * len(shape)
    sizes = (
        -(-(stop - start) // step)
        for start, stop, step in zip(
            op.params["start_indices"], op.params["limit_indices"], strides, strict=True
        )
    )
    names = _letters(n == m for n, m in zip(logical, sizes, strict=True))
    rows = factors(op, [names], [names], moved=(0,))
    for d, (n, m) in enumerate(zip(shape, out, strict=True)):
        if names[d] is not None or m < 1 or n == 1:
            continue
        sides = shift.slice_sides(_on_an_axis(op, n), _on_an_axis(op, m), *shift.slice_of(op.params, d))
        if m > 1 and _worth(op, d, *sides):
            rows.append(Row((Split(d),), (Split(d),)))
        if 2 * m <= n:
            rows.append(Row((Split(d),), (P,), reason=_taken_out(d), owned=True))
    return rows


@rule("pad", body=shift.pad_local, communication=shift.pad_communication, fused=True, note=MOVED)
def pad(op: Op) -> list[Row]:
    """Every dim; sums and extrema of operand and padding value together."""
    config = op.params["padding_config"]
    names = _letters(not any(c) for c in config)
    rows = factors(op, [names, ()], [names], moved=(0, 1))
    for d, (low, _, between) in enumerate(config):
        n, m = op.shapes[0][d], op.results[0][d]
        if names[d] is not None or n < 1 or m < 2:
            continue
        base, out = (_on_an_axis(op, n) if n > 1 else _whole(op, n)), _on_an_axis(op, m)
        source, target, _ = shift.pad_sides(base, out, int(low), int(between))
        if _worth(op, d, (source,), (target,)):
            rows.append(Row((Split(d) if n > 1 else B, B), (Split(d),)))
    return rows


@rule("concatenate", body=shift.concatenate_local, communication=shift.concatenate_communication, note=MOVED)
def concatenate(op: Op) -> list[Row]:
    """Every dim; sums and extrema of all together. Of the joined dim, operands of one row are whole."""
    dim = int(op.params["dimension"])
    names = _letters(d != dim for d in range(len(op.results[0])))
    rows = factors(op, [names] * len(op.shapes), [names], moved=tuple(range(len(op.shapes))))
    sizes, whole = [s[dim] for s in op.shapes], op.results[0][dim]
    parts = tuple(_on_an_axis(op, n) if n > 1 else _whole(op, n) for n in sizes)
    sides = shift.joined_sides(parts, _on_an_axis(op, whole))
    if max(sizes) > 1 and _worth(op, dim, *sides):
        ins: tuple[Signature, ...] = tuple(Split(dim) if n > 1 else B for n in sizes)
        rows.append(Row(ins, (Split(dim),)))
    return rows


@rule("split", body=shift.split_local, communication=shift.split_communication, note=MOVED)
def split(op: Op) -> list[Row]:
    """Every dim; sums and extrema. Of the cut dim, results of one row leave a sum."""
    dim = int(op.params["axis"])
    names = _letters(d != dim for d in range(len(op.shapes[0])))
    rows = factors(op, [names], [names] * len(op.results), moved=(0,))
    size, sizes = op.shapes[0][dim], [s[dim] for s in op.results]
    parts = tuple(_on_an_axis(op, n) if n > 1 else _whole(op, n) for n in sizes)
    partial = tuple(() if n > 1 else (0,) for n in sizes)
    sides = shift.split_sides(_on_an_axis(op, size), parts, partial)
    if size > 1 and _worth(op, dim, *sides):
        outs: tuple[Signature, ...] = tuple(Split(dim) if n > 1 else P for n in sizes)
        reason = _taken_out(dim) if P in outs else ""
        rows.append(Row((Split(dim),), outs, reason=reason, owned=P in outs))
    return rows


@rule("rev", body=shift.rev_local, communication=shift.rev_communication, note=MOVED)
def rev(op: Op) -> list[Row]:
    """Every dim."""
    gone, (shape,) = tuple(map(int, op.params["dimensions"])), op.shapes
    names = _letters(d not in gone for d in range(len(shape)))
    rows = factors(op, [names], [names], moved=(0,))
    for d in gone:
        if shape[d] > 1 and _worth(op, d, *shift.reversed_sides(_on_an_axis(op, shape[d]))):
            rows.append(Row((Split(d),), (Split(d),)))
    return rows
