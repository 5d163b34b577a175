"""The text of a plan: what it says, how wide it is, and what happens when there is too much to say."""

import re
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.hardware.catalogue import hardware_for
from sbp.passes.explain.plan import Collective
from sbp.passes.explain.words import MAX_ROWS, rows
from sbp.passes.face import Plan
from sbp.passes.program.names import Names
from sbp.passes.render.diff import diff_text
from sbp.passes.render.page import plan_html
from sbp.passes.render.text import MAX_WIDTH, plan_text
from sbp.text.units import bytes_text, seconds_text


def many(plan: Plan, lines: int, each: int) -> Plan:
    """A plan with `each` different collectives at each of `lines` lines, with 1, 2, 3, ... bytes."""
    first = plan.collectives[0]
    cs = [
        replace(
            first,
            tensor=f"t{i}",
            shape=(i + 1,),
            source=f"m.py:{i % lines}",
            wire_bytes=float(i + 1),
            seconds=1e-6 * (i + 1),
            reason=f"reason of t{i}",
        )
        for i in range(lines * each)
    ]
    return replace(plan, collectives=tuple(cs))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="derivatives have other ops there, and ties others"
)
def test_golden_text(plan: Plan, golden: Callable[[str, str], None]) -> None:
    # What ops cost beside the collectives depends on how the JAX at hand writes a derivative.
    waited = tuple(replace(c, exposed_seconds=c.seconds / 2) for c in plan.collectives)
    figures = {"seconds": 5e-4, "step_seconds": 4.5e-4, "bound": 5e-4, "memory_bytes": 8e7}
    fixed = replace(plan, collectives=waited, **figures)
    golden("two_layers.txt", str(fixed) + "\n")


def test_time_with_overlap_and_without(plan: Plan) -> None:
    assert plan.overlaps and plan.step_seconds == pytest.approx(
        plan.seconds - sum(c.seconds - c.exposed_seconds for c in plan.collectives)
    )
    overlapped, serial = seconds_text(plan.step_seconds), seconds_text(plan.seconds)
    exposed = f"({seconds_text(plan.exposed_seconds)} of communication exposed)"
    line = f"{overlapped} per step with overlap, estimated {exposed}; {serial} one thing after the other"
    assert line in plan_text(plan) and line in plan_html(plan)
    assert f"{overlapped} estimated" in repr(plan)
    alone = replace(plan, step_seconds=plan.seconds)
    assert not alone.overlaps and f"{serial} per step, estimated;" in plan_text(alone)


def test_the_page_has_a_column_of_what_is_exposed(plan: Plan) -> None:
    page = plan_html(plan)
    assert ">exposed</th>" in page
    assert all(f'data-v="{c.exposed_seconds!r}"' in page for c, n in plan.merged_collectives() if n == 1)


def test_diff_names_both_times_where_anything_overlaps(plan: Plan) -> None:
    alone = replace(plan, step_seconds=plan.seconds)
    lines = [line.split()[0] for line in diff_text(plan, alone).split("\n") if line]
    assert [x for x in lines if x in ("time", "overlapped", "exposed")] == ["time", "overlapped", "exposed"]
    assert "overlapped" not in diff_text(alone, alone)


def test_text_says_everything(plan: Plan) -> None:
    text = plan_text(plan)
    assert max(map(len, text.splitlines())) <= MAX_WIDTH
    assert "\x1b" not in text
    for c in plan.collectives:
        assert c.kind.replace("_", "-") in text and c.source in text and bytes_text(c.wire_bytes) in text
    # The reasons, however they are broken into lines.
    words = re.sub(r"\s+", " ", text)
    assert "of weights['down']" in words
    assert (
        "dot_general sums over dim 1 (size 4096), which is split over 'model' as weights['down'] is"
        in " ".join(c.reason for c in plan.collectives)
    )
    for total in (bytes_text(plan.wire_bytes), bytes_text(plan.memory_bytes), "proven optimal"):
        assert total in text
    assert "result[0]  as weights" in text


def test_gap_is_stated(plan: Plan) -> None:
    cheapest = replace(plan, bound=0.75 * plan.seconds, cheapest_seconds=None)
    assert "at most 25 % from the optimum" in plan_text(cheapest)
    chosen = replace(cheapest, cheapest_seconds=0.9 * plan.seconds, step_seconds=0.95 * plan.seconds)
    said = plan_text(chosen)
    assert max(map(len, said.splitlines())) <= MAX_WIDTH
    words = re.sub(r"\s+", " ", said)
    assert (
        "chosen for its step of" in words and "at most 16.7 % from the optimum; its step is at most" in words
    )


