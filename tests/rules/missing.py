"""Which rows a rule could have and has not: a search over the 1-D signatures of small applications.

For each choice of signatures of the operands the op runs on every device's shards: the rule's body where it
has one (it knows the shapes of results), else the plain primitive. A signature of the results holds if what
the devices have joins to the plain result, in several draws of the data.

A found row is **redundant** if another row, for nothing, takes the same operands to results as good:

- an operand can be used otherwise for nothing only if it is whole: `B` is sliced to `S(d)`, is `P("max")`
  and `P("min")` as it is, and is filled up to `P` where that row may see zeros (`Row.fills`). `S(d)` is not
  padded to a partial: every device would work on the full shape;
- a result is as good as all that follow from it for nothing: from `B` all others, from `S(d)` the partials.
  Nothing else follows without a reduction or a gathering.

So a row that is reported saves, somewhere, a collective or work that the listed rows need.

Left out: rows whose body talks (talking it can do anything; its price is another question); dims that no
group of `GROUPS` divides; applications of very few elements; where there are very many choices, those of the
scalars and of the last operands, which stay whole; operands that are not used; of several results of a body,
signatures that are not alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp import view
from sbp.compat import core
from sbp.rules import Row
from sbp.rules.factors import MAX, MIN
from sbp.rules.registry import valid_rows
from sbp.signature import B, P, Partial, Signature, Split
from tests.rules.claims import (
    Application,
    Array,
    Claim,
    Sample,
    applications,
    as_sums,
    describe,
    filled,
    from_numpy,
    same,
    to_numpy,
)
from tests.rules.special import any_integers, ignored, redrawn

GROUPS = (2, 3, 5, 7)
# As many choices of the operands' signatures as three matrices and a scalar have.
MOST = 900
DRAWS, EXTREMES = 3, 20
# What holds of fewer elements may hold by chance.
LEAST = 4


@dataclass(frozen=True, slots=True)
class Draw:
    """Values of the operands, and what one device makes of them."""

    values: tuple[Array, ...]
    results: tuple[Array, ...]
    seed: int


def divisors(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The smallest group that divides, of every dim."""
    sizes = {n for s in shapes for n in s if n > 1}
    found = {next((g for g in GROUPS if n % g == 0), 0) for n in sizes} - {0}
    return sorted(found) or [GROUPS[0]]


def choices(shape: Sequence[int], dtype: Any, group: int, more: Sequence[Partial] = ()) -> list[Signature]:
    """The signatures that a tensor may have along an axis.

    Arguments:
      more: reductions that are looked for beside sums, maxima and minima.
    """
    out: list[Signature] = [B, *(Split(d) for d, n in enumerate(shape) if n > 1 and n % group == 0), *more]
    if core.is_key(dtype):
        return out
    if dtype == bool:
        return [*out, MAX, MIN]
    ordered = not jnp.issubdtype(dtype, jnp.complexfloating)
    return [*out, P, MAX, MIN] if ordered else [*out, P]


def is_free(given: Signature, wanted: Signature, fills: bool) -> bool:
    """Whether an operand that lies as `given` can be used as `wanted` for nothing."""
    return given == wanted or (given == B and (wanted != P or fills))


def follows(got: Signature, wanted: Signature) -> bool:
    """Whether a result `wanted` is had for nothing from one that lies as `got`."""
    return wanted == got or got == B or (isinstance(got, Split) and isinstance(wanted, Partial))


def is_implied(row: Row, other: Row) -> bool:
    """Whether `other` makes `row` redundant."""
    operands = zip(row.operands, other.operands, strict=True)
    results = zip(other.results, row.results, strict=True)
    return all(is_free(g, w, i in other.fills) for i, (g, w) in enumerate(operands)) and all(
        follows(got, wanted) for got, wanted in results
    )


