"""Applications of reductions, cumulative ops and sorts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole

X, CUBE = whole((5, 7)), whole((5, 4, 3))
AWKWARD = np.where(whole((5, 7), low=0, high=9, seed=3) == 1, np.nan, X).astype(np.float32)
INFINITE = np.where(X > 3, np.inf, np.where(X < -2, -np.inf, X)).astype(np.float32)
DISTINCT = np.random.default_rng(0).permutation(36).reshape(3, 12).astype(np.float32)
THREE: Any = {"groups": (3,)}
ONE: Any = {"pairs": 1}


def reduction(name: str, x: Any, axes: tuple[int, ...], label: str = "", **options: Any) -> Sample:
    """One of the named reductions."""
    call = getattr(lax, name)
    label = f"{x.dtype}{''.join(map(str, axes))}{label}"
    return sample(name, lambda x: call(x, axes), x, label=label, **options)


def along(names: str, x: Any, axis: int, **options: Any) -> list[Sample]:
    """Cumulative functions along one dim."""
    calls = [(name, getattr(lax, name)) for name in names.split()]
    return [
        sample(
            name,
            lambda x, call=call, back=back: call(x, axis, reverse=back),
            x,
            label=f"{x.dtype}{back}",
            **options,
        )
        for name, call in calls
        for back in (False, True)
    ]


SAMPLES = [
    reduction("reduce_sum", X, (0,), pairs=2),
    reduction("reduce_sum", CUBE, (0, 2), pairs=3),
    reduction("reduce_sum", CUBE, (0, 1, 2)),
    reduction("reduce_sum", whole((5, 7), np.int8, -99, 99), (1,), **ONE),
    reduction("reduce_sum", AWKWARD, (1,), "nan", **ONE),
    reduction("reduce_sum", whole((0, 4)), (0,), **THREE),
    reduction("reduce_sum", whole((5, 7), np.complex64), (0,), **ONE),
    reduction("reduce_sum", whole((5, 7), np.uint8, 5, 9), (0,), **ONE),
    *[
        reduction(n, x, a, label, **THREE)
        for n in ("reduce_max", "reduce_min")
        for x, a, label in (
            (AWKWARD, (0,), "nan"),
            (INFINITE, (1,), "inf"),
            (X.astype(np.int32), (0, 1), ""),
            (whole((5, 7), np.uint8, 5, 9), (0,), ""),
            (whole((5, 7), bool), (0,), ""),
            (X.astype(jnp.bfloat16), (0,), ""),
        )
    ],
    reduction("reduce_max", CUBE, (0, 2), pairs=3),
    reduction("reduce_prod", X + 0.5, (1,), close=1e-5, **THREE),
    *[
        reduction(n, x, (0,), **ONE)
        for n in ("reduce_and", "reduce_or")
        for x in (whole((5, 7), bool), X.astype(np.int32))
    ],
    reduction("reduce_xor", X.astype(np.int32), (0,), **ONE),
    *[
        sample(n, lambda x, c=c: c(x, 1, np.int32), x, label=str(x.dtype), **ONE)
        for n, c in (("argmax", lax.argmax), ("argmin", lax.argmin))
        for x in (AWKWARD, X.astype(np.int32))
    ],
    *along("cumsum cumprod cummax cummin cumlogsumexp", whole((5, 4), low=1), 1, close=1e-5, **ONE),
    *along("cumsum cummax", whole((5, 4), np.int32), 0, **ONE),
    *[
        sample(n, lambda x, c=c: c(x, axis=1, reverse=True), whole((3, 12), low=1), label="reverse", pairs=4)
        for n, c in (("cumsum", lax.cumsum), ("cummin", lax.cummin))
    ],
    sample("cumsum", lambda x: lax.cumsum(x, axis=0), whole((12,)), pairs=4, label="twice"),
    # Ties, lowest values and NaN, also where shards in the middle are empty.
    *[
        sample(n, lambda x, c=c: c(x, 0, np.int32), x, label=f"{n}_{label}", pairs=4)
        for n, c in (("argmax", lax.argmax), ("argmin", lax.argmin))
        for label, x in (
            ("equal", np.zeros(9, np.float32)),
            ("lowest", np.full(5, -np.inf, np.float32)),
            ("highest", np.full(5, np.inf, np.float32)),
            ("nan", np.array([1, np.nan, 3, np.nan, 0], np.float32)),
            ("least", np.full(5, -(2**31), np.int32)),
        )
    ],
    sample("sort", lambda x: lax.sort(x, dimension=1), AWKWARD, pairs=2),
    sample(
        "sort",
        lambda x, y: lax.sort((x, y), dimension=0, num_keys=2),
        X,
        whole((5, 7), np.int32, seed=1),
        **THREE,
    ),
    sample("top_k", lambda x: lax.top_k(x, 3), AWKWARD, **THREE),
    sample("top_k", lambda x: lax.top_k(x, 2), whole((3, 12)), pairs=4, label="ties"),
    sample("top_k", lambda x: lax.top_k(x, 1), np.full(12, -np.inf, np.float32), pairs=2, label="lowest"),
    sample("approx_top_k", lambda x: lax.approx_max_k(x, 3), X, **THREE),
    sample("approx_top_k", lambda x: lax.approx_max_k(x, 2), DISTINCT, label="searched", pairs=2),
    sample("approx_top_k", lambda x: lax.approx_min_k(x, 2), DISTINCT - 50, label="searched min", **THREE),
    sample(
        "approx_top_k",
        lambda x: lax.approx_max_k(x, 2, aggregate_to_topk=False),
        DISTINCT,
        label="not aggregated",
        groups=(4,),
    ),
    sample("approx_top_k", lambda x: lax.approx_min_k(x, 3, reduction_dimension=0), X, label="min", **ONE),
]
