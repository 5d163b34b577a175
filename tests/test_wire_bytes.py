"""Wire bytes: the plan's figure equals the compiled program's, and is at most that of `jax.jit`."""

from __future__ import annotations

import pytest

from benchmarks.versus_jax import measure

# The most that we may send, as a share of what jit sends.
LIMITS = {"gpt/data:8": 1.0, "gpt/tensor:8": 1.0, "gpt/2d:2x4": 1.0, "gpt/zero:8": 0.70}


@pytest.mark.full
@pytest.mark.parametrize("row", LIMITS)
def test_gpt(row: str) -> None:
    """The GPT of the benchmark table, with the same shardings for both."""
    m = measure(row, seconds=0, auto=False)
    assert m.wire_bytes == pytest.approx(m.plan_wire_bytes, rel=0.01)
    assert m.byte_ratio <= LIMITS[row]
    assert m.gap == 0.0
