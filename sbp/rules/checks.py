"""What the author of a rule may get wrong, in rows and in letters, with what to write instead."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sbp.communication.protocol import reason_problem, unknown_places
from sbp.errors import Problem, raise_all
from sbp.rules.entry import Op, Row, Shape
from sbp.signature import AUTO_SPLIT, PARTIAL_OPS, Broadcast, Partial, Split, is_signature

ROW = "sbp.rules.Row(operands, results), with a tuple of signatures each"
TEXT = 'such as "b k, k n -> b n"'


def checked_rows(op: Op, given: Iterable[Row]) -> list[Row]:
    """What a rule's function has returned, if it is rows that fit the op.

    Raises:
      RuleError: with every row that does not.
    """
    if isinstance(given, Row) or not isinstance(given, Iterable):  # as a user's function may
        why = "a rule lists every signature that is valid, as many as there are"
        problem = _row_problem(op, given, "a list of rows, or a generator", why, "return [row], or yield it")
        raise_all([problem])
    rows, shapes = list(given), (*op.shapes, *op.results)
    # Nearly all rows are right: this costs what one look at each signature costs.
    raise_all(p for row in rows if not _is_right(op, row, shapes) for p in _row_problems(op, row))
    return rows


def _is_right(op: Op, row: object, shapes: Sequence[Shape]) -> bool:
    if not isinstance(row, Row) or not isinstance(row.operands, tuple) or not isinstance(row.results, tuple):
        return False
    if len(row.operands) != len(op.shapes) or len(row.results) != len(op.results):
        return False
    for s, shape in zip(row.operands + row.results, shapes, strict=True):
        if isinstance(s, Split):
            if not 0 <= s.dim < len(shape):
                return False
        elif not isinstance(s, Broadcast | Partial):
            return False
    return not row.reason or not unknown_places(row.reason)


def _row_problems(op: Op, row: object) -> Iterator[Problem]:
    if not isinstance(row, Row):
        why = "a rule returns rows, one for each signature that is valid"
        yield _row_problem(op, row, ROW, why, "from sbp.rules import Row")
        return
    for side, given, shapes in (
        ("operands", row.operands, op.shapes),
        ("results", row.results, op.results),
    ):
        if not isinstance(given, tuple):
            text = ", ".join(map(str, given)) if isinstance(given, list) else str(given)
            why = f"the {side} of a row are a {type(given).__name__}; rows are compared and remembered"
            yield _row_problem(op, row, "a tuple of signatures", why, f"{side}=({text},)")
            continue
        for s in given:
            if not is_signature(s) or s == AUTO_SPLIT:
                why = f"{_text(s)} among the {side} is no signature of one axis"
                yield _row_problem(op, row, "S(dim), B, P, P('max') or P('min')", why, "such as (S(0), B)")
        if len(given) != len(shapes):
            legal = f"{len(op.shapes)} operands -> {len(op.results)} results"
            why = "a row has one signature per operand and per result"
            yield _row_problem(op, row, legal, why, "see the table of ops for examples")
            continue
        yield from _dim_problems(op, row, side.removesuffix("s"), given, shapes)
    yield from reason_problem(f"the rule of {op.name!r}, Row(reason=...)", row.reason)


def _dim_problems(
    op: Op, row: Row, side: str, given: Sequence[object], shapes: Sequence[Shape]
) -> Iterator[Problem]:
    for i, (s, shape) in enumerate(zip(given, shapes, strict=True)):
        if isinstance(s, Split) and not 0 <= s.dim < len(shape):
            legal = f"S(0)..S({len(shape) - 1}), B or P" if shape else "B or P (a scalar has no dims)"
            why = f"{s} splits a dim that {side} {i}, of shape {shape}, does not have"
            fix = "count dims from 0" if s.dim >= 0 else f"S({s.dim + len(shape)}): rows count dims from 0"
            yield _row_problem(op, row, legal, why, fix if s.dim + len(shape) >= 0 else "count dims from 0")


def _row_problem(op: Op, row: object, legal: str, why: str, fix: str) -> Problem:
    return Problem("rule", f"the rule of {op.name!r}", _text(row), legal, why, fix)


def _text(x: object) -> str:
    """What was given: a row as its signatures, a type by its name."""
    if isinstance(x, Row):
        return f"{x.operands} -> {x.results}"
    return f"the type {x.__name__}" if isinstance(x, type) else repr(x)


def text_problems(
    name: str, text: str, reduced: Mapping[str, str], linear: Sequence[int], own_body: bool
) -> Iterator[Problem]:
    """What is wrong with a rule of letters, before any shape is known.

    Arguments:
      name: of the op.
      text, reduced, linear: as of `register_rule`.
      own_body: whether the rule has a body of its own, which may make what no operand has.
    """
    where = f"register_rule({name!r})"
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        why = "the arrow stands between the letters of the operands and those of the results"
        yield Problem("rule", where, repr(text), f"one '->', {TEXT}", why, "'b -> b' for an op of rows")
        return
    letters, made = _letters(left), [set(part.split()) - {"_"} for part in right.split(",")]
    for letter in sorted(set().union(*made) - letters) if not own_body else ():
        why = f"nothing says which part of {letter!r} a device makes: no operand has it"
        fix = "`_` for a dim that is made whole, or a body of your own: body="
        yield Problem("rule", where, repr(text), "letters of the operands in the results", why, fix)
    lost = sorted(k for k in letters if any(k not in part for part in made))
    for letter, how in reduced.items():
        got = f"reduced={{{letter!r}: {how!r}}}"
        if letter not in lost:
            why = f"{letter!r} is in no operand" if letter not in letters else f"every result has {letter!r}"
            legal = f"letters that a result of {text!r} lacks: {', '.join(lost) or 'there are none'}"
            yield Problem("rule", where, got, legal, why, "a letter of the operands that is reduced")
        if how not in PARTIAL_OPS:
            legal = ", ".join(map(repr, PARTIAL_OPS))
            fix = "a mean is a sum that a body of your own divides; without the letter the dim stays whole"
            yield Problem("rule", where, got, legal, "devices put their parts together by one of these", fix)
    n = len(left.split(","))
    for i in linear:
        if not isinstance(i, int) or not 0 <= i < n:
            why = f"{text!r} has {n} operand{'s' if n > 1 else ''}"
            fix = "positions count from 0; leave linear out where the op is not linear"
            legal = f"positions of operands: {', '.join(map(str, range(n)))}"
            yield Problem("rule", where, f"linear={tuple(linear)}", legal, why, fix)


def _letters(side: str) -> set[str]:
    return {letter for part in side.split(",") for letter in part.split()} - {"_"}
