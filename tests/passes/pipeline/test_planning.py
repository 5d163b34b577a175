"""What goes from one placement to another lies so that little of it is sent."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from models import resnet
from sbp import B, S
from sbp.hardware.catalogue import CATALOGUE, Hardware, Link
from sbp.options import PipelineOptions
from sbp.passes.face import Plan

WIDTH, ROWS, MICROBATCHES = 512, 256, 4
WHOLE = sbp.placement("cpu", shape=(2, 4), axes=("stage", "model"))
STAGES = WHOLE.split("stage")
H100 = CATALOGUE["h100"]
NODES_OF_FOUR = replace(H100, links=(Link(4, 370e9, 8e-6), Link(1 << 62, 5e9, 12e-6)))


def loss(params, x):
    """Each stage a pair of layers, the first split by columns and the second by rows."""
    for stage, (a, b) in zip(STAGES, params, strict=True):
        with sbp.on(stage):
            x = jax.nn.relu(x @ a) @ b
    with sbp.on(STAGES[-1]):
        return jnp.mean(x**2)


def planned(hardware: Hardware) -> Plan:
    step = sbp.microbatch(jax.value_and_grad(loss), MICROBATCHES, batch_args=1)
    program = sbp.compile(
        step, WHOLE, in_sbp=([([S(1)], [S(0)])] * 2, [B]), options=sbp.Options(hardware=hardware, check=True)
    )
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((MICROBATCHES * ROWS, WIDTH), jnp.float32)
    plan = program.plan([(weight, weight)] * 2, x)
    assert plan.stages
    return plan


@pytest.mark.parametrize("hardware", (H100, NODES_OF_FOUR))
def test_activations_and_gradients_are_sent_in_parts(hardware: Hardware) -> None:
    """Over a slow link all that a stage wants whole goes in parts, and is gathered where it arrives."""
    plan = planned(hardware)
    there, back = (c for c in plan.sends if c.wire_bytes > 100)
    part = MICROBATCHES * 4 * ROWS * WIDTH / 4
    assert there.axes == ("0", "1") and back.axes == ("1", "0")
    assert there.before == there.after and back.before == back.after  # both placements agree
    # Where the link is no slower, gathering what has come takes as long as sending it whole.
    assert there.wire_bytes == part
    assert back.wire_bytes == (part if hardware is NODES_OF_FOUR else 4 * part)


def test_what_sending_takes_is_in_no_placement_s_estimate() -> None:
    """It is that of the ways between them, and no gap of the plan."""
    plan = planned(NODES_OF_FOUR)
    assert [p.cheapest_gap for p in plan.stages] == [0.0, 0.0]
    assert all(p.bound == pytest.approx(p.cheapest_seconds or p.seconds, rel=1e-6) for p in plan.stages)
    assert all(c.kind != "send" for p in plan.stages for c in p.collectives)


def test_what_a_pass_has_put_in_the_place_of_a_sent_value_is_sent() -> None:
    """`sbp.rows` replaces the update of a table, here one that another placement reads."""
    tx = sbp.rows(optax.sgd(0.1))

    def step(table, state, ids):
        with sbp.on(STAGES[0]):
            grad = jax.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
            update, state = tx.update(grad, state, table)
        with sbp.on(STAGES[1]):
            return jnp.sum(jnp.sin(update)), state

    table = jnp.arange(64.0).reshape(16, 4)
    args = table, tx.init(table), jnp.arange(4)
    with pytest.warns(UserWarning, match="the whole table is updated, 256 B .* not just added to the table"):
        found = sbp.compile(step, WHOLE)(*args)[0]
    assert jnp.allclose(found, step(*args)[0], rtol=1e-5)


@pytest.mark.full
def test_what_the_next_stage_waits_for_is_boxed_in_the_forward() -> None:
    """Also where the backward of its own stage wants it so too: there it would be boxed too late."""
    whole = sbp.placement("h100", shape=(4, 2), axes=("stage", "model"))
    options = sbp.Options(pipeline=PipelineOptions(schedule="1f1b", stages=4), check=True)
    plan = sbp.compile(resnet.pipeline_step, whole, options=options).plan(*resnet.example_args())
    assert plan.stages and plan.schedule is not None


def test_placements_are_searched_for_the_shortest_step() -> None:
    """A placement may send more than the cheapest plan of it does, where kernels hide that."""
    whole = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))
    first, last = whole.split("stage")

    def parts(w: Any, x: Any, y: Any) -> Any:
        with sbp.on(first):
            one, other = (x.T @ w).T @ y, y @ w
        with sbp.on(last):
            return jnp.sum(one) + jnp.sum(other)

    def step(w: Any, x: Any, y: Any) -> Any:
        return sbp.microbatch(parts, 2, batch_args=(1, 2), reduce="sum")(w, x, y)

    # Sending takes about as long as computing.
    link = Link(1 << 60, 1e6, 1e-6)
    slow = Hardware("test", ((8, 3e6),), 3e6, 1e8, 1e12, (link,), 1.0, platform="gpu")
    args = [jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (64, 128, 128)]
    for platform in ("gpu", "cpu"):
        options = sbp.Options(hardware=replace(slow, platform=platform), cache=False)
        asked = sbp.AUTO, [sbp.S(0)], sbp.AUTO
        plan = sbp.compile(step, whole, in_sbp=asked, options=options).plan(*args)
        assert plan.stages and plan.bound <= plan.seconds
        (one, _) = plan.stages
        hides = one.cheapest_seconds is not None and one.step_seconds < one.cheapest_seconds < one.seconds
        assert hides == (platform == "gpu")
