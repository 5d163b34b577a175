"""Prints to a terminal: in its width, its colours, and its encoding.

Text that fits the terminal that it is printed to: its width, and its letters.
"""

import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

MAX_WIDTH = 160
"""Columns of a table, on a wider terminal too, and where text goes to a pipe or a file."""
MIN_WIDTH = 40
RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
_LABEL = re.compile(r"\s*(?:- |\S.*?\s{2,}(?=\S))")


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal that a stream (by default standard output) writes to, or None."""
    stream = sys.stdout if stream is None else stream
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (AttributeError, OSError, ValueError):  # a notebook's stream, or one that is closed
        return None
    return min(max(columns, MIN_WIDTH), MAX_WIDTH) if columns else None


def fit_lines(text: str, width: int | None) -> str:
    """The text with lines of at most `width` columns; None leaves it as it is.

    What is left of a long line stands below its beginning, or below what follows its label.

    >>> print(fit_lines("time    1.98 ms per step, of which 859 us are in collectives", 40))
    time    1.98 ms per step, of which 859
            us are in collectives
    """
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _lines(line, width))


def _lines(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip())
    label = _LABEL.match(line)
    hang = label.end() if label is not None and label.end() <= width // 2 else min(indent + 2, width // 2)
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * hang,
        replace_whitespace=False,
        break_on_hyphens=False,
    )


def draw_rules(text: str, stream: TextIO | None = None) -> str:
    """A text with rules of `-`, if the terminal that a stream writes to has no letter for lines."""
    stream = sys.stdout if stream is None else stream
    try:
        RULE.encode(getattr(stream, "encoding", None) or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return text.replace(RULE, "-")
    return text


def print_fitted(text: str) -> None:
    """Prints a text fitted to the terminal.

    Where it has colours, each kind of collective has its own, and warnings are red.
    """
    from rich.console import Console
    from rich.text import Text

    from sbp.passes.explain.words import kind_text
    from sbp.passes.render.colours import COLLECTIVES

    shown = Text(fit_lines(text, terminal_width()))
    for kind, mark in COLLECTIVES.items():
        shown.highlight_regex(rf"(?<![\w-]){kind_text(kind)}(?![\w-])", mark.border)
    shown.highlight_regex(r"(?m)^DOES NOT FIT(?:.*\n {2,})*.*", "bold red")
    Console(file=sys.stdout, highlight=False).print(shown, soft_wrap=True)


@contextmanager
def writable(stream: TextIO) -> Iterator[None]:
    """A stream whose encoding lacks a letter writes `?` for it instead of failing."""
    errors = stream.errors if isinstance(stream, io.TextIOWrapper) else None
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
