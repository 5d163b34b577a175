"""A small training of tables over three tiers, and the same on one device that holds everything.

python -m tests.runtime.embedding.tiers.clicks FOLDER STEPS SAVE_EVERY [CALLS]

writes every loss, and in the end all rows, to FOLDER, unless it is killed behind so many calls.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from sbp import embedding as em
from sbp.placement import placement
from sbp.runtime.embedding.tiers import segment, store
from sbp.runtime.embedding.tiers.device_rows import DeviceRows
from sbp.runtime.embedding.tiers.store import RowStore
from sbp.signature import S

STEPS = 24
KEY = 3
DEVICE, HOST = "9kB", "240kB"
PLACEMENT = placement("cpu", shape=(8,))
TABLES = (
    em.TableConfig("user", 900, 8, combiner="sum", dtype=np.float64),
    em.TableConfig(
        "item", 700, 8, initializer=jax.nn.initializers.normal(0.3), combiner="sum", dtype=np.float64
    ),
    em.TableConfig("tag", 500, 8, combiner="mean", dtype=np.float64),
)
FEATURES = (
    em.FeatureConfig("user", TABLES[0], (None,)),
    em.FeatureConfig("item", TABLES[1], (None, 3)),
    em.FeatureConfig("tag", TABLES[2], (None, 2)),
)
TX = sbp.rows(optax.adam(0.01))


@functools.cache
def clicks() -> list[tuple[dict[str, Any], np.ndarray]]:
    """Ids with a long tail: few keys come often, many seldom."""
    rng = np.random.default_rng(0)

    def ids(size: int, shape: tuple[int, ...]) -> np.ndarray:
        return np.minimum(rng.pareto(0.25, shape) * 5, size - 1).astype(np.int64)

    def one() -> dict[str, Any]:
        tags = ids(500, (32, 2))
        tags[::3, 1] = em.NO_ID
        weights = rng.uniform(0.5, 2, tags.shape)
        return {"user": ids(900, (32,)), "item": ids(700, (32, 3)), "tag": em.PaddedBags(tags, weights)}

    return [(one(), rng.normal(size=32)) for _ in range(STEPS)]


def step_of(tables: em.Collection) -> Any:
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            vectors = tables(params, batch[0])
            return jnp.mean(
                (jnp.tanh(vectors["user"] * vectors["item"] + vectors["tag"]).sum(1) - batch[1]) ** 2
            )

        value, slopes = jax.value_and_grad(loss)(params)
        added, state = TX.update(slopes, state, params)
        return optax.apply_updates(params, added), state, value

    return train_step


@functools.cache
def alone() -> tuple[em.Collection, Any, list[float]]:
    """A collection, the state, and the losses of one device that holds everything."""
    tables = em.Collection(FEATURES)
    params = tables.init(jax.random.key(KEY))
    state, losses, once = TX.init(params), list[float](), jax.jit(step_of(tables))
    for ids, y in clicks():
        params, state, loss = once(params, state, (jax.tree.map(narrow, ids), y))
        losses.append(float(loss))
    return tables, (params, state), losses


def narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32) if x.dtype == np.int64 else x


def tiered(folder: Path, **given: Any) -> em.Tiered:
    budgets = {"device": DEVICE, "host": HOST, "batches": 3} | given
    return em.Tiered(FEATURES, TX, PLACEMENT, ssd=folder, **budgets)


@functools.cache
def program() -> Any:
    """The step on eight devices; all tests have tables of one size, so it is compiled once."""
    tables = em.Tiered(FEATURES, TX, PLACEMENT, device=DEVICE, host=HOST, ssd="nowhere").tables
    params = jax.eval_shape(tables.init, jax.random.key(0))
    in_sbp = tables.in_sbp(PLACEMENT), tables.in_sbp(PLACEMENT, like=jax.eval_shape(TX.init, params)), [S(0)]
    return sbp.compile(step_of(tables), PLACEMENT, in_sbp=in_sbp, donate_argnums=(0, 1))


def start(tables: em.Tiered) -> tuple[Any, Any]:
    params = tables.init(jax.random.key(KEY))
    return params, TX.init(params)


def train(tables: em.Tiered, steps: int, **options: Any) -> Any:
    feed, quiet = em.TierFeed(tables, clicks()), {"progress": False}
    return sbp.fit(program(), start(tables), feed, steps=steps, **quiet | options)


def main(folder: Path, steps: int, save_every: int, calls: int = 0) -> None:
    """Trains, or goes on; writes every loss, and all rows in the end.

    Arguments:
      calls: how many times something is moved or written before the process is killed; 0: it is not.
    """
    killed_behind(calls)
    tables = tiered(folder / "rows")

    def log(row: Any) -> None:
        with open(folder / "losses.txt", "a") as file:
            file.write(json.dumps([row["step"], row["loss"]]) + "\n")

    done = train(tables, steps, checkpoint=folder / "steps", save_every=save_every, log=log)
    if done.step == steps:
        every = {t.name: tables.read(done.state, t.name, np.arange(t.vocabulary_size)) for t in TABLES}
        rows = {name: [x.tolist() for x in jax.tree.leaves(tree)] for name, tree in every.items()}
        if jax.process_index() == 0:
            (folder / "rows.json").write_text(json.dumps(rows))
    tables.close()


def killed_behind(calls: int) -> None:
    """Has this process killed in the midst of moving rows, or of writing a file."""
    left = itertools.count(calls, -1)

    def before(action: Any) -> Any:
        @functools.wraps(action)
        def last(*given: Any, **named: Any) -> Any:
            if next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*given, **named)

        return last

    store.FEWEST = 2  # so that many segments are merged
    moments = (
        (os, "fsync"),
        (segment, "_put"),
        (DeviceRows, "read"),
        (DeviceRows, "write"),
        (RowStore, "read"),
    )
    for place, name in (*moments, (sbp.Program, "__call__")):
        setattr(place, name, before(getattr(place, name)))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
