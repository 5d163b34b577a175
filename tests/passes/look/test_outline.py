"""The outline: every op in one leaf, layers found and folded, collectives where they are wanted."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from sbp.passes.face import Plan
from sbp.passes.look.outline import Outline, called, items
from sbp.passes.look.page_data import page_data
from sbp.passes.look.program_data import program_data
from sbp.passes.look.repeats import repeats
from sbp.passes.look.wiring import Wiring
from tests.passes.look.nets import deep, scanned


def outlined(plan: Plan) -> tuple[Outline, Wiring]:
    program = program_data(plan)
    assert program is not None
    outline = Outline.of(program, plan.in_paths)
    return outline, Wiring.of(outline, plan.placement.shape)


def ops_of(steps: Iterable[Mapping[str, Any]]) -> int:
    """Ops that are no loops, and are not made of constants only."""
    return sum(
        sum(ops_of(body) for body in s["bodies"]) if "loop" in s else "op" in s and bool(s["reads"])
        for s in steps
    )


@pytest.fixture(scope="module")
def deep_plan() -> Plan:
    return deep(12)


@pytest.mark.parametrize("make", [lambda: deep(3), scanned])
def test_every_op_is_counted_once(make: Any) -> None:
    outline, _ = outlined(make())
    assert outline.groups[0].ops == ops_of(outline.program["steps"]) > 0
    leaves = {k for k in range(len(outline.groups)) if all(g.parent != k for g in outline.groups)}
    assert sum(outline.groups[k].ops for k in leaves) == outline.groups[0].ops


def test_seconds_are_those_of_kernels(deep_plan: Plan) -> None:
    outline, _ = outlined(deep_plan)
    sent = sum(c.seconds for c in deep_plan.collectives)
    moved = sum(s["seconds"] for s in outline.program["steps"] if "move" in s and "row" not in s)
    constant = sum(s["seconds"] for s in outline.program["steps"] if "op" in s and not s["reads"])
    assert outline.groups[0].seconds == pytest.approx(deep_plan.seconds - sent - moved - constant)


def test_equal_layers_are_one_group(deep_plan: Plan) -> None:
    outline, _ = outlined(deep_plan)
    phases = {g.title: k for k, g in enumerate(outline.groups) if g.kind == "phase"}
    assert list(phases) == ["forward", "backward", "update"]
    layers = [g for g in outline.groups if g.kind == "layer"]
    for phase in ("forward", "backward"):
        own = [g for g in layers if g.parent == phases[phase]]
        assert sum(g.times for g in own) >= 11 and len(own) <= 3
        assert all(g.title.startswith("ws[") for g in own)
    # Twelve layers need no more groups than six.
    assert len(outline.groups) <= len(outlined(deep(6))[0].groups) + 4


def test_collectives_stand_where_they_are_wanted(deep_plan: Plan) -> None:
    outline, wiring = outlined(deep_plan)
    rows = Counter(r for s in wiring.sent for r in s.rows)
    assert set(rows) == set(range(len(deep_plan.collectives))) and set(rows.values()) == {1}
    n = len(outline.groups)
    for k, s in enumerate(wiring.sent):
        assert any(b == n + k for _, b in wiring.edges) or s.kind == "all_gather"
        assert any(a == n + k for a, _ in wiring.edges) or n + k in wiring.makers.values()


def test_a_loop_is_a_group() -> None:
    plan = scanned()
    outline, wiring = outlined(plan)
    (loop,) = (k for k, g in enumerate(outline.groups) if g.kind == "loop")
    assert outline.groups[loop].title == "scan x 3"
    # The stack is gathered once, before the loop, and read in it.
    (sent,) = wiring.sent
    assert sent.parent == outline.groups[loop].parent and plan.collectives[sent.rows[0]].count == 1
    (read,) = (b for a, b in wiring.edges if a == len(outline.groups))
    assert outline.groups[read].parent == loop


def test_arguments_and_results_lead_to_their_nodes(deep_plan: Plan) -> None:
    outline, wiring = outlined(deep_plan)
    given = {v for v, _ in outline.program["inputs"]}
    assert given == set(wiring.readers)
    assert set(wiring.makers) == set(range(len(deep_plan.out_paths)))


def test_a_function_that_is_called_again_is_another_group() -> None:
    steps = [
        {"op": "a", "at": "f.py:1", "reads": [[0, "B"]], "writes": [[1, "B"]]},
        {"op": "b", "at": "f.py:5", "reads": [[1, "B"]], "writes": [[2, "B"]]},
        {"op": "c", "at": "f.py:1", "reads": [[2, "B"]], "writes": [[3, "B"]]},
        {"op": "d", "at": "f.py:2", "reads": [[0, "B"]], "writes": [[4, "B"]]},
    ]
    found = list(called(list(items(steps, 1)), lambda i: ("", "f" if i.step["at"] != "f.py:5" else "g")))
    assert [(key[1], [i.step["op"] for i in own]) for key, own in found] == [
        ("f", ["a"]),
        ("g", ["b"]),
        ("f", ["c", "d"]),
    ]


def test_repeats_are_cut_where_layers_begin() -> None:
    """The last items of each repeat may belong to the first or to the next: whoever asks decides."""
    text = "xyz" + 3 * "abcdefxyz"
    first = repeats(text, mixed=lambda r: 0)
    assert [(r.start, r.period, r.times) for r in first] == [(0, 9, 3)]
    later = repeats(text, mixed=lambda r: r.start != 3)
    assert [(r.start, r.period, r.times) for r in later] == [(3, 9, 3)]
    assert repeats("abcdefgh", mixed=lambda r: 0) == []


def test_the_step_is_drawn_as_it_is_scheduled(plan: Plan) -> None:
    """Spans of a lane follow each other, the last end is the step, and all that is sent is there."""
    data = page_data(plan)
    (timeline,) = data["timelines"]
    spans = timeline["spans"]
    for lane in (0, 1):
        own = sorted(
            (a, b) for at, a, b in zip(spans["lane"], spans["from"], spans["to"], strict=True) if at == lane
        )
        assert own and all(a <= b for a, b in own)
        assert all(b <= c + 1e-12 for (_, b), (c, _) in itertools.pairwise(own))
    assert max(spans["to"]) == pytest.approx(plan.step_seconds)
    assert plan.physical is not None
    program = program_data(plan)
    assert program is not None
    rows = [r for _, _, rows in program["timeline"]["sent"] for r in rows]
    assert sorted(rows) == list(range(len(plan.collectives)))
    exposed = plan.step_seconds - sum(b - a for a, b, _ in program["timeline"]["kernels"])
    assert exposed == pytest.approx(plan.exposed_seconds, rel=1e-6)


def test_memory_over_the_step_has_its_peak(plan: Plan) -> None:
    memory = page_data(plan)["memory"]
    assert max(memory["course"]) == pytest.approx(plan.memory_bytes)
    assert sum(memory["live"]["bytes"]) + memory["between_bytes"] == pytest.approx(plan.memory_bytes)
    assert memory["live"]["bytes"] == sorted(memory["live"]["bytes"], reverse=True)


def test_without_overlap_there_is_no_timeline() -> None:
    data = page_data(scanned())
    assert data["timelines"] == [] and max(data["memory"]["course"]) > 0
