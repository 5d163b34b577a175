"""What pictures are drawn of: texts, rectangles, and colours for light and for dark.

Colours are attributes, as every viewer knows them, those of light. A rule for browsers whose reader prefers
dark replaces the ones of grounds and of the texts on them; what is filled with a colour of its own stays as
it is, text and all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

SANS = "Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif"
MARGIN = 24.0
INK, SOFT, LINE, GROUND, CARD = "#1f2933", "#57606a", "#b6bfc9", "#f3f6f9", "#ffffff"
CARD_LINE, TIP = "#9aa5b1", "#8c959f"
ALARM = "#b42318"
WARN = "#9a6700"
INK_ON_COLOUR, SOFT_ON_COLOUR = "#1b2430", "#222b36"
"""Of texts on a coloured fill: these do not change."""
DARK = {
    INK: "#e6edf3",
    SOFT: "#a9b4c0",
    LINE: "#57636f",
    GROUND: "#161b22",
    CARD: "#21262d",
    CARD_LINE: "#6b7682",
    TIP: "#8b949e",
    ALARM: "#ff8a80",
    WARN: "#e3b341",
}
PAPER_DARK = "#0d1117"
NARROW = 0.5
"""The width of a letter of `SANS`, relative to its size: what most texts keep within."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


def document(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """A picture on a ground of its own, light or dark as its reader prefers."""
    rules = "".join(
        f'.sbp-picture [{how}="{light}"]{{{how}:{dark}}}'
        for light, dark in DARK.items()
        for how in ("fill", "stroke")
    )
    paper = f".sbp-picture .paper{{fill:{PAPER_DARK}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="{SANS}" role="img" class="sbp-picture">',
            f"<title>{escape(title)}</title>",
            f"<style>@media (prefers-color-scheme:dark){{{rules}{paper}}}</style>",
            '<rect class="paper" width="100%" height="100%" fill="#ffffff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def text_at(x: float, y: float, text: str, size: float, **attributes: str) -> str:
    """A text whose baseline begins at a point; underscores of attributes stand for dashes."""
    more = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{more}>{escape(text)}</text>'


def rect(s: Spot, radius: float, fill: str, stroke: str = "none", line: float = 1.0) -> str:
    """A rectangle with round corners."""
    return (
        f'<rect x="{s.x:.1f}" y="{s.y:.1f}" width="{s.width:.1f}" height="{s.height:.1f}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="{line:g}"/>'
    )


def fit_text(text: str, width: float, advance: float) -> str:
    """A text cut in the middle to what fits: both ends of a path tell something.

    >>> fit_text("params['layers'][*]['qkv']", 60, 6)
    "par…'qkv']"
    """
    room = int(width / advance)
    if len(text) <= room:
        return text
    left = max(1, (room - 1) * 2 // 5)
    return f"{text[:left]}…{text[len(text) - (room - 1 - left) :]}"


def flow_layout(widths: Sequence[float], room: float, gap: float) -> Iterator[tuple[float, int]]:
    """Where things of some widths stand beside each other: how far to the right, and in which line.

    >>> list(flow_layout([40, 50, 30], room=100, gap=10))
    [(0.0, 0), (50.0, 0), (0.0, 1)]
    """
    x, line = 0.0, 0
    for width in widths:
        if x > 0 and x + width > room:
            x, line = 0.0, line + 1
        yield x, line
        x += width + gap
