"""Updates of one place, which XLA turns into slices: the other devices must drop them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S

X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
UPDATE = np.array([10, 20], np.float32)

WAYS: dict[str, Callable[..., Any]] = {
    "add": lambda x, u: x.at[:, 2].add(u),
    "mul": lambda x, u: x.at[:, 2].mul(u),
    "max": lambda x, u: x.at[:, 2].max(u),
    "set": lambda x, u: x.at[:, 2].set(u, unique_indices=True),
    "one": lambda x, u: x.at[1, 2].add(u[0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_update_into_a_dim_that_is_split(way: str) -> None:
    fn = WAYS[way]
    program = sbp.compile(fn, sbp.placement("cpu", shape=(2,)), in_sbp=([S(1)], [B]))
    np.testing.assert_array_equal(program(X, UPDATE), fn(jnp.asarray(X), UPDATE))


def test_one_update_into_a_shard_of_a_shard() -> None:
    program = sbp.compile(WAYS["add"], sbp.placement("cpu", shape=(2, 2)), in_sbp=([S(0), S(1)], [B, B]))
    np.testing.assert_array_equal(program(X, UPDATE), WAYS["add"](jnp.asarray(X), UPDATE))
