"""Small programs that several processes run, and one does.

python -m tests.runtime.processes.cases [--steps N] [--x64] [NAME ...] FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from sbp import B, S
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.options import ExchangeOptions, PipelineOptions

STEPS = 4
DIMS = 16


def mlp(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)


def real(x: np.ndarray) -> np.ndarray:
    """In the precision that JAX has."""
    return x.astype(jnp.result_type(float))


def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: real(rng.normal(size=s) / 4) for k, s in shapes.items()}


def weights() -> Any:
    return arrays(up=(DIMS, 4 * DIMS), down=(4 * DIMS, DIMS))


def batch_of(step: int) -> Any:
    rng = np.random.default_rng(step + 1)
    return tuple(real(rng.normal(size=(32, DIMS))) for _ in range(2))


def step_of(loss: Any, optimizer: Any, microbatches: int = 1) -> Any:
    gradients = jax.value_and_grad(loss)
    if microbatches > 1:
        gradients = sbp.microbatch(gradients, microbatches, batch_args=(1,))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = gradients(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def own_part(x: np.ndarray) -> np.ndarray:
    return np.split(x, jax.process_count())[jax.process_index()]


def trained(
    program: Any, params: Any, state: Any, batches: Callable[[int], Any], steps: int, own: bool = False
) -> Any:
    """Losses and parameters, as every process has them."""
    losses = []
    for i in range(steps):
        batch = batches(i)
        if own:
            batch = jax.tree.map(own_part, batch)
            params, state, batch = program.place(params, state, batch, own_rows=2)
        params, state, loss = program(params, state, batch)
        losses.append(float(loss))
    return {"losses": losses, "params": [x.tolist() for x in jax.tree.leaves(sbp.to_host(params))]}


def data(steps: int, own: bool = False) -> Any:
    optimizer = optax.adam(1e-2)
    program = sbp.compile(
        step_of(mlp, optimizer),
        sbp.placement("cpu", shape=(8,)),
        donate_argnums=(0, 1),
        in_sbp=([B], [B], [S(0)]),
    )
    params = weights()
    return trained(program, params, jax.tree.map(np.asarray, optimizer.init(params)), batch_of, steps, own)


def zero(steps: int) -> Any:
    optimizer = optax.adam(1e-2)
    program = sbp.compile(
        step_of(mlp, optimizer),
        sbp.placement("cpu", shape=(8,)),
        donate_argnums=(0, 1),
        in_sbp=([S(0)], sbp.AUTO, [S(0)]),
    )
    params = weights()
    return trained(program, params, jax.tree.map(np.asarray, optimizer.init(params)), batch_of, steps)


def tensor(steps: int) -> Any:
    optimizer = optax.adam(1e-2)
    program = sbp.compile(
        step_of(mlp, optimizer),
        sbp.placement("cpu", shape=(8,)),
        in_sbp=({"up": [S(1)], "down": [S(0)]}, sbp.AUTO, [B]),
    )
    params = weights()
    return trained(program, params, jax.tree.map(np.asarray, optimizer.init(params)), batch_of, steps)


def two_d(steps: int) -> Any:
    optimizer = optax.adam(1e-2)
    program = sbp.compile(
        step_of(mlp, optimizer),
        sbp.placement("cpu", shape=(2, 4)),
        in_sbp=({"up": [B, S(1)], "down": [B, S(0)]}, sbp.AUTO, [S(0), B]),
    )
    params = weights()
    return trained(program, params, jax.tree.map(np.asarray, optimizer.init(params)), batch_of, steps)


def auto(steps: int) -> Any:
    optimizer = optax.sgd(1e-1)
    program = sbp.compile(step_of(mlp, optimizer), sbp.placement("cpu", shape=(2, 4)))
    params = weights()
    return trained(program, params, optimizer.init(params), batch_of, steps)


def tower(placements: Any) -> Any:
    """Layers in stages; the first weight is used by the last stage again, the first activation skips all."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        skip = None
        for i, w in enumerate(params["w"]):
            with sbp.on(placements[i * len(placements) // len(params["w"])]):
                x = jnp.tanh(x @ w)
                skip = x if skip is None else skip
        with sbp.on(placements[-1]):
            return jnp.mean((x @ params["w"][0].T + skip - y) ** 2)

    return loss


def pipeline(steps: int, stages: int, schedule: str = "1f1b") -> Any:
    whole = sbp.placement("cpu", shape=(stages, 8 // stages), axes=("stage", "data"))
    optimizer = optax.adam(1e-2)
    params = {"w": [arrays(w=(DIMS, DIMS))["w"] for _ in range(4)]}
    program = sbp.compile(
        step_of(tower(whole.split("stage")), optimizer, 4),
        whole,
        donate_argnums=(0, 1),
        options=sbp.Options(pipeline=PipelineOptions(schedule=schedule)),
    )
    return trained(program, params, jax.tree.map(np.asarray, optimizer.init(params)), batch_of, steps)


def scanned(steps: int) -> Any:
    """A scan over layers that is cut into stages: stacked weights lie on all of them."""
    whole = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.mean((out - y) ** 2)

    optimizer = optax.adam(1e-2)
    params = arrays(w=(4, DIMS, DIMS))
    options = sbp.Options(pipeline=PipelineOptions(stages=2))
    program = sbp.compile(step_of(loss, optimizer, 4), whole, donate_argnums=(0, 1), options=options)
    return trained(program, params, jax.tree.map(np.asarray, optimizer.init(params)), batch_of, steps)


def rows(steps: int, own: bool = False) -> Any:
    """A table split by rows, whose exchange is planned from the first batch."""
    optimizer = optax.sgd(1e-1)
    tables = arrays(table=(64, DIMS), w=(DIMS, 1))

    def loss(params: Any, batch: Any) -> jax.Array:
        ids, y = batch
        return jnp.mean((params["table"][ids] @ params["w"] - y) ** 2)

    def batches(step: int) -> Any:
        rng = np.random.default_rng(step)
        return rng.integers(0, 64, 32).astype(np.int32), real(rng.normal(size=(32, 1)))

    program = sbp.compile(
        step_of(loss, optimizer),
        sbp.placement("cpu", shape=(8,)),
        in_sbp=({"table": [S(0)], "w": [B]}, [B], [S(0)]),
    )
    return trained(program, tables, optimizer.init(tables), batches, steps, own)


def crowded(steps: int) -> Any:
    """A table whose room is planned from a first batch of few ids, and again when others come."""
    keys, table = 2048, arrays(table=(1 << 13, 2))

    def loss(params: Any, ids: Any) -> jax.Array:
        return jnp.square(params["table"][ids]).mean()

    def batches(step: int) -> Any:
        few = np.arange(keys) % 16 * 512
        return (np.random.default_rng(step).integers(0, 1 << 13, keys) if step else few).astype(np.int32)

    optimizer = optax.sgd(1e-1)
    program = sbp.compile(
        step_of(loss, optimizer),
        sbp.placement("cpu", shape=(8,)),
        in_sbp=([S(0)], sbp.AUTO, [S(0)]),
        options=sbp.Options(hardware=BYTES_ONLY, exchange=ExchangeOptions(count_keys=True)),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(program, table, optimizer.init(table), batches, steps)
    again = sum("capacity was planned again" in str(w.message) for w in caught)
    counted = [(c.op, c.calls, c.given_keys == c.served_keys) for c in program.key_counts()]
    return {**found, "again": again, "counted": counted}


def keyed(steps: int) -> Any:
    """Parameters and keys as JAX makes them: every process its own, and all alike."""
    optimizer = optax.adam(1e-2)
    params = jax.tree.map(jnp.asarray, weights())

    def step(params: Any, state: Any, batch: Any) -> Any:
        *data, key = batch

        def loss(params: Any) -> jax.Array:
            kept = jax.random.bernoulli(key, 0.9, data[0].shape)
            return mlp(params, (jnp.where(kept, data[0], 0), data[1]))

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    program = sbp.compile(step, sbp.placement("cpu", shape=(2, 4)), donate_argnums=(0, 1))
    return trained(
        program, params, optimizer.init(params), lambda i: (*batch_of(i), jax.random.key(i)), steps
    )


CASES: Mapping[str, Callable[[int], Any]] = {
    "data": data,
    "own rows": partial(data, own=True),
    "tensor": tensor,
    "zero": zero,
    "2-D": two_d,
    "auto": auto,
    "arrays and keys": keyed,
    "2 stages": partial(pipeline, stages=2),
    "4 stages": partial(pipeline, stages=4),
    "zb-h1": partial(pipeline, stages=2, schedule="zb-h1"),
    "scan in stages": scanned,
    "rows": rows,
    "own rows of ids": partial(rows, own=True),
    "rooms too small": crowded,
}
"""Steps -> losses, and the leaves of the parameters behind the last one."""


def main(argv: list[str]) -> None:
    """Runs cases, and has process 0 write what each gives."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--x64", action="store_true")
    options.add_argument("names", nargs="*")
    options.add_argument("file")
    args = options.parse_args(argv)
    found = {}
    with jax.enable_x64(args.x64):
        for name in args.names or CASES:
            found[name] = CASES[name](args.steps)
            if jax.process_index() == 0:
                Path(args.file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
