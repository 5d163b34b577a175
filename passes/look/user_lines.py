"""What the user's own text says of an op: the function around its line, and the lines next to it."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from sbp.passes.program.graph import Source

AROUND = 3
"""Lines before and after one that is shown."""
_WRAPPED = re.compile(r"\w+\((.*)\)")
_NOISE = ("", "checkpoint", "rematted_computation", "remat")


@lru_cache(maxsize=64)
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """The functions of a source file, inner after outer: (first line, last line, name)."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    defs = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return tuple(sorted((n.lineno, n.end_lineno or n.lineno, n.name) for n in defs))


def function_at(source: Source) -> str:
    """The name of the innermost function around a line, if its file can be read."""
    around = [name for first, last, name in _functions(source.file) if first <= source.line <= last]
    return around[-1] if around else ""


def excerpt(source: Source) -> tuple[int, list[str]]:
    """The text around a line, and the number of its first line; no text of a file that cannot be read."""
    first = max(1, source.line - AROUND)
    lines = linecache.getlines(source.file)[first - 1 : source.line + AROUND] if source.file else []
    return first, [line.rstrip("\n") for line in lines]


def clean_scope(scope: str) -> str:
    """A name stack without what JAX's transformations and einsum add to it.

    >>> clean_scope("transpose(jvp(layer0))/attention/bqk,bkd->bqd")
    'layer0/attention'
    """
    parts = []
    for part in scope.split("/"):
        while (wrapped := _WRAPPED.fullmatch(part)) is not None:
            part = wrapped[1]
        if part not in _NOISE and not part.startswith("sbp.") and re.fullmatch(r"[\w.\[\]-]+", part):
            parts.append(part)
    return "/".join(parts)
