"""Applications of windows along split dims: convolutions in space, pooling, and their gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole


def line(n: int, taps: int, label: str, **options: Any) -> Sample:
    """A convolution along one dim."""
    options = {"window_strides": (1,), "padding": "SAME", **options}
    return sample(
        "conv_general_dilated",
        lambda x, w: lax.conv_general_dilated(x, w, **options),
        whole((1, 1, n)),
        whole((1, 1, taps), seed=1),
        label=f"line_{label}",
    )


def gradients(x: Any, w: Any, label: str, *, groups: int = 4, pairs: int = 1, **options: Any) -> Sample:
    """A convolution and its gradients by the input and by the kernel."""
    options = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME", **options}

    def run(x: Any, w: Any) -> Any:
        out, back = jax.vjp(lambda x, w: lax.conv_general_dilated(x, w, **options), x, w)
        return back(jnp.sign(out) + 1)

    return sample("conv_general_dilated", run, x, w, label=label, groups=(groups,), pairs=pairs)


def pool(name: str, n: int, window: int, stride: int, padding: Any, **dilation: int) -> Sample:
    """A reduction in windows along the first of two dims."""
    init, fn = {"sum": (0.0, lax.add), "max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min)}[name]
    wide = {key: (d, 1) for key, d in dilation.items()}
    return sample(
        f"reduce_window_{name}",
        lambda x: lax.reduce_window(x, init, fn, (window, 1), (stride, 1), padding, **wide),
        whole((n, 2)),
        label=f"{n}_{window}_{stride}_{padding}{''.join(dilation)}",
    )


def largest(window: int, stride: int, padding: Any) -> Any:
    """Pooling of the first of two dims by maxima."""
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (window, 1), (stride, 1), padding)


def scattered(n: int, window: int, stride: int, padding: Any) -> Sample:
    """The gradient of a maximum."""
    return sample(
        "select_and_scatter_add",
        lambda x: jax.vjp(largest(window, stride, padding), x)[1](largest(window, stride, padding)(x)),
        whole((n, 2)),
        label=f"{n}_{window}_{stride}_{padding}",
    )


def first_largest(a: Any, b: Any) -> Any:
    """The larger of two pairs; of equal ones the one that comes first."""
    keep = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] <= b[1]))
    return jnp.where(keep, a[0], b[0]), jnp.where(keep, a[1], b[1])


X, PLACES = whole((9, 2)), np.arange(18, dtype=np.int32).reshape(9, 2)
IMAGE, KERNEL = whole((1, 2, 8, 6)), whole((2, 2, 3, 3), seed=1)

SAMPLES = [
    line(8, 3, "even"),
    line(10, 3, "uneven"),
    line(9, 4, "valid", padding="VALID"),
    line(10, 3, "strides", window_strides=(2,)),
    line(9, 3, "drifting", window_strides=(2,)),
    line(11, 3, "one_sided", window_strides=(3,), padding=((2, 0),)),
    line(9, 3, "dilated", rhs_dilation=(2,), padding=((1, 3),)),
    line(9, 3, "negative", padding=((-1, 2),)),
    line(5, 3, "transposed", lhs_dilation=(2,), padding=((1, 2),)),
    line(7, 3, "transposed_odd", lhs_dilation=(3,), padding=((2, 0),)),
    line(8, 4, "both_dilated", lhs_dilation=(2,), window_strides=(3,), padding=((4, 5),)),
    line(8, 7, "several_hops"),
    line(24, 3, "many"),
    gradients(whole((1, 1, 8)), whole((1, 1, 3), seed=1), "line_gradients"),
    gradients(
        whole((2, 2, 9)), whole((3, 2, 3), seed=1), "line_gradients_strides", groups=2, window_strides=(2,)
    ),
    gradients(IMAGE, KERNEL, "image_gradients", groups=2, pairs=4),
    gradients(whole((1, 4, 8)), whole((4, 2, 3), seed=1), "line_groups", groups=2, feature_group_count=2),
    pool("max", 8, 2, 2, "VALID"),
    pool("max", 10, 2, 2, "VALID"),
    pool("max", 9, 3, 2, "SAME"),
    pool("min", 9, 3, 1, "SAME", window_dilation=2),
    pool("sum", 8, 3, 1, "SAME"),
    pool("sum", 7, 2, 1, ((1, 2), (0, 0)), base_dilation=2),
    sample(
        "reduce_window",
        lambda x, i: lax.reduce_window(
            (x, i), (np.float32(-9), np.int32(99)), first_largest, (3, 1), (2, 1), "SAME"
        ),
        X,
        PLACES,
        label="pairs",
    ),
    scattered(8, 2, 2, "VALID"),
    scattered(10, 2, 2, "VALID"),
    scattered(9, 3, 2, "SAME"),
    scattered(8, 3, 1, "SAME"),
    scattered(10, 2, 3, "VALID"),
    sample(
        "select_and_gather_add",
        lambda x, t: jax.jvp(largest(3, 2, "SAME"), (x,), (t,)),
        X,
        X[::-1].copy(),
        label="same",
    ),
]