def test_no_collectives(plan: Plan) -> None:
    empty = replace(plan, collectives=())
    assert "0 per step" in plan_text(empty)
    assert "No collectives" in plan_html(replace(empty, physical=None))


def test_very_many_lines_leave_a_summary(plan: Plan) -> None:
    big = many(plan, lines=200, each=2)
    shown, rest = rows(big)
    assert len(shown) == MAX_ROWS and len(rest) == 400 - MAX_ROWS
    assert min(r.collective.seconds for r in shown) > max(r.collective.seconds for r in rest)
    text = plan_text(big)
    sent, seconds = (sum(getattr(r.collective, of) for r in rest) for of in ("wire_bytes", "seconds"))
    assert f"and {len(rest)} smaller: {seconds_text(seconds)}, {bytes_text(sent)} in all" in text
    assert len(text.splitlines()) < 4 * MAX_ROWS + 40


def test_the_costliest_is_first_unless_asked_otherwise(plan: Plan) -> None:
    big = many(plan, lines=12, each=1)
    lines = [x for x in re.findall(r"m\.py:(\d+)", big.text()) if x]
    assert lines == sorted(lines, key=int, reverse=True) and len(lines) == 12
    assert re.findall(r"m\.py:(\d+)", big.text(by_time=False)) == lines[::-1]
    few = big.text(rows=3)
    assert len(re.findall(r"m\.py:(\d+)", few)) == 3 and "and 9 smaller" in few
    # The share of the step in which kernels wait stands below the time.
    top = max(big.collectives, key=lambda c: c.seconds)
    assert f"{top.exposed_seconds / big.step_seconds:.1%}" in big.text()


def test_eighty_columns_can_be_read(plan: Plan) -> None:
    text = plan_text(plan, 80)
    assert max(map(len, text.splitlines())) <= 80
    for c in plan.collectives:
        assert c.source in text and seconds_text(c.seconds) in text


def test_merged_rows_speak_for_layers(plan: Plan) -> None:
    c = plan.collectives[0]
    layers = tuple(replace(c, tensor=f"p['l'][{i}]['w']", reason=f"as p['l'][{i}]['w'] is") for i in range(3))
    ((one, n),) = replace(plan, collectives=layers).merged_collectives()
    assert (one.tensor, one.reason, n) == ("p['l'][*]['w']", "as p['l'][*]['w'] is", 3)
    assert one.wire_bytes == 3 * c.wire_bytes and one.count == 3 * c.count


def test_names_of_gradients_through_an_optimizer() -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.adamw(1e-3)

    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square(x @ p["w"] + p["b"]).mean()

    def step(params, state, x):  # type: ignore[no-untyped-def]
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = {"b": jax.ShapeDtypeStruct((16,), "float32"), "w": jax.ShapeDtypeStruct((8, 16), "float32")}
    state = jax.eval_shape(optimizer.init, params)
    slow = replace(hardware_for("cpu"), memory_bytes_per_second=4e9)  # splitting pays
    options = sbp.Options(hardware=slow)
    program = sbp.compile(step, sbp.placement("cpu", shape=(4,)), in_sbp=([B], [B], [S(0)]), options=options)
    plan = program.plan(params, state, jax.ShapeDtypeStruct((4096, 8), "float32"))
    assert {c.tensor for c in plan.collectives} == {"gradient of params['b']", "gradient of params['w']"}
    assert all("as x is; the update at" in c.reason for c in plan.collectives)
    assert plan.physical is not None
    names = Names(plan.physical.graph, plan.in_paths, plan.out_paths)
    assert {"forward", "backward", "update"} == set(names.phases.values())
    made = {names.of(x) for x in plan.physical.graph.outputs if isinstance(x, int)}
    assert {"new params['b']", "new params['w']"} <= made


def test_names_fall_back_to_the_op() -> None:
    devices = sbp.placement("cpu", shape=(4,))
    program = sbp.compile(lambda x: jnp.tanh(x @ x.T) @ x, devices, in_sbp=([S(1)],), out_sbp=[B])
    tensors = {c.tensor for c in program.plan(jax.ShapeDtypeStruct((8, 8), "float32")).collectives}
    assert tensors and tensors <= {"dot_general", "tanh", "x", "result"}


def test_html_escapes_names(plan: Plan) -> None:
    odd: Collective = replace(plan.collectives[0], tensor="<script>alert(1)</script>")
    html = plan_html(replace(plan, collectives=(odd,), physical=None))
    assert "<script>" not in html and "&lt;script&gt;" in html
