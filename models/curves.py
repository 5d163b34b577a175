"""The losses of a run beside those of one device, as a picture for light and for dark."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import numpy as np

INK, SOFT, FAINT = "#1f2933", "#57606a", "#d0d7de"
CURVES = ("#4a90c2", "#101418")
"""Of the distributed run and of the one device upon it: told apart by their brightness."""
DIFFERENCE = "#7b3294"
DARK = {
    INK: "#e6edf3",
    SOFT: "#a9b4c0",
    FAINT: "#37424d",
    CURVES[0]: "#2b7bb9",
    CURVES[1]: "#ffffff",
    DIFFERENCE: "#d6a5ff",
    "#ffffff": "#0d1117",
}
"""What a browser shows instead if its reader prefers dark."""
FONTS = ["Inter", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans", "sans-serif"]
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "svg.hashsalt": "sbp",
    "font.family": "sans-serif",
    "font.sans-serif": FONTS,
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
}
_ATTRIBUTE, _NUMBER = re.compile(r'="[^"]*"'), re.compile(r"-?\d+\.\d{3,}")


def loss_svg(curves: Mapping[str, Sequence[float]], title: str, first: int = 0) -> str:
    """The picture: a curve per run, and below, on axes of its own, how far the second is from the first.

    Arguments:
      curves: losses (nats) by the name of their run: the distributed one and, where it was checked, that of
        one device.
      title: the model and its data; what stands before the first comma is the heading.
      first: the step that the curves begin with.

    Raises:
      ImportError: without matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        compared = len(curves) > 1
        figure = Figure(figsize=(9, 5.6 if compared else 4))
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        axes: Any = figure.subplots(2 if compared else 1, sharex=True, height_ratios=[3, 1.1][: 1 + compared])
        top, *below = np.atleast_1d(axes)
        _losses(top, curves, first)
        if below:
            losses, others = list(curves.values())[:2]
            _difference(below[0], losses, others, first)
        (below or [top])[-1].set_xlabel("step")
        head, _, rest = title.partition(", ")
        figure.suptitle(head, x=0.01, ha="left", fontsize=15, fontweight="bold")
        top.set_title("\n".join(textwrap.wrap(rest, 110)), loc="left", fontsize=11, color=SOFT)
        out = StringIO()
        said = f"{title}; losses of the first steps: {first_losses(curves)}"
        figure.savefig(out, format="svg", metadata={"Title": title, "Description": said, "Date": None})
    return with_theme(out.getvalue())


def first_losses(curves: Mapping[str, Sequence[float]], count: int = 3) -> str:
    """The losses of the first steps of the first run, by which a picture is known to be of this run."""
    return " ".join(f"{x:.4f}" for x in next(iter(curves.values()))[:count])


def _losses(axes: Any, curves: Mapping[str, Sequence[float]], first: int) -> None:
    """The curves: one broad, the other thin and dashed upon it, so that both are seen where they are one."""
    looks: tuple[dict[str, Any], ...] = ({"linewidth": 5.5}, {"linewidth": 1.5, "dashes": (4, 2.5)})
    for (name, losses), colour, look in zip(curves.items(), CURVES, looks, strict=False):
        axes.plot(range(first, first + len(losses)), losses, color=colour, label=name, **look)
    axes.set_ylabel("loss (nats)")
    axes.legend(frameon=False, loc="upper right", handlelength=3.2)


def _difference(axes: Any, losses: Sequence[float], others: Sequence[float], first: int) -> None:
    """How far two runs are apart, relative to the loss; steps on which they are equal are left out."""
    apart = np.abs(np.subtract(losses, others)) / np.abs(others)
    shown = np.where(apart > 0, apart, np.nan)
    axes.plot(range(first, first + len(shown)), shown, color=DIFFERENCE, linewidth=1.4)
    axes.set_yscale("log" if (apart > 0).any() else "linear")
    axes.set_ylabel("difference\n(relative)")


def with_theme(svg: str) -> str:
    """A picture of matplotlib with the colours of dark for those who prefer it, and with short numbers."""
    rules = "".join(
        f'[style*="{how}: {light}"]{{{how}:{dark}!important}}'
        for light, dark in DARK.items()
        for how in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    short = _ATTRIBUTE.sub(lambda a: _NUMBER.sub(lambda x: f"{float(x[0]):.2f}", a[0]), svg)
    return re.sub(r"(<svg [^>]*>)", lambda found: found[1] + style, short, count=1)
