"""Applications of transforms, factorisations, solvers, windows and a user's own reduction."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole

BATCH = whole((3, 2, 2)) + 5 * np.eye(2, dtype=np.float32)
SIDES = whole((3, 2, 4), seed=1)
X, IMAGE = whole((5, 4)), whole((3, 4, 6))
ONE: Any = {"groups": (2,), "pairs": 0, "close": 1e-4}
THREE: Any = {"pairs": 1, "close": 1e-4}


def problems(name: str, fn: Any, *args: Any, **options: Any) -> Sample:
    """A batch of problems."""
    return sample(name, fn, *args, **{**ONE, **options})


def pooled(init: Any, fn: Any) -> Any:
    """Pooling of the last dim."""
    return lambda x: lax.reduce_window(x, init, fn, (1, 1, 2), (1, 1, 2), "VALID")


def sliding(init: Any, fn: Any) -> Any:
    """Overlapping, padded windows over the middle dim."""
    return lambda x: lax.reduce_window(x, init, fn, (1, 3, 1), (1, 1, 1), "SAME")


SAMPLES = [
    problems("cholesky", lambda x: lax.linalg.cholesky(x @ x.mT), BATCH, groups=(3,)),
    problems("eigh", lambda x: lax.linalg.eigh(x @ x.mT), BATCH),
    problems("lu", lax.linalg.lu, BATCH),
    problems(
        "lu_pivots_to_permutation",
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 2),
        np.ones((3, 2), np.int32),
    ),
    problems("qr", lax.linalg.qr, BATCH),
    problems("svd", lax.linalg.svd, BATCH),
    problems("householder_product", lax.linalg.householder_product, BATCH, whole((3, 2))),
    problems("hessenberg", lax.linalg.hessenberg, BATCH),
    problems("tridiagonal", lambda x: lax.linalg.tridiagonal(x @ x.mT), BATCH),
    problems("schur", lax.linalg.schur, BATCH),
    problems("eig", lax.linalg.eig, BATCH),
    sample(
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
        BATCH,
        SIDES,
        **THREE,
    ),
    sample(
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b),
        BATCH,
        SIDES.mT,
        label="right",
        **THREE,
    ),
    sample(
        "tridiagonal_solve",
        lax.linalg.tridiagonal_solve,
        *[whole((3, 4), low=1) + i for i in (0, 9, 0)],
        whole((3, 4, 2)),
        **THREE,
    ),
    sample("fft", jnp.fft.fft, X.astype(np.complex64), **THREE),
    sample("fft", jnp.fft.rfft2, IMAGE, label="rfft2", **THREE),
    sample("fft", lambda x: jnp.fft.irfft(x, 6), X.astype(np.complex64), label="irfft", **THREE),
    sample("reduce_window_sum", pooled(0.0, lax.add), IMAGE, pairs=2),
    sample("reduce_window_sum", sliding(0.0, lax.add), IMAGE, label="same", groups=(3,)),
    sample("reduce_window_max", pooled(-jnp.inf, lax.max), IMAGE, groups=(3,)),
    sample("reduce_window_min", sliding(jnp.inf, lax.min), IMAGE, groups=(3,)),
    sample("reduce_window", pooled(1.0, lambda a, b: a * b + 1), IMAGE, groups=(3,)),
    sample(
        "select_and_scatter_add",
        jax.grad(lambda x: jnp.sum(pooled(-jnp.inf, lax.max)(x) ** 2)),
        IMAGE,
        groups=(3,),
    ),
    sample(
        "select_and_gather_add",
        lambda x, t: jax.jvp(pooled(-jnp.inf, lax.max), (x,), (t,)),
        IMAGE,
        IMAGE[::-1].copy(),
        groups=(3,),
    ),
    sample(
        "reduce", lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (1,)), IMAGE, groups=(3,)
    ),
    sample(
        "reduce",
        lambda x, y: lax.reduce(
            (x, y), (np.float32(0), np.int32(1)), lambda a, b: (a[0] + 2 * b[0], a[1] * b[1]), (0,)
        ),
        X,
        X.astype(np.int32),
        groups=(3,),
    ),
    sample("device_put", lambda x: jax.device_put(x), X, groups=(3,)),
    # Between equal bounds it is a function.
    sample("rng_uniform", lambda a, b: lax.rng_uniform(a, b, (5, 4)), np.float32(2), np.float32(2)),
    sample(
        "rng_bit_generator",
        lambda k: lax.rng_bit_generator(k, (5, 4)),
        np.arange(4, dtype=np.uint32),
        groups=(2,),
    ),
]
