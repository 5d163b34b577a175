"""Timelines, tables, graph and panel: one leads to the other, by click and by key."""

from __future__ import annotations

from typing import Any

import pytest

from sbp.passes.face import Plan
from sbp.passes.render.page_data import page_data
from sbp.passes.render.web_page import plan_page
from tests.browser.waiting import until
from tests.passes.render.nets import scanned

pytestmark = pytest.mark.full

LIT = "sbpPage.timelines.views.map(v => [...v.lit])"
SPAN = """([view, k]) => { const v = sbpPage.timelines.views[view], s = v.data.spans;
  const r = v.canvas.getBoundingClientRect();
  const x = t => r.left + 84 + (t - v.from) / (v.to - v.from) * (r.width - 84);
  return [(x(s.from[k]) + x(s.to[k])) / 2, r.top + v.lanes()[s.lane[k]].y + 8]; }"""


def middle_of(page: Any, view: int, k: int) -> tuple[float, float]:
    """Where a span is on the screen."""
    page.evaluate("v => sbpPage.timelines.views[v].element.scrollIntoView({ block: 'center' })", view)
    x, y = page.evaluate(SPAN, [view, k])
    return x, y


def test_a_row_leads_to_the_timeline_and_back(gpt: Plan, page: str, open_page: Any) -> None:
    opened = open_page(page)
    p = opened.page
    spans = page_data(gpt)["timelines"][0]["spans"]
    # From the row: by key, on the button with its time.
    p.locator("table.rows td.c-seconds button").first.focus()
    row = int(p.evaluate("document.activeElement.closest('tr').dataset.row"))
    p.keyboard.press("Enter")
    assert p.locator("[role=tab][aria-selected=true]").inner_text() == "Timeline"
    lit = p.evaluate(LIT)[0]
    assert lit and all(row in spans["rows"][k] for k in lit)
    assert p.evaluate("document.activeElement.className") == "timeline"  # the keys go on from there
    opened.shoot("timeline")
    # And back, by key: another span, which lights its own row and box.
    p.keyboard.press("ArrowRight")
    p.keyboard.press("Enter")
    cursor = p.evaluate("sbpPage.timelines.views[0].cursor")
    assert cursor not in lit[:1]
    marked = p.locator("table.rows tr.marked").evaluate_all("rows => rows.map(r => Number(r.dataset.row))")
    assert marked and set(marked) == set(spans["rows"][cursor])
    until(p, "sbpPage.view.cy.$('.marked').length > 0")
    node = p.evaluate("Number(sbpPage.view.cy.$('.marked').id())")
    rows = p.evaluate("v => sbpPage.model.sent.rows[v - sbpPage.model.nGroups]", node)
    assert set(rows) & set(marked)
    p.locator(".detail button", has_text="in the table").first.click()
    assert p.locator("[role=tab][aria-selected=true]").inner_text() == "Collectives"
    assert p.evaluate("document.activeElement.closest('tr.marked') !== null")
    opened.check()


def test_a_kernel_leads_to_its_part_of_the_graph(page: str, open_page: Any) -> None:
    opened = open_page(page)
    p = opened.page
    p.locator("[role=tab]", has_text="Timeline").click()
    k = p.evaluate(
        "() => { const s = sbpPage.timelines.views[0].data.spans, long = k => s.to[k] - s.from[k];"
        " return [...s.lane.keys()].filter(k => s.node[k]).sort((a, b) => long(b) - long(a))[0]; }"
    )
    p.mouse.click(*middle_of(p, 0, k))
    until(p, "document.querySelector('.detail .facts') !== null")
    node = p.evaluate("k => sbpPage.timelines.views[0].data.spans.node[k]", k)
    assert p.inner_text(".detail h2").startswith(p.evaluate("v => sbpPage.model.groups.title[v]", node))
    assert k in p.evaluate(LIT)[0]
    opened.check()


def test_a_loop_leads_to_one_trip_of_it(open_page: Any) -> None:
    opened = open_page(plan_page(scanned()))
    p = opened.page
    p.locator("[role=tab]", has_text="Timeline").click()
    assert p.locator("canvas.timeline").count() == 2
    assert "one trip of scan at nets.py" in p.locator("figure figcaption").nth(1).inner_text()
    assert p.locator("h3", has_text="One trip of each loop").count() == 1
    k = p.evaluate("sbpPage.timelines.views[0].data.spans.opens.indexOf(1)")
    p.evaluate("k => sbpPage.timelines.views[0].pick(k)", k)
    assert "a click leads to one trip" in p.locator("figure p.mono").first.inner_text()
    until(p, "sbpPage.view.cy.$('.marked').length > 0")
    assert p.inner_text(".detail h2").startswith("scan x 3")
    opened.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_stands_in_boxes_can_be_read(page: str, open_page: Any, scheme: str) -> None:
    """At every zoom letters are 11 pixels high at least, or are not there."""
    opened = open_page(page, scheme=scheme)
    seen = []
    for zoom in (1.5, 1.0, 0.6, 0.3, 0.1):
        opened.page.evaluate("z => { sbpPage.view.cy.zoom(z); }", zoom)
        until(opened.page, f"Math.abs(sbpPage.view.zoomed - {zoom}) < 1e-6")
        sizes = opened.page.evaluate(
            "sbpPage.view.cy.nodes().map(n => [n.data('label'),"
            " n.numericStyle('font-size') * sbpPage.view.cy.zoom()])"
        )
        shown = [size for label, size in sizes if label]
        assert all(size > 10.99 for size in shown)
        seen.append(len(shown))
    assert seen[0] == seen[1] > 10 and seen[-1] < seen[0]
    opened.check()
