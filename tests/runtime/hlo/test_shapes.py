"""Shapes of HLO text."""

import pytest

from sbp.runtime.hlo.parser import HloTextError, tokenize
from sbp.runtime.hlo.shapes import ArrayShape, arrays, shape_bytes


def test_arrays_of_nested_tuples() -> None:
    found = arrays(tokenize("((f32[16,32]{1,0}), (bf16[4]{0}, u32[], token[]))"))
    assert [a.dtype for a in found] == ["f32", "bf16", "u32", "token"]
    assert [a.dims for a in found] == [(16, 32), (4,), (), ()]
    assert shape_bytes(tokenize("((f32[16,32]{1,0}), (bf16[4]{0}, u32[], token[]))")) == 2048 + 8 + 4


def test_layouts_say_the_memory_space() -> None:
    (host,) = arrays(tokenize("f32[2,3]{1,0:S(5)}"))
    assert host == ArrayShape("f32", (2, 3), 24, 5)
    assert host.elements == 6
    (tiled,) = arrays(tokenize("f32[2,3]{1,0:T(8,128)S(1)}"))
    assert (tiled.space, tiled.bytes) == (1, 24)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(HloTextError, match="element type 'q7'"):
        arrays(tokenize("q7[3]"))
