"""Functions whose gradients are compared: ops of every family, as models use them, on small shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Sample:
    """A differentiable function and its arguments: arrays, or the shapes of float ones."""

    name: str
    fn: Callable[..., Any]
    shapes: Sequence[Any]
    complex: bool = False
    close: float = 2e-4

    @property
    def args(self) -> list[Any]:
        rng = np.random.default_rng(len(self.name))
        return [x if isinstance(x, np.ndarray) else self._floats(rng, x) for x in self.shapes]

    def _floats(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        x = rng.normal(size=shape)
        if self.complex:
            return (x + 1j * rng.normal(size=shape)).astype(np.complex64)
        return x.astype(np.float32)


WORDS = np.array([[1, 0, 7, 7], [3, 9, 2, 1], [0, 0, 5, 8]], np.int32)
ROWS = np.array([0, 5, 3], np.int32)
PARTS = np.array([0, 2, 1, 2, 2, 0, 1, 0], np.int32)


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-3) * scale + shift


def rms_norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * scale


def batch_norm(x: Any, scale: Any) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-3) * scale


def conv(padding: Any, **how: Any) -> Callable[[Any, Any], Any]:
    strides, names = how.pop("strides", (1, 1)), ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=names, **how)


def conv_1d(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"))


def attention(**how: Any) -> Callable[..., Any]:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **how)


def cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def pooling(reduce: Any, start: float) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, start, reduce, (1, 2, 3, 1), (1, 2, 2, 1), "SAME")


def rnn(w: Any, u: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x @ u)
        return h, h.sum(-1)

    return lax.scan(step, jnp.zeros((x.shape[1], w.shape[0])), x)


def gru(w: Any, u: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        z, r = jnp.split(jax.nn.sigmoid(h @ w + x @ u), 2, -1)
        h = z * h + (1 - z) * jnp.tanh(r * h)
        return h, h

    return lax.scan(step, jnp.zeros((x.shape[1], w.shape[0])), x, reverse=True)[1]


def loops(x: Any, w: Any) -> Any:
    x = lax.fori_loop(0, 3, lambda i, h: jnp.sin(h @ w + i), x)
    return lax.cond(jnp.sum(w) > 0, lambda h: h @ w, lambda h: jnp.cos(h), x)


def checkpointed(x: Any, w: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w) + h)
    return layer(layer(x, w), w.T)


def dots_saved(x: Any, w: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda h, w: jnp.sin(jnp.sin(h @ w) @ w), policy=policy)(x, w)


@jax.custom_vjp
def doubled_backwards(x: Any) -> Any:
    return jnp.sin(x)


doubled_backwards.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * jnp.cos(x) * g + g.sum(0),))


@jax.custom_jvp
def clipped_slope(x: Any) -> Any:
    return jnp.exp(x)


@clipped_slope.defjvp
def _clipped_slope_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return jnp.exp(x), jnp.minimum(jnp.exp(x), 2.0) * t


def positive(a: Any) -> Any:
    """Positive definite matrices, from any."""
    return a @ a.swapaxes(-1, -2) + 4 * jnp.eye(a.shape[-1])


def mixture(x: Any, gate: Any, experts: Any) -> Any:
    """The two best of four experts, per row."""
    best, which = lax.top_k(x @ gate, 2)
    weights = (jax.nn.one_hot(which, 4) * jax.nn.softmax(best)[..., None]).sum(1)
    return jnp.einsum("be,bd,edh->bh", weights, x, experts)


def low_precision(x: Any, w: Any) -> Any:
    half = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return half.astype(jnp.float32).sum(0)


def second_order(x: Any, w: Any) -> Any:
    """Gradients inside: the penalty of a norm of a gradient."""
    g = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
    return jnp.sqrt(1 + (g**2).sum(-1))


def rotary(x: Any) -> Any:
    a, b = jnp.split(x, 2, -1)
    angle = jnp.arange(x.shape[1])[:, None] * 0.1 ** jnp.arange(a.shape[-1])
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def embedding_tied(table: Any, words: Any) -> Any:
    return jnp.take(table, words, axis=0, mode="clip") @ table.T


def concatenate_split(x: Any, y: Any) -> Any:
    return jnp.split(jnp.concatenate([x, y, x], 1), 2, 1)[1]


def tile_repeat_diag(x: Any) -> Any:
    return jnp.tile(x, (2, 1)) * jnp.repeat(x, 2, 0) + jnp.diag(x).sum()


def map_vmap(x: Any, w: Any) -> Any:
    dots = jax.vmap(jnp.dot, (0, None))(x, w[0])
    return lax.map(lambda r: jnp.tanh(w @ r), x) + dots[:, None]


def fft(x: Any) -> Any:
    back = jnp.fft.irfft(jnp.fft.rfft(x, axis=0), 8, axis=0)
    return jnp.abs(jnp.fft.rfft(x, axis=1)) + back[:, :5]


def complexes(x: Any, y: Any) -> Any:
    return jnp.real(x @ y) + jnp.imag(jnp.conj(x)[:, :1] * y[0]) + jnp.abs(x[:, :2]).sum()


def triangular_solve(a: Any, b: Any) -> Any:
    return jax.scipy.linalg.solve_triangular(positive(a), b, lower=True)


def determinant_inverse(a: Any) -> Any:
    return jnp.linalg.slogdet(positive(a))[1] + jnp.linalg.inv(positive(a)).sum()


def shifted(x: Any) -> Any:
    return jnp.roll(x, 3, 0) * jnp.flip(x, 1) + jnp.pad(x, ((1, 0), (0, 2)), mode="wrap")[:-1, 2:]


def updated(x: Any, row: Any, at: Any) -> Any:
    x = lax.dynamic_update_slice(x, row[None] * 2, (at[0], 0))
    return lax.dynamic_slice(x, (at[1], 1), (4, 3)) * x[:4, :3]


HEADS = (2, 8, 4, 4)  # batch, length, heads, width
IMAGE, KERNEL = (2, 9, 8, 4), (3, 3, 4, 8)

SAMPLES = [
    Sample("tanh_mul", lambda x, y: jnp.tanh(x) * y / (1 + y * y), [(8, 5), (8, 1)]),
    Sample("powers", lambda x: jnp.abs(x) ** 1.5 + jnp.exp2(x) + x**3, [(7, 12)]),
    Sample("gelu_silu_softplus", lambda x: jax.nn.gelu(x) + jax.nn.silu(x) * jax.nn.softplus(x), [(16, 3)]),
    Sample("relu_leaky_where", lambda x, y: jax.nn.relu(x) + jnp.where(y > 0, y, 0.1 * x), [(8, 8), (8, 8)]),
    Sample("special", lambda x: lax.lgamma(2 + x * x) + lax.erf(x) * lax.digamma(1 + x * x), [(12, 4)]),
    Sample("maximum_clip", lambda x, y: jnp.maximum(x, y) + jnp.clip(x, -0.5, 0.5), [(4, 8), (8,)]),
    Sample("hypot_arctan2", lambda x, y: jnp.hypot(x, y) + jnp.arctan2(x, y), [(8, 4), (8, 4)]),
    Sample("matmul", lambda x, w: x @ w, [(8, 12), (12, 16)]),
    Sample("matmul_batched", lambda x, w: x @ w, [(4, 5, 8), (4, 8, 3)]),
    Sample("matmul_bias_broadcast", lambda x, w, b: jnp.tanh(x @ w + b) @ w.T, [(3, 8, 4), (4, 16), (16,)]),
    Sample("einsum_three", partial(jnp.einsum, "bij,bjk,kl->bil"), [(2, 3, 4), (2, 4, 8), (8, 5)]),
    Sample("outer_trace", lambda x, y: jnp.outer(x, y) + jnp.trace(jnp.outer(y, x)), [(8,), (7,)]),
    Sample("conv_same", conv("SAME"), [IMAGE, KERNEL]),
    Sample("conv_strided", conv([(1, 1), (0, 2)], strides=(2, 3)), [IMAGE, KERNEL]),
    Sample("conv_dilated", conv("VALID", rhs_dilation=(2, 2)), [IMAGE, KERNEL]),
    Sample("conv_transposed", conv([(2, 1), (1, 2)], lhs_dilation=(2, 2)), [(2, 4, 5, 4), KERNEL]),
    Sample("conv_depthwise", conv("SAME", feature_group_count=4), [IMAGE, (3, 3, 1, 8)]),
    Sample("conv_1d", conv_1d, [(4, 3, 16), (8, 3, 5)]),
    Sample("layer_norm", layer_norm, [(6, 4, 8), (8,), (8,)]),
    Sample("rms_norm", rms_norm, [(8, 16), (16,)]),
    Sample("batch_norm", batch_norm, [(4, 3, 5, 8), (8,)]),
    Sample("l2_normalise", lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), [(8, 7)]),
    Sample("attention", attention(), [HEADS, HEADS, HEADS]),
    Sample("attention_causal", attention(is_causal=True), [HEADS, HEADS, HEADS]),
    Sample("attention_grouped", attention(), [HEADS, (2, 8, 2, 4), (2, 8, 2, 4)]),
    Sample("attention_cross", attention(scale=0.3), [HEADS, (2, 5, 4, 4), (2, 5, 4, 4)]),
    Sample("rotary", rotary, [(4, 6, 8)]),
    Sample("embedding", lambda table, words: jnp.sin(table[words]), [(10, 8), WORDS]),
    Sample("embedding_tied", embedding_tied, [(10, 8), WORDS]),
    Sample("take_columns", lambda x, at: jnp.take(x, at, axis=1), [(5, 8), PARTS]),
    Sample("cross_entropy", cross_entropy, [(3, 4, 10), WORDS]),
    Sample("segment_sum", lambda x, at: jnp.sin(jax.ops.segment_sum(x, at, 3)), [(8, 5), PARTS]),
    Sample("segment_max", lambda x, at: jax.ops.segment_max(x, at, 3), [(8, 5), PARTS]),
    Sample("scatter_set", lambda x, y: x.at[1::2].set(y) * 2, [(8, 4), (4, 4)]),
    Sample("scatter_mul", lambda x, y: x.at[ROWS].multiply(y, unique_indices=True), [(8, 4), (3, 4)]),
    Sample("dynamic_slices", updated, [(8, 5), (5,), np.array([3, 2], np.int32)]),
    Sample("cumsum", lambda x: jnp.sin(jnp.cumsum(x, 0)) + lax.cumsum(x, 1, reverse=True), [(12, 5)]),
    Sample("cumprod", lambda x: jnp.cumprod(1 + 0.1 * x, 0), [(8, 5)]),
    Sample("cummax", lambda x: lax.cummax(x, 1), [(4, 12)]),
    Sample("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 0), [(8, 3)]),
    Sample("associative_scan", lambda x: lax.associative_scan(lambda a, b: a * 0.5 + b, x), [(8, 4)]),
    Sample("sort", lambda x: jnp.sort(x, 0) * jnp.arange(5.0) + jnp.sort(x, 1), [(8, 5)]),
    Sample("argsort_take", lambda x: jnp.take_along_axis(x, jnp.argsort(-x, 0), 0) * x, [(8, 5)]),
    Sample("top_k", lambda x: lax.top_k(x, 3)[0] * jnp.arange(3.0), [(4, 12)]),
    Sample("median_quantile", lambda x: jnp.median(x, 0) + jnp.quantile(x, 0.3, axis=0), [(9, 8)]),
    Sample("logsumexp", lambda x: jax.nn.logsumexp(x, (0, 2)), [(4, 8, 3)]),
    Sample("softmax_rows", lambda x: jax.nn.softmax(x, 0) * jax.nn.log_softmax(x, 1), [(8, 12)]),
    Sample("prod_max_min", lambda x: jnp.prod(1 + 0.2 * x, 0) + x.max(0) - x.min(0), [(8, 5)]),
    Sample("prod_last", lambda x: jnp.prod(jnp.tanh(x), 1), [(4, 2)]),
    Sample("std_mean", lambda x: x.std(0) * x.mean(1).sum() + jnp.ptp(x), [(8, 7)]),
    Sample("max_pool", pooling(lax.max, -np.inf), [(2, 8, 9, 3)]),
    Sample("avg_pool", pooling(lax.add, 0.0), [(2, 8, 9, 3)]),
    Sample("reshapes", lambda x, y: x.reshape(8, 15).T.reshape(5, 24) @ y.reshape(24, 2), [(2, 60), (6, 8)]),
    Sample("concatenate_split", concatenate_split, [(8, 3), (8, 4)]),
    Sample("shifted", shifted, [(8, 6)]),
    Sample("tile_repeat_diag", tile_repeat_diag, [(5, 5)]),
    Sample("rnn", rnn, [(8, 8), (4, 8), (5, 6, 4)]),
    Sample("gru", gru, [(8, 16), (4, 16), (4, 3, 4)]),
    Sample("loops", loops, [(4, 8), (8, 8)]),
    Sample("map_vmap", map_vmap, [(6, 8), (8, 8)]),
    Sample("custom_vjp", lambda x: doubled_backwards(x) * x, [(8, 4)]),
    Sample("custom_jvp", lambda x: clipped_slope(x).sum(0), [(8, 5)]),
    Sample("checkpoint", checkpointed, [(8, 16), (16, 16)]),
    Sample("checkpoint_dots", dots_saved, [(8, 8), (8, 8)]),
    Sample("second_order", second_order, [(4, 8), (8, 5)]),
    Sample("mixture", mixture, [(8, 12), (12, 4), (4, 12, 5)]),
    Sample("low_precision", low_precision, [(8, 16), (16, 4)], close=4e-2),
    Sample("fft", fft, [(8, 8)]),
    Sample("fft_complex", lambda x: jnp.fft.ifft2(jnp.fft.fft(x) * jnp.conj(x)), [(4, 8)], complex=True),
    Sample("complex", complexes, [(8, 4), (4, 5)], complex=True),
    Sample("cholesky", lambda a: jnp.linalg.cholesky(positive(a)), [(5, 4, 4)]),
    Sample("solve", lambda a, b: jnp.linalg.solve(positive(a), b), [(3, 4, 4), (3, 4, 2)]),
    Sample("triangular_solve", triangular_solve, [(4, 4), (4, 8)]),
    Sample("slogdet_inverse", determinant_inverse, [(3, 4, 4)]),
    Sample("eigh", lambda a: jnp.linalg.eigh(positive(a))[0], [(3, 4, 4)]),
]  # fmt: skip
