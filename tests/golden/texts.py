"""How texts are compared with the golden ones."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MOST_LINES = 120


def difference(name: str, want: str, got: str) -> str:
    """What has changed, line by line; nothing if the texts are equal.

    >>> print(difference("a.txt", "x\\ny\\n", "x\\nz\\n"))
    --- tests/golden/a.txt
    +++ now
    @@ -1,2 +1,2 @@
     x
    -y
    +z
    """
    lines = difflib.unified_diff(
        want.splitlines(), got.splitlines(), f"tests/golden/{name}", "now", n=6, lineterm=""
    )
    shown = list(lines)
    more = len(shown) - MOST_LINES
    return "\n".join([*shown[:MOST_LINES], *([f"... and {more} more lines"] if more > 0 else [])])
