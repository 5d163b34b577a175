"""Samples of parameters that the other samples leave as JAX sets them: modes, promises, flags, directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole

ROWS, FEW = whole((5, 4)), np.array([3, 0, 9, -1], np.int32)
SORTED = np.array([0, 2, 3], np.int32)
MATRIX = np.tril(whole((4, 4), low=1, high=4)).astype(np.float32) + 4 * np.eye(4, dtype=np.float32)
SIDES = whole((4, 5), seed=2)
MODES: tuple[Any, ...] = ("clip", "drop", "promise_in_bounds")


def scattered(how: str, label: str, index: Any = FEW, **flags: Any) -> Sample:
    """Updates of rows: `how` is what `.at[...]` calls it."""
    name = {"set": "scatter", "multiply": "scatter-mul", "subtract": "scatter-sub"}.get(how, f"scatter-{how}")
    inside = index % 5 if flags.get("mode") == "promise_in_bounds" else index
    updates = whole((len(index), 4), seed=4)
    return sample(name, lambda x, i, u: getattr(x.at[i], how)(u, **flags), ROWS, inside, updates, label=label)


def applied(fn: Callable[[Any], Any], label: str, **flags: Any) -> Sample:
    """A function of the user's on some rows."""
    return sample("scatter", lambda x, i: x.at[i].apply(fn, **flags), ROWS, SORTED, label=label)


def conv(label: str, dtype: Any = np.float32, **flags: Any) -> Sample:
    image, kernel = whole((2, 3, 8), dtype), whole((4, 3, 3), dtype, seed=1)
    return sample(
        "conv_general_dilated",
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", **flags),
        image,
        kernel,
        label=label,
    )


def solve(label: str, **flags: Any) -> Sample:
    how = {"left_side": True, "lower": True, **flags}
    fn = partial(lax.linalg.triangular_solve, **how)
    return sample("triangular_solve", fn, MATRIX, SIDES, close=1e-4, label=label)


SAMPLES = [
    *[
        scattered(how, f"{how}-{mode}", mode=mode)
        for how in ("max", "min", "multiply", "set", "subtract")
        for mode in MODES
    ],
    *[
        scattered(how, f"{how}-sorted-unique", SORTED, unique_indices=True, indices_are_sorted=True)
        for how in ("add", "max", "min", "multiply", "set", "subtract")
    ],
    applied(lambda row: row * row + 1, "apply"),
    applied(jnp.exp, "apply-unique", unique_indices=True),
    applied(lambda row: jnp.maximum(row, 2), "apply-clip", mode="clip", indices_are_sorted=True),
    sample("sort", lambda x: lax.sort(x, dimension=0, is_stable=False), ROWS, label="unstable"),
    sample("sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=2), ROWS, ROWS[::-1], label="keys"),
    *[
        sample(f"cum{how}", partial(getattr(lax, f"cum{how}"), axis=0, reverse=True), ROWS, label="reverse")
        for how in ("prod", "min", "max", "sum")
    ],
    sample("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 0, reverse=True), ROWS, close=1e-5, label="reverse"),
    *[
        sample(name, lambda x, f=f: f(x, 1, jnp.int8), ROWS, label="int8")
        for name, f in (("argmax", lax.argmax), ("argmin", lax.argmin))
    ],
    *[
        sample(f"reduce_{how}", lambda x, fn=fn: fn(x, (0, 1)), whole((5, 4), dtype), label="all")
        for how, fn, dtype in (
            ("and", jnp.all, bool),
            ("or", jnp.any, bool),
            ("prod", jnp.prod, np.float32),
            ("xor", lax.reduce_xor, np.int32),
        )
    ],
    sample("round", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), whole((8,)) / 2, label="up"),
    sample("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), whole((8,)) / 3, label="bfloat16"),
    sample("concatenate", lambda x: lax.concatenate([x, 2 * x], 1), ROWS, label="last"),
    sample("dot_general", lambda x, y: jnp.dot(x, y, precision="highest"), ROWS, whole((4, 3)), label="hi"),
    conv("highest", precision="highest"),
    conv("wider", np.int8, preferred_element_type=np.int32),
    solve("plain"),
    solve("upper", lower=False),
    solve("transposed", transpose_a=True),
    solve("conjugate", transpose_a=True, conjugate_a=True),
    solve("unit", unit_diagonal=True),
    sample("eigh", lambda x: jnp.linalg.eigvalsh(x @ x.mT, UPLO="U"), MATRIX[None], close=1e-3, label="up"),
    sample("svd", lambda x: jnp.linalg.svd(x, compute_uv=False), MATRIX[None], close=1e-3, label="values"),
    sample("qr", lambda x: jnp.linalg.qr(x, mode="r"), MATRIX[None], close=1e-3, label="r"),
]
