"""Applications of the ops that move elements."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole

X, CUBE = whole((5, 4)), whole((5, 4, 3))
THREE: Any = {"groups": (3,)}
# What moves rows: as many compositions on two axes as there are, or nearly so.
BOTH: Any = {"groups": (2, 4), "pairs": 4}


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


def joined(*xs: Any) -> Any:
    """A concatenation along the first dim."""
    return lax.concatenate(xs, 0)


def pad(shape: tuple[int, ...], config: Any, dtype: Any = np.float32, **options: Any) -> Sample:
    """A padding with 7."""
    return sample("pad", lambda x, v: lax.pad(x, v, config), whole(shape, dtype), dtype(7), **options)


SAMPLES = [
    spread((5,), (4, 5), (1,), pairs=2),
    spread((5, 1), (5, 4), (0, 1)),
    spread((1, 1), (5, 4), (0, 1), **THREE),
    spread((), (5, 4), ()),
    spread((4, 5), (4, 3, 5), (0, 2), **THREE),
    spread((1,), (1, 6), (0,), **THREE),
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
    reshape((12, 5), (2, 6, 5), pairs=2),
    reshape((5, 7), (7, 5), **THREE),
    reshape((1, 8), (2, 4), **THREE),
    sample("concatenate", lambda *xs: lax.concatenate(xs, 1), X, X - 1, whole((5, 2)), pairs=2),
    sample("concatenate", lambda x: lax.concatenate([x, x], 0), whole((5,)), **THREE),
    sample("concatenate", joined, whole((1, 3)), whole((14, 3)), label="roll", **BOTH),
    sample("concatenate", joined, whole((9, 2)), whole((0, 2)), whole((2, 2)), label="ragged", **BOTH),
    sample("concatenate", joined, whole((16, 2)), whole((16, 2), seed=1), label="halves", **BOTH),
    sample("concatenate", joined, whole((7,), bool), whole((6,), bool), label="bool", **THREE),
    sample("split", lambda x: lax.split(x, (1, 3), axis=1), X),
    sample("split", lambda x: lax.split(x, (8, 8), axis=0), whole((16, 3)), label="halves", **BOTH),
    sample("split", lambda x: lax.split(x, (4, 0, 1, 6), axis=0), whole((11, 3)), label="ragged", **BOTH),
    sample("split", lambda x: lax.split(x, (1, 6), axis=0), whole((7,), bool), label="bool", **THREE),
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
    pad((15, 3), ((1, 0, 0), (0, 0, 0)), label="shift", **BOTH),
    pad((11, 3), ((-2, 3, 0), (0, 2, 0)), label="cut", **BOTH),
    pad((5, 5), ((1, 2, 2), (0, -1, 1)), label="between", **BOTH),
    pad((6,), ((-5, -4, 3),), label="mostly between", **BOTH),
    pad((2,), ((3, 0, 7),), label="far apart", **THREE),
    pad((9,), ((2, -3, 2),), np.int8, label="int8", **THREE),
    pad((1, 3), ((4, 5, 0), (0, 0, 0)), label="one row", **BOTH),
    pad((8,), ((-5, -2, 0),), label="one left", **THREE),
    sample("pad", lambda x: jnp.pad(x, ((0, 0), (1, 0))), X, label="literal", **THREE),
    sample("slice", lambda x: lax.slice(x, (0, 1, 0), (5, 3, 3)), CUBE, pairs=2),
    sample("slice", lambda x: lax.slice(x, (0, 1), (5, 4), (1, 2)), X, label="strided"),
    sample("slice", lambda x: lax.slice(x, (0, 0), (5, 3)), X, label="prefix", **THREE),
    sample("slice", lambda x: lax.slice(x, (0, 0), (1, 4), (3, 1)), whole((1, 4)), label="single", **THREE),
    sample("slice", lambda x: lax.slice(x, (1, 0), (16, 3)), whole((16, 3)), label="shift", **BOTH),
    sample("slice", lambda x: lax.slice(x, (8, 1), (16, 5)), whole((16, 5)), label="half", **BOTH),
    sample("slice", lambda x: lax.slice(x, (2, 1), (17, 9), (3, 2)), whole((18, 9)), label="every", **BOTH),
    sample("slice", lambda x: lax.slice(x, (9,), (11,), (2,)), whole((13,)), label="one", **BOTH),
    sample("slice", lambda x: lax.slice(x, (3,), (8,)), whole((9,), bool), label="bool", **THREE),
    sample("slice", lambda x: lax.slice(x, (3,), (8,)), whole((9,), np.int32), label="int32", **THREE),
    sample(
        "slice",
        lambda x: lax.slice(jax.random.split(jax.random.key(0), x.shape[0]), (2,), (5,)),
        whole((6,)),
        label="keys",
        **THREE,
    ),
    sample("tile", lambda x: lax.tile(x, (1, 3)), X, pairs=2),
    sample("tile", lambda x: lax.tile(x, (2, 1, 3)), whole((3, 5, 1)), label="both", pairs=2),
    sample("tile", lambda x: lax.tile(x, (5,)), whole((7,), np.int8), label="int8", **THREE),
    sample("rev", lambda x: lax.rev(x, (0,)), X, pairs=2),
    sample("rev", lambda x: lax.rev(x, (0, 1)), whole((8, 7)), label="both", **BOTH),
    sample("rev", lambda x: lax.rev(x, (1,)), whole((1, 9), bool), label="bool", **THREE),
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
