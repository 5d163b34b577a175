"""Plans as files: what is written is read back, and what cannot be is refused in words."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import sbp
from sbp.passes.face import Plan
from sbp.passes.look.files import WRITERS


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


@pytest.mark.parametrize("suffix", list(WRITERS))
def test_every_suffix(plan: Plan, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan{suffix.upper() if suffix == '.svg' else suffix}"
    plan.save(path)
    text = path.read_text(encoding="utf-8")
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
        p.save(tmp_path / f"{name}{suffix}")
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


def test_a_page_says_what_the_costliest_could_lie_as(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.html", choices=2)
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    choices = json.loads(text.split('id="plan-data">')[1].split("</script>")[0])["choices"]
    costliest = sorted((c for c, _ in plan.merged()), key=lambda c: -c.seconds)
    assert len(choices) == 2 and set(choices) <= {c.tensor for c in costliest}
    for rows in choices.values():
        first, *others = rows
        assert first["chosen"] and first["seconds"] == pytest.approx(plan.step_seconds, rel=1e-5)
        assert others and not any(r["chosen"] for r in others)
    plan.save(tmp_path / "plan.html")
    assert '"choices":{}' in (tmp_path / "plan.html").read_text(encoding="utf-8")
