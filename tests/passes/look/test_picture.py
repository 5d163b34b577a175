"""The picture: the graph has every collective, its boxes can be read, the drawing shows what it holds."""

import itertools
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.passes.face import Plan
from sbp.passes.look.drawing import COLOURS, dot_text, drawing, kinds_of
from sbp.passes.look.layered import place, spread
from sbp.passes.look.picture import HARD_LIMIT, nodes_of, plan_graph
from sbp.passes.look.svg import plan_svg
from sbp.signature import format_sbp

SVG = "{http://www.w3.org/2000/svg}"


def deep(layers: int, shape: tuple[int, ...] = (2, 2)) -> Plan:
    """A residual network of many layers, without scopes: its lines are all the same."""

    def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        hidden = x @ w["up"]
        hidden = jnp.tanh(hidden)
        return x + hidden @ w["down"]

    def loss(ws: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for w in ws:
            x = block(x, w)
        return jnp.square(x).mean()

    def step(ws, x):  # type: ignore[no-untyped-def]
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

    w = {"down": jax.ShapeDtypeStruct((64, 16), "float32"), "up": jax.ShapeDtypeStruct((16, 64), "float32")}
    given = [{"down": [B, S(0)], "up": [B, S(1)]}] * layers, [S(0), B]
    program = sbp.compile(step, sbp.placement("cpu", shape=shape), in_sbp=given)
    return program.plan([w] * layers, jax.ShapeDtypeStruct((32, 16), "float32"))


@pytest.fixture(scope="module")
def deep_plan() -> Plan:
    return deep(12)


def check_graph(plan: Plan, graph: nx.DiGraph) -> None:
    assert nx.is_directed_acyclic_graph(graph)
    collectives = sorted(i for _, i in nodes_of(graph, "collective"))
    assert collectives == list(range(len(plan.collectives)))
    for _, i in nodes_of(graph, "collective"):
        node = ("collective", i)
        assert graph.in_degree(node) >= 1 and graph.out_degree(node) >= 1
        assert {s for _, _, d in graph.in_edges(node, data=True) for _, _, s, _ in d["tensors"]} == {
            format_sbp(plan.collectives[i].before)
        }
    assert len(list(nodes_of(graph, "result"))) == len(plan.out_paths)


def test_graph_has_every_collective(plan: Plan) -> None:
    check_graph(plan, plan_graph(plan))


def test_graph_of_many_layers(deep_plan: Plan) -> None:
    graph = plan_graph(deep_plan)
    check_graph(deep_plan, graph)
    assert len(list(nodes_of(graph, "ops"))) <= HARD_LIMIT


def wavy(x: jax.Array) -> jax.Array:
    """Three lines of three ops each."""
    x = jnp.sin(jnp.cos(jnp.sin(x)))
    x = jnp.cos(jnp.sin(jnp.cos(x)))
    return jnp.exp(jnp.exp(jnp.exp(x)))


def test_ops_are_gathered() -> None:
    """Every op that computes is in exactly one box, however many boxes there may be."""
    program = sbp.compile(wavy, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)],))
    plan = program.plan(jax.ShapeDtypeStruct((8,), "float32"))
    fine, coarse = plan_graph(plan, 10), plan_graph(plan, 1)
    assert [len(g.nodes[n]["box"].sources) for g in (fine, coarse) for n in nodes_of(g, "ops")] == [
        3,
        3,
        3,
        9,
    ]


def test_ops_are_never_lost() -> None:
    plan = deep(2)
    fine, coarse = plan_graph(plan, 10_000), plan_graph(plan, 1)
    ops = [sum(len(g.nodes[n]["box"].sources) for n in nodes_of(g, "ops")) for g in (fine, coarse)]
    assert ops[0] == ops[1] > 0
    assert len(list(nodes_of(coarse, "ops"))) <= len(list(nodes_of(fine, "ops")))
    check_graph(plan, coarse)


def test_boxes_are_called_by_their_functions(plan: Plan) -> None:
    graph = plan_graph(plan)
    boxes = [graph.nodes[n]["box"] for n in nodes_of(graph, "ops")]
    assert {b.phase for b in boxes} == {"forward", "backward", "update"}
    assert {b.title for b in boxes} == {"loss", "update"}
    assert all(re.fullmatch(r"two_layers\.py:\d+(-\d+)?", b.lines) for b in boxes)


