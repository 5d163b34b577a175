"""The picture of the losses: what it says, that it is small, and that it is read in light and in dark."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from models import curves

SVG = "{http://www.w3.org/2000/svg}"
STEPS = 300


@pytest.fixture(scope="module")
def picture() -> str:
    losses = [4 * 0.98**k + 1 for k in range(STEPS)]
    others = [x * (1 + 1e-6 * np.sin(k)) for k, x in enumerate(losses)]
    return curves.loss_svg({"cpu(data=2 x model=4)": losses, "one device": others}, "GPT, of 2 layers")


def test_it_says_what_it_shows(picture: str) -> None:
    said = {(t.text or "").strip() for t in ET.fromstring(picture).iter(f"{SVG}text")}
    assert {"GPT", "of 2 layers", "step", "loss (nats)", "difference", "(relative)"} <= said
    assert {"cpu(data=2 x model=4)", "one device"} <= said
    assert "losses of the first steps: 5.0000 4.9200 4.8416" in picture


def test_both_curves_are_seen(picture: str) -> None:
    """One is broad, the other thin, dashed and upon it; the difference has axes of its own."""
    first, second = (picture.index(f"stroke: {c}; stroke-width") for c in curves.CURVES)
    broad, thin = (re.search(rf"stroke: {c}; stroke-width: ([\d.]+)", picture) for c in curves.CURVES)
    assert first < second and broad and thin and float(broad[1]) > 3 * float(thin[1])
    assert re.search(rf"stroke-dasharray: [^;]+;[^\"]*stroke: {curves.CURVES[1]}", picture)
    assert picture.count('id="axes_') == 2 and curves.DIFFERENCE in picture


def test_one_run_has_one_curve() -> None:
    alone = curves.loss_svg({"eight": [2.0, 1.0]}, "GPT")
    assert alone.count('id="axes_') == 1 and "difference" not in alone


def test_equal_runs_have_no_difference_to_draw() -> None:
    assert "nan" not in curves.loss_svg({"a": [2.0, 1.0], "b": [2.0, 1.0]}, "GPT").lower().replace(
        "inant", ""
    )


def test_it_is_small_and_the_same_each_time(picture: str) -> None:
    assert len(picture) < 45_000
    given = {"eight": [2.0, 1.0]}, "GPT"
    assert curves.loss_svg(*given) == curves.loss_svg(*given)


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(dark: bool) -> None:
    """WCAG AA: texts 4.5 to 1, lines 3 to 1; one curve upon the other is seen too."""

    def shown(colour: str) -> str:
        return curves.DARK[colour] if dark else colour

    paper = shown("#ffffff")
    assert all(contrast(shown(c), paper) >= 4.5 for c in (curves.INK, curves.SOFT))
    assert all(contrast(shown(c), paper) >= 3 for c in (*curves.CURVES, curves.DIFFERENCE))
    assert contrast(*map(shown, curves.CURVES)) >= 3


def test_every_colour_has_one_for_dark(picture: str) -> None:
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", picture))
    assert used - {"#000000"} <= set(curves.DARK)
    assert "#000000" not in used
