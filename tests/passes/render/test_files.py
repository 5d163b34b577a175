"""Plans as files: what is written is read back, and what cannot be is refused in words."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import sbp
from sbp.passes.explain.choices import Removal, RowChoices
from sbp.passes.face import Plan
from sbp.passes.render.files import TRACE, WRITERS
from sbp.passes.render.page_data import row_key
from sbp.passes.render.web_page import plan_page
from tests.passes.render.nets import deep


def test_json_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(str(path))
    loaded = sbp.load_plan(path)
    assert loaded == plan and loaded.physical is None
    assert loaded.collectives == plan.collectives
    assert (loaded.step_seconds, loaded.exposed_seconds) == (plan.step_seconds, plan.exposed_seconds)
    assert (loaded.gap, loaded.wire_bytes, loaded.by_kind()) == (plan.gap, plan.wire_bytes, plan.by_kind())
    assert str(loaded) == str(plan)
    again = tmp_path / "again.json"
    loaded.save(str(again))
    assert again.read_bytes() == path.read_bytes()


def test_the_program_stands_in_the_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    program = json.loads(text)["program"]
    steps = program["steps"]
    assert plan.physical is not None and len(steps) == len(plan.physical.steps)
    assert text.count('\n{"op"') + text.count('\n{"move"') == len(steps)  # a line each
    assert sorted(s["row"] for s in steps if "row" in s) == list(range(len(plan.collectives)))
    assert sum(x[2] for x in program["peak"]) + program["between_bytes"] == pytest.approx(plan.memory_bytes)
    assert sum(s["seconds"] for s in steps) == pytest.approx(plan.seconds)


class _Outside(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "data")]


# Without stages there is no schedule to trace.
@pytest.mark.some(1)
@pytest.mark.parametrize("suffix", [s for s in WRITERS if s != TRACE])
def test_every_suffix(plan: Plan, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan{suffix.upper() if suffix == '.svg' else suffix}"
    plan.save(path)
    text = path.read_text(encoding="utf-8")
    if suffix == ".py":  # says how tensors lie, and no collective
        compile(text, path, "exec")
        assert "ARGUMENTS = {" in text
        return
    assert text.count("all_reduce" if suffix in (".json", ".html") else "all-reduce") >= 2
    if suffix == ".html":
        page = _Outside()
        page.feed(text)
        assert not page.found and "@import" not in text and "url(http" not in text
        assert all(json.dumps(c.reason) in text for c in plan.collectives)
    elif suffix == ".svg":
        assert ET.fromstring(text).tag.endswith("svg")


def test_notebook_form(plan: Plan) -> None:
    page = _Outside()
    page.feed(plan._repr_html_())
    assert page.tags.count("svg") == 1 and "script" not in page.tags


@pytest.mark.parametrize("name", ["plan.txt", "plan", "plan.json.gz"])
def test_bad_suffix(plan: Plan, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"legal +\.json, \.html, \.dot, \.svg") as e:
        plan.save(str(tmp_path / name))
    assert isinstance(e.value, sbp.SbpError) and name in str(e.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".dot", ".svg", ".html"])
def test_a_loaded_plan_is_drawn_as_before(plan: Plan, tmp_path: Path, suffix: str) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = sbp.load_plan(tmp_path / "plan.json")
    for name, p in (("before", plan), ("after", loaded)):
        p.save(tmp_path / f"{name}{suffix}", choices=0)  # what else there could be, only the program knows
    before, after = ((tmp_path / f"{name}{suffix}").read_text("utf-8") for name in ("before", "after"))
    assert before == after


@pytest.mark.parametrize("suffix", [".dot", ".svg"])
def test_a_plan_without_its_program_has_no_picture(plan: Plan, tmp_path: Path, suffix: str) -> None:
    plan.save(tmp_path / "plan.json")
    bare = replace(sbp.load_plan(tmp_path / "plan.json"), program=None)
    with pytest.raises(sbp.SbpError, match="without its program"):
        bare.save(tmp_path / f"plan{suffix}")
    bare.save(tmp_path / "plan.html")
    assert '"groups"' not in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json", "cannot be read as JSON"),
        ("[1, 2]", "format 'sbp-plan', version 4"),
        ('{"format": "sbp-plan", "version": 99}', "99"),
        ('{"format": "sbp-plan", "version": 4}', "KeyError: 'placement'"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    with pytest.raises(sbp.SbpError, match=complaint):
        sbp.load_plan(tmp_path / "plan.json")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(sbp.SbpError, match="No such file"):
        sbp.load_plan(tmp_path / "nowhere.json")


def test_an_unknown_field_is_refused(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    data["collectives"][0]["colour"] = "red"
    (tmp_path / "plan.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(sbp.SbpError, match="colour"):
        sbp.load_plan(tmp_path / "plan.json")


def choices_of(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8")
    data = text.split('id="plan-data">')[1].split("</script>")[0]
    found: list[dict[str, Any]] = json.loads(data)["choices"]
    return found


def test_a_page_says_what_the_costliest_could_lie_as(plan: Plan, tmp_path: Path) -> None:
    """Unasked, and for as many as are asked for."""
    costliest = max((c for c, _ in plan.merged_collectives()), key=lambda c: c.cost)
    plan.save(tmp_path / "plan.html")
    assert choices_of(tmp_path / "plan.html")[0]["row"] == row_key(costliest)
    plan.save(tmp_path / "plan.html", choices=2, time_limit=60)
    choices = choices_of(tmp_path / "plan.html")
    assert len({c["row"] for c in choices}) == 2
    for choice in choices:
        first, *others = choice["rows"]
        assert first["chosen"] and first["seconds"] == pytest.approx(plan.step_seconds, rel=1e-5)
        assert others and not any(r["chosen"] for r in others) and choice["hold"]
    for nothing in ({"choices": 0}, {"time_limit": 0}):
        plan.save(tmp_path / "plan.html", **nothing)  # type: ignore[arg-type]
        assert choices_of(tmp_path / "plan.html") == []


def test_what_is_said_to_remove_a_collective_removes_it() -> None:
    """Whatever is held, one tensor or two, at rest or where it is made: the whole plan is without it then."""
    plan = deep(2)
    rows = [c for c, _ in plan.merged_collectives()]
    assert plan.replanner is not None
    said = 0
    for row, found in plan.replanner.rows_choices(plan, rows, 3, 120.0):
        removal = found.removal
        assert removal is not None and bool(removal.holds) != bool(removal.remark)
        if not removal.holds:
            continue
        other = plan
        for held in removal.holds:
            name = held.where if held.how == "in_sbp" else held.tensor.replace(", made at ", " at ")
            other = other.what_if(name, held.signature)
        left = [(c.kind, c.source, c.shape) for c in other.collectives]
        assert (row.kind, row.source, row.shape) not in left
        assert removal.whole and removal.figures is not None
        assert other.step_seconds == pytest.approx(removal.figures.step_seconds, rel=1e-6)
        said += 1
    assert said


def test_a_page_says_why_nothing_was_found(tmp_path: Path) -> None:
    """Without time a removal is not looked for to its end; the page has the words."""
    plan = deep(2)
    row = max((c for c, _ in plan.merged_collectives()), key=lambda c: c.seconds)
    choices = {row_key(row): RowChoices((), Removal(remark="there was no time to look further"))}
    text = plan_page(plan, choices=choices)
    assert '"removals":[{' in text and "there was no time to look further" in text


def test_without_time_the_costliest_still_have_alternatives() -> None:
    """What all could lie as comes first; what to write to do without them is left to who asks for longer."""
    plan = deep(2)
    rows = sorted((c for c, _ in plan.merged_collectives()), key=lambda c: -c.seconds)[:3]
    assert plan.replanner is not None
    found = list(plan.replanner.rows_choices(plan, rows, 3, 1e-9))
    assert found == []
    whole = list(plan.replanner.rows_choices(plan, rows, 3, 120.0))
    assert [row for row, _ in whole] == rows and all(x.tensors for _, x in whole)
    assert all(t.near for _, x in whole for t in x.tensors)
