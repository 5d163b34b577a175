"""Prints to a terminal: in its width, its colours, and its encoding."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from sbp.passes.render.width import fitted, terminal_width


def print_fitted(text: str) -> None:
    """Prints a text fitted to the terminal.

    Where it has colours, each kind of collective has its own, and warnings are red.
    """
    from rich.console import Console
    from rich.text import Text

    from sbp.passes.explain.words import kind_text
    from sbp.passes.render.colours import COLLECTIVES

    shown = Text(fitted(text, terminal_width()))
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
