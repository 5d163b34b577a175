"""What the user's own text says of an op: the function around its line, and the lines next to it."""

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


@lru_cache(maxsize=64)
def _targets(file: str) -> tuple[tuple[int, int, str], ...]:
    """The statements of a file that name what they make, inner after outer: (first line, last, name)."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found = []
    for function in ast.walk(tree):
        for node in ast.iter_child_nodes(function):
            name = ""
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                name = node.targets[0].id
            elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            elif isinstance(node, ast.Return) and isinstance(function, ast.FunctionDef):
                name = function.name
            if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append((node.lineno, node.end_lineno or node.lineno, name))
    return tuple(sorted(found, key=lambda f: (f[0], -f[1])))


def name_at(source: Source) -> str:
    """What the user calls the value of a line: the variable it is assigned to, the function that returns it.

    "" where the line says no one name, and of a file that cannot be read.
    """
    around = [name for first, last, name in _targets(source.file) if first <= source.line <= last]
    return around[-1].strip("_") if around else ""


def text_at(source: Source) -> str:
    """The text of a line; "" of a file that cannot be read."""
    return linecache.getline(source.file, source.line).strip() if source.file else ""
