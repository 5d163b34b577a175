"""Pages that lay what was measured, or simulated, beside what was estimated."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks import cases
from sbp import S
from sbp.passes.explain.measurement import MeasuredCollective, MeasuredStep
from sbp.passes.face import Plan
from sbp.passes.render.web_page import plan_page, profiled_page
from sbp.runtime.profile.profile import Profile
from tests.golden import two_stages

pytestmark = pytest.mark.full

ONE_REM = 0.1


@pytest.fixture(scope="module")
def profile() -> Profile:
    case = cases.mlp_case("2d", (2, 4), 2)
    program = sbp.compile(case.step, sbp.placement("cpu", shape=(2, 4)), in_sbp=case.in_sbp)
    return program.profile(*case.make())


def test_both_figures_are_on_the_page(profile: Profile, open_page: Any) -> None:
    step = profile.step
    assert step is not None
    opened = open_page(profiled_page(profile.plan, profile))
    p = opened.page
    claim = p.inner_text("header.claim")
    assert (
        "estimated" in claim
        and "measured by JAX's profiler" in claim
        and "waiting for other devices" in claim
    )
    # Two bars; the parts of the second are those of the step.
    assert p.locator(".bar").count() == 2
    widths = "es => es.map(e => e.getBoundingClientRect().width)"
    kernels = p.locator(".beside .part.forward, .beside .part.backward, .beside .part.update")
    whole = sum(p.locator(".beside .part").evaluate_all(widths))
    share = sum(kernels.evaluate_all(widths)) / whole
    assert share == pytest.approx(step.kernel_seconds / step.seconds, abs=ONE_REM)
    opened.shoot("measured_first_screen")
    # The table has both, and sorts by either.
    heads = p.locator("table.rows thead th").all_inner_texts()
    assert [h.strip(" ↓↑") for h in heads if h.strip(" ↓↑") in ("time", "measured", "of estimate")] == [
        "time",
        "measured",
        "of estimate",
    ]
    p.click("th.c-measured button")
    first = int(p.locator("table.rows tbody tr").first.get_attribute("data-row"))
    seconds = [step.of(c).seconds or -1 for c, _ in profile.plan.merged_collectives()]
    assert seconds[first] == max(seconds)
    # So does the panel of a collective, and that of a group.
    p.locator("table.rows tbody tr").first.click()
    p.wait_for_selector(".detail .collective")
    assert re.search(r"measured\s+[\d.]+ (µs|ms|s), [\d.]+ % of the step", p.inner_text(".detail"))
    p.locator('.outline li:has-text("forward")').first.click()
    p.wait_for_selector(".detail h2:has-text('forward')")
    assert "the estimate" in p.inner_text(".detail")
    opened.check()


def test_lines_and_the_timeline(profile: Profile, open_page: Any) -> None:
    opened = open_page(profiled_page(profile.plan, profile), width=420, scheme="dark")
    p = opened.page
    p.locator('[role="tab"]', has_text="Measured").click()
    said = p.inner_text(".beside-tables")
    assert "unattributed: between ops" in said and "mlp.py:" in said and "Kernels, by your lines" in said
    p.locator('[role="tab"]', has_text="Timeline").click()
    assert p.locator("figcaption", has_text="measured by JAX's profiler").is_visible()
    # A measured step is no trip of a loop.
    assert p.locator("canvas.timeline").count() == 2 and p.locator("h3", has_text="One trip").count() == 0
    opened.shoot("measured_narrow_dark")
    opened.check()


def test_a_row_without_a_time_says_why(profile: Profile, open_page: Any) -> None:
    """Whatever the reason is: text, never markup."""
    step, why = profile.step, "<img src=x onerror=alert(1)>"
    assert step is not None
    (row, _), *_ = profile.plan.merged_collectives()
    names = row.name.split("+")
    lost = [MeasuredCollective(m.name, None, remark=why) if m.name in names else m for m in step.collectives]
    opened = open_page(plan_page(profile.plan, beside=(replace(step, collectives=tuple(lost)),)))
    opened.page.evaluate("sbpPage.select({ row: 0 })")
    opened.page.wait_for_selector(".detail .collective")
    assert f"no time: {why}" in opened.page.inner_text(".detail")
    assert opened.page.inner_text('tr[data-row="0"] td.c-measured') == "–"
    opened.check()


def test_a_pipeline(open_page: Any) -> None:
    program = sbp.compile(two_stages.step, two_stages.step_placement, in_sbp=two_stages.step_sbp)
    profile = program.profile(*two_stages.values())
    opened = open_page(profiled_page(profile.plan, profile))
    assert "on each of 2 placements" in opened.page.locator(".parts").text_content()
    assert opened.page.locator(".bar").count() == 2
    assert "Actions" in opened.page.inner_text('[role="tablist"]')
    opened.page.evaluate("sbpPage.select({ row: sbpPage.model.data.rows.kind.indexOf('send') })")
    opened.page.wait_for_selector(".detail .collective")
    assert "Actions has it" in opened.page.inner_text(".detail")
    opened.check()


def test_a_simulated_step(open_page: Any) -> None:
    """As a report of a compiled program has it: its kernels are not told apart."""
    program = sbp.compile(
        lambda x, w: jnp.sin(x @ w), sbp.placement("h100", shape=(4,)), in_sbp=([S(1)], [S(0)])
    )
    plan: Plan = program.plan(*[jax.ShapeDtypeStruct((4096, 4096), "float32")] * 2)
    (row,) = plan.collectives
    sent = MeasuredCollective(row.name, 2e-4, 1e-4, 0.0, 1)
    step = MeasuredStep("simulated", "for a chip", 1e-3, 1, (), 9e-4, (sent,), 0.0, 0.0, 0.0)
    opened = open_page(plan_page(plan, beside=(step,)))
    assert "1 ms simulated for a chip" in opened.page.inner_text("header.claim")
    assert opened.page.locator('[role="tab"]', has_text="Simulated").count() == 1
    assert opened.page.inner_text("td.c-measured") == "200 µs"
    assert opened.page.locator("th.c-measured").all_inner_texts() == ["simulated"]
    opened.check()


def test_a_page_without_a_profile_is_as_it_was(profile: Profile, open_page: Any, tmp_path: Path) -> None:
    profile.plan.save(tmp_path / "plan.html")
    opened = open_page((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert opened.page.locator(".bar").count() == 1 and opened.page.locator("th.c-measured").count() == 0
    tabs = opened.page.inner_text('[role="tablist"]')
    assert "Measured" not in tabs and "Simulated" not in tabs
    opened.check()
