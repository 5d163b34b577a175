"""What several processes say when they start again, and when one of them finds a NaN: by the launcher."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp import B, S
from sbp.errors import ArgumentError, NonFiniteError
from sbp.runtime.processes.process_group import process_group
from tests.runtime.program import starting
from tests.runtime.program.starting import BATCH, COMPILED, FOUND, counted

CHECKED = sbp.Options(debug_nans=True)


def tied(options: sbp.Options) -> Any:
    """Two stages: both use the first weight, and a key goes from one to the other; parameters are donated."""
    place = sbp.placement("cpu", shape=(2, 4))
    first, second = place.split(0)

    def loss(params: Any, x: Any, keys: Any) -> Any:
        with sbp.on(first):
            x, key = jnp.tanh(x @ params[0]), jax.random.fold_in(keys[0], 1)
        with sbp.on(second):
            x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
            return jnp.mean((jnp.tanh(x @ params[1]) @ params[0].T) ** 2)

    def step(params: Any, x: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), len(x))
        both = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=(1, 2))
        value, grads = both(params, x, keys)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value

    return sbp.compile(step, place, in_sbp=([B], [S(0)]), donate_argnums=0, options=options)


def two_steps(program: Any, layers: int) -> list[float]:
    """The losses of a step and of the next one, whose state lies as the first has left it."""
    state, first = program(starting.weights(layers), BATCH)
    return [float(first), float(program(state, BATCH)[1])]


def restarted(make: Any, layers: int, folder: Path) -> Any:
    """Losses of a program, its file and its cache; programs compiled for the file, and those of the cache."""
    path = folder / f"{make.__name__}.sbpx"
    program = make(sbp.Options(cache=folder))
    losses = two_steps(program, layers)
    program.save_executable(path)
    loaded = sbp.load_executable(path)
    with counted() as events:
        again = two_steps(loaded, layers)
    with counted() as more:
        cached = two_steps(make(sbp.Options(cache=folder)), layers)
    return losses, again, cached, events.get(COMPILED, 0), more.get(FOUND, 0)


def refused(call: Any) -> str:
    """The message of a NaN."""
    try:
        call()
    except NonFiniteError as e:
        return str(e)
    return "none"


def quiet(x: Any) -> Any:
    """Compiled where the log is at INFO; the programs behind it where it is at DEBUG."""
    return x + 1


def on_one_device() -> Any:
    x = np.ones((16, 4), np.float32)
    x[13] = -1  # device 6, of process 1
    eight = sbp.placement("cpu", shape=(8,))
    return sbp.compile(lambda x: jnp.sqrt(x) * 2, eight, in_sbp=([S(0)],), options=CHECKED)(x)


def on_devices_of_both() -> Any:
    x = np.ones((16, 4), np.float32)
    x[[3, 13]] = -1  # devices 1 and 6
    eight = sbp.placement("cpu", shape=(8,))
    return sbp.compile(lambda x: jnp.sqrt(x) * 2, eight, in_sbp=([S(0)],), options=CHECKED)(x)


def in_a_stage() -> Any:
    place = sbp.placement("cpu", shape=(2, 4))
    first, second = place.split(0)

    def fn(x: Any) -> Any:
        with sbp.on(first):
            x = x * 2
        with sbp.on(second):
            return jnp.log(x)

    return sbp.compile(fn, place, in_sbp=([B],), options=CHECKED)(-np.ones((8, 4), np.float32))


def rows_of_its_own() -> list[str]:
    """What is said of an argument that each process gives otherwise: rows, and all of a small one."""
    step = sbp.compile(lambda w, x: (x * w).sum(), sbp.placement("cpu", shape=(8,)), in_sbp=([B], [S(0)]))
    rank, found = jax.process_index(), []
    for w, x in (
        (np.ones(4, np.float32), np.full((8, 4), rank, np.float32)),
        (jnp.full(4, rank), np.ones((8, 4), np.float32)),
    ):
        step = sbp.compile(step.fn, step.placement, in_sbp=step.in_sbp)
        try:
            step.place(w, x)
            found.append("none")
        except ArgumentError as e:
            found.append(str(e))
    return found


def host_batches() -> list[Any]:
    """The sums of batches that all give whole, in three types, and how often processes have met for them."""
    step = sbp.compile(lambda x: x.sum(), sbp.placement("cpu", shape=(8,)), in_sbp=([S(0)],))
    others, met = process_group(), list[int]()
    assert others is not None
    x = np.arange(32.0).reshape(8, 4).astype(np.float32)
    sums = []
    for i in range(3):
        sums.append(float(step(x + i)))
        met.append(others.meetings)
    kept = np.ones(4, np.float32)
    grow = sbp.compile(lambda w: w + 1, step.placement, in_sbp=([B],), donate_argnums=(0,))
    sums.append(float(np.asarray(sbp.to_host(grow(kept))).sum()))
    sums.append(float(kept.sum()))  # who donates a host array has it still
    numbers = sbp.compile(lambda x, n, on: jnp.where(on, x * n, x).sum(), step.placement)
    sums.append(float(numbers(np.ones((8, 2)), 3, True)))  # 64 bits, which JAX has not, and Python's numbers
    return [sums, met[1:] == met[:-1]]


def main(folder: str) -> None:
    """Prints what this process has to say."""
    logging.basicConfig(
        filename=Path(folder, f"log{jax.process_index()}.txt"), format="%(levelname)s %(message)s"
    )
    log = logging.getLogger("sbp")
    log.setLevel(logging.INFO)
    sbp.compile(quiet, sbp.placement("cpu", shape=(8,)))(np.ones(8, np.float32))
    log.setLevel(logging.DEBUG)
    said = {
        "unlike": rows_of_its_own(),
        "batches": host_batches(),
        "whole": restarted(starting.whole, 2, Path(folder)),
        "staged": restarted(starting.staged, 4, Path(folder)),
        "tied": restarted(tied, 2, Path(folder)),
        "device": refused(on_one_device),
        "devices": refused(on_devices_of_both),
        "stage": refused(in_a_stage),
    }
    Path(folder, f"said{jax.process_index()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
