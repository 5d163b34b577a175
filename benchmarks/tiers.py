"""Tables over three tiers: how fast, beside the same in memory; what they take, beside their budgets.

    python -m benchmarks.tiers speed [--rows 2000000] [--host 2.4]
    python -m benchmarks.tiers budgets [--rows 16000000]
    python -m benchmarks.tiers equal [--rows 244000]

A net over eight features with Zipf keys of a table each, width 64, Adagrad, on eight devices of the CPU.
`speed` trains the same clicks with all rows in memory and with rows in passes, in turns, at a size that fits
both; the devices' budget is that of the rows alone. `budgets` writes all rows to the disk first, trains, and
prints the peaks of devices and host. `equal` compares all rows in 64 bits with those of one device.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from sbp import B, S
from sbp import embedding as em
from sbp.runtime.embedding.tiers.budgets import memory_now, rows_within, step_bytes
from sbp.text.units import bytes_text

DEVICES, WIDTH, FEATURES = 8, 64, 8
KEY = 1
LINE = sbp.placement("cpu", shape=(DEVICES,))
TX = sbp.rows(optax.adagrad(0.05))
ROW_BYTES = 2 * 4 * WIDTH


def features(rows: int) -> tuple[em.FeatureConfig, ...]:
    """One for each table; all tables have so many rows together."""
    dtype = jnp.zeros(()).dtype
    tables = [
        em.TableConfig(f"t{i}", rows // FEATURES, WIDTH, combiner="sum", dtype=dtype) for i in range(FEATURES)
    ]
    return tuple(em.FeatureConfig(t.name, t, (None,)) for t in tables)


class Clicks:
    """Batches of Zipf keys: the share of the k-th most popular one is proportional to `k ** -exponent`."""

    def __init__(self, rows: int, batch: int, exponent: float = 1.05) -> None:
        self.rows, self.batch, self.exponent = rows // FEATURES, batch, exponent

    def __call__(self, step: int) -> Any:
        rng, e = np.random.default_rng(step), 1 - self.exponent
        u = rng.random((FEATURES, self.batch))
        ranks = ((self.rows**e - 1) * u + 1) ** (1 / e) - 1
        keys = (ranks.astype(np.int64) * 2654435761) % self.rows
        ids = {f"t{i}": k for i, k in enumerate(keys)}
        return ids, rng.normal(size=self.batch).astype(np.float32)


def step_of(tables: em.Collection) -> Any:
    """A step of training."""

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            vectors = jnp.concatenate([*tables(params["tables"], batch[0]).values()], axis=1)
            hidden = jax.nn.relu(vectors @ params["in"])
            return jnp.square(jax.nn.relu(hidden @ params["mid"]) @ params["out"] - batch[1]).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        added, state = TX.update(slopes["tables"], state, params["tables"])
        rows = optax.apply_updates(params["tables"], added)
        net = {n: params[n] - 0.01 * slopes[n] for n in ("in", "mid", "out")}
        return {"tables": rows, **net}, state, value

    return train_step


def net() -> dict[str, Any]:
    """What is learned beside the tables."""
    rng = np.random.default_rng(0)
    shapes = {"in": (WIDTH * FEATURES, 256), "mid": (256, 128), "out": (128,)}
    return {n: rng.normal(size=s).astype(np.float32) * s[0] ** -0.5 for n, s in shapes.items()}


def program(tables: em.Collection) -> Any:
    """The step, compiled for the devices."""
    params = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in tables.stacks.items()}
    state = tables.in_sbp(LINE, like=jax.eval_shape(TX.init, params))
    lies = {"tables": tables.in_sbp(LINE), **{name: [B] for name in ("in", "mid", "out")}}
    return sbp.compile(step_of(tables), LINE, in_sbp=(lies, state, [S(0)]), donate_argnums=(0, 1))


def fill(tiered: em.Tiered, state: Any, rows: int) -> None:
    """Writes all rows to the disk, as they begin."""
    tiered.read(state, "t0", [0])  # opens the stores
    (tier,) = tiered._tiers.values()
    every = np.concatenate([em.unify(i, np.arange(rows // FEATURES)) for i in range(FEATURES)]).view(
        np.uint64
    )
    for part in np.array_split(every, math.ceil(rows * ROW_BYTES / 2**28)):
        tier.stores.write(part, tier.new(part), step=0)
    tier.stores.commit()


def equal(args: argparse.Namespace, folder: str) -> None:
    """All rows, and what the optimizer has of them, beside those of one device that holds everything."""
    jax.config.update("jax_enable_x64", True)
    own = features(args.rows)
    tiered = em.Tiered(
        own,
        TX,
        LINE,
        device=2 * args.rows * ROW_BYTES / args.device / DEVICES,
        host=2 * args.rows * ROW_BYTES * args.host,
        ssd=folder,
        batches=args.batches,
    )
    clicks, whole, steps = Clicks(args.rows, args.batch), em.Collection(own), args.rounds * args.steps
    feed = em.TierFeed(tiered, clicks)
    start = begun(tiered.tables, tiered.init(jax.random.key(KEY)))
    done = sbp.fit(program(tiered.tables), start, feed, steps=steps)
    params, once = whole.init(jax.random.key(KEY)), jax.jit(step_of(whole), donate_argnums=(0, 1))
    state: Any = {"tables": params, **net()}, TX.init(params)
    losses = list[float]()
    for i in range(steps):
        *state, loss = once(*state, narrow(clicks(i)))
        losses.append(float(loss))
    apart = [abs(a - row["loss"]) for a, row in zip(losses, done.history, strict=True)]
    rows = list[float]()
    for f in own:
        ids = np.arange(args.rows // FEATURES)
        pair = whole.read(tuple(state), f.name, ids), tiered.read(done.state, f.name, ids)
        rows += [
            float(np.abs(np.asarray(x) - y).max()) for x, y in zip(*map(jax.tree.leaves, pair), strict=True)
        ]
    print(f"{bytes_text(2 * args.rows * ROW_BYTES)} of rows in 64 bits, {steps} steps; {feed.total}")
    print(f"largest difference to one device: losses {max(apart):.1e}, rows and their state {max(rows):.1e}")
    tiered.close()


def begun(tables: em.Collection, rows: Any) -> Any:
    """Parameters and state."""
    state = jax.eval_shape(TX.init, rows)
    made = jax.jit(TX.init, out_shardings=tables.shardings(LINE, like=state))
    return {"tables": rows, **net()}, made(rows)


def narrow(batch: Any) -> Any:
    """A batch as a plain collection takes it."""
    return {name: ids.astype(np.int32) for name, ids in batch[0].items()}, batch[1]


@dataclass
class Tiers:
    """A training in passes.

    Arguments:
      args: of the command line.
      folder: of the rows.
    """

    args: argparse.Namespace
    folder: str

    def __post_init__(self) -> None:
        self.clicks = Clicks(self.args.rows, self.args.batch)
        self.limit = self.args.rows * ROW_BYTES / self.args.device / DEVICES
        least = ROW_BYTES * self.args.batch * FEATURES / DEVICES
        measured = self.args.what == "budgets"
        self.tables = self.made(rows_within(self.limit, least, self.step_bytes) if measured else self.limit)
        self.state = begun(self.tables.tables, self.tables.init(jax.random.key(KEY)))
        self.step, self.loss = program(self.tables.tables), math.nan
        fill(self.tables, self.state, self.args.rows)
        self.feed = em.TierFeed(self.tables, self.clicks)
        self.device_bytes = 0

    def made(self, device: float) -> em.Tiered:
        """The tables, with a budget of the rows of a pass."""
        args = self.args
        host = args.rows * ROW_BYTES * args.host
        own, folder = features(args.rows), self.folder
        return em.Tiered(own, TX, LINE, device=device, host=host, ssd=folder, batches=args.batches)

    def step_bytes(self, device: float) -> int:
        """What a step takes of each device, with a budget of the rows of a pass."""
        tables = self.made(device).tables
        rows = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in tables.stacks.items()}
        abstract = {"tables": rows, **net()}, jax.eval_shape(TX.init, rows)
        found = step_bytes(program(tables).lower(*abstract, narrow(self.clicks(0))).compile())
        print(f"rows of {bytes_text(device)}, a step of {bytes_text(found)} on each device", flush=True)
        return found

    def train(self, coming: Any, first: int, count: int) -> None:
        """Some steps."""
        for i in range(first, first + count):
            batch = next(coming)
            self.state = self.feed.state_for(i + 1, self.state)
            *self.state, self.loss = self.step(*self.state, batch)
            self.device_bytes = max(self.device_bytes, memory_now().device)
        jax.block_until_ready(self.state)


def speed(args: argparse.Namespace, folder: str) -> None:
    """The same clicks in memory and in passes, in turns."""
    tiers, whole = Tiers(args, folder), em.Collection(features(args.rows))
    step, state = program(whole), begun(whole, whole.init(jax.random.key(KEY), LINE))
    ratios, loss = list[float](), math.nan
    with tiers.feed.batches_from(0) as batches:
        coming = iter(batches)
        for k in range(args.rounds):
            first = k * args.steps
            began = time.perf_counter()
            tiers.train(coming, first, args.steps)
            middle = time.perf_counter()
            for i in range(first, first + args.steps):
                *state, loss = step(*state, narrow(tiers.clicks(i)))
            jax.block_until_ready(state)
            here, there = middle - began, time.perf_counter() - middle
            ratios.append(there / here)
            print(
                f"{here:.2f} s, in memory {there:.2f} s: {there / here:.2f} of the speed; {tiers.feed}",
                flush=True,
            )
            assert abs(float(tiers.loss) - float(loss)) < 1e-4, (tiers.loss, loss)
    print(f"median but for the first: {statistics.median(ratios[1:]):.2f}")
    tiers.tables.close()


class Peaks:
    """The most that is taken of the host, looked at now and then."""

    def __init__(self) -> None:
        self.host = self.mapped = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            now = memory_now()
            self.host, self.mapped = max(self.host, now.host), max(self.mapped, now.mapped_bytes)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def budgets(args: argparse.Namespace, folder: str) -> None:
    """What a training takes, beside its budgets."""
    began = time.perf_counter()
    tiers = Tiers(args, folder)
    (tier,) = tiers.tables._tiers.values()
    print(
        f"{bytes_text(args.rows * ROW_BYTES)} of rows written in {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    with tiers.feed.batches_from(0) as batches:
        coming = iter(batches)
        tiers.train(coming, 0, 1)
        compiled = tiers.step.lower(*tiers.state, tiers.step.abstract_args[2]).compile()
        stats: Any = compiled.memory_analysis()
        before = memory_now()
        with Peaks() as peaks:
            for k in range(args.rounds):
                began = time.perf_counter()
                tiers.train(coming, 1 + k * args.steps, args.steps)
                seconds = time.perf_counter() - began
                device = tiers.device_bytes + stats.temp_size_in_bytes
                host = peaks.host - before.host
                print(
                    f"{seconds:.1f} s, {args.steps * args.batch / seconds:,.0f} clicks/s\n"
                    f"  device {bytes_text(device)} of {bytes_text(tiers.limit)}, "
                    f"host {bytes_text(host)} of {bytes_text(tiers.tables.host_bytes)}, "
                    f"{bytes_text(peaks.mapped)} mapped, disk {bytes_text(tier.stores.bytes)}\n"
                    f"  {tiers.feed}",
                    flush=True,
                )
    tiers.tables.close()


def main() -> None:
    """As the command line says."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    options.add_argument("what", choices=("speed", "budgets", "equal"))
    options.add_argument("--rows", type=int, default=2_000_000)
    options.add_argument("--batch", type=int, default=4096)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--steps", type=int, default=32, help="of a round")
    options.add_argument("--batches", type=int, default=64, help="of a pass, at most")
    options.add_argument(
        "--device", type=float, default=32, help="all rows are so many times the devices' budgets"
    )
    options.add_argument("--host", type=float, default=0.125, help="budget of the host, in parts of all rows")
    args = options.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        {"speed": speed, "budgets": budgets, "equal": equal}[args.what](args, folder)


if __name__ == "__main__":
    main()
