"""Whether the source of a plan gives what its program gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.hardware.catalogue import Hardware, Link
from sbp.placement import Placement

# Ops cost, sending does not: what can run split, does.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
GRID = sbp.placement("cpu", shape=(2, 4), axes=("data", "model"))


def bits(x: Any) -> np.ndarray[Any, Any]:
    """A result on the host; of keys their words."""
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def differences(got: Sequence[Any], want: Sequence[Any], close: float) -> list[str]:
    """What is not equal, in words.

    Arguments:
      close: the relative and absolute difference that may be; 0: bit for bit.
    """
    out = [] if len(got) == len(want) else [f"{len(got)} results for {len(want)}"]
    for k, (a, b) in enumerate(zip(got, want, strict=False)):
        lies = a.size == 0 or a.sharding.is_equivalent_to(b.sharding, a.ndim)
        if a.shape != b.shape or a.dtype != b.dtype or not lies:
            out.append(f"result {k}: {a.dtype}{a.shape} {a.sharding} for {b.dtype}{b.shape} {b.sharding}")
            continue
        x, y = bits(a), bits(b)
        if x.tobytes() == y.tobytes():
            continue
        wide = (np.complex128 if x.dtype.kind == "c" else np.float64) if close else None
        same = wide and np.allclose(x.astype(wide), y.astype(wide), close, close, equal_nan=True)
        if not same:
            worst = np.max(np.abs(x.astype(np.complex128) - y.astype(np.complex128)), initial=0.0)
            out.append(f"result {k}: differs by {worst}")
    return out


def checked(
    fn: Callable[..., Any],
    args: Sequence[Any],
    on: Placement = GRID,
    *,
    close: float = 0.0,
    **options: Any,
) -> Any:
    """The source of a function's plan for some arguments, which gives what the program gives.

    Arguments:
      close: as of `differences`.
    """
    program = sbp.compile(fn, on, **options)
    source = program.plan(*args).source()
    compile(source.text, "source", "exec")
    # Each has its own: they may be donated.
    got, want = (run(*jax.tree.map(jnp.array, args)) for run in (source.load(), program))
    assert not differences(got, jax.tree.leaves(want), close), source.text
    return source
