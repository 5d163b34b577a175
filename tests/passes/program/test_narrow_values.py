"""Which values hold no more than a narrower type can."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from sbp.passes.program.narrow_values import holds, narrowest_dtypes
from sbp.passes.program.trace import trace


def found(fn: Any, dtype: Any) -> dict[str, str]:
    graph = trace(fn, [np.ones((4, 6), dtype)], {}).graph
    return {graph.values[v].name: str(narrow) for v, narrow in narrowest_dtypes(graph).items()}


@pytest.mark.parametrize(
    ("narrow", "wide", "held"),
    [
        (np.float16, np.float32, True),
        (ml_dtypes.bfloat16, np.float32, True),
        (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, True),
        (ml_dtypes.bfloat16, np.float16, False),  # as many bytes
        (np.float32, np.float16, False),
        (np.bool_, np.int8, False),  # as many bytes
        (np.bool_, np.float32, True),
        (np.int8, ml_dtypes.bfloat16, True),
        (np.int16, np.float32, True),
        (np.int32, np.float32, False),
        (np.int32, np.float64, True),
        (np.int8, np.uint32, False),  # negative ones
        (np.uint8, np.int16, True),
        (np.float32, np.int64, False),
        (np.float32, np.complex64, False),
        (ml_dtypes.int4, np.int8, False),  # XLA packs no collective
    ],
)
def test_a_type_holds_another(narrow: Any, wide: Any, held: bool) -> None:
    assert holds(np.dtype(narrow), np.dtype(wide)) is held


def test_what_is_rearranged_stays_what_it_is() -> None:
    names = found(lambda x: lax.rev(x.astype(jnp.float32).T[1:].reshape(2, -1), (0,)), np.float16)
    assert names == dict.fromkeys(("convert_element_type", "transpose", "slice", "reshape", "rev"), "float16")


def test_the_narrowest_of_several_conversions_counts() -> None:
    assert set(found(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), np.int8).values()) == {"int8"}


def test_what_is_computed_is_as_wide_as_its_type() -> None:
    assert set(found(lambda x: x.astype(jnp.float32) + 1, np.float16)) == {"convert_element_type"}
    assert set(found(lambda x: lax.optimization_barrier(x.astype(jnp.float32)) * 2, np.float16)) == {
        "convert_element_type"
    }
    assert not found(lambda x: x.astype(jnp.float16), np.float32)
