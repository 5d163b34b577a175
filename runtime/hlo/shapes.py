"""Shapes of HLO text: element types, dims and bytes."""

import math
from dataclasses import dataclass

from sbp.runtime.hlo.parser import HloTextError, Tokens, closing_bracket, integers

# Sub-byte types take a whole byte unless the layout says E(bits), as in XLA's own ShapeUtil.
_DTYPES_OF_BYTES = {
    0: "token opaque",
    1: "pred s1 u1 s2 u2 s4 u4 s8 u8 f4e2m1fn f8e3m4 f8e4m3 f8e4m3b11fnuz f8e4m3fn f8e4m3fnuz f8e5m2 "
    "f8e5m2fnuz f8e8m0fnu",
    2: "s16 u16 f16 bf16",
    4: "s32 u32 f32",
    8: "s64 u64 f64 c64",
    16: "c128",
}
_DTYPE_BYTES = {name: size for size, names in _DTYPES_OF_BYTES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array of a shape; a dynamic dimension `<=n` is n.

    Arguments:
      space: the memory space of its layout: 0 is the device's, 5 the host's.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


def arrays(shape: Tokens) -> tuple[ArrayShape, ...]:
    """The arrays of a shape, those of nested tuples in order.

    >>> from sbp.runtime.hlo.parser import tokenize
    >>> [(a.dtype, a.dims, a.bytes) for a in arrays(tokenize("(bf16[4,8]{1,0}, s32[])"))]
    [('bf16', (4, 8), 64), ('s32', (), 4)]
    """
    return tuple(_array(shape, i) for i in range(len(shape) - 1) if shape[i + 1] == "[")


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element, those of sub-byte types rounded up.

    >>> dtype_bytes("bf16"), dtype_bytes("pred")
    (2, 1)
    """
    return _DTYPE_BYTES[dtype]


def shape_bytes(shape: Tokens) -> int:
    """Bytes of a shape, tuples summed."""
    return sum(array.bytes for array in arrays(shape))


def _array(shape: Tokens, index: int) -> ArrayShape:
    dtype = shape[index]
    if dtype not in _DTYPE_BYTES:
        known = ", ".join(sorted(_DTYPE_BYTES))
        raise HloTextError(f"unknown element type {dtype!r} in shape {''.join(shape)}; known: {known}")
    close = closing_bracket(shape, index + 1)
    dims = tuple(integers(shape[index + 2 : close]))
    layout = (
        shape[close + 1 : closing_bracket(shape, close + 1)] if shape[close + 1 : close + 2] == ["{"] else ()
    )
    packed, space = _parts(layout, "E"), _parts(layout, "S")
    elements = math.prod(dims)
    size = -(-elements * packed[0] // 8) if packed else elements * _DTYPE_BYTES[dtype]
    return ArrayShape(dtype, dims, size, space[0] if space else 0)


def _parts(layout: Tokens, letter: str) -> list[int]:
    """The numbers of the parts E(bits) or S(space) of a layout, which may follow another without a gap."""
    return [int(layout[i + 2]) for i, word in enumerate(layout) if word == letter]
