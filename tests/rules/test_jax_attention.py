"""`jax.nn.dot_product_attention` in ordinary ops, with all that it takes: any signature gives the numbers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import AUTO, B, S
from sbp.hardware.catalogue import hardware_for

LINE, GRID = sbp.placement("cpu", shape=(4,)), sbp.placement("cpu", shape=(2, 2))
# Memory so slow that even such small tensors are split, not gathered.
SPLITS = replace(hardware_for("cpu"), memory_bytes_per_second=1e9)
SIGNATURES: list[Any] = [
    (LINE, AUTO),
    pytest.param(LINE, [S(0)], marks=pytest.mark.slow),
    pytest.param(LINE, [S(2)], marks=pytest.mark.slow),
    (LINE, [S(1)]),
    (GRID, [S(0), S(2)]),
    pytest.param(GRID, [S(2), S(1)], marks=pytest.mark.slow),
]
BATCH, QUERIES, KEYS, HEADS, KV_HEADS, WIDTH = 4, 6, 8, 8, 4, 16
MASK = np.random.default_rng(5).random((BATCH, 1, QUERIES, KEYS)) < 0.7
QUERY_LENGTHS, KEY_LENGTHS = jnp.array([3, 6, 5, 1]), jnp.array([8, 2, 6, 1])
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal, no implementation named": (np.float32, {"is_causal": True, "implementation": None}),
    "causal in bfloat16": (jnp.bfloat16, {"is_causal": True}),
    "lengths": (np.float32, {"query_seq_lengths": QUERY_LENGTHS, "key_value_seq_lengths": KEY_LENGTHS}),
    "mask, window and scale": (np.float32, {"mask": MASK, "local_window_size": (3, 2), "scale": 0.3}),
}


def draw(shape: tuple[int, ...], seed: int, dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def operands(dtype: Any) -> tuple[jax.Array, ...]:
    """Queries, keys, values, and a bias that the batch shares."""
    kv = BATCH, KEYS, KV_HEADS, WIDTH
    return (
        draw((BATCH, QUERIES, HEADS, WIDTH), 0, dtype),
        draw(kv, 1, dtype),
        draw(kv, 2, dtype),
        draw((1, HEADS, QUERIES, KEYS), 3, dtype),
    )


@cache
def step_of(case: str) -> Callable[..., Any]:
    attend = partial(jax.nn.dot_product_attention, **{"implementation": "xla", **CASES[case][1]})

    def loss(*args: Any) -> Any:
        out = attend(*args)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)


@cache
def of_one_device(case: str) -> Any:
    return jax.jit(step_of(case))(*operands(CASES[case][0]))


@pytest.mark.some(3)
@pytest.mark.parametrize(("placement", "given"), SIGNATURES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_any_signature_gives_what_one_device_gives(case: str, placement: sbp.Placement, given: Any) -> None:
    args = operands(CASES[case][0])
    in_sbp = given if given is AUTO else (given, given, given, [B] * placement.ndim)
    program = sbp.compile(step_of(case), placement, in_sbp=in_sbp, options=sbp.Options(hardware=SPLITS))
    close = 2e-2 if args[0].dtype == jnp.bfloat16 else 2e-5
    for got, want in zip(*map(jax.tree.leaves, (program(*args), of_one_device(case))), strict=True):
        wide = [np.asarray(x, np.float64) for x in (got, want)]
        np.testing.assert_allclose(*wide, rtol=close, atol=close * max(1.0, float(np.abs(wide[1]).max())))
    assert not any("no rule" in note or "whole" in note for note in program.plan(*args).notes)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="an argument of jax 0.12")
@pytest.mark.parametrize("given", [[S(0)], [S(2)]], ids=str)
def test_the_logarithms_of_sums_too(given: Any) -> None:
    args = operands(np.float32)
    fn = partial(jax.nn.dot_product_attention, return_residual=True)
    program = sbp.compile(fn, LINE, in_sbp=(given, given, given, [B]))
    for got, want in zip(program(*args), fn(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_it_is_ordinary_ops_for_gpus_too(implementation: Any) -> None:
    """JAX picks no kernel by itself, and a plan is of what runs."""
    fn = partial(jax.nn.dot_product_attention, implementation=implementation)
    plan = sbp.compile(fn, sbp.placement("h100", shape=(4,)), in_sbp=[S(0)]).plan(*operands(jnp.bfloat16)[:3])
    assert plan.physical is not None
    ops = [n.op for n in plan.physical.graph.walk()]
    assert ops.count("dot_general") == 2
    assert not any("attention" in op for op in ops)
