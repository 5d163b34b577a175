"""The outline: every op in one leaf, layers found and folded, collectives where they are wanted."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.passes.face import Plan
from sbp.passes.render.outline import Outline, items, items_by_call
from sbp.passes.render.page_data import page_data
from sbp.passes.render.program_data import program_data
from sbp.passes.render.repeats import repeats
from sbp.passes.render.wiring import Wiring
from tests.passes.render.nets import deep, scanned


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
    rows = Counter(r for s in wiring.collectives for r in s.rows)
    assert set(rows) == set(range(len(deep_plan.collectives))) and set(rows.values()) == {1}
    n = len(outline.groups)
    for k, s in enumerate(wiring.collectives):
        assert any(b == n + k for _, b in wiring.edges) or s.kind == "all_gather"
        assert any(a == n + k for a, _ in wiring.edges) or n + k in wiring.makers.values()


def test_a_loop_is_a_group() -> None:
    plan = scanned()
    outline, wiring = outlined(plan)
    (loop,) = (k for k, g in enumerate(outline.groups) if g.kind == "loop")
    assert outline.groups[loop].title == "scan x 3"
    # The stack is gathered once, before the loop, and read in it.
    (sent,) = wiring.collectives
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
    found = list(
        items_by_call(list(items(steps, 1)), lambda i: ("", "f" if i.step["at"] != "f.py:5" else "g"))
    )
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


def ends(timeline: Mapping[str, Any], lane: int) -> list[tuple[float, float]]:
    """From when to when the spans of a lane run."""
    spans = timeline["spans"]
    return [(a, b) for at, a, b in zip(spans["lane"], spans["from"], spans["to"], strict=True) if at == lane]


def test_without_overlap_one_thing_runs_after_the_other() -> None:
    plan = scanned()
    step, trip = page_data(plan)["timelines"]
    spans = sorted(ends(step, 0) + ends(step, 1))
    assert spans[0][0] == 0.0 and spans[-1][1] == pytest.approx(plan.step_seconds)
    assert all(b == pytest.approx(c) for (_, b), (c, _) in itertools.pairwise(spans))
    # The loop is one span, which leads to one of its three trips.
    (loop,) = (k for k, at in enumerate(step["spans"]["opens"]) if at == 1)
    assert step["spans"]["to"][loop] - step["spans"]["from"][loop] == pytest.approx(3 * trip["seconds"])
    assert "scan at nets.py:" in trip["name"] and trip["name"].endswith("of 3")
    held = step["held"][0]
    assert max(n for _, n in held) == pytest.approx(plan.memory_bytes)
    assert all(a <= b for (a, _), (b, _) in itertools.pairwise(held)) and held[-1][0] == plan.step_seconds


def test_a_trip_of_a_loop_is_drawn_with_what_it_hides() -> None:
    """Layers in a scan on eight H100s, split inside: each trip sends a sum."""

    def loss(ws: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.square(jax.lax.scan(block, x, ws)[0]).mean()

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, "float32")

    ws = {"up": shape(6, 1024, 8192), "down": shape(6, 8192, 1024)}
    given = {"up": S(2), "down": S(1)}, B
    program = sbp.compile(jax.grad(loss), sbp.placement("h100", shape=(8,)), in_sbp=given)
    plan = program.plan(ws, shape(2048, 1024))
    data = page_data(plan)
    step, *trips = data["timelines"]
    assert len(trips) == 2  # forward and backward
    assert max(b for lane in (0, 1) for _, b in ends(step, lane)) == pytest.approx(plan.step_seconds)
    opens = step["spans"]["opens"]
    for at, trip in enumerate(trips, 1):
        k = opens.index(at)
        seconds = step["spans"]["to"][k] - step["spans"]["from"][k]
        assert seconds == pytest.approx(6 * trip["seconds"], rel=0.35)  # the first and the last are others
    assert {r for t in trips for rows in t["spans"]["rows"] for r in rows}
    assert {r for t in (step, *trips) for rows in t["spans"]["rows"] for r in rows} == set(
        range(len(data["rows"]["kind"]))
    )
    kernels = [n for n, lane in zip(step["spans"]["node"], step["spans"]["lane"], strict=True) if lane == 0]
    assert any(kernels) and all(n is None or 0 < n < len(data["groups"]["kind"]) for n in kernels)


def test_what_loops_read_leads_to_who_reads_it() -> None:
    data = page_data(scanned())
    nodes = dict(zip(data["at_rest"]["path"], data["at_rest"]["nodes"], strict=True))
    inside = {k for k, kind in enumerate(data["groups"]["kind"]) if kind == "line"}
    assert set(nodes["x"]) & inside


def test_layers_that_differ_are_told_by_their_weights() -> None:
    """Blocks of which some have a projection, as in residual networks of images: what repeats is no layer."""

    def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        h = norm(x @ w["a"])
        h = norm(jnp.tanh(h) @ w["b"])
        x = norm(x @ w["skip"]) if "skip" in w else x
        return jnp.tanh(x + h)

    def norm(x: jax.Array) -> jax.Array:
        centred = x - x.mean(0)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(0) + 1e-5)

    def net(w: dict[str, Any], x: jax.Array) -> jax.Array:
        x = norm(x @ w["stem"])
        for layers in w["groups"]:
            for one in layers:
                x = block(x, one)
        return x @ w["head"]

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, "float32")

    plain = {"a": shape(64, 64), "b": shape(64, 64)}
    groups = [[plain | {"skip": shape(64, 64)}, plain, plain], [plain | {"skip": shape(64, 64)}, plain]]
    weights = {"stem": shape(32, 64), "groups": groups, "head": shape(64, 8)}
    plan = sbp.compile(net, sbp.placement("cpu", shape=(2,))).plan(weights, shape(16, 32))
    outline, _ = outlined(plan)
    layers = [(g.title, g.times, g.ops) for g in outline.groups if g.kind == "layer"]
    assert all("groups[" in title for title, _, _ in layers)
    assert sum(times for _, times, _ in layers) == 5
    # The projection of a block is in the block, and nothing of a block stands beside it.
    beside = [g.title for g in outline.groups if g.parent == 0 and g.kind != "layer"]
    assert not any("skip" in title or "block" in title for title in beside)
    assert len({ops / times for _, times, ops in layers}) >= 2


def test_layers_whose_weights_are_all_cast_at_once_are_one_group() -> None:
    """As models in bfloat16 do, each layer in a scope of its own: the layers are what uses the weights."""

    def net(ws: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for i, w in enumerate(jax.tree.map(lambda w: w.astype("bfloat16"), ws)):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w["a"]) @ w["b"]
        return x

    w = {name: jax.ShapeDtypeStruct((16, 16), "float32") for name in "ab"}
    plan = sbp.compile(net, sbp.placement("cpu", shape=(2,))).plan(
        [w] * 6, jax.ShapeDtypeStruct((8, 16), "bfloat16")
    )
    outline, _ = outlined(plan)
    layers = [(g.title, g.times) for g in outline.groups if g.kind == "layer"]
    assert sum(times for _, times in layers) == 6 and len(layers) <= 3
    assert all(title.startswith("ws[") for title, _ in layers)
    assert not any(g.title.startswith("layer") for g in outline.groups)
