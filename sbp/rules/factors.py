"""Factors: the notation in which almost every rule is written.

Each dim of an operand or result carries a letter, or None if it must be whole. "b k, k n -> b n" with k
reduced by sum yields every valid 1-D signature of a matrix product:

- split one letter: what carries it is S(its dim), the others B; a result without it is P(its reduction);
- linear in an operand: that operand P(sum), the others B, results P(sum);
- additive: the listed operands all P(sum), the others B, results P(sum);
- moved: results are made of elements of the listed operands, so all of these may be P, under one reduction;
- increasing / decreasing: P(max) and P(min) pass through, or are exchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import jax

from sbp.communication.protocol import Context
from sbp.errors import Problem, RuleError
from sbp.rules.entry import Op, Row
from sbp.signature import PARTIAL_OPS, B, P, Partial, Signature, Split

Letters: TypeAlias = tuple[str | None, ...]
MAX, MIN = Partial("max"), Partial("min")


def split_rows(
    operands: Sequence[Letters],
    results: Sequence[Letters],
    sizes: Mapping[str, int],
    reduced: Mapping[str, str],
) -> Iterable[Row]:
    """One row for each letter that can be split. Letters of size 1 are not worth a row."""
    for letter, size in sizes.items():
        if size <= 1:
            continue
        missing = [letter not in r for r in results]
        if any(missing) and reduced.get(letter) not in PARTIAL_OPS:
            continue
        out = tuple(
            Partial(reduced[letter]) if gone else Split(r.index(letter))
            for r, gone in zip(results, missing, strict=True)
        )
        ins: tuple[Signature, ...] = tuple(Split(o.index(letter)) if letter in o else B for o in operands)
        yield Row(ins, out, reason=_reason(ins) if any(missing) else "")


def _reason(operands: Sequence[Signature]) -> str:
    """Where a sum comes from: the operand dims that are contracted, as `{axes}` will complete it."""
    dims = [f"dim {s.dim} of operand {i}" for i, s in enumerate(operands) if isinstance(s, Split)]
    return f"{' and '.join(dims)} is reduced here and split over {{axes}}"


def linear_rows(n_operands: int, n_results: int, linear: Iterable[int]) -> Iterable[Row]:
    """A sum in one operand alone passes through."""
    for i in linear:
        ins = tuple(P if j == i else B for j in range(n_operands))
        yield Row(ins, (P,) * n_results, multiplies=n_operands > 1)


def additive_row(n_operands: int, n_results: int, operands: Sequence[int], *, moves: bool = False) -> Row:
    """Sums in all of `operands` at once pass through; a whole operand may be filled with zeros for it."""
    fills = tuple(operands) if len(operands) > 1 else ()
    ins = tuple(P if j in operands else B for j in range(n_operands))
    return Row(ins, (P,) * n_results, fills, moves=moves)


def moved_rows(n_operands: int, n_results: int, operands: Sequence[int]) -> Iterable[Row]:
    """Sums, maxima and minima, in all of `operands` at once, pass where results are made of their elements.

    A whole operand is the maximum of its copies, so it needs nothing to be one.
    """
    yield additive_row(n_operands, n_results, operands, moves=True)
    for how in (MAX, MIN):
        ins = tuple(how if j in operands else B for j in range(n_operands))
        yield Row(ins, (how,) * n_results, tuple(operands), moves=True)


def monotone_rows(n_operands: int, n_results: int, operand: int, *, increasing: bool) -> Iterable[Row]:
    """Maxima and minima in one operand pass through a monotone function."""
    for op, other in ((MAX, MIN), (MIN, MAX)):
        ins = tuple(op if j == operand else B for j in range(n_operands))
        yield Row(ins, ((op if increasing else other),) * n_results)


def sizes_of(op: Op, operands: Sequence[Letters], results: Sequence[Letters]) -> dict[str, int]:
    """The size of every letter, in order of appearance.

    Raises:
      RuleError: if the letters do not fit the shapes.
    """
    sizes: dict[str, int] = {}
    for letters, shape in zip([*operands, *results], [*op.shapes, *op.results], strict=True):
        if len(letters) != len(shape):
            raise _misfit(op, f"{letters} for a shape of {len(shape)} dims")
        for letter, n in zip(letters, shape, strict=True):
            if letter is not None and sizes.setdefault(letter, n) != n:
                raise _misfit(op, f"factor {letter!r} is {sizes[letter]} in one place and {n} in another")
    return sizes


def _misfit(op: Op, why: str) -> RuleError:
    shapes = ", ".join(map(str, op.shapes)) + " -> " + ", ".join(map(str, op.results))
    return RuleError(
        Problem(
            "rule",
            f"the rule of {op.name!r}",
            shapes,
            "one letter per dim, one size per letter",
            why,
            "`_` for a dim that must be whole",
        )
    )


def factors(
    op: Op,
    operands: Sequence[Letters],
    results: Sequence[Letters],
    *,
    reduced: Mapping[str, str] | None = None,
    linear: Iterable[int] = (),
    additive: Sequence[int] = (),
    moved: Sequence[int] = (),
    increasing: Iterable[int] = (),
    decreasing: Iterable[int] = (),
) -> list[Row]:
    """Every valid 1-D signature that follows from the letters and the stated properties."""
    n, m = len(operands), len(results)
    rows = list(split_rows(operands, results, sizes_of(op, operands, results), reduced or {}))
    rows.extend(linear_rows(n, m, linear))
    if additive:
        rows.append(additive_row(n, m, additive))
    if moved:
        rows.extend(moved_rows(n, m, moved))
    for i in increasing:
        rows.extend(monotone_rows(n, m, i, increasing=True))
    for i in decreasing:
        rows.extend(monotone_rows(n, m, i, increasing=False))
    return rows


@dataclass(frozen=True)
class Spec:
    """A rule that a user writes as text, such as "b k, k n -> b n".

    Arguments:
      text: the letters.
      reductions: the letters that a reduction removes, and by what.
      linear: the operands in which the op is linear.
      masks: whether the body sees to the padding of reduced letters itself.
    """

    text: str
    reductions: Mapping[str, str]
    linear: tuple[int, ...]
    masks: bool

    @cached_property
    def letters(self) -> tuple[list[Letters], list[Letters]]:
        """Of the operands, and of the results."""
        left, _, right = self.text.partition("->")
        return _side(left), _side(right)

    @cached_property
    def neutral(self) -> frozenset[str]:
        """The reduced letters along which zeros change nothing: of a sum that is linear in what has them."""
        carried = {letter for i in self.linear for letter in self.letters[0][i]}
        return frozenset(k for k, how in self.reductions.items() if how == "sum" and k in carried)

    def rows(self, op: Op) -> list[Row]:
        """The rows. Where nothing is known that padding could be, a reduced letter splits if it divides."""
        operands, results = self.letters
        if len(operands) != len(op.shapes) or len(results) != len(op.results):
            raise _misfit(op, f"{self.text!r} has {len(operands)} operands and {len(results)} results")
        even = {k: v for k, v in self.reductions.items() if self.masks or k in self.neutral}
        sizes = sizes_of(op, operands, results)
        even |= {k: v for k, v in self.reductions.items() if sizes.get(k, 1) % op.group == 0}
        return factors(op, operands, results, reduced=even, linear=self.linear)

    def mask_shards(self, ctx: Context, *args: jax.Array) -> list[jax.Array]:
        """The shards, zeros for the padding of reduced letters in all of them: zero times NaN is NaN."""
        dims = ([d for d, c in enumerate(letters) if c in self.neutral] for letters in self.letters[0])
        return [ctx.mask(x, at, d, 0) for x, at, d in zip(args, ctx.operands, dims, strict=True)]


def _side(text: str) -> list[Letters]:
    return [tuple(None if c == "_" else c for c in part.split()) for part in text.split(",")]


def same_dims(op: Op) -> tuple[list[Letters], list[Letters]]:
    """Letters for an element-wise op: operand dims of size 1 beside larger ones, and scalars, carry none."""
    out = max(op.results, key=len)
    names = tuple(f"d{i}" for i in range(len(out)))
    operands: list[Letters] = [
        tuple(name if n == m else None for name, n, m in zip(names, s, out, strict=True)) if s else ()
        for s in op.shapes
    ]
    return operands, [names] * len(op.results)
