"""Attention in one kernel, as cuDNN computes it: by batch, by heads, and by queries.

`jax.nn.dot_product_attention(implementation="cudnn")` is traced as one primitive forward, one backward.
The scores, of every query with every key, never lie in memory: the forward keeps one float32 per query and
head, the logarithm of the sum of its exponentials, and the backward computes the scores again from it
(FlashAttention-2: Dao, 2023).

Letters: `b` batch, `t` queries, `h` heads. With fewer heads of keys than of queries, a device has the keys of
its queries' heads if they divide; else it gets all keys and takes those that its queries meet.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp.communication.protocol import Context
from sbp.compat.ops import run_attention
from sbp.rules.entry import Matmul, Op, Row
from sbp.rules.factors import Letters, split_rows
from sbp.rules.registry import rule
from sbp.signature import P

QUERY, KEY, VALUE, BIAS, QUERY_LENGTHS, KEY_LENGTHS, OFFSETS, _, PAGES = range(9)
"""Operands of both; those that an application does not use have no elements."""
BACKWARD = 13
"""How many operands the backward has: statistics, result and its gradient behind those of the forward."""
CAUSAL = ("CAUSAL", "PADDING_CAUSAL")
NOTE = "keys by sequence are whole"
SUMMED = {
    "b": "the gradient of a bias that the batch shares is summed up over it, and it is split over {axes}",
    "h": "a gradient of what heads share is summed up over them, and they are split over {axes}",
    "t": "the gradients of keys and values are summed up over queries, which are split over {axes}",
}
"""Why a result is partial, by the letter that is split."""


def _heads_dim(params: Mapping[str, Any]) -> int:
    """Which dim of queries and keys has the heads: JAX has them before the sequence or behind it."""
    return 1 if params["layout"] == 1 else 2


@dataclass(frozen=True)
class Attention:
    """The sizes of an application, on what outer axes left of it.

    Arguments:
      op: the application.
    """

    op: Op

    @cached_property
    def heads(self) -> int:
        """The position of the heads in queries and keys; the other of dims 1 and 2 is the sequence."""
        return _heads_dim(self.op.params)

    def of(self, operand: int) -> tuple[int, int, int, int]:
        """Batch, sequence, heads and width of queries, keys or values."""
        shape = self.op.shapes[operand]
        return shape[0], shape[3 - self.heads], shape[self.heads], shape[3]

    @property
    def backward(self) -> bool:
        """Whether it is the backward."""
        return len(self.op.shapes) >= BACKWARD

    @property
    def is_packed(self) -> bool:
        """Whether a row of the batch holds several sequences."""
        return len(self.op.shapes[OFFSETS]) == 2

    @property
    def is_paged(self) -> bool:
        """Whether keys lie in pages, which any row of the batch may use."""
        return len(self.op.shapes[PAGES]) == 4

    @cached_property
    def heads_per_key(self) -> int:
        """How many heads of queries share one of keys."""
        return self.op.logical[QUERY][self.heads] // self.op.logical[KEY][self.heads]

    def letters(self, with_keys: bool) -> tuple[list[Letters], list[Letters]]:
        """The letters of operands and results.

        Arguments:
          with_keys: whether heads of keys are split with those of queries.
        """
        sizes = dict(zip("bth", self.of(QUERY), strict=False))
        query: list[str | None] = ["b", "t", "t", None]
        query[self.heads] = "h"
        key: Letters = tuple("h" if c == "h" and with_keys else c if c == "b" else None for c in query)

        def where_equal(letters: Letters, operand: int) -> Letters:
            """The letters of dims that are not 1 for all, or 0 because the operand is not used."""
            shape = self.op.shapes[operand]
            known = [*letters, *[None] * len(shape)][: len(shape)]
            return tuple(
                c if c is not None and n == sizes[c] else None for c, n in zip(known, shape, strict=True)
            )

        bias = where_equal(("b", "h", "t", None), BIAS)
        lengths = [where_equal(("b",), i) for i in range(QUERY_LENGTHS, PAGES + 2)]
        operands: list[Letters] = [tuple(query), key, key, bias, *lengths]
        out, statistics = tuple(query), ("b", "h", "t")
        if not self.backward:
            return operands, [out, statistics][: len(self.op.results)]
        results: list[Letters] = [tuple(query), key, key, bias]
        return [*operands, statistics, out, out], results[: len(self.op.results)]

    def rows(self) -> Iterable[Row]:
        """Every valid 1-D signature."""
        group, (_, queries, heads, _), keys = self.op.group, self.of(QUERY), self.of(KEY)[2]
        if not (self.is_packed or self.is_paged):
            yield from self._split("b")
            if self._by_query(queries):
                yield from self._split("t")
        in_step = heads == keys * self.heads_per_key
        if in_step and (self.heads_per_key == 1 or keys % group == 0):
            yield from self._split("h")
        elif heads % group == 0 and self._aligned(heads // group):
            yield from self._split("h", with_keys=False)

    def _split(self, letter: str, *, with_keys: bool = True) -> Iterable[Row]:
        """The row that splits a letter, if there is more than one of it."""
        sizes = dict(zip("bth", self.of(QUERY), strict=False))
        for row in split_rows(*self.letters(with_keys), {letter: sizes[letter]}, {letter: "sum"}):
            yield replace(row, reason=SUMMED[letter] if P in row.results else "")

    def _aligned(self, heads: int) -> bool:
        """Whether so many heads of queries meet whole groups, or part of one."""
        return heads % self.heads_per_key == 0 or self.heads_per_key % heads == 0

    def _by_query(self, queries: int) -> bool:
        """Whether a query can be told nothing of its position. cuDNN takes a bias for even sequences only."""
        plain = self.op.params["mask_type"].name == "NO_MASK" and not self.op.params["sliding_window_length"]
        return plain and (not self.op.shapes[BIAS][0] or -(-queries // self.op.group) % 2 == 0)

    @property
    def keys_seen(self) -> int:
        """How many keys a query meets, rounded up; those after it, or out of its window, are not computed."""
        queries, keys, window = self.of(QUERY)[1], self.of(KEY)[1], self.op.params["sliding_window_length"]
        if self.op.params["mask_type"].name not in CAUSAL and not window:
            return keys
        most = min(keys, window or keys)
        rising = min(queries, most)
        return -(-(rising * (rising + 1) // 2 + (queries - rising) * most) // max(queries, 1))

    @property
    def matmul(self) -> Matmul:
        """The products: queries by keys, weights by values; for gradients the first again, and four more."""
        batch, queries, heads, width = self.of(QUERY)
        keyed, valued = (3, 2) if self.backward else (1, 1)
        products = keyed + valued
        k = (keyed * width + valued * self.of(VALUE)[3]) // products
        return Matmul(products * batch * heads, queries, self.keys_seen, k, self.op.dtypes[:2], fused=True)


def _whole(params: Mapping[str, Any]) -> str:
    """Why an application runs whole, if it does."""
    if params["dropout_rate"]:
        return "which weights it drops depends on where they lie in its operands"
    return "slopes go by the number of the head" if params["mask_type"].name == "ALIBI" else ""


def _taken(ctx: Context) -> int | None:
    """How many heads of keys the queries of a device meet, if it has more of them."""
    dim = _heads_dim(ctx.params)
    query, key = ctx.operands[QUERY], ctx.operands[KEY]
    if query.axes(dim) == key.axes(dim):
        return None
    return max(1, query.local[dim] * key.shape[dim] // query.shape[dim])


def _local(ctx: Context, *args: jax.Array) -> list[jax.Array]:
    """Padding is zero, since gradients of a bias are summed up over it; and of length 1, so that none is read
    where no memory is."""
    args = tuple(
        ctx.mask(x, at, range(len(at.shape)), int(i in (QUERY_LENGTHS, KEY_LENGTHS)))
        for i, (x, at) in enumerate(zip(args, ctx.operands, strict=True))
    )
    count, dim = _taken(ctx), _heads_dim(ctx.params)
    if count is None:
        return run_attention(ctx.primitive, args, ctx.params)
    query, key = ctx.operands[QUERY], ctx.operands[KEY]
    first = ctx.offset(query, dim) // (query.shape[dim] // key.shape[dim]) - ctx.offset(key, dim)
    met = [
        lax.dynamic_slice_in_dim(x, first, count, dim, allow_negative_indices=False)
        for x in args[KEY : VALUE + 1]
    ]
    results = run_attention(ctx.primitive, (args[QUERY], *met, *args[BIAS:]), ctx.params)
    if len(args) >= BACKWARD:
        for i in (KEY, VALUE):
            zeros = jnp.zeros(args[i].shape, args[i].dtype)
            results[i] = lax.dynamic_update_slice_in_dim(
                zeros, results[i], first, dim, allow_negative_indices=False
            )
    return results


def _backward_held(ctx: Context) -> float:
    """A float32 sum of the queries' gradient, and one of the gradient by the result per query and head: the
    workspace of cuDNN (`dQ_accum`, `softmax_sum` in cudnn-frontend). The scores are nowhere."""
    *rows, width = ctx.operands[QUERY].local
    return 4.0 * math.prod(rows) * (width + 1)


def attention_matmul(op: Op) -> Matmul:
    """The products that an application computes, as one batch."""
    return Attention(op).matmul


def _rows(op: Op) -> list[Row]:
    return [] if _whole(op.params) else list(Attention(op).rows())


@rule("dot_product_attention_fwd_wrapper", body=_local, matmul=attention_matmul, whole=_whole, note=NOTE)
def forward(op: Op) -> list[Row]:
    """Batch, heads, and queries where there is no mask."""
    return _rows(op)


@rule(
    "dot_product_attention_bwd_wrapper",
    body=_local,
    matmul=attention_matmul,
    body_bytes=_backward_held,
    whole=_whole,
    note=NOTE,
)
def backward(op: Op) -> list[Row]:
    """Batch, heads, and queries where there is no mask; these leave sums of gradients of keys and values."""
    return _rows(op)
