"""The folded graph and its pictures: every collective is there, nothing overlaps, deep nets stay small."""

import itertools
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import S
from sbp.passes.face import Plan
from sbp.passes.render.colours import COLLECTIVES
from sbp.passes.render.dot import dot_text
from sbp.passes.render.folded_graph import MAX_BOXES, fold, kinds_of
from sbp.passes.render.svg import place, plan_svg
from tests.passes.render.nets import deep, scanned

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def deep_plan() -> Plan:
    return deep(12)


def test_every_collective_is_drawn_once(plan: Plan, deep_plan: Plan) -> None:
    for p in (plan, deep_plan, scanned()):
        drawn = sorted(r for _, rows in fold(p).nodes(data="rows") for r in rows)
        assert drawn == list(range(len(p.collectives)))


def test_pills_say_what_they_stand_for(plan: Plan) -> None:
    found = fold(plan)
    for _, d in found.nodes(data=True):
        if d["kind"] != "ops":
            (own,) = {plan.collectives[r].kind for r in d["rows"]}
            assert d["kind"] == own
    assert {kind for kind, _, _ in kinds_of(plan)} == set(plan.by_kind())


def test_deep_networks_stay_small() -> None:
    sizes = [fold(deep(n)).number_of_nodes() for n in (6, 24)]
    assert sizes[0] == sizes[1] <= MAX_BOXES + 12
    assert all(fold(deep(6), 4).number_of_nodes() <= n for n in sizes[:1])


def test_dot_and_svg_have_the_same_content(plan: Plan) -> None:
    graph, dot, svg = fold(plan), dot_text(plan), plan_svg(plan)
    assert len(re.findall(r"^ +n\d+ \[label=", dot, re.MULTILINE)) == graph.number_of_nodes()
    assert dot.count(" -> n") == graph.number_of_edges()
    root = ET.fromstring(svg)
    assert len(root.findall(f".//{SVG}g/{SVG}path")) == graph.number_of_edges()
    shown = {t.text for t in root.iter(f"{SVG}text")}
    assert {d["note"] for _, d in graph.nodes(data=True) if "note" in d} <= shown


def test_colours_tell_the_kinds_apart(plan: Plan) -> None:
    svg = plan_svg(plan)
    assert all(COLLECTIVES[kind].border in svg for kind in plan.by_kind())
    borders = [
        COLLECTIVES[k].border for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
    ]
    assert len(set(borders)) == len(borders)


def test_nothing_overlaps_and_all_is_inside(plan: Plan, deep_plan: Plan) -> None:
    for p in (plan, deep_plan):
        layout = place(fold(p))
        spots = list(layout.spots.values())
        for a, b in itertools.combinations(spots, 2):
            beside = a.x + a.width <= b.x or b.x + b.width <= a.x
            assert beside or a.y + a.height <= b.y or b.y + b.height <= a.y, (a, b)
        assert all(s.x >= 0 and s.x + s.width <= layout.width for s in spots)
        assert all(s.y >= 0 and s.y + s.height <= layout.height for s in spots)


def test_a_forward_alone_has_one_lane() -> None:
    program = sbp.compile(
        lambda x, w: jnp.tanh(x @ w), sbp.placement("cpu", shape=(4,)), in_sbp=([S(1)], [S(0)])
    )
    plan = program.plan(jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32"))
    assert [name for name, _ in place(fold(plan)).lanes] == ["forward"]


def test_a_plan_without_collectives_is_drawn() -> None:
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)],))
    plan = program.plan(jax.ShapeDtypeStruct((8,), "float32"))
    assert not plan.collectives
    assert ET.fromstring(plan_svg(plan)) is not None and "digraph" in dot_text(plan)


def test_a_plan_of_nothing_is_drawn() -> None:
    program = sbp.compile(lambda x: x, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)],))
    plan = program.plan(jax.ShapeDtypeStruct((8,), "float32"))
    assert ET.fromstring(plan_svg(plan)) is not None and "digraph" in dot_text(plan)
