"""Plans made again around a tensor: the same figures whoever asks, and those of a program that says so."""

import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, P, S
from sbp.hardware.catalogue import hardware_for
from sbp.passes.face import Plan
from sbp.signature import NdSbp

GRID = sbp.placement("h100", shape=(2, 4), axes=("data", "model"))


def step(params: Any, x: Any, y: Any, hold: NdSbp | None = None) -> Any:
    def loss(params: Any) -> Any:
        hidden = jax.nn.relu(x @ params["layers"][0]) @ params["layers"][1]
        hidden = hidden if hold is None else sbp.annotate(hidden, hold)
        return jnp.mean((hidden - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = {"layers": [array(512, 2048), array(2048, 512)]}, array(4096, 512), array(4096, 512)


# Where nothing overlaps the plan is the cheapest one thing after the other, and proven to be.
SERIAL = sbp.Options(hardware=replace(hardware_for("h100"), platform="serial"))


def planned(fn: Any = step, options: sbp.Options = SERIAL, **given: Any) -> Plan:
    return sbp.compile(fn, GRID, options=options, **given).plan(*ARGS)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def figures(plan: Plan) -> tuple[float, float, float]:
    return plan.seconds, plan.wire_bytes, plan.memory_bytes


@pytest.mark.parametrize("name", ["params['layers'][0]", "x", "result[0]['layers'][1]", "sub"])
def test_every_alternative_is_the_plan_that_holds_it(plan: Plan, name: str) -> None:
    choices = plan.why(name)
    assert len(choices.alternatives) == 4 and choices.count > 4 and "at the peak" in str(choices)
    assert [h.figures.seconds for h in choices.alternatives] == sorted(
        h.figures.seconds for h in choices.alternatives
    )
    assert choices.signatures[0] not in [h.signature for h in choices.alternatives]
    for held in choices.alternatives:
        other = plan.what_if(name, held.signature)
        assert other.seconds == pytest.approx(held.figures.seconds, rel=1e-9) and other.gap == 0.0
        assert other.seconds >= plan.seconds * (1 - 1e-9)


def test_all_are_looked_at(plan: Plan) -> None:
    choices = plan.why("x", most=100)
    assert choices.slower == choices.unknown == 0 and len(choices.alternatives) == 8
    assert plan.why("x").slower == 4


def test_an_argument_is_held_as_in_sbp_holds_it(plan: Plan) -> None:
    other = plan.what_if("x", [S(0), B])
    assert figures(other) == figures(planned(in_sbp=(sbp.AUTO, [S(0), B], sbp.AUTO)))
    assert other.in_sbp[other.in_paths.index("x")] == (S(0), B)
    assert type(other) is type(plan) and other.notes[0].startswith(
        "what if: x, float32[4096, 512] held to [S(0), B]: +"
    )
    text = plan.diff(other)
    assert "what other does more (+) or less (-)" in text and "x  [B, B] -> [S(0), B]" in text


def test_what_an_op_makes_is_held_as_annotate_holds_it(plan: Plan) -> None:
    line = step.__code__.co_firstlineno + 2
    for nd in ((S(0), B), (S(0), S(1)), (B, P)):
        other = plan.what_if(f"dot_general at test_replanner.py:{line}, float32[4096, 512]", nd)
        said = planned(lambda p, x, y, nd=nd: step(p, x, y, nd))
        # The user's annotation also is an op of its backward; it costs nothing there.
        assert other.seconds == pytest.approx(said.seconds, rel=1e-4)
        assert other.wire_bytes == pytest.approx(said.wire_bytes, rel=1e-9)


def test_what_is_held_stays_held(plan: Plan) -> None:
    first = plan.what_if("x", [S(0), B])
    second = first.what_if("params['layers'][1]", [S(1), B])
    assert second.in_sbp[1:3] == ((S(1), B), (S(0), B))
    assert second.seconds >= first.seconds and second.why("x").signatures == ((S(0), B),)


def test_tensors_of_many_layers_are_held_together() -> None:
    square = {"layers": [array(512, 512)] * 2}, *ARGS[1:]
    plan = sbp.compile(step, GRID, options=SERIAL).plan(*square)
    held = plan.what_if("params['layers'][*]", [S(0), B])
    assert held.in_sbp[:2] == held.out_sbp[:2] == ((S(0), B), (S(0), B))
    choices = plan.why("params['layers'][*]")
    assert choices.alike == 2 and "2 alike, fixed together" in str(choices)
    for one in choices.alternatives:
        both = plan.what_if("params['layers'][*]", one.signature)
        assert both.seconds == pytest.approx(one.figures.seconds, rel=1e-9)


def test_what_the_user_fixed_stays() -> None:
    fixed = planned(in_sbp=(sbp.AUTO, [B, S(0)], sbp.AUTO))
    assert all(plan.in_sbp[2] == (B, S(0)) for plan in (fixed, fixed.what_if("y", [S(1), B])))
    # Unless it is what is asked about.
    assert fixed.why("x").alternatives[0].figures.seconds <= fixed.seconds


def test_a_body_of_a_loop() -> None:
    def looped(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    plan = sbp.compile(looped, GRID, options=SERIAL).plan(array(1024, 512), array(512, 512))
    line = looped.__code__.co_firstlineno + 1
    for name in (f"tanh at test_replanner.py:{line}", f"dot_general at test_replanner.py:{line}"):
        held = plan.why(name).alternatives[0]
        assert plan.what_if(name, held.signature).seconds == pytest.approx(held.figures.seconds, rel=1e-9)


@pytest.mark.full
def test_a_plan_is_no_heavier_for_it(plan: Plan) -> None:
    again = planned()
    assert again == plan and again.replanner is not None
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(1,)))
    batch = jnp.ones((8, 8))
    gone = weakref.ref(batch)
    kept = program.plan(batch)
    del program, batch
    gc.collect()
    assert gone() is None and kept.why("x").signatures == kept.in_sbp
    loaded = pickle.loads(pickle.dumps(sbp.Plan(**{**vars(plan), "physical": None})))
    assert loaded == plan and loaded.replanner is None
    with pytest.raises(sbp.SbpError, match="without its program"):
        loaded.why("x")


@pytest.mark.parametrize(
    ("name", "nd", "complaint"),
    [
        ("parms['layers'][0]", [B, B], "nearest: params['layers'][0]"),
        ("dot_general", [B, B], "2 tensors of different kinds"),
        ("x", [S(0)], "1 signature"),
        ("x", [S(5), B], "splits a dim that a tensor of 2 dims does not have"),
        ("x", [P, B], "P never crosses the boundary"),
        ("x", "[S(0), B]", "a text is no signature"),
        ("max", [P, B], "max has no signature that leaves P"),
    ],
)
def test_what_cannot_be(plan: Plan, name: str, nd: Any, complaint: str) -> None:
    with pytest.raises(sbp.SbpError) as caught:
        plan.what_if(name, nd)
    assert complaint in str(caught.value)


@pytest.mark.full
def test_with_overlap_the_shortest_step_comes_first() -> None:
    """Each alternative is chosen as the plan is: not the cheapest one thing after the other."""
    plan = planned(options=sbp.Options())
    choices = plan.why("params['layers'][0]")
    steps = [held.figures.step_seconds for held in choices.alternatives]
    assert steps == sorted(steps) and plan.overlaps
    for held in choices.alternatives:
        # The program with the pin has fewer candidates: the search looks at other plans.
        other = plan.what_if("params['layers'][0]", held.signature)
        assert other.step_seconds == pytest.approx(held.figures.step_seconds, rel=0.15)
