"""What fills the holes of the table in random_ops.py: values that fit, axes, shapes, slices."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.random_ops import Op, Value

Pick = Callable[[Sequence[Any]], Any]
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16)
# Classes of dtypes, by the letter that a hole asks for.
CLASSES = {
    "f": ("float32", "bfloat16"),
    "i": ("int32",),
    "b": ("bool",),
    "c": ("complex64",),
    "n": ("float32", "bfloat16", "int32"),
    "m": ("float32", "bfloat16", "int32", "complex64"),
    "a": ("float32", "bfloat16", "int32", "complex64", "bool"),
    "k": ("key<fry>",),
}


@dataclass
class Draw:
    """The filling of one line's holes; `reads` are the values used, `bounds` their bounds."""

    pick: Pick
    values: dict[int, Value]
    op: Op
    grad: bool
    reads: list[int] = field(default_factory=list)

    @property
    def x(self) -> Value:
        """The first operand."""
        return self.values[self.reads[0]]

    def line(self) -> str | None:
        """The code with its holes filled; None if something does not fit."""
        out = []
        for text, name, kind, _ in string.Formatter().parse(self.op.text):
            filled = HOLES[name](self, kind or "a") if name else ""
            if filled is None:
                return None
            out += [text, filled]
        return "".join(out)

    def value(self, kind: str, fits: Callable[[Value], bool] = lambda v: True) -> str | None:
        """A value of a class; ops that jump see exact values only."""
        exact = self.op.how == "jump" or (self.op.how == "kink" and self.grad)
        found = [
            i
            for i, v in self.values.items()
            if v.dtype in CLASSES[kind] and fits(v) and not (exact and v.noise) and (self.op.empty or v.size)
        ]
        if not found:
            return None
        # Newer values more often: programs should be deep.
        self.reads.append(self.pick(found + found[-4:] * 3))
        return f"v{self.reads[-1]}"


def _x(d: Draw, kind: str) -> str | None:
    return d.value(kind, lambda v: len(v.shape) >= d.op.ndim)


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


def _y(d: Draw, kind: str) -> str | None:
    return d.value(kind, lambda v: _broadcasts(v.shape, d.x.shape))


def _alike(d: Draw, kind: str) -> str | None:
    return d.value(kind, lambda v: (v.shape, v.dtype) == (d.x.shape, d.x.dtype))


def _index(d: Draw, kind: str) -> str | None:
    return d.value("i", lambda v: 0 < v.size <= 16 and len(v.shape) <= 2)


def _number(d: Draw, kind: str) -> str | None:
    found = d.value("i", lambda v: v.size > 0)
    return found and f"jnp.sum({found})"


def _axis(d: Draw, kind: str) -> str | None:
    axes = range(len(d.x.shape))
    return str(d.pick(axes)) if axes else None


def _axes(d: Draw, kind: str) -> str:
    axes = [a for a in range(len(d.x.shape)) if d.pick((True, False))]
    return str(tuple(axes)) if axes else "None"


def _perm(d: Draw, kind: str) -> str:
    rest, out = list(range(len(d.x.shape))), []
    while rest:
        out.append(d.pick(rest))
        rest.remove(out[-1])
    return str(tuple(out))


def _merged(d: Draw, kind: str) -> str:
    """The shape with two neighbours as one dim."""
    s, at = d.x.shape, d.pick(range(len(d.x.shape) - 1))
    return str((*s[:at], s[at] * s[at + 1], *s[at + 2 :]))


def _cut(d: Draw, kind: str) -> str:
    """The shape with one dim as two."""
    s, at = d.x.shape, d.pick(range(len(d.x.shape)))
    factor = d.pick([f for f in range(1, s[at] + 1) if s[at] % f == 0] or [1])
    return str((*s[:at], factor, s[at] // factor, *s[at + 1 :]))


def _reshaped(d: Draw, kind: str) -> str:
    """Any shape of as many elements."""
    left, out = d.x.size, []
    while left > 1 and len(out) < 3:
        out.append(d.pick([f for f in range(1, left + 1) if left % f == 0]))
        left //= out[-1]
    return str((*out, left))


def _slices(d: Draw, kind: str) -> str:
    ways = (":", "1:", ":-1", "::2", "::-1", "1::3", ":2", "-1:", "None, :", "0", "-1:0:-2")
    return ", ".join(d.pick(ways if n else (":", "None, :")) for n in d.x.shape) or "..."


def _pads(d: Draw, kind: str) -> str:
    ways = ((0, 0, 0), (1, 0, 0), (0, 2, 0), (1, 1, 1), (-1, 0, 0), (0, -1, 2), (3, -1, 0))
    return str([d.pick(ways if n > 1 else ways[:3]) for n in d.x.shape])


def _shape(d: Draw, kind: str) -> str:
    return str(tuple(d.pick(SIZES) for _ in range(d.pick((1, 2, 2, 3)))))


def _small(d: Draw, kind: str) -> str:
    return str(d.pick((1, 2, 3, 5)))


def _shift(d: Draw, kind: str) -> str:
    return str(d.pick((1, -1, 3, -5)))


def _upto(d: Draw, kind: str) -> str:
    """A length within the last dim."""
    return str(d.pick(range(1, max(2, d.x.shape[-1] + 1))))


def _einsum(d: Draw, kind: str) -> str | None:
    """A product of `x` and another value over any letters: batch dims, contractions, outer products."""
    one = d.value(kind, lambda v: d.op.ndim <= len(v.shape) <= 3)
    other = one and d.value(kind, lambda v: 1 <= len(v.shape) <= 3 and v.size * d.x.size <= 1 << 14)
    if other is None:
        return None
    x, y = d.x, d.values[d.reads[-1]]
    left = "abc"[: len(x.shape)]
    right, unused = "", list(left)
    for n, fresh in zip(y.shape, "wxyz", strict=False):
        same = [c for c in unused if x.shape[left.index(c)] == n]
        right += d.pick([*same, fresh]) if same else fresh
        unused = [c for c in unused if c not in right]
    letters = list(dict.fromkeys(left + right))
    shared = [c for c in letters if c in left and c in right]
    kept = [c for c in letters if d.pick((True, False) if c in shared else (True, True, True, False))]
    order = []
    while kept:
        order.append(d.pick(kept))
        kept.remove(order[-1])
    return f'"{left},{right}->{"".join(order)}", {one}, {other}'


HOLES: dict[str, Callable[[Draw, str], str | None]] = {
    "x": _x, "y": _y, "alike": _alike, "index": _index, "number": _number, "key": lambda d, k: d.value("k"),
    "axis": _axis, "axes": _axes, "perm": _perm, "merged": _merged, "cut": _cut, "reshaped": _reshaped,
    "slices": _slices, "pads": _pads, "shape": _shape, "small": _small, "shift": _shift, "upto": _upto,
    "einsum": _einsum, "again": lambda d, k: f"v{d.reads[0]}",
    "keep": lambda d, k: d.pick(("False", "True")),
}  # fmt: skip
