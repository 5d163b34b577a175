"""Rows of a stack as bytes: what every array with a line per row has of a row, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from sbp.compat.untyped import PyTree
from sbp.runtime.embedding.row_access import stack_leaves
from sbp.runtime.embedding.row_map import RowMap
from sbp.runtime.embedding.tiers.segment import Rows

WORD_BYTES = 8


@dataclass(frozen=True)
class RowField:
    """What one array has of each row.

    Arguments:
      path: of the array in its tree.
      dtype, shape: of a line.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of a line."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.path}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class RowCodec:
    """How rows become bytes; columns of arrays in the order of their tree, filled up to whole words.

    Arguments:
      fields: of a row.

    >>> fields = RowField("['w']", np.dtype("float32"), (3,)), RowField("['count']", np.dtype("int16"), ())
    >>> codec = RowCodec(fields)
    >>> rows = codec.rows([np.ones((2, 3), np.float32), np.array([4, 5], np.int16)])
    >>> codec.width, rows.shape, [x.tolist() for x in codec.lines(rows)]
    (16, (2, 16), [[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [4, 5]])
    """

    fields: tuple[RowField, ...]

    @staticmethod
    def of(tree: PyTree, maps: Mapping[str, RowMap], stack: str) -> RowCodec:
        """That of the arrays of a tree that have a line per row of a stack.

        Arguments:
          tree: parameters, an optimizer's state or both, of arrays or their shapes.
          maps: of all stacks, as `Collection.row_maps`.
        """
        found = zip(stack_leaves(tree, maps), jax.tree.leaves(tree), strict=True)
        return RowCodec(
            tuple(
                RowField(leaf.path, np.dtype(x.dtype), tuple(x.shape[len(leaf.lead) :]))
                for leaf, x in found
                if leaf is not None and leaf.stack == stack
            )
        )

    @cached_property
    def width(self) -> int:
        """Bytes of a row."""
        return -(-sum(f.bytes for f in self.fields) // WORD_BYTES) * WORD_BYTES

    @property
    def layout(self) -> str:
        """What a row has, in words; a store of another layout is refused."""
        return "; ".join(map(str, self.fields))

    def rows(self, lines: Sequence[NDArray[Any]]) -> Rows:
        """The rows of the lines of each field, "n ..."."""
        count = len(lines[0])
        out, begin = np.zeros((count, self.width), np.uint8), 0
        for f, x in zip(self.fields, lines, strict=True):
            flat = np.ascontiguousarray(x, f.dtype).reshape(-1).view(np.uint8)
            out[:, begin : begin + f.bytes] = flat.reshape(count, f.bytes)
            begin += f.bytes
        return out

    def lines(self, rows: Rows) -> list[NDArray[Any]]:
        """The inverse of `rows`."""
        out, begin = list[NDArray[Any]](), 0
        for f in self.fields:
            part = np.ascontiguousarray(rows[:, begin : begin + f.bytes]).reshape(-1)
            out.append(part.view(f.dtype).reshape(len(rows), *f.shape))
            begin += f.bytes
        return out
