"""The drawings: every lane, box and span is there, and the files are what they claim to be."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from sbp.passes.render.colours import ACTIONS
from sbp.passes.render.timeline import WORDS, chrome_trace, timeline_svg
from sbp.passes.schedule.actions import Kind
from sbp.passes.schedule.communication import add_transfers
from sbp.passes.schedule.orders import GENERATORS
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import Span, Timeline
from sbp.passes.schedule.times import equal_times
from tests.passes.schedule.texts import action, named

SVG = "{http://www.w3.org/2000/svg}"


def run(name: str, transfer: float = 0.25) -> Timeline:
    schedule = add_transfers(named(name, 4, 8))
    return simulate(schedule, equal_times(schedule.stages, transfer=transfer))


def texts(root: ET.Element) -> list[str]:
    return [e.text or "" for e in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", list(GENERATORS))
def test_the_picture_has_all_lanes_and_actions(name: str) -> None:
    timeline = run(name)
    root = ET.fromstring(timeline_svg([timeline]))
    assert root.tag == f"{SVG}svg"
    found = texts(root)
    assert found[0] == name
    assert [t for t in found if t.startswith("rank ")] == [f"rank {r}" for r in range(4)]
    heading = f"{name}: 4 ranks, {timeline.makespan:.1f} s, bubble {timeline.bubble_fraction:.1%}"
    assert heading in found
    titles = [e.text or "" for e in root.iter(f"{SVG}title")]
    drawn = [s for spans in timeline.spans for s in spans if s.action.kind not in (Kind.RECV_F, Kind.RECV_B)]
    assert sorted(t.split(" ")[0] for t in titles[1:]) == sorted(str(s.action) for s in drawn)
    used = {s.action.kind for s in drawn}
    assert {WORDS[k] for k in used} == {t for t in found if t in WORDS.values()}
    assert set(ACTIONS) == set(WORDS) >= used


def test_boxes_stand_where_they_should() -> None:
    """One unit is as long for every box, and the pairs of DualPipeV share their lane."""
    root = ET.fromstring(timeline_svg([run("dualpipe-v", 0)]))
    boxes = {}
    for g in root.iter(f"{SVG}g"):
        title, rect = g.find(f"{SVG}title"), g.find(f"{SVG}rect")
        if title is not None and rect is not None:
            boxes[(title.text or "").split(" ")[0]] = [
                float(rect.attrib[k]) for k in ("x", "y", "width", "height")
            ]
    unit = boxes["F0:0"][2]
    assert boxes["F0:1"] == pytest.approx(
        [boxes["F0:0"][0] + unit, boxes["F0:0"][1], unit, boxes["F0:0"][3]], abs=0.02
    )
    pairs = [
        (f, b) for f in boxes for b in boxes if f[0] == "F" and b[0] == "B" and boxes[f][:1] == boxes[b][:1]
    ]
    halves = [(f, b) for f, b in pairs if boxes[f][3] == boxes[b][3] == boxes["F0:0"][3] / 2]
    assert len(halves) >= 16
    for f, b in halves:
        if abs(boxes[f][1] - boxes[b][1]) < 20:
            assert boxes[b][1] == boxes[f][1] + boxes[f][3]


def test_numbers_are_drawn_where_they_fit() -> None:
    wide = ET.fromstring(timeline_svg([run("1f1b")]))
    assert sum(t.isdigit() for t in texts(wide)) == 4 * 8 * 2
    span = Span(0, action("F0:0"), 0.0, 1e-6), Span(0, action("F0:1"), 1.0, 2.0)
    narrow = ET.fromstring(timeline_svg([Timeline("x", (span,))]))
    assert [t for t in texts(narrow) if t.isdigit()] == ["1"]


def test_measured_above_simulated() -> None:
    """On one scale; a measured clock may start anywhere."""
    simulated = run("zb-v")
    measured = Timeline(
        "measured",
        tuple(
            tuple(Span(s.rank, s.action, 1000 + 1.5 * s.start, 1000 + 1.5 * s.end) for s in spans)
            for spans in simulated.spans
        ),
    )
    root = ET.fromstring(timeline_svg([simulated, measured], "ZB-V <both>"))
    found = texts(root)
    assert "ZB-V <both>" in found
    assert sum(t.startswith("rank ") for t in found) == 8
    assert any(t.startswith(f"measured: 4 ranks, {1.5 * simulated.makespan:.1f} s, bubble") for t in found)
    lanes = [e for e in root.iter(f"{SVG}rect") if e.attrib["fill"] == "#f3f6f9"]
    ends = [
        float(e.attrib["x"]) + float(e.attrib["width"]) for e in root.iter(f"{SVG}rect") if "x" in e.attrib
    ]
    assert max(ends) <= float(lanes[0].attrib["x"]) + float(lanes[0].attrib["width"]) + 0.1


def test_the_picture_needs_nothing_else() -> None:
    text = timeline_svg([run("1f1b")])
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert "script" not in text


@pytest.mark.parametrize("name", list(GENERATORS))
def test_the_trace_has_a_span_per_action(name: str) -> None:
    timeline = run(name)
    events = json.loads(chrome_trace([timeline], unit_seconds=1e-3))["traceEvents"]
    spans = [s for rank in timeline.spans for s in rank]
    whole = {(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert whole == {
        (str(s.action), s.rank, 1e3 * s.start, 1e3 * (s.end - s.start)) for s in spans if s.action.computes
    }
    begun = {(e["id"], e["tid"], e["ts"]) for e in events if e["ph"] == "b"}
    assert begun == {(f"1.{s.action}", s.rank, 1e3 * s.start) for s in spans if not s.action.computes}
    assert len([e for e in events if e["ph"] == "e"]) == len(begun)
    assert sum(e["ph"] in "Xb" for e in events) == len(spans)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {f"rank {r}" for r in range(4)}


def test_the_trace_holds_several_timelines() -> None:
    events = json.loads(chrome_trace([run("1f1b"), run("zb-h1")]))["traceEvents"]
    names = {e["pid"]: e["args"]["name"].split(",")[0] for e in events if e["name"] == "process_name"}
    assert names == {1: "1f1b", 2: "zb-h1"}
