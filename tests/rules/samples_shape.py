"""Applications of the ops that move elements."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole

X, CUBE = whole((5, 4)), whole((5, 4, 3))
THREE: Any = {"groups": (3,)}


def reshape(old: tuple[int, ...], new: tuple[int, ...], **options: Any) -> Sample:
    """A reshape."""
    label = f"{'x'.join(map(str, old))}-{'x'.join(map(str, new))}"
    options = {"pairs": 2, **options}
    return sample("reshape", lambda x: lax.reshape(x, new), whole(old), label=label, **options)


def spread(old: tuple[int, ...], new: tuple[int, ...], dims: tuple[int, ...], **options: Any) -> Sample:
    """A broadcast."""
    label = f"{'x'.join(map(str, old))}-{'x'.join(map(str, new))}"
    return sample(
        "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, new, dims), whole(old), label=label, **options
    )


SAMPLES = [
    spread((5,), (4, 5), (1,), pairs=2),
    spread((5, 1), (5, 4), (0, 1)),
    spread((1, 1), (5, 4), (0, 1), **THREE),
    spread((), (5, 4), ()),
    spread((4, 5), (4, 3, 5), (0, 2), **THREE),
    spread((1,), (1, 6), (0,), **THREE),
    spread((2,), (0, 2), (1,), **THREE),
    sample("transpose", lambda x: lax.transpose(x, (2, 0, 1)), CUBE, pairs=2),
    sample("squeeze", lambda x: lax.squeeze(x, (1,)), whole((5, 1, 4))),
    sample("squeeze", lambda x: lax.squeeze(x, (0, 1)), whole((1, 1)), **THREE),
    reshape((4, 6), (24,), pairs=2),
    reshape((24,), (4, 6), pairs=2),
    reshape((6, 4), (3, 8)),
    reshape((5, 4), (20,)),
    reshape((5, 4), (5, 2, 2)),
    reshape((5, 1, 7), (1, 5, 7, 1), pairs=2),
    reshape((2, 3, 5), (6, 5)),
    sample("reshape", lambda x: lax.reshape(x, (24,), (1, 0)), whole((4, 6)), label="turned"),
    sample("reshape", lambda x: lax.reshape(x, (4, 6), (2, 0, 1)), whole((2, 3, 4)), label="turned-grouped"),
    reshape((8, 3, 2), (4, 2, 6), pairs=2),
    reshape((), (1, 1), **THREE),
    reshape((1,), (), **THREE),
    reshape((0, 4), (4, 0), **THREE),
    reshape((12, 5), (2, 6, 5), pairs=2),
    reshape((5, 7), (7, 5), **THREE),
    reshape((1, 8), (2, 4), **THREE),
    sample("concatenate", lambda *xs: lax.concatenate(xs, 1), X, X - 1, whole((5, 2)), pairs=2),
    sample("concatenate", lambda x: lax.concatenate([x, x], 0), whole((5,)), **THREE),
    sample("split", lambda x: lax.split(x, (1, 3), axis=1), X),
    sample("stack", lambda x, y: jnp.stack([x, y], 1), X, X - 1),
    sample("unstack", lambda x: jnp.unstack(x, axis=1), X),
    sample("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (2, 1, 0))), X, np.float32(7), pairs=2),
    sample(
        "pad",
        lambda x, v: lax.pad(x, v, ((-1, 2, 0), (0, 0, 0))),
        X,
        np.float32(7),
        label="negative",
        **THREE,
    ),
    sample(
        "pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, -1, 2))), X, np.float32(7), label="inner", **THREE
    ),
    sample("pad", lambda x, v: lax.pad(x, v, ()), whole(), np.float32(7), label="scalar", **THREE),
    sample("pad", lambda x: jnp.pad(x, ((0, 0), (1, 0))), X, label="literal", **THREE),
    sample("slice", lambda x: lax.slice(x, (0, 1, 0), (5, 3, 3)), CUBE, pairs=2),
    sample("slice", lambda x: lax.slice(x, (0, 1), (5, 4), (1, 2)), X, label="strided"),
    sample("slice", lambda x: lax.slice(x, (0, 0), (5, 3)), X, label="prefix", **THREE),
    sample("slice", lambda x: lax.slice(x, (0, 0), (1, 4), (3, 1)), whole((1, 4)), label="single", **THREE),
    sample("rev", lambda x: lax.rev(x, (0,)), X, pairs=2),
    *[
        sample(
            "iota", lambda d=d, t=t: lax.broadcasted_iota(t, (5, 4), d), label=f"{np.dtype(t)}{d}", **THREE
        )
        for d, t in (
            (0, np.int32),
            (1, np.float32),
            (0, np.int8),
            (0, np.uint16),
            (1, jnp.bfloat16),
            (0, np.complex64),
        )
    ],
    sample("iota", lambda: lax.iota(np.int32, 9), pairs=2),
    sample("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i), (5, 2)), X, np.int32(3), pairs=2),
    sample("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i,), (1,)), whole((1,)), np.int32(0), **THREE),
    sample(
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (np.uint8(0), i), (5, 2)),
        X,
        np.uint8(9),
        label="uint8",
        **THREE,
    ),
    sample(
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, 1), (5, 2)),
        X,
        np.int32(-7),
        label="negative",
        **THREE,
    ),
    sample(
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, i), (4, 2)),
        whole((300, 3)),
        np.uint8(255),
        label="far",
        **THREE,
    ),
    sample("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i,), (0,)), X[0], np.int32(2), label="none"),
    sample(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 2)),
        whole((8, 12)),
        whole((3, 5), seed=1),
        np.int32(4),
        pairs=4,
        label="inside",
    ),
    sample(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)),
        X,
        whole((5, 2), seed=1),
        np.int32(1),
        pairs=2,
    ),
    sample(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i,)),
        whole((5,)),
        whole((5,), seed=1),
        np.int32(3),
        **THREE,
    ),
]
