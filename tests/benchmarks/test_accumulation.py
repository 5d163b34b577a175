"""The ports to explicit mode compute what the GPT does, and through sbp, unchanged, they send no more."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from benchmarks.accumulation import BEST, COLUMNS, SMALL, columns, rows_of
from benchmarks.accumulation import ROWS as NAMES

ROWS = rows_of(NAMES, "1,8", "cpu", SMALL)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("best", [False, True], ids=["plain", "best"])
@pytest.mark.full
def test_a_port_through_sbp_is_the_gpt_on_one_device(row: Any, best: bool, x64: None) -> None:
    config = (
        row.config if row.model == "gpt" else replace(row.config, weight_dtype=float, compute_dtype=float)
    )
    row = replace(row, config=config)
    params, _, tokens, key = row.values()
    params = jax.device_get(params)
    args = params, row.optimizer.init(params), tokens, key
    port, step = row.port(best)
    with jax.set_mesh(jax.make_mesh(row.shape, port.axes)):
        got = sbp.compile(step, row.placement, in_sbp=row.specs(port))(*args)
    expected = jax.jit(row.step())(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_nothing_is_lost_to_the_best_port(row: Any) -> None:
    found = columns(row)
    assert found[COLUMNS[-1]].wire_bytes <= found[BEST].wire_bytes
    assert found[COLUMNS[-1]].peak_bytes <= found[BEST].peak_bytes
    for name in COLUMNS[3:]:
        assert found[name].wire_bytes <= found[BEST].wire_bytes
    assert found["sbp"].wire_bytes <= found["jit"].wire_bytes
