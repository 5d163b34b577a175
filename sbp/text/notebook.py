"""Names of notebook cells, and the HTML of small values there."""

import os
import sys
from collections.abc import Sequence
from html import escape

MOST = 16
"""Rows and columns of a placement that are shown."""


def file_name(file: str) -> str:
    """The name of a file as its user knows it; for a notebook's cell, the number of the cell.

    IPython compiles each cell under a made-up file name, and remembers the number of its cell.
    """
    # Whoever is in a notebook has imported it.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    number = None if shell is None else getattr(shell.compile, "_filename_map", {}).get(file)
    return os.path.basename(file) if number is None else f"cell {number}"


def grid_html(title: str, ranks: Sequence[int], shape: Sequence[int], axes: Sequence[str]) -> str:
    """An HTML table of ranks: the innermost axis runs from left to right, all others run down."""
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
    """The HTML of a signature and its meaning."""
    return f"<code>{escape(text)}</code> <small>{escape(meaning)}</small>"
