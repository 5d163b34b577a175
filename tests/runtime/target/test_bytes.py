"""Programs compiled for eight absent H100s: the plan's wire bytes are those of the optimised HLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.runtime.hlo.meter import Meter, read_compiled
from tests.runtime.lower.conversions import CASES as CONVERSIONS
from tests.runtime.target.plugin import needs_plugin

pytestmark = needs_plugin


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its arguments, and signatures.

    Arguments:
      grid: the sizes of the placement.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    in_sbp: Any
    out_sbp: Any = sbp.AUTO
    grid: tuple[int, ...] = (8,)

    def compiled(self) -> tuple[float, Meter]:
        """The plan's wire bytes, and what the meter reads."""
        placement = sbp.placement("h100", shape=self.grid)
        program = sbp.compile(self.fn, placement, in_sbp=self.in_sbp, out_sbp=self.out_sbp)
        lowered = program.lower(*self.args)
        return program.plan(*self.args).wire_bytes, read_compiled(lowered.compile())


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def tied(grid: tuple[int, ...], dtype: str) -> Case:
    """A step of Adam on a table that embeds and scores: sparse exchanges, which have rounds beyond the plan.

    The table is split along the last axis of the grid, the batch along the first.
    """
    optimizer = optax.adam(1e-3)
    params = {"table": f32(32768, 128), "hidden": f32(128, 128)}

    def loss(params: Any, ids: Any, weights: Any) -> Any:
        p = jax.tree.map(lambda x: x.astype(dtype), params)
        x = jnp.tanh(p["table"][ids] @ p["hidden"])
        return jnp.square(x * p["table"][weights]).astype(jnp.float32).mean()

    def step(params: Any, state: Any, ids: Any, weights: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, ids, weights)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    own = {"table": [*[B] * (len(grid) - 1), S(0)], "hidden": [B] * len(grid)}
    state = jax.eval_shape(optimizer.init, params)
    lying = optax.tree_utils.tree_map_params(
        optimizer, lambda _, nd: nd, state, own, transform_non_params=lambda _: [B] * len(grid)
    )
    batch = [S(0)] * len(grid)
    return Case(step, (params, state, ids(16384), ids(16384)), (own, lying, batch, batch), grid=grid)


def layers_gathered_in_a_loop() -> Case:
    """The gradient of a scan whose checkpointed body gathers its layer's weights."""

    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w.T), None

    def grads(w: Any, x: Any) -> Any:
        w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
        return lax.scan(jax.checkpoint(block), x, w)[0].astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    return Case(jax.grad(grads), (f32(4, 256, 256), x), ([S(1)], [S(0)]), [S(1)])


def added(x: Any) -> Any:
    """Sums of columns in their own type."""
    return lax.reduce(x, np.array(0, x.dtype), lax.add, (0,))


def sums(dtype: str, out: Any) -> Case:
    return Case(added, (jax.ShapeDtypeStruct((4096, 256), jnp.dtype(dtype)),), [S(0)], out)


def twice(x: Any, up: Any, down: Any) -> Any:
    """A forward pass that is written twice, as for a loss and an accuracy."""

    def logits() -> Any:
        return jax.nn.relu(x @ up) @ down

    return jnp.square(logits()).mean(), logits().argmax(-1)


CASES: dict[str, Callable[[], Case]] = {
    "a table by exchange": lambda: tied((8,), "float32"),
    "a table by exchange, in bfloat16, on two axes": lambda: tied((2, 4), "bfloat16"),
    "layers gathered in a loop": layers_gathered_in_a_loop,
    "written twice": lambda: Case(
        twice, (f32(64, 256), f32(256, 1024), f32(1024, 256)), ([B], [S(1)], [S(0)]), [B]
    ),
    "rows of a table on two axes, in bfloat16": lambda: Case(
        lambda t, i: t[i],
        (jax.ShapeDtypeStruct((1 << 18, 64), jnp.bfloat16), ids(1 << 14)),
        [S(0), S(0)],
        [S(0), S(0)],
        (2, 4),
    ),
    "the largest values alone": lambda: Case(lambda x: lax.top_k(x, 8)[0], (f32(256, 4096),), [S(1)], [B]),
    "maxima in bfloat16": lambda: Case(
        lambda x: x.max(0), (jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16),), [S(0)], [B]
    ),
    **{f"sums in {d}": partial(sums, d, [B]) for d in ("bfloat16", "int16", "uint4")},
    "sums in int16, split": partial(sums, "int16", [S(0)]),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_what_the_gpu_sends(name: str) -> None:
    planned, meter = CASES[name]().compiled()
    assert planned > 0
    assert meter.wire_bytes == pytest.approx(planned, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_beside_collectives(name: str) -> None:
    """XLA would send the type before a conversion, or after it, by itself (collective_quantizer.cc)."""
    x = CONVERSIONS[name]
    asked: Any = [[nd] for nd in x.asked] if len(x.asked) > 1 else list(x.asked)
    planned, meter = Case(x.fn, (x.arg,), [x.given], asked).compiled()
    assert planned > 0
    assert meter.wire_bytes == pytest.approx(planned, rel=0.01)


@pytest.mark.full
def test_rows_are_looked_up_once_and_rounds_beyond_the_plan_are_kept_apart() -> None:
    """Two results of the same rows: one exchange, whose further rounds run only if a bucket is too full."""
    args = f32(1 << 20, 128), ids(1 << 15)
    planned, meter = Case(lambda t, i: (t[i] * 2, t[i].max(1)), args, [S(0)], [S(0)]).compiled()
    assert meter.by_kind().keys() == {"all_to_all"}
    assert meter.wire_bytes == pytest.approx(planned, rel=0.01)
    assert meter.overflow_wire_bytes > 0 and meter.unknown_trip_counts == ()
