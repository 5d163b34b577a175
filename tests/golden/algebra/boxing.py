"""The page of boxing: which moves lead from one signature to another, and what they send."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move, itemsize, wire_bytes
from sbp.passes.boxing.paths import Boxing
from sbp.placement import placement
from sbp.signature import B, NdSbp, P, S, format_sbp
from tests.golden.algebra.words import NO_BREAK, bytes_text, dtype_text, wrapped
from tests.golden.hardware import HARDWARE

HOW_TO_READ = """
Written by `python -m pytest tests/golden --update-golden`. A block has one tensor on one hierarchy of
devices, axis 0 outside. A line leads from a signature to another by the moves that take the least time on
hardware of round figures (tests/golden/hardware.py): each with the axes that take part where there are
several, collectives with the bytes that one device sends, padding included. Steps without bytes are local:
`slice` keeps a part of what the device has, `fill` leaves a whole tensor on one device and makes zeros on
the others, `embed` puts a shard among zeros (or what an extremum ignores), `keep` takes copies for parts of
an extremum.
""".strip()
# One axis: everything that a tensor of two dims can be.
SIGNATURES = (B, S(0), S(1), P, P("max"), P("min"))
SHAPES = ((8, 16), (10, 6))
# Two axes: what training steps and pipelines do, and what is hard; large, so that bytes decide, not latency.
HIERARCHY = (2, 4)
LARGE = ((8192, 4096), (10002, 4098))
PAIRS: tuple[tuple[NdSbp, NdSbp], ...] = (
    ((S(0), B), (B, B)),
    ((S(0), S(0)), (B, B)),
    ((S(0), S(1)), (B, B)),
    ((B, B), (S(0), S(0))),
    ((P, B), (B, B)),
    ((P, P), (B, B)),
    ((P, P), (S(0), S(0))),
    ((P, P), (S(0), B)),
    ((P, P), (B, S(0))),
    ((S(0), P), (S(0), B)),
    ((S(0), P), (S(0), S(0))),
    ((S(0), P), (S(0), S(1))),
    ((P, S(0)), (S(0), S(0))),
    ((P, S(1)), (S(0), S(1))),
    ((P, S(0)), (B, S(0))),
    ((S(0), B), (B, S(0))),
    ((B, S(0)), (S(0), B)),
    ((S(0), S(1)), (S(1), S(0))),
    ((S(0), S(0)), (S(1), S(1))),
    ((S(0), S(0)), (S(0), S(1))),
    ((S(0), S(0)), (S(1), S(0))),
    ((S(0), S(0)), (S(0), B)),
    ((S(0), S(0)), (B, S(0))),
    ((S(0), B), (S(0), P)),
    ((B, S(0)), (P, P)),
    ((P("max"), P("max")), (B, B)),
    ((P("max"), P("max")), (S(0), S(0))),
    ((P("max"), S(0)), (B, S(0))),
)


def page() -> list[str]:
    """The blocks of the page."""
    line, plane = (4,), HIERARCHY
    pairs = [((a,), (b,)) for a, b in itertools.permutations(SIGNATURES, 2)]
    blocks = ["# Boxing: from one signature to another", *HOW_TO_READ.split("\n\n")]
    blocks += [_block(shape, dtype, line, pairs) for shape, dtype in _tensors(SHAPES)]
    blocks.append(_block(SHAPES[0], np.dtype("float16"), line, _extrema(pairs)))
    return [*blocks, *(_block(shape, dtype, plane, PAIRS) for shape, dtype in _tensors(LARGE))]


def _tensors(shapes: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [(shape, np.dtype("float32")) for shape in shapes]


def _extrema(pairs: Iterable[tuple[NdSbp, NdSbp]]) -> list[tuple[NdSbp, NdSbp]]:
    """The reductions of extrema: of short floats they are compared in wider ones."""
    return [(a, b) for a, b in pairs if a == (P("max"),)]


def _block(
    shape: tuple[int, ...], dtype: np.dtype, hierarchy: tuple[int, ...], pairs: Iterable[tuple[NdSbp, NdSbp]]
) -> str:
    devices = placement("gpu", shape=hierarchy)
    reductions = frozenset({"sum", "max", "min"})
    box = Boxing(shape, dtype, Network(devices, HARDWARE), reductions, tuple(range(len(shape))))
    title = f"{dtype_text(dtype)}[{','.join(map(str, shape))}] over {' x '.join(map(str, hierarchy))} devices"
    head = f"    {'from':<16}    {'to':<16}  {'sends':>11}"
    return "\n".join([title, head, *_lines(box, hierarchy, pairs)])


def _lines(box: Boxing, hierarchy: tuple[int, ...], pairs: Iterable[tuple[NdSbp, NdSbp]]) -> Iterator[str]:
    for before, after in pairs:
        moves = box.path(before, after)
        each = [wire_bytes(m, box.shape, itemsize(m, box.dtype), hierarchy) for m in moves]
        sent = bytes_text(math.fsum(each)) if sum(each) else "-"
        steps = ", ".join(_step(m, n, len(hierarchy) > 1) for m, n in zip(moves, each, strict=True))
        start = f"    {_nd(before):<16} -> {_nd(after):<16}  {sent:>11}  "
        yield from wrapped(f"{start}{steps}", " " * len(start), keep=len(start))


def _nd(nd: NdSbp) -> str:
    return format_sbp(nd) if len(nd) > 1 else str(nd[0])


def _step(move: Move, sent: float, several: bool) -> str:
    axes = f"axis{NO_BREAK}{f',{NO_BREAK}'.join(map(str, move.axes))}"
    words = [move.kind.replace("_", "-"), *([f"over{NO_BREAK}{axes}"] if several else [])]
    return NO_BREAK.join([*words, *([bytes_text(sent)] if move.is_collective else [])])
