"""What a training step calls that is no op of JAX: fused causal attention, and products of 8-bit numbers.

Here they have a meaning and a rule, so that they are planned and priced as one op each, as they run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sbp.compat import core
from sbp.rates.matmuls import FUSED_SHARE
from sbp.rules import REGISTRY, Matmul, Op, register_rule

FLASH2_SHARE = 0.44
"""Of the rate of a product as large, what FlashAttention-2 reaches on Hopper, for whose matrix units it was
not written: 35 % of the peak, where products have 79 % (arXiv:2407.08608, section 1)."""
SHARES = {"attention": FUSED_SHARE, "flash2_attention": FLASH2_SHARE}
"""By name of the kernel."""
# Products of a forward pass: scores, and weights with values. A backward pass computes the scores again and
# has four gradients (Dao et al., 2022, arXiv:2205.14135).
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Masked scores, `b k g q s` in float32: a position sees those before it."""
    scores = jnp.einsum("bkgqe,bkse->bkgqs", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    rows, columns = scores.shape[-2:]
    seen = jnp.arange(rows)[:, None] + (columns - rows) >= jnp.arange(columns)[None, :]
    return jnp.where(seen, scores, -jnp.inf)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same in ops of JAX: the weights of all positions are in memory.

    Arguments:
      q: queries, `b k g q e`: heads of keys, queries of each.
      k, v: keys and values, `b k s e`.
    """
    weights = jax.nn.softmax(_scores(q, k), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bkse->bkgqe", weights, v)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    scores = _scores(q, k)
    norm = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - norm[..., None]).astype(v.dtype)
    return [jnp.einsum("bkgqs,bkse->bkgqe", weights, v), norm]


def _backward(*args: jax.Array) -> list[jax.Array]:
    q, k, v, _, _, ct = args
    return list(jax.vjp(plain_attention, q, k, v)[1](ct))


def _products(op: Op, *, count: int, share: float) -> Matmul:
    """A kernel skips the blocks that the mask hides: half of all keys, on average."""
    (*batch, rows, e), (*_, columns, _), (*_, f) = op.shapes[:3]
    slower = round(count * math.prod(batch) / share)
    return Matmul(slower, rows, (e + f) // 2, max(1, columns // 2), op.dtypes[:2])


_QUERIES, _KEYS, _NORMS = "b k g q _", "b k _ _", "b k g q"


def _kernel(name: str, share: float) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Causal attention as one kernel, and its gradient as another, of a rate."""
    forward_name, backward_name = f"published_{name}", f"published_{name}_gradient"
    forward_op = core.make_op(forward_name, _forward)
    backward_op = core.make_op(backward_name, _backward)
    # A model of these may be loaded twice in one process, by tests.
    if forward_name not in REGISTRY:
        register_rule(
            forward_name,
            f"{_QUERIES}, {_KEYS}, {_KEYS} -> {_QUERIES}, {_NORMS}",
            matmul=partial(_products, count=FORWARD_PRODUCTS, share=share),
        )
        register_rule(
            backward_name,
            f"{_QUERIES}, {_KEYS}, {_KEYS}, {_QUERIES}, {_NORMS}, {_QUERIES} -> {_QUERIES}, {_KEYS}, {_KEYS}",
            reduced={"g": "sum", "q": "sum"},
            matmul=partial(_products, count=BACKWARD_PRODUCTS, share=share),
        )

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward_op.bind(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        out, norm = (checkpoint_name(x, "context") for x in forward_op.bind(q, k, v))
        return out, (q, k, v, out, norm)

    def backward(kept: Any, ct: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(backward_op.bind(*kept, ct))

    attention.defvjp(forward, backward)
    return attention


ATTENTION = {name: _kernel(name, share) for name, share in SHARES.items()}
"""By name of the kernel; arguments as those of `plain_attention`."""
fused_attention = ATTENTION["attention"]


def product(x: jax.Array, w: jax.Array, eight_bits: bool) -> jax.Array:
    """`... k, k n -> ... n`; its operands and those of its gradients in 8 bits, if asked for."""
    return _product8(x, w) if eight_bits else _times(x, w, x.dtype)


def _times(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _quantized(x: jax.Array) -> jax.Array:
    """Scales are those of steps before ("delayed scaling"), and 1 here: they cost nothing."""
    return x.astype(jnp.float8_e4m3fn)


@jax.custom_vjp
def _product8(x: jax.Array, w: jax.Array) -> jax.Array:
    return _times(_quantized(x), _quantized(w), x.dtype)


def _product8_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    x8, w8 = _quantized(x), _quantized(w)
    return _times(x8, w8, x.dtype), (x8, w8)


def _product8_backward(kept: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    (x, w), ct8 = kept, _quantized(ct)
    rows = tuple(range(x.ndim - 1))
    dx = lax.dot_general(ct8, w, (((ct8.ndim - 1,), (1,)), ((), ())), preferred_element_type=ct.dtype)
    dw = lax.dot_general(x, ct8, ((rows, rows), ((), ())), preferred_element_type=ct.dtype)
    return dx, dw


_product8.defvjp(_product8_forward, _product8_backward)
