"""Scatters of one number per row as element-wise ops: when they are, and that results stay the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.program.trace import trace


def ops_of(fn, *args):
    return [n.op for n in trace(fn, args, {}).graph.nodes]


def scatter(x, indices, updates, mode, batching=(0,)):
    n = x.ndim - 1
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(n,),
        scatter_dims_to_operand_dims=(n,),
        operand_batching_dims=batching,
        scatter_indices_batching_dims=batching,
    )
    return lax.scatter_add(x, indices, updates, dims, mode=mode)


def loss(x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], axis=-1).mean()


@pytest.mark.parametrize("shape", [(8, 5), (4, 3, 6)])
def test_the_gradient_of_a_loss_has_no_scatter_and_is_the_same_to_the_last_bit(shape) -> None:
    x = jax.random.normal(jax.random.key(0), shape)
    labels = jax.random.randint(jax.random.key(1), shape[:-1], -shape[-1], shape[-1])
    step = jax.grad(loss)
    assert "scatter-add" not in ops_of(step, x, labels)
    program = sbp.compile(step, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)], [S(0)]))
    assert np.array_equal(program(x, labels), jax.jit(step)(x, labels))


def test_the_dim_that_is_picked_from_may_be_split() -> None:
    x, labels = jax.random.normal(jax.random.key(0), (8, 12)), jnp.arange(8) % 12
    step = jax.grad(lambda x: jnp.take_along_axis(x, labels[:, None], axis=-1).sum())
    program = sbp.compile(step, sbp.placement("cpu", shape=(4,)), in_sbp=([S(1)],))
    assert np.array_equal(program(x), jax.jit(step)(x))


@pytest.mark.parametrize("mode", ["drop", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int8, jnp.uint32])
def test_what_is_out_of_bounds_is_dropped_or_goes_to_the_nearest(mode, dtype) -> None:
    given = [0, 2, 3, 100] if mode != "promise_in_bounds" else [0, 2, 1, 2]
    indices = jnp.array(given, dtype)[:, None]
    updates = jnp.array([1.5, -0.0, jnp.inf, jnp.nan], jnp.float32)

    def step(indices, updates):
        return scatter(jnp.zeros((4, 3)), indices, updates, mode)

    assert "scatter-add" not in ops_of(step, indices, updates)
    program = sbp.compile(step, sbp.placement("cpu", shape=(2,)), in_sbp=([B], [B]))
    ours, theirs = program(indices, updates), jax.jit(step)(indices, updates)
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_positions_beyond_a_small_type_of_indices_are_positions() -> None:
    indices, updates = jnp.array([[3], [127]], jnp.int8), jnp.ones(2)

    def step(indices, updates):
        return scatter(jnp.zeros((2, 300)), indices, updates, "clip")

    program = sbp.compile(step, sbp.placement("cpu", shape=(2,)), in_sbp=([B], [B]))
    assert np.array_equal(program(indices, updates), jax.jit(step)(indices, updates))


def test_a_scatter_into_a_tensor_stays_in_place() -> None:
    def step(x, indices, updates):
        return scatter(x, indices, updates, "drop")

    assert "scatter-add" in ops_of(step, jnp.ones((4, 3)), jnp.zeros((4, 1), jnp.int32), jnp.ones(4))


def test_several_indices_per_row_stay_a_scatter() -> None:
    step = jax.grad(lambda x: jnp.take_along_axis(x, jnp.zeros((4, 2), jnp.int32), axis=-1).sum())
    assert "scatter-add" in ops_of(step, jnp.ones((4, 3)))


def test_the_gradient_of_a_table_stays_a_scatter() -> None:
    step = jax.grad(lambda table: table[jnp.arange(3)].sum())
    assert "scatter-add" in ops_of(step, jnp.ones((5,)))


def test_a_scatter_into_ones_stays() -> None:
    def step(indices, updates):
        return scatter(jnp.ones((4, 3)), indices, updates, "drop")

    assert "scatter-add" in ops_of(step, jnp.zeros((4, 1), jnp.int32), jnp.ones(4))