def maximal(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other one implies; of rows that imply each other the first."""
    kept: list[Row] = []
    for row in rows:
        if not any(is_implied(row, k) for k in kept):
            kept = [k for k in kept if not is_implied(k, row)] + [row]
    return kept


def extreme_parts(value: Array, op: str, group: int, rng: np.random.Generator, exact: bool) -> list[Array]:
    """Parts that break what holds for small ones only.

    Of extrema: their identity, and anything that they ignore. Of sums: integers that wrap around on the way,
    and fractions; if they are to be `exact`, so large that 16 bits do not hold them.
    """
    if op not in ("sum", "max", "min"):
        return view.parts_of(value, op, group, rng)
    if op != "sum":
        parts, owner = filled(value, op, group, rng), rng.integers(0, group, value.shape)
        other = [np.where(rng.random(value.shape) < 0.5, part, ignored(value, op, rng)) for part in parts]
        return [np.where(owner == i, value, part) for i, part in enumerate(other)]
    if value.dtype.kind in "iu":
        return as_sums(value, group, rng)
    noise = rng.integers(-9, 10, size=(group - 1, *value.shape)).astype(value.dtype)
    if value.dtype.itemsize > 2:
        noise = noise * (1025.25 if exact else 1.25)
    return [*noise, (value - noise.sum(axis=0, dtype=value.dtype)).astype(value.dtype)]


def alike(signature: Signature, told: Signature) -> bool:
    """Whether a body that was told of `told` may as well have made `signature`."""
    return signature == told or (told == B and not isinstance(signature, Split))


class Search:
    """The rows of one application on an axis of one size."""

    def __init__(self, app: Application, group: int, close: float) -> None:
        self.app, self.group, self.close = app, group, close
        self.shapes, self.results = [x.shape for x in app.operands], [x.shape for x in app.results]
        self.op = app.op(self.shapes, self.results, group)
        self.rule = app.node.rule
        self.bodied = self.rule is not None and self.rule.body is not None
        self.listed = valid_rows(self.rule, self.op)
        said = {s for row in self.listed for s in (*row.operands, *row.results) if isinstance(s, Partial)}
        self.more = sorted(said - {P, MAX, MIN}, key=repr)
        self.claims: dict[Any, Claim | None] = {}
        self.shards: dict[Any, view.Shards] = {}
        self.drawn: dict[Any, Draw] = {}
        self.program: Callable[..., list[Any]] | None = None
        self.used = [self.matters(i) for i in range(len(self.shapes))]

    def draw(self, seed: int, odd: Sequence[int] = (), ints: Sequence[int] = ()) -> Draw:
        """Values for all operands: infinite ones in those of `odd`, any integers in those of `ints`."""
        key = seed, tuple(odd), tuple(ints)
        if key not in self.drawn:
            rng, operands = np.random.default_rng([seed, 7]), self.app.operands
            values = [to_numpy(x) for x in operands]
            if seed:
                values = [
                    redrawn(v, x.dtype, i in odd, rng)
                    for i, (v, x) in enumerate(zip(values, operands, strict=True))
                ]
            for i in ints:
                values[i] = any_integers(values[i], rng)
            self.drawn[key] = Draw(tuple(values), self.plain(values), len(self.drawn))
        return self.drawn[key]

    def plain(self, values: Sequence[Array]) -> tuple[Array, ...]:
        """What one device makes of the operands."""
        node, origin = self.app.node, (np.int32(0),)
        args = [from_numpy(v, x) for v, x in zip(values, self.app.operands, strict=True)]

        def body(coords: Any, *args: Any) -> list[Any]:
            return core.bind(node.primitive, args, dict(node.params))

        self.program = self.program or self.app.programs.find(body, origin, *args)
        return tuple(map(to_numpy, self.program(origin, *args)))

    def matters(self, operand: int) -> bool:
        """Whether results depend on an operand: of one that is not used everything would hold."""
        drawn = [self.draw(seed) for seed in range(DRAWS)]
        mixed = [[*d.values] for d in drawn]
        for values, other in zip(mixed, [*drawn[1:], drawn[0]], strict=True):
            values[operand] = other.values[operand]
        each = zip(map(self.plain, mixed), drawn, strict=True)
        return not all(same(x, y, 0.0) for got, d in each for x, y in zip(got, d.results, strict=True))

    def operands(self) -> Iterator[tuple[Signature, ...]]:
        """The choices for all operands; if they are too many, the last and the scalars stay whole."""
        each = zip(self.shapes, self.op.dtypes, self.used, strict=True)
        every = [choices(s, d, self.group, self.more) if used else [B] for s, d, used in each]
        room = MOST
        for i in sorted(range(len(every)), key=lambda i: (not self.shapes[i], i)):
            every[i] = every[i] if len(every[i]) <= room else every[i][:1]
            room //= len(every[i])
        return itertools.product(*every)

    def ways(self, cut: bool = True) -> Iterator[tuple[Signature, ...]]:
        """What the body may be told of its results; a plain op is told nothing. Sums come of cut operands."""
        yield (B,) * len(self.results)
        if self.bodied:
            every = [
                choices(s, d, self.group, self.more)
                for s, d in zip(self.results, self.op.result_dtypes, strict=True)
            ]
            alike = [s for s in every[0] if isinstance(s, Split) or (cut and s == P)]
            yield from ((s,) * len(every) for s in alike if all(s in signatures for signatures in every))

    def key(self, operands: Sequence[Signature], way: Sequence[Signature]) -> Any:
        """What tells programs apart: extrema are whole to every body, and so are sums to a plain op."""
        whole = (MAX, MIN, *self.more) if self.bodied else (MAX, MIN, *self.more, P)
        return tuple(B if s in whole else s for s in operands), tuple(way)

    def claim(self, key: Any) -> Claim | None:
        """The body for these shards, if it has one that does not talk."""
        if key not in self.claims:
            ins, outs = key
            made = Claim(self.app, [(s,) for s in ins], [(s,) for s in outs], (self.group,))
            self.claims[key] = None if made.communication else made
        return self.claims[key]

    def split(self, draw: Draw, operand: int, signature: Signature, extreme: bool) -> view.Shards:
        """The shards of an operand."""
        key = draw.seed, operand, signature, extreme
        if key not in self.shards:
            value, seed = draw.values[operand], 10 * draw.seed + operand
            if extreme and isinstance(signature, Partial):
                rng = np.random.default_rng(seed)
                parts = extreme_parts(value, signature.op, self.group, rng, not self.close)
                self.shards[key] = {(i,): part for i, part in enumerate(parts)}
            else:
                self.shards[key] = view.split(value, (signature,), (self.group,), seed=seed)
        return self.shards[key]

    def tests(self, operands: Sequence[Signature]) -> Iterator[tuple[Draw, bool]]:
        """The draws, the sample's own first, and whether parts are extreme. Then the values are so too.

        What meets a sum stays finite: a finite sum of parts times infinity is NaN, if their signs differ.
        """
        yield from ((self.draw(seed), False) for seed in range(DRAWS))
        partial = {d for s, d in zip(operands, self.op.dtypes, strict=True) if isinstance(s, Partial)}
        ints = [i for i, d in enumerate(self.op.dtypes) if d in partial and jnp.issubdtype(d, jnp.integer)]
        odd = [i for i, s in enumerate(operands) if s == P] or range(len(operands))
        for seed in range(DRAWS, DRAWS + (EXTREMES if partial else 2 * DRAWS)):
            yield self.draw(seed, odd if partial else (), ints), bool(partial)

    def hold(self, operands: Sequence[Signature], way: Sequence[Signature]) -> list[list[Signature]]:
        """The signatures of every result that hold."""
        key = self.key(operands, way)
        claim = self.claim(key)
        if claim is None:
            return []
        left = [
            [s for s in choices(shape, dtype, self.group, self.more) if not self.bodied or alike(s, told)]
            for shape, dtype, told in zip(self.results, self.op.result_dtypes, way, strict=True)
        ]
        for draw, extreme in self.tests(operands):
            shards = [self.split(draw, i, s, extreme) for i, s in enumerate(operands)]
            try:
                got = claim.run(shards)
            except Exception:  # these shapes do not fit each other
                self.claims[key] = None
                return []
            left = [
                [s for s in signatures if self.joins(parts, want, s)]
                for parts, want, signatures in zip(got, draw.results, left, strict=True)
            ]
            if not all(left):
                return []
        return left

    def joins(self, shards: view.Shards, want: Array, signature: Signature) -> bool:
        """Whether the shards mean the plain result."""
        try:
            got = view.join(shards, want.shape, (signature,), (self.group,))
        except ValueError:
            return False
        return got.dtype == want.dtype and same(got, want, self.close)

    def found(self) -> list[Row]:
        """Every row that holds, of every operands' choice the best."""
        rows = []
        for operands in self.operands():
            for way in self.ways(any(isinstance(s, Split) for s in operands)):
                best = [
                    [s for s in held if not any(follows(o, s) and o != s for o in held)]
                    for held in self.hold(operands, way)
                ]
                if best:
                    rows += [Row(operands, results) for results in itertools.product(*best)]
        return rows

    def unseen(self, found: Sequence[Row]) -> list[Row]:
        """Listed rows that the search should have found, and has not; not sums that are rounded."""
        looked, op = set(self.operands()), self.op
        rounded = core.itemsize(op.result_dtypes[0]) < max(map(core.itemsize, op.dtypes), default=0)

        def silent(row: Row) -> bool:
            if P in row.operands and rounded:
                return False
            told = [s if isinstance(s, Split) or s == P else B for s in row.results]
            way = tuple(told) if self.bodied else (B,) * len(told)
            return way in set(self.ways()) and self.claim(self.key(row.operands, way)) is not None

        rows = [row for row in self.listed if row.operands in looked and silent(row)]
        return [row for row in rows if not any(is_implied(row, other) for other in found)]


def searches(one: Sample) -> Iterator[Search]:
    """The applications of a sample, on axes that divide their dims; very few elements say nothing."""
    for app in applications(one):
        shapes = [x.shape for x in (*app.operands, *app.results)]
        sizes = [math.prod(s) for s in shapes]
        if min(sizes) > 0 and max(sizes) >= LEAST:
            yield from (Search(app, group, one.close) for group in divisors(shapes))


def report(one: Sample) -> tuple[list[Row], list[str]]:
    """The rows that hold, are not listed and not redundant; and listed ones that the search does not see."""
    missing: list[Row] = []
    unseen: list[str] = []
    with np.errstate(all="ignore"):  # of infinities and integers at their ends
        for search in searches(one):
            found = search.found()
            new = [row for row in found if not any(is_implied(row, other) for other in search.listed)]
            missing += maximal(new)
            blind = search.unseen(found)
            unseen += [f"group {search.group}: {describe(row.operands, row.results)}" for row in blind]
    return list(dict.fromkeys(missing)), unseen
