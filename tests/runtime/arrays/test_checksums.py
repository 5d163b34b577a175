"""A checksum is what its definition says, of whatever parts it is taken, and changes with every bit."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sbp.runtime.arrays.checksums import WORD, checksum

DTYPES = ["bool", "int8", "bfloat16", "float8_e4m3fn", "int4", "float32", "int64", "complex64", "complex128"]


def slow_checksum(whole: np.ndarray[Any, Any]) -> int:
    """The definition, in integers of Python."""
    width = min(whole.dtype.itemsize, 8)
    words = np.ascontiguousarray(whole).reshape(-1).view(f"u{width}").tolist()
    total = 0
    for place, bits in enumerate(words):
        word = (place * 0x9E3779B97F4A7C15 + bits * 0xC4CEB9FE1A85EC53) % WORD
        word ^= word >> 32
        word = word * 0xFF51AFD7ED558CCD % WORD
        total += word ^ word >> 29
    return total % WORD


def whole_checksum(whole: np.ndarray[Any, Any]) -> int:
    return checksum(whole, tuple((0, n) for n in whole.shape), whole.shape)


@pytest.mark.parametrize("name", DTYPES)
def test_it_is_what_the_definition_says_of_any_parts(name: str) -> None:
    rng = np.random.default_rng(0)
    for shape in [(), (7,), (6, 4), (4, 1, 8), (2, 3, 4, 5)]:
        whole = np.asarray(rng.integers(0, 7, shape)).astype(jnp.dtype(name))
        wanted = slow_checksum(whole)
        assert whole_checksum(whole) == wanted
        for _ in range(4):
            cuts = [sorted({0, n, int(rng.integers(0, n + 1))}) for n in shape]
            boxes = itertools.product(*[itertools.pairwise(c) for c in cuts])
            parts = [checksum(whole[tuple(slice(*b) for b in box)], box, shape) for box in boxes]
            assert sum(parts) % WORD == wanted


def test_every_bit_and_every_exchange_is_seen() -> None:
    whole = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    before = whole_checksum(whole)
    for at in np.ndindex(whole.shape):
        for bit in range(32):
            other = whole.copy()
            other.view(np.uint32)[at] ^= np.uint32(1 << bit)
            assert whole_checksum(other) != before
    for a, b in itertools.combinations(np.ndindex(whole.shape), 2):
        other = whole.copy()
        other[a], other[b] = whole[b], whole[a]
        assert whole_checksum(other) != before
    assert whole_checksum(np.zeros((3, 4), np.float32)) != before
