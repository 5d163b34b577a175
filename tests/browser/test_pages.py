"""Pages as a reader uses them: what is on the first screen, what opens, what is found, with keys too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

import sbp
from sbp import B, S
from sbp.passes.face import Plan
from sbp.passes.render.web_page import plan_page
from tests.browser.waiting import until
from tests.passes.render.nets import piped

SMALLEST_PX = 11
CONTRAST = 4.5
"""WCAG AA, for text of ordinary size."""


def test_the_first_screen_has_the_answer(gpt: Plan, page: str, open_page: Any) -> None:
    opened = open_page(page)
    opened.shoot("first_screen")
    said = opened.page.inner_text("header.claim")
    assert "proven optimal" in said and "fits" in said and "exposed" in said
    rows = opened.page.locator(".costliest li")
    costliest = max((c for c, _ in gpt.merged_collectives()), key=lambda c: c.cost)
    assert rows.count() == 5 and costliest.source in rows.first.inner_text()
    bar = opened.page.locator(".bar .part").evaluate_all("es => es.map(e => e.getBoundingClientRect().width)")
    assert len(bar) >= 4 and bar[1] > bar[0] > 100  # the backward takes longer than the forward
    bottom = opened.page.locator(".costliest").bounding_box()
    assert bottom["y"] + bottom["height"] < 1000
    opened.check()


def test_a_layer_opens_and_its_costliest_collective_is_read(gpt: Plan, page: str, open_page: Any) -> None:
    opened = open_page(page)
    p = opened.page
    p.locator('.outline li:has-text("layers[")').first.dblclick()
    until(p, "document.querySelectorAll('.outline .key').length > 0 || sbpPage.view.seen.length > 20")
    # By its size: the hexagons' areas say the time.
    largest = p.evaluate(
        "() => { const m = sbpPage.model; let best = 0;"
        " const wide = v => sbpPage.view.size(v).w;"
        " for (let v = m.nGroups; v < m.n; v++) if (!best || wide(v) > wide(best)) best = v;"
        " return best; }"
    )
    p.evaluate("v => sbpPage.select({ node: v })", largest)
    p.wait_for_selector(".detail .collective")
    opened.shoot("opened_layer")
    rows = p.evaluate("v => sbpPage.model.sent.rows[v - sbpPage.model.nGroups]", largest)
    said = p.inner_text(".detail")
    row = [c for c, _ in gpt.merged_collectives()][rows[0]]
    assert row.reason in said and row.source in said and "per device and step" in said
    assert p.locator("table.rows tr.marked").count() == 1  # the row lights up
    assert p.locator(".source .here").count() >= 1
    opened.check()


def test_every_collective_is_on_the_page(gpt: Plan, page: str, open_page: Any) -> None:
    opened = open_page(page)
    times = opened.page.locator("table.rows td.c-times").all_inner_texts()
    assert sum(map(int, times)) == sum(c.count for c in gpt.collectives)
    model = "sbpPage.model.sent"
    assert opened.page.evaluate(f"{model}.count.reduce((a, b) => a + b, 0)") == sum(
        c.count for c in gpt.collectives
    )
    assert opened.page.evaluate(f"{model}.bytes.reduce((a, b) => a + b, 0)") == pytest.approx(
        gpt.wire_bytes, rel=1e-4
    )


def test_a_parameter_is_found(page: str, open_page: Any) -> None:
    opened = open_page(page)
    opened.page.fill(".search input", "params up")
    opened.page.wait_for_selector(".found li button")
    opened.page.keyboard.press("Enter")
    said = opened.page.inner_text(".detail")
    assert "params['layers']" in said and "each device has" in said
    assert opened.page.locator(".detail svg.devices").count() == 1
    opened.page.fill(".search input", "nothing like this")
    assert "nothing is called so" in opened.page.inner_text(".found")
    opened.check()


def test_the_table_sorts_and_filters(gpt: Plan, page: str, open_page: Any) -> None:
    opened = open_page(page)
    p = opened.page
    costs = [c.cost for c, _ in gpt.merged_collectives()]
    assert p.locator("th[aria-sort=descending]").count() == 2  # by what waits, which is the share too
    first = p.locator("table.rows tbody tr").first.get_attribute("data-row")
    assert costs[int(first)] == max(costs)
    p.click("th.c-bytes button")
    first = p.locator("table.rows tbody tr").first.get_attribute("data-row")
    assert [c.wire_bytes for c, _ in gpt.merged_collectives()][int(first)] == max(
        c.wire_bytes for c, _ in gpt.merged_collectives()
    )
    p.fill(".filter input", "all-gather")
    kinds = set(p.locator("table.rows tbody td.c-kind").all_inner_texts())
    assert kinds == {"all-gather"}


def test_phases_are_hidden_and_shown(page: str, open_page: Any) -> None:
    opened = open_page(page)
    before = opened.page.evaluate("sbpPage.view.seen.length")
    opened.page.locator(".toolbar label", has_text="backward").locator("input").uncheck()
    until(opened.page, f"sbpPage.view.seen.length < {before}")
    opened.check()


def test_keys_reach_everything(page: str, open_page: Any) -> None:
    """Tab leads from the claim to the table; the outline opens and closes by arrows."""
    opened = open_page(page)
    p, reached = opened.page, set[str]()
    for _ in range(60):
        p.keyboard.press("Tab")
        reached.add(
            p.evaluate(
                "document.activeElement.closest('.bar, .costliest, .toolbar, .outline, .tabs')"
                "?.className ?? ''"
            )
        )
    assert {"bar", "costliest", "toolbar", "outline", "tabs"} <= reached
    p.locator('.outline [tabindex="0"]').focus()
    shown = p.locator(".outline li").count()
    p.keyboard.press("ArrowLeft")  # closes the first phase
    until(p, f"document.querySelectorAll('.outline li').length < {shown}")
    p.keyboard.press("ArrowRight")
    until(p, f"document.querySelectorAll('.outline li').length === {shown}")
    p.keyboard.press("ArrowDown")
    p.keyboard.press("Enter")
    p.wait_for_selector(".detail .facts")
    opened.check()


TEXTS = """() => {
  const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const luminance = c => { const [r, g, b] = c.map(x => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const parse = s => s.match(/[\\d.]+/g).map(Number);
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0.9) return c.slice(0, 3); } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!own || !box.width || !box.height || e.closest("svg, noscript, script, style")) continue;
    if (e.closest(".bubble")) continue;
    const a = luminance(parse(style.color).slice(0, 3)), b = luminance(ground(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([e.textContent.trim().slice(0, 40), e.className, parseFloat(style.fontSize), contrast]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(page: str, open_page: Any, scheme: str) -> None:
    opened = open_page(page, scheme=scheme)
    opened.page.evaluate("sbpPage.select({ row: 0 })")
    opened.page.wait_for_selector(".detail .collective")
    opened.shoot(f"theme_{scheme}")
    texts = opened.page.evaluate(TEXTS)
    assert len(texts) > 100
    assert not [t for t in texts if t[2] < SMALLEST_PX or t[3] < CONTRAST]


def test_the_theme_is_switched(page: str, open_page: Any) -> None:
    opened = open_page(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    before = opened.page.evaluate(ground)
    opened.page.locator(".toolbar button", has_text="theme").click()
    assert opened.page.evaluate(ground) != before
    opened.check()


def test_a_narrow_screen_needs_no_scrolling_sideways(page: str, open_page: Any) -> None:
    opened = open_page(page, width=400, height=800)
    opened.shoot("narrow")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert opened.page.locator(".graph").bounding_box()["width"] > 300
    opened.check()


def test_names_are_data(gpt: Plan, open_page: Any) -> None:
    evil = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"
    first, *rest = gpt.collectives
    named = replace(
        gpt,
        name=evil,
        collectives=(replace(first, tensor=evil, source=f"{evil}.py:3", reason=evil), *rest),
        in_paths=(evil, *gpt.in_paths[1:]),
        notes=(evil,),
    )
    opened = open_page(plan_page(named))
    p = opened.page
    p.evaluate("sbpPage.select({ row: sbpPage.model.data.rows.reason.findIndex(r => r.includes('owned')) })")
    p.wait_for_selector(".detail .collective")
    assert evil in p.inner_text(".detail")
    for tab in p.locator("[role=tab]").all():
        tab.click()
    p.fill(".search input", "owned")
    assert p.evaluate("window.owned") is None
    opened.check()


def test_a_pipeline_has_its_timeline(open_page: Any) -> None:
    plan = piped()
    opened = open_page(plan_page(plan))
    p = opened.page
    assert "bubble" in p.inner_text("header.claim")
    p.locator("[role=tab]", has_text="Timeline").click()
    canvas = p.locator("canvas.timeline")
    assert canvas.bounding_box()["width"] > 1200
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    p.mouse.move(box["x"] + 100, box["y"] + 15)
    until(p, "document.querySelector('figure p.mono').textContent.includes('stage 0')")
    opened.shoot("pipeline")
    p.evaluate("sbpPage.select({ row: sbpPage.model.data.rows.kind.indexOf('send') })")
    p.wait_for_selector(".detail .collective")
    lanes = p.evaluate(
        "sbpPage.model.groups.title.filter((t, k) => sbpPage.model.groups.kind[k] === 'phase')"
    )
    assert lanes.count("update") == 2  # of each placement, and no update in a forward
    opened.check()


def test_a_plan_without_its_program_still_has_its_tables(gpt: Plan, open_page: Any) -> None:
    opened = open_page(plan_page(replace(gpt, physical=None, program=None)))
    assert opened.page.locator("table.rows tbody tr").count() > 5
    assert opened.page.locator(".graph").count() == 0
    opened.page.locator(".costliest button.row").first.click()
    opened.check()


def test_what_is_split_and_padded_is_drawn(open_page: Any) -> None:
    """Six rows over four devices: two each, and the last has none."""
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(2, 2)), in_sbp=([S(0), B],))
    opened = open_page(plan_page(program.plan(jax.ShapeDtypeStruct((6, 4), "float32"))))
    said = opened.page.evaluate(
        "() => { const f = deviceDrawing([5, 4], '[S(0), P]', [2, 2], ['a', 'b']);"
        " const count = of => f.querySelectorAll(of).length;"
        " return [count('.padding'), count('.partial'), f.textContent]; }"
    )
    assert said[0] == 2 and said[1] == 4 and "padded by 1 in dim 0" in said[2] and "[3, 4]" in said[2]
    opened.check()


def test_a_notebook_shows_every_column_on_any_ground(gpt: Plan, chromium: Any) -> None:
    """In a dark notebook: all columns of a cell are there, and texts have the notebook's colour."""
    page = chromium.new_page(viewport={"width": 1100, "height": 800})
    body = f"<body style='margin:0;background:#111;color:rgb(238, 238, 238)'>{gpt._repr_html_()}</body>"
    page.set_content(f"<!doctype html><html>{body}</html>")
    table = page.locator(".sbp .wide").first
    assert table.evaluate("e => e.scrollWidth <= e.clientWidth")
    colours = "es => [...new Set(es.map(e => getComputedStyle(e).color))]"
    assert page.locator(".sbp td, .sbp th, .sbp h1").evaluate_all(colours) == ["rgb(238, 238, 238)"]
    assert page.locator(".sbp .pill").evaluate_all(colours) == ["rgb(27, 36, 48)"]
    page.close()
