"""What stands around the step on rows of a table: clipping, loss scales, micro-batches, and what each takes.

    python -m benchmarks.composed_rows [clipped "four micro-batches" ...] [--rows 500000] [--rounds 30]
    python -m benchmarks.composed_rows --check

A table over eight devices of the CPU, row-wise Adagrad for it, and Adam for a dense weight. Every step is
timed beside the plain one, in turns in one run; a step of four micro-batches is beside four plain steps, and
`MultiSteps` takes a step in one of four.
`memory` is that of a device by XLA, in parts of the plain step's; of stages it is the plan's, in parts of
that of a plain step on as many devices as a stage has. `sparse` says that no tensor of the size of the table
is made. `--check` compares ten steps in 64 bits with those of one device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from sbp import B, S
from sbp.passes.physical.program import Compute
from sbp.runtime import embedding as em
from sbp.runtime.embedding.optimizers import rowwise_adagrad

DEVICES, WIDTH, BATCH, PARTS = 8, 32, 4096, 4
LINE, WHOLE = sbp.placement("cpu", shape=(DEVICES,)), sbp.placement("cpu", shape=(2, DEVICES // 2))


def by_rows() -> Any:
    """The table by rows, the weight by Adam."""
    each = {"table": sbp.rows(rowwise_adagrad(0.05)), "weight": optax.adam(1e-3)}
    return optax.multi_transform(each, {"table": "table", "weight": "weight"})


def loss(params: Any, ids: Any) -> Any:
    """Of a batch."""
    return jnp.square(params["table"][ids] @ params["weight"] - 1).mean()


def usual(tx: Any) -> Callable[..., Any]:
    """A step of training."""

    def step(params: Any, state: Any, ids: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, ids)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, value

    return step


def scaled(tx: Any) -> Callable[..., Any]:
    """With a loss scale: where a gradient is not finite it counts as none."""

    def step(params: Any, state: Any, ids: Any) -> Any:
        scale = 1024.0 * (1 + jnp.abs(params["weight"]).mean())
        value, grads = jax.value_and_grad(lambda p: scale * loss(p, ids))(params)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        grads = jax.tree.map(lambda g: jnp.where(finite, g / scale, 0), grads)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, value / scale

    return step


def in_parts(tx: Any, of: Callable[..., Any] = loss) -> Callable[..., Any]:
    """In micro-batches, each as large as a batch of the plain step.

    Arguments:
      of: the loss.
    """

    def step(params: Any, state: Any, ids: Any) -> Any:
        part = sbp.microbatch(jax.value_and_grad(of), PARTS, batch_args=1)
        value, grads = part(params, ids)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, value

    return step


def in_stages(tx: Any) -> Callable[..., Any]:
    """The same micro-batches; the table is on four devices, the weight on the other four."""
    tables, rest = WHOLE.split(0)

    def staged(params: Any, ids: Any) -> Any:
        with sbp.on(tables):
            rows = jnp.tanh(params["table"][ids])
        with sbp.on(rest):
            return jnp.square(rows @ params["weight"] - 1).mean()

    return in_parts(tx, staged)


class Held:
    """`em.accumulate` for the table, and Adam for the weight, as an optimizer of both."""

    def init(self, params: Any) -> Any:
        """The state of both."""
        tables, held = self.accumulation(params)
        weight = optax.MultiSteps(optax.adam(1e-3), PARTS).init(params["weight"])
        return held.init(dict.fromkeys(tables.stacks, params["table"]), ids_of(jnp.zeros(BATCH, int))), weight

    @staticmethod
    def accumulation(params: Any) -> tuple[em.Collection, em.Accumulation]:
        """The table as a collection, and what accumulates its gradients."""
        table = em.TableConfig("table", *params["table"].shape, dtype=params["table"].dtype)
        tables = em.Collection((em.FeatureConfig("id", table),), spread=False, multiple=DEVICES)
        return tables, em.accumulate(tables, sbp.rows(rowwise_adagrad(0.05)), PARTS)


def ids_of(ids: Any) -> dict[str, Any]:
    """Ids as a collection takes them."""
    return {"id": ids.astype(jnp.int32)}


def holding(tx: Held) -> Callable[..., Any]:
    """A step that holds ids and gradients, and takes those of four batches at once."""

    def step(params: Any, state: Any, ids: Any) -> Any:
        (tables, held), (table_state, weight_state) = tx.accumulation(params), state
        stacks = dict.fromkeys(tables.stacks, params["table"])
        mean = lambda vectors, weight: jnp.square(vectors["id"] @ weight - 1).mean()  # noqa: E731
        vectors = tables(stacks, ids_of(ids))
        value, (slopes, slope) = jax.value_and_grad(mean, (0, 1))(vectors, params["weight"])
        stacks, table_state = held.update(stacks, table_state, ids_of(ids), slopes)
        rest = optax.MultiSteps(optax.adam(1e-3), PARTS)
        added, weight_state = rest.update(slope, weight_state, params["weight"])
        (table,) = stacks.values()
        return {"table": table, "weight": params["weight"] + added}, (table_state, weight_state), value

    return step


@dataclass(frozen=True)
class Composed:
    """A step on rows with something around it.

    Arguments:
      tx: its optimizer.
      step: of an optimizer.
      batches: of the plain step that it takes at once.
      place: where it runs.
    """

    tx: Callable[[], Any] = by_rows
    step: Callable[[Any], Callable[..., Any]] = usual
    batches: int = 1
    place: sbp.Placement = LINE


CASES: Mapping[str, Composed] = {
    "plain": Composed(),
    "clipped": Composed(lambda: optax.chain(optax.clip_by_global_norm(0.1), by_rows())),
    "loss scale": Composed(step=scaled),
    "if finite": Composed(lambda: optax.apply_if_finite(by_rows(), 3)),
    "four micro-batches": Composed(step=in_parts, batches=PARTS),
    "two stages": Composed(step=in_stages, batches=PARTS, place=WHOLE),
    "accumulate": Composed(Held, holding),
    "MultiSteps": Composed(lambda: optax.MultiSteps(by_rows(), PARTS)),
}


class Run:
    """A case on its devices.

    Arguments:
      case: what runs.
      rows: of the table.
      dtype: of the parameters.
    """

    def __init__(self, case: Composed, rows: int, dtype: type[np.floating] = np.float32) -> None:
        rng, tx = np.random.default_rng(0), case.tx()
        params = {
            "table": rng.normal(size=(rows, WIDTH)).astype(dtype),
            "weight": rng.normal(size=(WIDTH, 1)).astype(dtype),
        }
        self.ids = (rng.zipf(1.2, BATCH * case.batches) % rows).astype(np.int32)
        self.args = params, jax.tree.map(np.asarray, jax.jit(tx.init)(params))
        self.step = case.step(tx)
        in_sbp = {"table": [S(0)], "weight": [B]}, sbp.AUTO, [S(0)]
        self.program = sbp.compile(self.step, case.place, in_sbp=in_sbp, donate_argnums=(0, 1))
        self.plan = self.program.plan(*self.args, self.ids)
        self.seconds = list[float]()

    def turn(self) -> None:
        """A step more."""
        begun = time.perf_counter()
        *args, _ = jax.block_until_ready(self.program(*self.args, self.ids))
        self.args = tuple(args)
        self.seconds.append(time.perf_counter() - begun)

    @property
    def step_seconds(self) -> float:
        """Of a step: the median of means of four in a row."""
        rest = self.seconds[len(self.seconds) % PARTS :][PARTS:]
        return statistics.median(statistics.fmean(rest[i : i + PARTS]) for i in range(0, len(rest), PARTS))

    def difference(self, steps: int = 10) -> float:
        """The largest difference to one device after some steps, in parts of the largest number."""
        one = many = self.args
        plain = jax.jit(self.step)
        for k in range(steps):
            ids = np.roll(self.ids, k) + np.int32(k)
            *one, _ = plain(*one, ids)
            *many, _ = self.program(*many, ids)
        wide = [[np.asarray(x, np.float64) for x in jax.tree.leaves(args)] for args in (one, many)]
        return max(float(np.abs(a - b).max() / max(1.0, np.abs(a).max())) for a, b in zip(*wide, strict=True))

    @property
    def memory_bytes(self) -> float:
        """What the compiled program takes of a device, arguments included."""
        if self.plan.stages:
            return self.plan.memory_bytes
        found = self.program.lower(*self.args, self.ids).compile().memory_analysis()
        return float(found.temp_size_in_bytes + found.argument_size_in_bytes)

    @property
    def sparse(self) -> bool:
        """Whether no op makes a tensor as large as the table, those that update it in place apart."""
        rows, made = len(self.args[0]["table"]), list[tuple[int, ...]]()
        for plan in self.plan.stages or [self.plan]:
            assert plan.physical is not None
            computed = [s.node for s, _ in plan.physical.walk() if isinstance(s, Compute)]
            values = [v for n in computed if n.op != "sbp_update_rows" for v in n.outputs]
            made += [plan.physical.graph.values[v].shape for v in values]
        return not any(len(shape) == 2 and shape[0] == rows for shape in made)


def main() -> None:
    """Times the cases beside the plain one."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", default=list(CASES)[1:], help=", ".join(list(CASES)[1:]))
    options.add_argument("--rows", type=int, default=500_000, help="of the table")
    options.add_argument("--rounds", type=int, default=30, help="of which each takes a step")
    options.add_argument("--check", action="store_true", help="compare with one device instead")
    asked = options.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if asked.check:
        jax.config.update("jax_enable_x64", True)
        print("| step | largest difference |\n|---|---|")
        for name in asked.names:
            print(f"| {name} | {Run(CASES[name], asked.rows, np.float64).difference():.1e} |", flush=True)
        return
    plain = Run(CASES["plain"], asked.rows)
    print("| step | ms | of plain steps | memory | sparse |\n|---|---|---|---|---|")
    for name in asked.names:
        run = Run(CASES[name], asked.rows)
        plain.seconds.clear()
        for _ in range(asked.rounds):
            run.turn()
            plain.turn()
        own, other = run.step_seconds, plain.step_seconds
        alone = run.plan.placement if not run.plan.stages else run.plan.stages[0].placement
        beside = Run(Composed(place=alone), asked.rows)
        part, more = own / (CASES[name].batches * other), run.memory_bytes / beside.memory_bytes
        sparse = "yes" if run.sparse else "no"
        print(f"| {name} | {own * 1e3:.2f} | {part:.2f} | {more:.2f} | {sparse} |", flush=True)
    print(f"\nplain: {other * 1e3:.2f} ms, {plain.memory_bytes / 1e6:.1f} MB a device")


if __name__ == "__main__":
    main()
