"""cuDNN's attention as plain JAX on CPUs, so that its rules can be tried where there is no GPU.

Only the kernels are replaced, by formulas: what JAX traces, and how it calls them, is JAX's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as kernels
from jax.interpreters import mlir

LEAST = -1e30


def _scores(query: Any, key: Any, bias: Any, lengths: Any, params: Any) -> jax.Array:
    """The scaled and masked scores, float32: `b h t s`. Heads are the dim before the sequence."""
    shared, (t, s) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    scores = jnp.einsum("bhte,bhse->bhts", query, jnp.repeat(key, shared, 1)) * params["scale"]
    scores = scores + bias if params["variadic_args"][0] else scores
    before = jnp.arange(t)[:, None] - jnp.arange(s)
    seen, mask, window = (
        jnp.ones((1, 1, t, s), bool),
        params["mask_type"].name,
        params["sliding_window_length"],
    )
    if "CAUSAL" in mask:
        seen &= before >= 0
    if window:
        seen &= (before >= 0) & (before < window)
    if "PADDING" in mask:
        of_query, of_key = (n[:, None, None, None] for n in lengths)
        seen &= (jnp.arange(t)[:, None] < of_query) & (jnp.arange(s) < of_key)
    return jnp.where(seen, scores, LEAST)


def _turned(params: Any, *xs: Any) -> list[jax.Array]:
    """Queries, keys and the like in float32, heads before the sequence; or back again."""
    return [x if params["layout"] else jnp.swapaxes(x, 1, 2) for x in xs]


def forward(query: Any, key: Any, value: Any, bias: Any, *rest: Any, **params: Any) -> list[jax.Array]:
    """The result, and the logarithm of the sum of exponentials where it is asked for."""
    dtype, shared = (
        query.dtype,
        query.shape[1 if params["layout"] else 2] // key.shape[1 if params["layout"] else 2],
    )
    query, key, value, bias = (x.astype(jnp.float32) for x in (query, key, value, bias))
    query, key, value = _turned(params, query, key, value)
    scores = _scores(query, key, bias, rest[:2], params)
    statistics = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bhts,bhse->bhte", jnp.exp(scores - statistics[..., None]), jnp.repeat(value, shared, 1))
    (out,) = _turned(params, out)
    return [out.astype(dtype), statistics] if params["is_training"] else [out.astype(dtype)]


def backward(query: Any, key: Any, value: Any, bias: Any, *rest: Any, **params: Any) -> list[jax.Array]:
    """The gradients of queries, keys, values, and of the bias where it is asked for."""
    dtype, *_, statistics, out, grad = query.dtype, *rest
    dims = query, key, value, out, grad
    query, key, value, out, grad = _turned(params, *(x.astype(jnp.float32) for x in dims))
    groups = *key.shape[:2], query.shape[1] // key.shape[1], *key.shape[2:]
    weights = jnp.exp(_scores(query, key, bias.astype(jnp.float32), rest[:2], params) - statistics[..., None])
    of_weights = jnp.einsum("bhte,bhse->bhts", grad, jnp.repeat(value, groups[2], 1))
    of_scores = weights * (of_weights - jnp.sum(grad * out, axis=-1, keepdims=True))
    of_query = params["scale"] * jnp.einsum("bhts,bhse->bhte", of_scores, jnp.repeat(key, groups[2], 1))
    of_key = params["scale"] * jnp.einsum("bhts,bhte->bhse", of_scores, query).reshape(groups).sum(2)
    of_value = jnp.einsum("bhts,bhte->bhse", weights, grad).reshape(groups).sum(2)
    grads = [x.astype(dtype) for x in _turned(params, of_query, of_key, of_value)]
    if params["variadic_args"][1]:
        shared = [d for d in (0, 1) if bias.shape[d] != of_scores.shape[d]]
        grads.append(jnp.sum(of_scores, axis=shared, keepdims=True).astype(bias.dtype))
    return grads


def register() -> None:
    """Lets CPUs run both."""
    both: list[tuple[Any, Callable[..., Any]]] = [
        (kernels._dot_product_attention_fwd_p, forward),
        (kernels._dot_product_attention_bwd_p, backward),
    ]
    for primitive, formula in both:
        mlir.register_lowering(primitive, mlir.lower_fun(formula, multiple_results=True), platform="cpu")
