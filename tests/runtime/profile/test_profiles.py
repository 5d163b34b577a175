"""Profiles of programs that run: every collective has its time or a reason, and the parts are the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from benchmarks import cases
from models.dlrm import DLRM
from models.recommender.layers import Inputs
from models.recommender.learner import LAYOUTS, OPTIMIZERS, Learner, collection
from models.recommender.synthetic import Teacher
from sbp import S
from sbp.passes.explain.measurement import BOXING, MADE_BY_XLA, group_times, steps_by_number
from sbp.passes.explain.plan import PlanData
from sbp.passes.face import load_plan
from sbp.passes.render.measurement_text import measured_text, ratio_text
from sbp.passes.render.page_data import page_data
from sbp.passes.render.program_data import program_data
from sbp.passes.render.web_page import data_of
from sbp.runtime.hlo.parser import parse
from sbp.runtime.profile.profile import Profile
from sbp.runtime.profile.trace_alignment import MARK
from tests.golden import two_stages

Made = tuple[Any, Any]
"""A program and its arguments."""


def of_case(case: cases.Case, shape: tuple[int, ...], **given: Any) -> Made:
    program = sbp.compile(case.step, sbp.placement("cpu", shape=shape), in_sbp=case.in_sbp, **given)
    return program, case.make()


def scanned() -> Made:
    """A loop over stacked weights, forward and backward, with what is gathered inside."""

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].sum()

    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        return ws - 0.1 * jax.grad(loss)(ws, x)

    program = sbp.compile(step, sbp.placement("cpu", shape=(4,)), in_sbp=([S(1)], [S(0)]), donate_argnums=0)
    return program, (jnp.ones((3, 64, 64)) / 64, jnp.ones((128, 64)))


def recommender() -> Made:
    """A small DLRM, its tables split by rows: sparse exchanges send inside ops."""
    sizes, width, dense, clicks = (4000, 300, 9000, 1700), 16, 5, 256
    learner = Learner(
        DLRM((32,), (32,)),
        Inputs(dense, len(sizes), width),
        collection(sizes, width, LAYOUTS["rows"](4), 4),
        OPTIMIZERS["adagrad"].make(0.1),
        optax.adam(0.01),
    )
    batch = Teacher.plant(sizes, dense=dense, seed=1).batch(clicks, 0)
    batch = replace(batch, keys=np.asarray(batch.keys).astype(np.int32))
    params = learner.init(jax.random.key(0))
    placement = sbp.placement("cpu", shape=(4,))
    program = sbp.compile(learner.step, placement, in_sbp=learner.in_sbp(placement), donate_argnums=(0, 1))
    return program, (params, learner.init_state(params), batch)


PROGRAMS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: of_case(cases.mlp_case("2d", (2, 4), 2), (2, 4)),
    "gpt": lambda: of_case(cases.gpt_case("2d", (2, 4), 1), (2, 4), donate_argnums=(0, 1)),
    "scan": scanned,
    "dlrm": recommender,
    "tables by rows": lambda: of_case(cases.embedding_case("rows", (4,), 2), (4,)),
}


SMALL = ("mlp",)
LARGE = [pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS if name not in SMALL]


@pytest.fixture(scope="module", params=[*SMALL, *LARGE])
def made(request: pytest.FixtureRequest) -> tuple[Any, Any, Profile]:
    program, args = PROGRAMS[request.param]()
    return program, args, program.profile(*args)


@pytest.mark.some(1)
def test_every_collective_has_its_time_or_a_reason(made: tuple[Any, Any, Profile]) -> None:
    _, _, profile = made
    assert profile.step is not None, profile.no_breakdown_reason
    rows = profile.step.rows
    assert [c.name for c in profile.step.collectives if c.name] == [c.name for c in profile.plan.collectives]
    timed = [c for c in profile.plan.collectives if rows[c.name].seconds is not None]
    assert len(timed) >= len(profile.plan.collectives) / 2
    for c in profile.plan.collectives:
        m = rows[c.name]
        if m.seconds is None:
            assert m.remark and "has no event" not in m.remark
        else:
            assert m.seconds > 0 and m.times >= c.count and m.exposed_seconds <= profile.step.seconds


def test_the_parts_are_the_step(made: tuple[Any, Any, Profile]) -> None:
    _, _, profile = made
    step = profile.step
    assert step is not None
    parts = step.kernel_seconds + step.exposed_seconds + step.waiting_seconds + step.unclaimed_seconds
    assert parts == pytest.approx(step.seconds, rel=1e-9)
    assert step.added_seconds < step.kernel_seconds  # kernels lead back to the program
    program = program_data(profile.plan)
    assert program is not None and len(step.step_seconds) == len(list(steps_by_number(program["steps"])))
    groups = group_times(program, step)
    assert math.fsum(g.seconds for g in groups) == pytest.approx(step.kernel_seconds)
    planned = math.fsum(g.estimated_seconds for g in groups)
    collectives = math.fsum(c.seconds for c in profile.plan.collectives)
    assert planned + collectives == pytest.approx(profile.plan.seconds, rel=0.02)
    assert any(g.seconds for g in groups if g.phase not in (BOXING, ""))


def test_text_fits_a_terminal(made: tuple[Any, Any, Profile]) -> None:
    _, _, profile = made
    text = profile.text(80)
    assert max(map(len, text.split("\n"))) <= 80
    assert all(
        words in text for words in ("waiting for other devices", "unattributed: between", "kernels of")
    )
    assert "share 2 cores" in replace(profile, cores=2).text(80)


def test_a_page_has_both(made: tuple[Any, Any, Profile]) -> None:
    _, _, profile = made
    step = profile.step
    assert step is not None
    data = page_data(profile.plan, step)
    assert data["beside"]["kernels"][0] == pytest.approx(step.kernel_seconds)
    known = [s for s in data["rows"]["measured"] if s is not None]
    assert math.fsum(known) == pytest.approx(math.fsum(c.seconds or 0 for c in step.collectives if c.name))
    roots = [v for v, parent in enumerate(data["groups"]["parent"]) if parent == 0]
    inside = math.fsum(data["groups"]["measured"][v] for v in roots)
    assert inside == pytest.approx(data["groups"]["measured"][0])
    assert 0 < inside <= step.kernel_seconds * (1 + 1e-9)
    drawn = data["timelines"][-1]
    assert "measured by JAX's profiler" in drawn["name"]
    assert set(drawn["spans"]["lane"]) == {0, 1}
    assert max(drawn["spans"]["to"]) <= step.seconds * 1.05
    kinds = set(drawn["spans"]["kind"])
    assert kinds & {c.kind for c in profile.plan.collectives}
    assert ("wait" in kinds) == any(span.waits and span.rows for span in step.spans)


def test_arguments_are_not_consumed() -> None:
    program, args = scanned()
    placed = program.place(*args)
    profile = program.profile(*placed)
    assert profile.step is not None and not any(x.is_deleted() for x in placed)
    assert program(*placed).shape == args[0].shape and placed[0].is_deleted()


@pytest.mark.full
def test_marks_change_nothing_but_names() -> None:
    """The program that is profiled is the one that runs: the same instructions, in the same order."""
    program, args = PROGRAMS["gpt"]()
    _, built = program._prepare(args, {}, concrete=True)
    physical = built.plan.physical
    marks = {id(step): f"{MARK}{k}" for k, (step, _) in enumerate(physical.walk())}
    _, _, consts = built.executable
    placed = built.place(jax.tree.leaves(args))
    texts = [
        built.jit(program.placement.mesh, None, m).lower(*placed, *consts).compile().as_text()
        for m in ({}, marks)
    ]
    assert f"sbp.{MARK}" in texts[1] and f"sbp.{MARK}" not in texts[0]

    def opcodes(text: str) -> list[tuple[str, str]]:
        module = parse(text)
        return [
            (x.opcode, "".join(x.shape))
            for c in module.computations.values()
            for x in c.instructions.values()
        ]

    assert opcodes(texts[0]) == opcodes(texts[1])


def test_part_of_the_devices() -> None:
    """Devices are found by their place in the mesh, not by their numbers."""
    _, last = sbp.placement("cpu", shape=(2, 4), axes=("half", "x")).split("half")
    program = sbp.compile(lambda x: jnp.sin(x).sum(), last, in_sbp=[S(0)])
    profile = program.profile(jnp.ones((1024, 64)))
    assert profile.step is not None and profile.step.devices == 4
    (row,) = profile.step.collectives
    assert row.seconds is not None and row.times == 1


def test_a_profile_that_is_being_recorded(tmp_path: Any) -> None:
    """JAX records one at a time: the step is measured, and not divided."""
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(2,)))
    with jax.profiler.trace(str(tmp_path)):
        profile = program.profile(jnp.ones((4, 4)))
    assert profile.step is None and "cannot be started" in profile.no_breakdown_reason
    assert "not: JAX's profiler cannot be started" in str(profile)


@pytest.mark.full
def test_a_saved_plan_takes_the_profile(tmp_path: Any) -> None:
    program, args = PROGRAMS["mlp"]()
    plan, profile = program.plan(*args), program.profile(*args)
    plan.save(tmp_path / "plan.json")
    load_plan(tmp_path / "plan.json").save(tmp_path / "plan.html", profile=profile)
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert '"word":"measured"' in page


@pytest.fixture(scope="module")
def pipeline() -> Profile:
    program = sbp.compile(
        two_stages.step, two_stages.step_placement, in_sbp=two_stages.step_sbp, donate_argnums=0
    )
    return program.profile(*two_stages.values())


def program_of(plan: PlanData) -> dict[str, Any]:
    found = program_data(plan)
    assert found is not None
    return found


@pytest.mark.full
def test_each_placement_of_a_pipeline(pipeline: Profile) -> None:
    """Its parts are the step too, and every collective of every placement has its time."""
    plan = pipeline.plan
    assert plan.stages and len(pipeline.places) == 2 and not pipeline.no_breakdown_reason
    for part, step in zip(plan.stages, pipeline.places, strict=True):
        parts = step.kernel_seconds + step.exposed_seconds + step.waiting_seconds + step.unclaimed_seconds
        assert parts == pytest.approx(step.seconds, rel=1e-9) and step.kernel_seconds > 0
        assert step.seconds == pipeline.places[0].seconds and step.devices == 2
        # Kernels are of lines of the stage, in the pass that their piece is of.
        groups = [g for g in group_times(program_of(part), step) if g.source != MADE_BY_XLA]
        assert {g.phase for g in groups if g.seconds} >= {"forward", "backward"}
        assert all(g.source.startswith("two_stages.py:") for g in groups if g.phase != BOXING)
        assert [c.name for c in step.collectives] == [c.name for c in part.collectives]
        assert all(c.seconds is not None and c.times >= 1 for c in step.collectives)


def test_what_a_stage_sends_stands_beside_its_estimate(pipeline: Profile) -> None:
    sent = {a.kind.value: a for a in pipeline.actions if a.kind.value in ("SF", "SB")}
    assert pipeline.task is not None
    times = pipeline.task.figures.times
    assert sent["SF"].estimated_seconds == times.on_the_way(0, 1) and sent[
        "SB"
    ].estimated_seconds == times.on_the_way(1, 0)
    headings, *rows = pipeline.rows()
    ratio = headings.index("ratio")
    assert [row[ratio] for row in rows] == [
        ratio_text(a.alone_seconds, a.estimated_seconds) for a in pipeline.actions
    ]


def test_a_page_of_a_pipeline_has_both(pipeline: Profile) -> None:
    data = data_of(pipeline.plan, pipeline.timelines, pipeline.step_breakdowns)
    rows = data["rows"]
    assert {len(column) for column in rows.values()} == {len(rows["kind"])}
    for kind, seconds, remark in zip(rows["kind"], rows["measured"], rows["remark"], strict=True):
        assert (seconds is None and "Actions" in remark) if kind == "send" else seconds > 0
    groups = data["groups"]
    assert len(groups["measured"]) == len(groups["kind"]) and sum(data["beside"]["lines"]["seconds"]) > 0
    whole = [s for s, kind in zip(groups["measured"], groups["kind"], strict=True) if kind == "place"]
    assert groups["measured"][0] == pytest.approx(math.fsum(whole)) and len(whole) == 2
    parts = [data["beside"]["kernels"][0], data["beside"]["exposed"][0], data["beside"]["waiting"]]
    assert math.fsum([*parts, *data["beside"]["idle"]]) == pytest.approx(data["beside"]["total"])


def test_text_of_a_pipeline_fits_a_terminal(pipeline: Profile) -> None:
    text = pipeline.text(80)
    assert max(map(len, text.split("\n"))) <= 80 and text.count("where the time went") == 2


@pytest.mark.parametrize("ratio", [9.999, 99.989, 99.999, 999.9])
def test_parts_fit_a_terminal_at_any_ratio(pipeline: Profile, ratio: float) -> None:
    for plan, step in zip(pipeline.plan.stages, pipeline.places, strict=True):
        text = measured_text(plan, step, 80, estimated=step.seconds / ratio)
        assert max(map(len, text.split("\n"))) <= 80
