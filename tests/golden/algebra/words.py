"""What a row costs, in words and figures."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from sbp.communication.joint import results_of
from sbp.communication.protocol import Context
from sbp.layout import Layout, chunk, local_shape, valid_length
from sbp.passes.boxing.moves import itemsize, moves_from, wire_bytes
from sbp.passes.program.views import context_of, op_of
from sbp.rules import Row
from sbp.signature import B, P, Partial, Signature, Split
from tests.golden.algebra.applications import Application, lying

WIDTH = 110
AXIS = "axis"
# Between a number and its unit: lines are not broken there.
NO_BREAK = "\u00a0"
# The largest denominator that a reader takes in at a glance.
SMALL = 12
NAMES = {
    "sum": "sum",
    "max": "maximum",
    "min": "minimum",
    "prod": "product",
    "and": "bitwise and",
    "or": "bitwise or",
    "xor": "bitwise exclusive or",
}
SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def dtype_text(dtype: Any) -> str:
    """The name of a dtype as jaxprs have it.

    >>> dtype_text(np.dtype("float32")), dtype_text(np.dtype("bool"))
    ('f32', 'bool')
    """
    kind, digits, rest = re.fullmatch(r"([a-z]+)(\d*)(.*)", str(dtype)).groups()  # type: ignore[union-attr]
    return f"{SHORT.get(kind, kind) if digits else kind}{digits}{rest}"


def tensor_text(x: Any) -> str:
    """Dtype and shape: f32[5,7]."""
    return f"{dtype_text(x.dtype)}[{','.join(map(str, x.shape))}]"


def signature_text(row: Row) -> str:
    """A row as text: S(0), B -> S(0)."""
    return f"{', '.join(map(str, row.operands))} -> {', '.join(map(str, row.results))}".strip()


def number_text(x: float) -> str:
    """A whole number, or three decimals.

    >>> number_text(90.0), number_text(4.5)
    ('90', '4.5')
    """
    return f"{x:.3f}".rstrip("0").rstrip(".")


def bytes_text(n: float) -> str:
    """Bytes, all digits."""
    return f"{number_text(n)}{NO_BREAK}B"


def work(one: Application, row: Row | None = None) -> tuple[float, float]:
    """FLOPs and bytes of memory traffic on one device; of the whole op without a row."""
    shapes, results = one.op.shapes, one.op.results
    if row is not None:
        shapes, results = (
            tuple(local_shape(x, (s,), (one.group,)) for x, s in zip(xs, signatures, strict=True))
            for xs, signatures in ((shapes, row.operands), (results, row.results))
        )
    op = op_of(one.graph, one.node, shapes, results, 1)
    return float(one.rule.flops(op)), float(one.rule.traffic(op))


def share_text(part: float, whole: float) -> str:
    """A part of a whole: in lowest terms where these are small; `-` of nothing.

    >>> share_text(2.0, 8.0), share_text(8.0, 8.0), share_text(164.0, 284.0), share_text(0.0, 0.0)
    ('1/4', '1', '164/284', '-')
    """
    if not whole:
        return "-"
    share = Fraction(part / whole).limit_denominator(10_000)
    return str(share) if share.denominator <= SMALL else f"{number_text(part)}/{number_text(whole)}"


def row_words(one: Application, row: Row) -> list[str]:
    """What a row sends, what waits, what it promises and what it does with padding: a clause each."""
    return [*_sent(one, row), *_waits(one, row), *_promises(one, row), *_padding(one, row)]


def sent_bytes(one: Application, row: Row) -> float:
    """What one device sends inside the body."""
    return sum(t.wire_bytes for t in one.communication(row))


def _sent(one: Application, row: Row) -> Iterator[str]:
    said: Counter[str] = Counter()
    for talk in one.communication(row):
        kind = talk.kind.replace("_", "-")
        said[f"{kind} {bytes_text(talk.wire_bytes)}: {talk.reason.format(axes='the axis')}"] += 1
    yield from (f"{times} times {what}" if times > 1 else what for what, times in said.items())


def _waits(one: Application, row: Row) -> Iterator[str]:
    """Which reduction the results wait for, and what it takes."""
    here = _partial(one.results, row.results)
    before = _partial(one.operands, row.operands)
    for op in dict.fromkeys(op for op, _ in here):
        name = NAMES[op]
        came = [x for how, x in before if how == op]
        given = [x for how, x in before]
        what = _reduction(one, [x for how, x in here if how == op], op)
        if came:
            yield f"{name} passes: {what}, before it {_reduced_bytes(one, came, op)}"
        elif given:
            yield f"{before[0][0]} becomes {op}: {what}"
        else:
            yield f"waits for a {name}: {what}" + (f", because {_reason(row)}" if row.reason else "")
    if before and not here:
        yield "takes partial operands, and gives whole results"


def _partial(values: tuple[Any, ...], signatures: tuple[Signature, ...]) -> list[tuple[str, Any]]:
    each = zip(values, signatures, strict=True)
    return [(s.op, x) for x, s in each if isinstance(s, Partial)]


def _reason(row: Row) -> str:
    return row.reason.format(axes="the axis")


def _reduced_bytes(one: Application, values: list[Any], op: str) -> str:
    """What an all-reduce of some tensors sends."""
    total = sum(_moves(one, x, op).get("all_reduce", 0.0) for x in values)
    return bytes_text(total)


def _reduction(one: Application, values: list[Any], op: str) -> str:
    """What reducing the results takes: whole, or into shards where they have a dim to split."""
    words = [f"all-reduce {_reduced_bytes(one, values, op)}"]
    kind = "reduce_scatter" if op == "sum" else "all_to_all"
    cheapest = [_moves(one, x, op).get(kind) for x in values]
    if all(n is not None for n in cheapest):
        words.append(f"{kind.replace('_', '-')} {bytes_text(sum(n or 0.0 for n in cheapest))}")
    return " or ".join(words)


def _moves(one: Application, x: Any, op: str) -> dict[str, float]:
    """The bytes of each kind of reduction of a tensor, split by its best dim."""
    found: dict[str, float] = {}
    for move in moves_from((Partial(op),), (B, *(Split(d) for d, n in enumerate(x.shape) if n > 1))):
        sent = wire_bytes(move, x.shape, itemsize(move, x.dtype), (one.group,))
        found[move.kind] = min(sent, found.get(move.kind, math.inf))
    return found


def _promises(one: Application, row: Row) -> Iterator[str]:
    """The flags of a row."""
    for partial in dict.fromkeys(row.operands[i] for i in row.fills):
        which = [i for i in row.fills if row.operands[i] == partial]
        how = "may be zeros on all devices but one" if partial == P else "may be whole"
        yield f"{_operands(which)} {how}"
    if row.moves:
        yield "bit for bit"
    if row.owned:
        yield "one device has the element, the others zeros"
    if row.multiplies:
        yield "multiplies the parts"
    if row.needs_finite(one.op):
        yield "operands must be finite" if row.finite_only else "parts must be finite"


def _operands(which: list[int]) -> str:
    *most, last = map(str, which)
    return f"operands {', '.join(most)} or {last}" if most else f"operand {last}"


@dataclass(frozen=True)
class CacheRequests(Context):
    """A `Context` that notes how a body tells padding from rows."""

    fills: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def length(self, layout: Layout, dim: int) -> Any:
        if layout.has_padding(dim):
            self.lengths.append(dim)
        return Context.length(self, layout, dim)

    def mask(self, x: Any, layout: Layout, dims: Any, fill: Any) -> Any:
        known = len(self.lengths)
        out = Context.mask(self, x, layout, dims, fill)
        if len(self.lengths) > known:
            del self.lengths[known:]
            self.fills.append(fill)
        return out


def _padding(one: Application, row: Row) -> Iterator[str]:
    """How the rows of each size that does not divide lie, and what the body does with the padding."""
    sizes = one.uneven(row)
    if sizes:
        shards = ", ".join(f"{n} as {_shards(n, one.group)}" for n in sizes)
        yield f"pads {shards}: {_masked(one, row)}"


def _shards(n: int, group: int) -> str:
    lengths = [valid_length(n, (0,), (group,), (i,)) for i in range(group)]
    return f"{'+'.join(map(str, lengths))} of {chunk(n, group)}"


def _masked(one: Application, row: Row) -> str:
    """Seen by a trace of the body: nothing is compiled."""
    body = one.rule.body
    if body is None:
        return "left as it is"
    plain = context_of(one.graph, one.node, lying(row), (one.group,), names=(AXIS,))
    fields = {k: getattr(plain, k) for k in plain.__dataclass_fields__}
    ctx = CacheRequests(**fields)

    def run(at: Any, *args: Any) -> list[Any]:
        return list(results_of([body(replace(ctx, coords=[at]), *args)])[0])

    given = zip(ctx.operands, one.operands, strict=True)
    args = [jax.ShapeDtypeStruct(layout.local, x.dtype) for layout, x in given]
    traced = jax.make_jaxpr(run, axis_env=[(AXIS, one.group)])(jax.ShapeDtypeStruct((), np.int32), *args)
    fills = dict.fromkeys(map(_fill_text, ctx.fills))
    words = [f"masked by {' and '.join(fills)}"] if fills else []
    words += ["told by its length"] if ctx.lengths else []
    place = traced.jaxpr.invars[0]
    placed = any(x is place for eqn in traced.jaxpr.eqns for x in eqn.invars)
    return ", ".join(words) or ("placed by position" if placed else "left as it is")


def _fill_text(fill: Any) -> str:
    try:
        return str(np.asarray(fill).item())
    except (TypeError, ValueError):
        return "an operand"


def wrapped(text: str, indent: str = "", keep: int = 0) -> list[str]:
    """Lines of at most `WIDTH` columns; the first `keep` columns stay as they are."""
    head, rest = text[:keep], text[keep:]
    start = keep or len(text) - len(text.lstrip())
    lines = textwrap.wrap(
        rest, WIDTH, initial_indent=" " * start, subsequent_indent=indent, break_on_hyphens=False
    )
    first = [head + lines[0][keep:], *lines[1:]] if lines else [text]
    return [line.replace(NO_BREAK, " ").rstrip() for line in first]