def test_drawing_counts_what_the_plan_counts(plan: Plan, deep_plan: Plan) -> None:
    for p in (plan, deep_plan):
        found = kinds_of(drawing(p))
        assert {k: n for k, (n, _) in found.items()} == {k: n for k, (n, _) in p.by_kind().items()}
        for kind, (_, wire) in found.items():
            assert wire == pytest.approx(p.by_kind()[kind][1])


def test_dot_and_svg_have_the_same_content(plan: Plan) -> None:
    graph, dot, svg = drawing(plan), dot_text(plan), plan_svg(plan)
    assert len(re.findall(r"^ +n\d+ \[label=", dot, re.MULTILINE)) == graph.number_of_nodes()
    assert dot.count(" -> n") == graph.number_of_edges()
    root = ET.fromstring(svg)
    assert len(root.findall(f".//{SVG}g/{SVG}path")) == graph.number_of_edges()
    shown = {t.text for t in root.iter(f"{SVG}text")}
    for _, d in graph.nodes(data=True):
        assert not d["head"] or d["head"] in shown
        assert d["head"] in dot


def test_colours_tell_the_kinds_apart(plan: Plan) -> None:
    svg = plan_svg(plan)
    for kind in plan.by_kind():
        assert COLOURS[kind][1] in svg
    borders = [COLOURS[k][1] for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")]
    assert len(set(borders)) == len(borders)


def test_nothing_overlaps_and_all_is_inside(plan: Plan, deep_plan: Plan) -> None:
    for p in (plan, deep_plan):
        layout = place(drawing(p))
        spots = list(layout.spots.values())
        for a, b in itertools.combinations(spots, 2):
            apart = (
                a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
            )
            assert apart, (a, b)
        assert all(s.x >= 0 and s.x + s.width <= layout.width for s in spots)
        assert all(s.y >= 0 and s.y + s.height <= layout.height for s in spots)


def test_spread_is_the_least_movement() -> None:
    """Against all positions on a grid, for three items."""
    rng = np.random.default_rng(1)
    heights = np.array([4.0, 2.0, 6.0])
    grid = np.arange(-12.0, 28.0)
    every = np.array(list(itertools.product(grid, repeat=3)))
    for _ in range(10):
        wanted = rng.integers(0, 16, 3).astype(float)
        tops = np.array(spread(wanted.tolist(), heights.tolist(), 1.0))
        order = np.argsort(wanted, kind="stable")
        pairs = list(itertools.pairwise(order))
        assert all(tops[a] + heights[a] + 1 <= tops[b] + 1e-9 for a, b in pairs)
        legal = np.all([every[:, a] + heights[a] + 1 <= every[:, b] for a, b in pairs], axis=0)
        best = np.square(every[legal] + heights / 2 - wanted).sum(axis=1).min()
        assert np.square(tops + heights / 2 - wanted).sum() <= best + 1e-9


def test_a_forward_alone_has_one_lane() -> None:
    program = sbp.compile(
        lambda x, w: jnp.tanh(x @ w), sbp.placement("cpu", shape=(4,)), in_sbp=([S(1)], [S(0)])
    )
    plan = program.plan(jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32"))
    assert [name for name, _ in place(drawing(plan)).lanes] == ["forward"]
    assert ET.fromstring(plan_svg(plan)) is not None


def test_a_plan_without_collectives_is_drawn() -> None:
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)],))
    plan = program.plan(jax.ShapeDtypeStruct((8,), "float32"))
    assert not plan.collectives
    assert ET.fromstring(plan_svg(plan)) is not None and "digraph" in dot_text(plan)


def test_a_loop_is_drawn_in_place() -> None:
    def f(x: jax.Array, ws: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    program = sbp.compile(f, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)], [S(1)]))
    plan = program.plan(
        jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((3, 16, 16), "float32")
    )
    check_graph(plan, plan_graph(plan))
    assert ET.fromstring(plan_svg(plan)) is not None
