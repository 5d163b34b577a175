"""Updates that go through a tensor and arguments in different orders."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.passes.physical.fusion import ShardSizes, op_of
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.layouts import turned_tensors

ON = sbp.placement("h100", shape=(8,))
N = 4096
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def update(x: Any, moment: Any, weight: Any) -> Any:
    moment = 0.9 * moment + jnp.square(x)
    return moment, weight - moment * x


def updated_transposed(x: Any, moment: Any, weight: Any) -> Any:
    return update(x.T, moment, weight)


def only(x: Any, moment: Any, weight: Any) -> Any:
    return x + 1, moment, weight


def planned(fn: Any, split: int) -> Any:
    """The plan where the first argument is split along dim `split`, and all else is whole."""
    program = sbp.compile(fn, ON, in_sbp=([S(split)], [B], [B]), out_sbp=[B], donate_argnums=(1, 2))
    return program.plan(SQUARE, SQUARE, SQUARE)


def found(fn: Any, split: int) -> list[int]:
    """How many results are made of each tensor that is turned over."""
    p = planned(fn, split).physical
    sizes, held = ShardSizes(p), list(zip(p.graph.inputs, p.inputs, strict=True))
    kept = list(zip(p.graph.outputs, p.outputs, strict=True))
    k = kernels([op_of(s, p) for s in p.steps], sizes, kept, held)
    return [len(x.results) for x in turned_tensors(k, sizes, [k.ends[v] for v in kept])]


@pytest.mark.parametrize(
    ("fn", "split", "expected"),
    [
        # Moment and weight are results of one kernel.
        (update, 1, [2]),
        (update, 0, []),
        # It is gathered along its first dim: before it is transposed, or after.
        (updated_transposed, 0, []),
        (updated_transposed, 1, []),
        # A result that has been gathered is turned over itself.
        (only, 1, [0]),
        (only, 0, []),
    ],
)
def test_what_is_turned_over(fn: Any, split: int, expected: list[int]) -> None:
    assert found(fn, split) == expected


def test_results_of_what_is_turned_over_take_no_space_of_arguments() -> None:
    """Both are written apart, and copied: two more than where the gather is along dim 0."""
    turned_over, in_order = (planned(update, split).memory_bytes for split in (1, 0))
    assert turned_over - in_order == pytest.approx(2 * 4 * N * N, rel=0.01)
