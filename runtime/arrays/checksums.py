"""Checksums of arrays that do not depend on how they are laid out.

A checksum is the sum, modulo 2**64, of a mixed word per element, of its bits and its place in the logical
array. So it can be taken in parts, by whoever has a part, and the parts of any layout add up to the same. A
flipped bit changes one word; elements that trade places change two. The mixing steps are those of the
finalizer of MurmurHash3 (Appleby, 2011).
"""

from typing import Any

import numpy as np

from sbp.compat.machine_code import compile_loops

WORD = 1 << 64
WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Box = tuple[tuple[int, int], ...]
"""Where a part lies in its array: start and end along each dim."""


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of a shard's index.

    >>> box_of((slice(2, 4), slice(None)), (8, 3))
    ((2, 4), (0, 3))
    """
    ends = (s.indices(n) for s, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in ends)


def checksum(part: np.ndarray[Any, Any], box: Box, shape: tuple[int, ...]) -> int:
    """What a part adds to the checksum of its array.

    Arguments:
      part: the elements of the box, in row-major order.
      box: where they lie.
      shape: of the whole array.

    >>> whole = np.arange(6.0).reshape(2, 3)
    >>> halves = checksum(whole[:1], ((0, 1), (0, 3)), (2, 3)) + checksum(whole[1:], ((1, 2), (0, 3)), (2, 3))
    >>> halves % WORD == checksum(whole, ((0, 2), (0, 3)), (2, 3))
    True
    """
    words = _words(part)
    if words.size > part.size:  # complex128: two words an element
        box, shape = (*box, (0, 2)), (*shape, 2)
    sizes, strides, offset = _runs(box, shape)
    return int(_sum(words, sizes, strides, offset)) if words.size else 0


def _words(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = np.ascontiguousarray(part).reshape(-1)
    return flat.view(WIDTHS.get(flat.dtype.itemsize, np.uint64))


def _runs(box: Box, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.uint64]:
    """Sizes and strides of a box in its array, dims that lie without a gap taken together; and its start."""
    sizes, strides, stride, offset = [1], [1], 1, 0
    gap = False
    for (start, stop), n in zip(reversed(box), reversed(shape), strict=True):
        if gap or not sizes:
            sizes.append(stop - start)
            strides.append(stride)
        else:
            sizes[-1] *= stop - start
        gap = stop - start != n
        offset += start * stride
        stride *= n
    return np.array(sizes[::-1], np.int64), np.array(strides[::-1], np.int64), np.uint64(offset)


_PLACE = np.uint64(0x9E3779B97F4A7C15)
_BITS = np.uint64(0xC4CEB9FE1A85EC53)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_HALF, _LESS = np.uint64(32), np.uint64(29)


@compile_loops
def _sum(words: Any, sizes: Any, strides: Any, offset: Any) -> Any:
    """The sum over a box, run by run; a counter goes through the outer dims."""
    run, outer = sizes[-1], sizes.size - 1
    counter = np.zeros(sizes.size, np.int64)
    total, place, at = np.uint64(0), offset, 0
    for _ in range(words.size // run):
        for j in range(run):
            word = (place + np.uint64(j)) * _PLACE + np.uint64(words[at + j]) * _BITS
            word ^= word >> _HALF
            word *= _MIX
            word ^= word >> _LESS
            total += word
        at += run
        d = outer - 1
        while d >= 0:
            counter[d] += 1
            place += np.uint64(strides[d])
            if counter[d] < sizes[d]:
                break
            place -= np.uint64(strides[d] * sizes[d])
            counter[d] = 0
            d -= 1
    return total
