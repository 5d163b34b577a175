"""Matches the user's lines of two plans, between which the user has edited the file."""

from collections.abc import Mapping
from typing import Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Box
from sbp.passes.render.program_data import line_data

Lines = Mapping[str, Mapping[str, Any]]
"""By line, such as "gpt.py:41", the text around it."""


def lines_of(plan: PlanData) -> Lines:
    """The user's lines in a plan."""
    if plan.stages:
        return {where: line for p in plan.stages for where, line in lines_of(p).items()}
    if plan.physical is None:
        return {} if plan.program is None else dict(plan.program.get("lines", {}))
    found = (s.source if isinstance(s, Box) else s.node.source for s, _ in plan.physical.walk())
    return {str(s): line_data(s) for s in found if s.file}


def same_lines(a: Lines, b: Lines) -> dict[str, str]:
    """What lines of one program are called in another.

    A line is the nearest one with the same text; one whose text is not there has moved with the line before
    it that is.

    >>> line = lambda first, *text: {"first": first, "text": text}
    >>> a = {"f.py:3": line(3, "h = x @ w"), "f.py:4": line(4, "return h")}
    >>> b = {"f.py:3": line(3, "h = annotate(x @ w, B)"), "f.py:5": line(5, "return h")}
    >>> same_lines(a, b)
    {'f.py:3': 'f.py:3', 'f.py:4': 'f.py:5'}
    """
    texts: dict[tuple[str, str], list[int]] = {}
    for where in b:
        file, number = _place(where)
        texts.setdefault((file, _text(b, where)), []).append(number)
    found: dict[str, str] = {}
    moved: dict[str, int] = {}
    for where in sorted(a, key=_place):
        file, number = _place(where)
        if text := _text(a, where):
            # Lines that are written alike have moved as what is before them.
            expected = number + moved.get(file, 0)
            near = min(texts.get((file, text), ()), key=lambda n: abs(n - expected), default=None)
            if near is not None:
                moved[file] = near - number
        found[where] = f"{file}:{number + moved.get(file, 0)}"
    return found


def _place(where: str) -> tuple[str, int]:
    file, _, number = where.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def _text(lines: Lines, where: str) -> str:
    """A line without white space around it; "" for none."""
    line = lines[where]
    at = _place(where)[1] - line["first"]
    return str(line["text"][at]).strip() if 0 <= at < len(line["text"]) else ""
