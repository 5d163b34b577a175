"""Statements that fit a line: broken at brackets, commas and operators."""

import re
import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 100
"""Columns of a line."""
_STEP = 4
_OPEN, _CLOSE = "([{", ")]}"
_OPERATORS = (
    (" == ", " != ", " <= ", " >= ", " < ", " > "),
    (" | ",),
    (" ^ ",),
    (" & ",),
    (" + ", " - "),
    (" * ", " / ", " @ "),
)
_SHORT = 44
"""Columns of what stands with others in a line."""
_PLAIN = re.compile(r"[\w.:\"= ]+")


def statement(prefix: str, code: str, indent: int, suffix: str = "") -> list[str]:
    """An expression with what stands before and behind it, in as many lines as it takes.

    >>> print("\\n".join(statement("x = ", "f(" + ", ".join(["argument"] * 12) + ")", 0)))
    x = f(
        argument, argument, argument, argument, argument, argument, argument, argument, argument,
        argument, argument, argument,
    )
    >>> statement(f'"{"n" * 90}": ', "PartitionSpec()", 4, ",")[1]
    '        PartitionSpec(),'
    """
    whole = f"{' ' * indent}{prefix}{code}{suffix}"
    if len(whole) <= WIDTH:
        return [whole]
    if prefix.endswith('": ') and code.endswith("()"):  # of a dict, with nothing to break inside
        return [f"{' ' * indent}{prefix[:-1]}", f"{' ' * (indent + _STEP)}{code}{suffix}"]
    at = _call(code)
    if at is not None:
        inner = items(split(code[at + 1 : -1], (", ",)), indent + _STEP, last_comma=at > 0)
        return [f"{' ' * indent}{prefix}{code[: at + 1]}", *inner, f"{' ' * indent}{code[-1]}{suffix}"]
    terms = _terms(code)
    if len(terms) == 1:
        return _method(prefix, code, indent, suffix) or [whole]
    body = list(_chain(terms, indent + _STEP, ""))
    return [f"{' ' * indent}{prefix}(", *body, f"{' ' * indent}){suffix}"]


def _method(prefix: str, code: str, indent: int, suffix: str) -> list[str]:
    """`(a + b).f(c)`: broken inside the first bracket."""
    at = next((i for i, c in enumerate(code) if c in _OPEN), None)
    if at is None:
        return []
    end = next(i for i, depth in _depths(code) if i > at and depth == 0 and code[i] in _CLOSE)
    parts = split(code[at + 1 : end], (", ",))
    rows = items(parts, indent + _STEP, last_comma=code[at - 1 : at].isalnum() if at else False)
    return [f"{' ' * indent}{prefix}{code[: at + 1]}", *rows, f"{' ' * indent}{code[end:]}{suffix}"]


def items(parts: Sequence[str], indent: int, last_comma: bool = True) -> list[str]:
    """What stands between brackets: in one line, several to a line, or one to a line.

    >>> print("\\n".join(items(["a", "(" + ", ".join(["name"] * 24) + ")"], 0)))
    a,
    (
        name, name, name, name, name, name, name, name, name, name, name, name, name, name, name,
        name, name, name, name, name, name, name, name, name,
    ),
    """
    whole = ", ".join(parts)
    if indent + len(whole) <= WIDTH:
        return [" " * indent + whole]
    if len(parts) == 1 and not last_comma:  # an expression in brackets is no tuple
        return _inner(parts[0], indent, "")
    if all(len(p) <= _SHORT or _PLAIN.fullmatch(p) for p in parts):
        return fill_lines([f"{p}," for p in parts], indent)
    return [line for p in parts for line in _inner(p, indent, ",")]


def _inner(code: str, indent: int, suffix: str) -> list[str]:
    """An expression between brackets, which needs none of its own."""
    if indent + len(code) + len(suffix) <= WIDTH:
        return [" " * indent + code + suffix]
    name, sign, value = code.partition("=")
    if sign and name.isidentifier() and not value.startswith("="):
        return statement(f"{name}=", value, indent, suffix)
    terms = _terms(code)
    if _call(code) is None and len(terms) > 1:
        return list(_chain(terms, indent, suffix))
    return statement("", code, indent, suffix)


def _chain(terms: Sequence[str], indent: int, suffix: str) -> Iterator[str]:
    """Terms, each with its operator before it, one to a line."""
    for k, term in enumerate(terms):
        sign, space, rest = ("", "", term) if not k else term.partition(" ")
        sign += space
        yield from statement(sign, rest, indent, suffix if k == len(terms) - 1 else "")


def fill_lines(words: Sequence[str], indent: int) -> list[str]:
    """Words, as many to a line as fit."""
    lines, line = [], " " * indent
    for word in words:
        if len(line) + len(word) + (line.strip() != "") > WIDTH:
            lines.append(line)
            line = " " * indent
        line += (" " if line.strip() else "") + word
    return [*lines, line]


def _terms(code: str) -> list[str]:
    """An expression at its loosest operators, each of which stays before what follows it."""
    for signs in _OPERATORS:
        parts = split(code, signs, keep=True)
        if len(parts) > 1:
            return parts
    return [code]


def _depths(code: str) -> Iterator[tuple[int, int]]:
    """The positions of characters outside of strings, with the depth of brackets behind each."""
    depth, quote = 0, ""
    for i, c in enumerate(code):
        if quote:
            quote = "" if c == quote and code[i - 1] != "\\" else quote
            continue
        if c in "\"'":
            quote = c
            continue
        depth += (c in _OPEN) - (c in _CLOSE)
        yield i, depth


def _call(code: str) -> int | None:
    """Where the bracket opens that closes at the end, if all before it is a name."""
    if not code or code[-1] not in _CLOSE:
        return None
    opened = [i for i, depth in _depths(code) if depth == 1 and code[i] in _OPEN]
    closed = [i for i, depth in _depths(code) if depth == 0 and code[i] in _CLOSE]
    if not opened or len(closed) != 1 or not re.fullmatch(r"-?[\w.]*", code[: opened[0]]):
        return None
    return opened[0]


def split(code: str, signs: Sequence[str], keep: bool = False) -> list[str]:
    """A text at some signs outside of brackets and strings.

    >>> split('f(a, b), "c, d", e', (", ",))
    ['f(a, b)', '"c, d"', 'e']
    >>> split("a + f(b + c) - d", (" + ", " - "), keep=True)
    ['a', '+ f(b + c)', '- d']
    """
    parts, start = [], 0
    for i, depth in _depths(code):
        if depth == 0 and i >= start and code.startswith(tuple(signs), i):
            sign = next(s for s in signs if code.startswith(s, i))
            parts.append(code[start:i])
            start = i + 1 if keep else i + len(sign)
    return [*parts, code[start:]] if code[start:] else parts


def comment(text: str, indent: int) -> list[str]:
    """A comment, later lines set in."""
    pad = " " * indent + "# "
    return textwrap.wrap(
        text, WIDTH, initial_indent=pad, subsequent_indent=f"{pad}  ", break_on_hyphens=False
    )
