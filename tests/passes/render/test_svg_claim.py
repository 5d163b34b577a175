"""The head of a picture: the bar is the step, rows are the plan's, and it is read in light and in dark."""

import re
import xml.etree.ElementTree as ET

import jax
import pytest

import sbp
from sbp import B, S
from sbp.passes.explain.words import kind_text, rows
from sbp.passes.face import Plan
from sbp.passes.render.colours import ACTIONS, COLLECTIVES, KERNELS, OPS, mark_of
from sbp.passes.render.outline import Outline
from sbp.passes.render.program_data import program_data
from sbp.passes.render.svg import claim_svg, plan_svg
from sbp.passes.render.svg_claim import COSTLIEST, Spot, step_parts, streams
from sbp.passes.render.svg_parts import (
    ALARM,
    CARD,
    DARK,
    GROUND,
    INK,
    INK_ON_COLOUR,
    PAPER_DARK,
    SOFT,
    SOFT_ON_COLOUR,
)
from sbp.text.units import bytes_text, seconds_text
from tests.models.test_curves import contrast
from tests.passes.render.nets import deep, piped

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def overlapped() -> Plan:
    """A step on GPUs, some of whose communication is hidden."""

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(ws: list[jax.Array]) -> jax.Array:
            h = x
            for w in ws:
                h = jax.nn.relu(h @ w)
            return (h * h).mean()

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    program = sbp.compile(step, sbp.placement("h100", shape=(8,)), in_sbp=([B], [S(0)]))
    w = jax.ShapeDtypeStruct((2048, 2048), "float32")
    return program.plan([w] * 4, jax.ShapeDtypeStruct((65536, 2048), "float32"))


def outline(plan: Plan) -> Outline:
    program = program_data(plan)
    assert program is not None
    return Outline.of(program, plan.in_paths)


def words(svg: str) -> list[str]:
    root = ET.fromstring(svg)
    return [e.text or "" for tag in ("text", "tspan") for e in root.iter(f"{SVG}{tag}")]


def test_the_bar_is_the_step(overlapped: Plan) -> None:
    for plan in (overlapped, deep(3)):
        parts = step_parts(plan, outline(plan))
        assert sum(p.seconds for p in parts) == pytest.approx(plan.step_seconds)
        waited = sum(p.seconds for p in parts if p.kind)
        assert waited == pytest.approx(plan.exposed_seconds) and waited > 0
        assert {"forward", "backward", "update"} >= {p.name for p in parts if not p.kind} >= {"backward"}


def test_the_costliest_are_listed(overlapped: Plan) -> None:
    for plan in (overlapped, deep(3)):
        said = words(claim_svg(plan))
        shown, rest = rows(plan, COSTLIEST)
        assert "The costliest collectives" in said and shown
        for r in shown:
            assert bytes_text(r.collective.wire_bytes) in said and kind_text(r.collective.kind) in said
            assert seconds_text(r.collective.seconds) in said and r.collective.source in said
        assert any(t.startswith(f"and {len(rest)} smaller") for t in said) == bool(rest)


def test_rows_that_each_have_a_node_are_not_listed(plan: Plan) -> None:
    """A small program's picture has them in its graph; in a large one some are inside what is folded."""
    heading = "The costliest collectives"
    assert heading not in words(plan_svg(plan)) and heading in words(claim_svg(plan))
    assert heading in words(plan_svg(deep(24)))


def test_what_runs_beside_what(overlapped: Plan) -> None:
    """Kernels above, what is sent below: as long together as they take, apart from gaps that nobody sees."""
    drawn, _ = streams(overlapped, outline(overlapped), Spot(0, 0, 1062, 0))
    boxes = [
        (float(m[1]), float(m[2]), m[3])
        for m in (re.search(r'x="([\d.]+)" .*?width="([\d.]+)".*?fill="(#\w+)"', d) for d in drawn)
        if m
    ]
    kernels = sum(width for _, width, fill in boxes if fill in {mark.fill for mark in KERNELS.values()})
    left_out = overlapped.exposed_seconds / overlapped.step_seconds
    assert kernels / 1000 == pytest.approx(1 - left_out, abs=0.03)
    sent = {fill for _, _, fill in boxes} & {mark.fill for mark in COLLECTIVES.values()}
    assert sent == {mark_of(kind).fill for kind in overlapped.by_kind()}
    assert streams(deep(3), outline(deep(3)), Spot(0, 7, 900, 0)) == ([], 7)


def test_names_are_text() -> None:
    def f(x: jax.Array) -> jax.Array:
        return x.sum(0)

    f.__name__ = "<b>&"
    program = sbp.compile(f, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)],), out_sbp=[B])
    plan = program.plan(jax.ShapeDtypeStruct((8, 8), "float32"))
    assert any("<b>&" in t for t in words(claim_svg(plan)))


@pytest.mark.parametrize("dark", [False, True])
def test_texts_are_read_in_light_and_dark(dark: bool) -> None:
    """WCAG AA on every ground that a text stands on."""

    def shown(colour: str) -> str:
        return DARK.get(colour, colour) if dark else colour

    grounds = [PAPER_DARK if dark else "#ffffff", shown(GROUND), shown(CARD)]
    assert all(contrast(shown(c), g) >= 4.5 for c in (INK, SOFT, ALARM) for g in grounds)
    fills = {mark.fill for mark in (*COLLECTIVES.values(), *KERNELS.values())}
    assert not {*fills, INK_ON_COLOUR, SOFT_ON_COLOUR} & set(DARK)
    assert all(contrast(c, g) >= 4.5 for c in (INK_ON_COLOUR, SOFT_ON_COLOUR) for g in fills)


def test_no_colour_is_left_behind(overlapped: Plan) -> None:
    """Every colour of a picture has one for dark, or is meant to stay."""
    marks = (*COLLECTIVES.values(), *KERNELS.values(), *ACTIONS.values(), OPS)
    stay = {c for mark in marks for c in mark[:2]} | {INK_ON_COLOUR, SOFT_ON_COLOUR}
    for svg in (plan_svg(overlapped), claim_svg(overlapped), plan_svg(deep(24))):
        assert {*re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', svg)} <= stay | set(DARK)
    assert "prefers-color-scheme:dark" in claim_svg(piped())


def test_a_picture_without_a_program_is_refused(overlapped: Plan) -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match="no program to draw"):
        claim_svg(replace(overlapped, physical=None, program=None))
