"""What is printed: the claim, the graph as a drawing, the table, in light colours."""

from __future__ import annotations

import io
from typing import Any

import pytest

from sbp.passes.face import Plan

pypdf = pytest.importorskip("pypdf", reason="pip install -e '.[browser]'")


def printed(opened: Any) -> Any:
    return pypdf.PdfReader(io.BytesIO(opened.page.pdf(prefer_css_page_size=True, print_background=True)))


def test_a_page_prints_all_that_it_says(gpt: Plan, page: str, open_page: Any) -> None:
    opened = open_page(page, scheme="dark")
    opened.page.evaluate("sbpPage.select({ row: 0 })")
    opened.page.wait_for_selector(".detail .collective")
    pages = [p.extract_text() for p in printed(opened).pages]
    text = "\n".join(pages)
    flat = " ".join(text.split())
    assert "train_step" in pages[0] and "exposed" in pages[0] and "Where the time goes" in pages[0]
    for c, _ in gpt.merged_collectives():  # every row, its line and its reason
        assert c.source in text and " ".join(c.reason.split())[:40] in flat
    # Boxes and collectives of the graph are text too, which a picture of the screen would not have.
    (graph,) = [p for p in pages if "layers[0] ▸" in p and "all-to-all ×2" in p]
    assert "forward" in graph and "update" in graph
    assert "each device has" in text and "Alive at the peak" in text  # panel, and a tab that is not open
    assert "search:" not in text and "close all" not in text
    # A picture of it says nothing when the paper is black.
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    opened.check()


def test_after_it_is_printed_the_page_is_as_before(page: str, open_page: Any) -> None:
    opened = open_page(page)
    printed(opened)
    assert opened.page.locator(".print-graph").count() == 0
    assert opened.page.locator("[role=tabpanel]:visible").count() == 1
    opened.check()
