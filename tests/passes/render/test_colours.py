"""Colours: read by everybody, those who see no red or no green too, on light and on dark paper."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from sbp.passes.render.colours import ACTIONS, COLLECTIVES, KERNELS, Mark, every_mark
from sbp.passes.render.svg import INK
from sbp.passes.render.web_page import web_file

Array = NDArray[np.float64]

# What is seen of linear RGB: by all three kinds of cones, and without those for green or for red
# (Machado, Oliveira and Fernandes, 2009, severity 1.0).
SEEN = {
    "trichromat": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
APART = 18.0
"""Of CIE Lab: about 2 is just noticeable side by side, 10 at a glance."""
TEXT_CONTRAST, LINE_CONTRAST = 4.5, 3.0
"""WCAG AA, for text and for what is no text."""
PAPERS = "#ffffff", "#0f1419"


def linear(colour: str) -> Array:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: Array) -> Array:
    t = (np.clip(rgb, 0, 1) @ XYZ.T) / XYZ.sum(1)
    f = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(a: str, b: str, seen: str) -> float:
    """How different two colours look."""
    return float(np.linalg.norm(lab(SEEN[seen] @ linear(a)) - lab(SEEN[seen] @ linear(b))))


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(XYZ[1] @ linear(c)) + 0.05 for c in (a, b))
    return high / low


def kinds() -> dict[str, Mark]:
    return {k: m for k, m in COLLECTIVES.items() if k != "ragged_all_to_all"}  # an all-to-all too


@pytest.mark.parametrize("seen", SEEN)
def test_collectives_are_told_apart(seen: str) -> None:
    for (a, one), (b, two) in itertools.combinations(kinds().items(), 2):
        assert apart(one.fill, two.fill, seen) >= APART, (a, b)
    for (a, one), (b, two) in itertools.product(kinds().items(), KERNELS.items()):
        assert apart(one.fill, two.fill, seen) >= APART, (a, b)


@pytest.mark.parametrize("seen", SEEN)
def test_actions_of_a_schedule_are_told_apart(seen: str) -> None:
    computing = [m for kind, m in ACTIONS.items() if kind.value in "FBIW"]
    for one, two in itertools.combinations(computing, 2):
        assert apart(one.fill, two.fill, seen) >= APART, (one, two)


def test_the_test_sees_what_is_not_told_apart() -> None:
    """Red and green of one lightness: far from each other, and the same to who sees no green."""
    assert apart("#db4584", "#449c76", "trichromat") > 90 and apart("#db4584", "#449c76", "deuteranopia") < 6


def marks() -> Iterable[tuple[str, Mark]]:
    return (*COLLECTIVES.items(), *KERNELS.items(), *((k.value, m) for k, m in ACTIONS.items()))


def test_text_is_read_on_every_fill() -> None:
    assert f'INK = "{INK}"' in web_file("words.js") and f"--on-fill: {INK}" in web_file("style.css")
    for name, mark in marks():
        assert contrast(mark.fill, INK) >= TEXT_CONTRAST, name


def test_borders_are_seen_on_every_paper() -> None:
    for name, mark in marks():
        assert all(contrast(mark.border, paper) >= LINE_CONTRAST for paper in PAPERS), name


def test_every_collective_has_a_code_of_its_own() -> None:
    codes = [m.code for m in COLLECTIVES.values()]
    assert all(codes) and len(set(codes)) == len(codes)


def test_pages_have_no_colours_of_their_own() -> None:
    """All forms take them from one table."""
    for name in ("words.js", "graph.js", "timeline.js", "panels.js", "claim.js", "style.css"):
        text, coloured = web_file(name), (*COLLECTIVES.values(), *ACTIONS.values())
        assert not any(m.fill in text or m.border in text for m in coloured), name
    assert {*COLLECTIVES, *KERNELS, *(k.value for k in ACTIONS)} == every_mark().keys()
