"""The evaluator of physical programs, against XLA, and against the plan's own rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import CALL_SECONDS, Evaluator, executions
from sbp.passes.physical.fusion import op_of
from sbp.passes.physical.program import Border
from sbp.passes.program.control import WHILE_TRIPS
from sbp.rates.tables import matmul_rates

GRID = sbp.placement("cpu", shape=(2, 2))
LAYERS, WIDTH, ROWS = 12, 64, 256


def layers(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def unrolled(w: Any, x: Any) -> Any:
    for i in range(LAYERS):
        x = jnp.tanh(x @ w[i])
    return jnp.mean(x)


ARGS = np.ones((LAYERS, WIDTH, WIDTH), np.float32), np.ones((ROWS, WIDTH), np.float32)
SPLIT = ([B, B], [S(0), S(0)])


def test_a_loop_holds_one_trip_at_a_time() -> None:
    """Its peak is near that of the same layers one after the other, and near XLA's, forward and backward."""
    for fn, other, most in ((layers, unrolled, 1.5), (jax.grad(layers), jax.grad(unrolled), 2.0)):
        program = sbp.compile(fn, GRID, in_sbp=SPLIT)
        plan = program.plan(*ARGS)
        apart = sbp.compile(other, GRID, in_sbp=SPLIT).plan(*ARGS)
        assert plan.memory_bytes < most * apart.memory_bytes
        stats = program.lower(*ARGS).compile().memory_analysis()
        xla = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        assert 0.6 * xla < plan.memory_bytes < 1.6 * xla


def waiting(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0].sum() < 5, lambda c: (jnp.tanh(c[0] @ c[1]), c[1]), (x, x.T))[0]


def test_a_loop_of_unknown_length_counts_alike_in_the_search_and_in_the_plan() -> None:
    """So that the bound of the search and the seconds of the plan speak of one cost; bytes count it once."""
    plan = sbp.compile(waiting, GRID, in_sbp=([S(0), B],)).plan(np.ones((64, 64), np.float32))
    assert plan.physical is not None
    inside = [e for e in executions(plan.physical.steps) if e.assumed_count == WHILE_TRIPS]
    assert inside and all(e.times == 1 for e in inside)
    takes = Evaluator(plan.physical, Network(plan.placement, plan.hardware))
    assert plan.seconds == takes.seconds() >= WHILE_TRIPS * sum(takes.seconds_of(e.step) for e in inside)
    assert plan.seconds >= 0.999 * plan.bound
    assert sum(isinstance(s, Border) for s in plan.physical.steps) == 1
    sent = sum(takes.box_bytes(b) * n for b, n in plan.physical.boxes()) + sum(
        c.wire_bytes for c in plan.collectives if c.before == c.after
    )
    assert plan.wire_bytes == pytest.approx(sent) and plan.wire_bytes > 0


def test_xla_schedules_by_figures_of_its_own() -> None:
    """Products and collectives are what its tables say, and all convolutions are alike."""
    on = sbp.placement("h100", shape=(2,))

    def fn(x: Any, w: Any, image: Any, kernel: Any) -> Any:
        return jnp.sum(x @ w), lax.conv(image, kernel, (1, 1), "SAME")

    shapes = (4096, 4096), (4096, 4096), (8, 4, 16, 16), (4, 4, 3, 3)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    plan = sbp.compile(fn, on, in_sbp=([S(0)], [B], [B], [B])).plan(*args)
    p = plan.physical
    assert p is not None
    takes = Evaluator(p, Network(plan.placement, plan.hardware))
    ops = [op_of(s, p) for s in p.steps]
    (product,) = [o for o in ops if o.name == "dot_general"]
    assert product.step is not None
    rate = matmul_rates()["sm_90", "f32"][2048, 4096, 4096]
    assert takes.scheduled_seconds(product) == pytest.approx(2 * 4096**2 * 2048 / rate)
    assert [takes.scheduled_seconds(o) for o in ops if o.name == "conv_general_dilated"] == [CALL_SECONDS]
    sent = {takes.scheduled_seconds(o) for o in ops if o.sends}
    assert sent and max(sent) < 1e-6  # a number, at the rate of a KiB


@pytest.mark.parametrize(("columns", "microseconds"), [(1024, 1461.8 + 3.1), (2048, 51.6)])
def test_a_long_sum_of_few_tiles_is_split(columns: int, microseconds: float) -> None:
    """Its parts are of float32, of which XLA has no table: it counts each dim in bytes of the result. Added
    up they are by another kernel."""
    on = sbp.placement("h100", shape=(2,))
    x, y = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 8192), (8192, 2 * columns)))
    plan = sbp.compile(lambda x, y: x @ y, on, in_sbp=([B], [S(1)])).plan(x, y)
    assert plan.physical is not None
    takes = Evaluator(plan.physical, Network(plan.placement, plan.hardware))
    ops = [op_of(s, plan.physical) for s in plan.physical.steps]
    (product,) = [o for o in ops if o.name == "dot_general"]
    assert 1e6 * takes.scheduled_seconds(product) == pytest.approx(microseconds, rel=1e-3)


@pytest.mark.parametrize("shape", [(1,), (8, 1), (1, 8)])
def test_an_axis_of_one_device_sends_nothing(shape: tuple[int, ...]) -> None:
    """Moves over it are none, together as alone."""

    def fn(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    lone = [S(0) if n == 1 else B for n in shape]
    ws, x = [jax.ShapeDtypeStruct((256, 256), jnp.float16)] * 4, jax.ShapeDtypeStruct((64, 256), jnp.float16)
    plan = sbp.compile(fn, sbp.placement("h100", shape=shape), in_sbp=([lone] * 4, [S(0)] * len(shape))).plan(
        ws, x
    )
    assert plan.wire_bytes == 0 and plan.exposed_seconds == 0
