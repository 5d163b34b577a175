"""Applications of the attention that cuDNN computes, whose kernels are formulas here (cudnn.py)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp.compat.ops import assumed_cudnn
from tests.rules import cudnn
from tests.rules.claims import Sample, sample, whole

cudnn.register()
FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
HOPPER = (9, 0)
LENGTHS = np.array([3, 4], np.int32), np.array([5, 2], np.int32)


def half(*shape: int, seed: int = 0) -> jax.Array:
    """Small numbers in float16."""
    return jnp.asarray(whole(shape, seed=seed) / 4, jnp.float16)


def operands(heads: int = 4, kv_heads: int = 4, batch: int = 2) -> tuple[jax.Array, ...]:
    """Four queries and six keys of width 8."""
    return half(batch, 4, heads, 8), half(batch, 6, kv_heads, 8, seed=1), half(batch, 6, kv_heads, 8, seed=2)


def fused(**options: Any) -> Callable[..., Any]:
    """The attention of queries, keys, values and maybe a bias; lengths are options."""

    def run(query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        with assumed_cudnn(HOPPER):
            return jax.nn.dot_product_attention(query, key, value, bias, implementation="cudnn", **options)

    return run


def gradients(**options: Any) -> Callable[..., Any]:
    """Of all operands, by a result that each of its elements counts otherwise in."""

    def run(*args: Any) -> Any:
        def loss(*args: Any) -> Any:
            out = fused(**options)(*args)
            return jnp.sum(out.astype(jnp.float32) * jnp.linspace(-1, 1, out.size).reshape(out.shape))

        return jax.grad(loss, argnums=tuple(range(len(args))))(*args)

    return run


def both(label: str, args: tuple[Any, ...], how: Any = None, **options: Any) -> list[Sample]:
    """The forward and the backward."""
    made = {"close": 4e-3, "label": label, **(how or {})}
    return [
        sample(FORWARD, fused(**options), *args, **made),
        sample(BACKWARD, gradients(**options), *args, **made),
    ]


SEVERAL: Any = {"pairs": 3}
THREE: Any = {"groups": (3,)}
SAMPLES = [
    *both("plain", operands(), SEVERAL),
    *both("causal", operands(), is_causal=True),
    *both("window", operands(), is_causal=True, local_window_size=(1, 0), how=THREE),
    *both("grouped", operands(8, 4), SEVERAL),
    *both("shared-by-four", operands(8, 2), SEVERAL),
    *both("one-head-of-keys", operands(6, 1), THREE),
    *both("bias", (*operands(), half(2, 4, 4, 6, seed=3)), SEVERAL),
    *both("bias-of-the-batch", (*operands(batch=3), half(1, 4, 4, 6, seed=3)), SEVERAL),
    *both("bias-of-heads", (*operands(), half(2, 1, 4, 6, seed=3)), SEVERAL),
    *both("bias-of-all", (*operands(3, 3, 3), half(1, 1, 4, 6, seed=3)), {"groups": (2,)}),
    *both(
        "lengths", operands(), query_seq_lengths=LENGTHS[0], key_value_seq_lengths=LENGTHS[1], is_causal=True
    ),
]
