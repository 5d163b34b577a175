"""As a new user would: the page says what to write to be rid of the costliest collective; that is done, and
the page of both plans shows that it is gone."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from sbp.passes.face import Plan
from sbp.passes.render.web_page import diff_page

pytestmark = pytest.mark.full

HEAD = """
import jax
import jax.numpy as jnp

import sbp
from sbp import B, S


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, "float32")


ARGS = {"up": shape(1024, 4096), "down": shape(4096, 1024)}, shape(8192, 1024)
IN_SBP = {"up": [B, S(1)], "down": [B, S(0)]}, [S(0), B]
PLACEMENT = sbp.placement("h100", shape=(2, 4))


"""
WEIGHT = (
    HEAD.replace('"up": [B, S(1)]', '"up": [S(0), S(1)]')
    + """def step(w, x):
    hidden = x @ w["up"]
    return jnp.tanh(hidden)
"""
)

LINE = (
    HEAD
    + """def step(w, x):
    hidden = jnp.tanh(x @ w["up"])
    made = hidden @ w["down"]
    result = jnp.tanh(made)
    return result
"""
)


def planned(file: Path, name: str) -> Plan:
    """The plan of a file as it is now."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = module.sbp.compile(module.step, module.PLACEMENT, in_sbp=module.IN_SBP)
    found: Plan = program.plan(*module.ARGS)
    return found


def written(text: str, where: str, code: str, sbp: str) -> str:
    """A program in which a line is annotated, or an argument given otherwise, as a page says."""
    if code.startswith("in_sbp"):
        key = re.search(r"\['(\w+)'\]", where)
        old = rf'("{key[1]}": )\[[^\]]*\]' if key else r"(\}, )\[[^\]]*\]"
        return re.sub(old, rf"\g<1>{sbp}", text, count=1)
    lines = text.split("\n")
    at = int(where.rpartition(":")[2]) - 1
    head, sign, value = lines[at].partition(" = ")
    lines[at] = f"{head}{sign}{code.replace('…', value)}"
    return "\n".join(lines)


@pytest.mark.parametrize("program", [WEIGHT, LINE], ids=["weight", "line"])
def test_from_the_page_to_the_annotation_and_back(program: str, open_page: Any, tmp_path: Path) -> None:
    file = tmp_path / "mlp.py"
    file.write_text(program, encoding="utf-8")
    before = planned(file, "before")
    before.save(tmp_path / "before.json")
    before.save(tmp_path / "before.html", time_limit=60)
    p = open_page((tmp_path / "before.html").read_text(encoding="utf-8")).page
    p.locator(".costliest button.row").first.click()
    p.wait_for_selector(".detail .advice code")
    row = p.evaluate("sbpPage.model.data.rows.seconds.indexOf(Math.max(...sbpPage.model.data.rows.seconds))")
    costliest = [c for c, _ in before.merged_collectives()][row]
    said = [
        (code.get_attribute("data-where"), code.inner_text(), code.get_attribute("data-sbp"))
        for code in p.locator(".detail .advice code[data-where]").all()
    ]
    for one in said:
        file.write_text(written(file.read_text(encoding="utf-8"), *one), encoding="utf-8")
    assert file.read_text(encoding="utf-8") != program
    after = planned(file, "after")
    names = "before", "after"
    diff = open_page(diff_page(before, after, names))
    diff.shoot("diff")
    gone = diff.page.locator("table.diff-rows tr.removed", has_text=costliest.source)
    assert gone.count() >= 1
    # In the graph too, where it stood, with what it stood between, without opening anything.
    removed = diff.page.evaluate(
        "sbpPage.view.cy.nodes('.removed').map(n => [n.data('label'), n.connectedEdges().length])"
    )
    assert removed and all(label.startswith(("removed", "−")) and edges for label, edges in removed)
    gone.first.click()
    diff.page.wait_for_selector(".detail .collective")
    diff.check()
    # The page has said what the step takes then, of the program as a whole.
    (told,) = [
        r
        for r in p.evaluate("sbpPage.model.data.removals")
        if r["holds"] and r["row"].startswith(costliest.name + " ")
    ]
    assert told["whole"] and [(h["where"], h["sbp"]) for h in told["holds"]] == [(a, b) for a, _, b in said]
    assert told["seconds"] == pytest.approx(after.step_seconds, rel=0.02)
    assert "The whole program was planned again" in p.inner_text(".detail .advice")
