"""Applications of matrix products and convolutions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole

THREE: Any = {"groups": (3,)}


def dot(spec: str, x: Any, y: Any, **options: Any) -> Sample:
    """A product in Einstein's notation."""
    return sample(
        "dot_general", lambda x, y: jnp.einsum(spec, x, y), x, y, label=f"{spec}{x.dtype}", **options
    )


def product(dims: Any, x: Any, y: Any, out: Any, **options: Any) -> Sample:
    """A product with the result's dtype given."""
    label = f"{x.dtype}-{np.dtype(out)}"
    return sample(
        "dot_general",
        lambda x, y: lax.dot_general(x, y, dims, preferred_element_type=out),
        x,
        y,
        label=label,
        **options,
    )


def conv(x: Any, w: Any, label: str, **options: Any) -> Sample:
    """A convolution."""
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return sample(
        "conv_general_dilated", lambda x, w: lax.conv_general_dilated(x, w, **options), x, w, label=label
    )


def weight_gradient(x: Any, w: Any, label: str, **options: Any) -> Sample:
    """Both gradients of a convolution."""

    def gradient(x: Any, w: Any) -> Any:
        run = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", **options)  # noqa: E731
        out, back = jax.vjp(run, x, w)
        return back(jnp.sign(out) + 1)

    return sample("conv_general_dilated", gradient, x, w, label=label, groups=(3,), pairs=1)


PLAIN = (((1,), (0,)), ((), ()))
NHWC = ("NHWC", "HWIO", "NHWC")
IMAGE, KERNEL = whole((5, 4, 6, 5)), whole((3, 4, 3, 2), seed=1)
GROUPED, GROUPED_KERNEL = whole((2, 12, 5, 4)), whole((24, 2, 3, 2), seed=1)

SAMPLES = [
    dot("ij,jk->ik", whole((5, 7)), whole((7, 3), seed=1), pairs=3),
    dot("bij,bjk->bik", whole((3, 5, 4)), whole((3, 4, 2), seed=1)),
    dot("abij,abkj->abik", whole((2, 3, 5, 4)), whole((2, 3, 2, 4), seed=1), **THREE),
    dot("xij,jix->x", whole((3, 5, 4)), whole((4, 5, 3), seed=1)),
    dot("xji,jiy->xy", whole((3, 5, 4)), whole((5, 4, 2), seed=1)),
    dot("i,i->", whole((7,)), whole((7,), seed=1)),
    dot("i,j->ij", whole((7,)), whole((4,), seed=1)),
    dot("ij,j->i", whole((5, 1)), whole((1,), seed=1), **THREE),
    dot("ij,jk->ik", whole((5, 7), np.int32), whole((7, 3), np.int32, seed=1)),
    dot("ij,jk->ik", whole((5, 7), np.complex64), whole((7, 3), np.complex64, seed=1), **THREE),
    dot("ij,jk->ik", whole((5, 0)), whole((0, 3), seed=1), **THREE),
    dot("ij,jk->ik", whole((5, 7)) > 0, whole((7, 3), seed=1) > 0),
    product(PLAIN, whole((5, 7), np.int8), whole((7, 3), np.int8, seed=1), np.int32),
    product(
        PLAIN, whole((5, 7)).astype(jnp.bfloat16), whole((7, 3)).astype(jnp.bfloat16), np.float32, **THREE
    ),
    product(PLAIN, whole((5, 7)), whole((7, 3)), jnp.bfloat16, **THREE),
    conv(IMAGE, KERNEL, "same"),
    conv(IMAGE, KERNEL, "strides", window_strides=(2, 1), padding=((1, 2), (0, 1))),
    conv(IMAGE, KERNEL, "dilated", padding=((1, 1), (0, 2)), rhs_dilation=(2, 1), lhs_dilation=(1, 2)),
    conv(whole((5, 6, 5, 4)), whole((3, 2, 4, 3), seed=1), "nhwc", dimension_numbers=NHWC),
    conv(GROUPED, GROUPED_KERNEL, "groups", feature_group_count=6),
    conv(
        whole((2, 5, 4, 6)),
        whole((3, 2, 1, 6), seed=1),
        "depthwise",
        feature_group_count=6,
        dimension_numbers=NHWC,
    ),
    conv(whole((12, 4, 5, 3)), whole((12, 4, 2, 2), seed=1), "batches", batch_group_count=6),
    conv(IMAGE.astype(np.int32), KERNEL.astype(np.int32), "int32"),
    weight_gradient(IMAGE, KERNEL, "gradient"),
    weight_gradient(GROUPED, GROUPED_KERNEL, "groups_gradient", feature_group_count=6),
    sample(
        "ragged_dot_general",
        lax.ragged_dot,
        whole((6, 5)),
        whole((3, 5, 4), seed=1),
        np.array([2, 1, 3], np.int32),
    ),
    sample(
        "ragged_dot_general",
        lambda x, y, n: jax.vjp(lambda x, y: lax.ragged_dot(x, y, n), x, y)[1](whole((6, 4), seed=2)),
        whole((6, 5)),
        whole((3, 5, 4), seed=1),
        np.array([2, 1, 3], np.int32),
        label="gradient",
        **THREE,
    ),
]
