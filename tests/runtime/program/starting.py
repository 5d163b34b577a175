"""Programs started again: `python -m tests.runtime.program.starting FOLDER` says what was compiled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp import B, S

DIMS = 16


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x * x)


def step(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def weights(layers: int = 2) -> Any:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(DIMS, DIMS)).astype(np.float32) for _ in range(layers)]


BATCH = np.linspace(-1, 1, 16 * DIMS, dtype=np.float32).reshape(16, DIMS)


def whole(options: sbp.Options | None = None) -> Any:
    """A train step on eight devices, whose parameters are donated."""
    eight = sbp.placement("cpu", shape=(8,))
    return sbp.compile(step, eight, in_sbp=([S(0)], [S(0)]), donate_argnums=0, options=options)


def staged(options: sbp.Options | None = None) -> Any:
    """The same in four stages, with micro-batches."""
    place = sbp.placement("cpu", shape=(4, 2))

    def staged_loss(params: Any, x: Any) -> Any:
        for stage, w in zip(place.split(0), params, strict=True):
            with sbp.on(stage):
                x = jnp.tanh(x @ w)
        with sbp.on(place.split(0)[-1]):
            return jnp.mean(x * x)

    def staged_step(params: Any, x: Any) -> Any:
        value, grads = sbp.microbatch(jax.value_and_grad(staged_loss), 2, batch_args=1)(params, x)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value

    return sbp.compile(staged_step, place, in_sbp=([B], [S(0)]), donate_argnums=0, options=options)


COMPILED = "/jax/core/compile/backend_compile_duration"
FOUND = "/jax/compilation_cache/cache_retrieval_time_sec"


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often JAX traces, lowers and compiles, by its own events."""
    found: dict[str, int] = {}

    def note(event: str, _: float, **__: Any) -> None:
        found[event] = found.get(event, 0) + 1

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def main(folder: str) -> None:
    """Compiles and runs both."""
    options = sbp.Options(cache=Path(folder))
    said: dict[str, Any] = {}
    for make, layers in ((whole, 2), (staged, 4)):
        params = weights(layers)
        jax.block_until_ready(jax.device_put(params[0]))
        program = make(options)
        with counted() as events:
            began = time.perf_counter()
            new, value = program(params, BATCH)
            jax.block_until_ready((new, value))
            said[make.__name__] = {
                "seconds": time.perf_counter() - began,
                "events": events,
                "loss": float(value),
                "sum": [float(np.asarray(w).sum()) for w in new],
            }
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
