"""What notebooks are told: which cell a line stands in, and how small things look there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from html import escape

MOST = 16
"""Rows and columns of a placement that are shown."""


def file_name(file: str) -> str:
    """What a user calls a file: its name, and of a notebook's cell its number.

    IPython compiles a cell as a file of a name that nobody knows; it keeps the number that stands beside it.
    """
    # Whoever is in a notebook has imported it.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    number = None if shell is None else getattr(shell.compile, "_filename_map", {}).get(file)
    return os.path.basename(file) if number is None else f"cell {number}"


def grid_html(title: str, ranks: Sequence[int], shape: Sequence[int], axes: Sequence[str]) -> str:
    """A table of ranks: the innermost axis from left to right, all others down."""
    columns = shape[-1]
    rows = [ranks[k : k + columns] for k in range(0, len(ranks), columns)]
    cut = columns > MOST

    def line(row: Sequence[int]) -> str:
        cells = [str(rank) for rank in row[:MOST]] + (["…"] if cut else [])
        return "<tr>" + "".join(f'<td style="text-align:right">{cell}</td>' for cell in cells) + "</tr>"

    body = "".join(map(line, rows[:MOST])) + ("<tr><td>…</td></tr>" if len(rows) > MOST else "")
    down = " x ".join(axes[:-1])
    said = f"{down} down, {axes[-1]} across" if down else f"{axes[-1]} across"
    return f"<b>{escape(title)}</b> <small>{escape(said)}</small><table>{body}</table>"


def signature_html(text: str, meaning: str) -> str:
    """A signature and what it means."""
    return f"<code>{escape(text)}</code> <small>{escape(meaning)}</small>"
