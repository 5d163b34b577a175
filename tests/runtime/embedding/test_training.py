"""A split table that is trained by rows ends as on one device, whatever the optimizer and the keys are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.hardware.catalogue import Hardware, Link
from sbp.options import ExchangeOptions
from sbp.passes.physical.program import Compute
from sbp.runtime.embedding.optimizers import ftrl, rowwise_adagrad, rowwise_adam
from sbp.runtime.hlo.meter import read_compiled

Array = np.ndarray[Any, Any]
HASTY: dict[str, Any] = {"xla_backend_optimization_level": 0}
ROWS, WIDTH, HOTNESS = 320, 4, 4
# Room for so few keys that most distributions take more rounds than one.
CAPACITY = 4
# Both work and words are dear, so that what is split is neither gathered nor split otherwise.
DEAR = Hardware("dear", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e4, 1e-9),), 1.0)
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}

# With its usual epsilon, 1e-8, Adam makes whole steps of gradients that are rounding errors.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.02),
    "momentum": lambda: optax.sgd(0.005, momentum=0.9),
    "adagrad": lambda: optax.adagrad(0.1),
    "rowwise": lambda: rowwise_adagrad(0.1),
    "adam": lambda: optax.adam(0.01, eps=1e-3),
    "rowwise adam": lambda: rowwise_adam(0.01, epsilon=1e-3),
    "ftrl": lambda: ftrl(0.1, l1=1e-4, l2=0.1),
}
PLACEMENTS = (1,), (2,), (4,), (8,), (2, 4)
# Bags in a batch: one size divides by every number of devices, one by none.
BATCHES = 32, 29


@dataclass(frozen=True)
class Case:
    """One program.

    Arguments:
      shape: of the placement.
      batch: bags in a batch.
    """

    optimizer: str
    shape: tuple[int, ...]
    batch: int
    dtype: str

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.optimizer}-{'x'.join(map(str, self.shape))}-{self.batch}-{self.dtype}"


def bags_of(case: Case, device: int) -> slice:
    """The bags of a device; the outer axis cuts first, with its own ceiling."""
    start, size = 0, case.batch
    for n, at in zip(case.shape, np.unravel_index(device, case.shape), strict=True):
        chunk = -(-size // n)
        start, size = start + int(at) * chunk, max(0, min(chunk, size - int(at) * chunk))
    return slice(start, start + size)


def absent(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Ids that have no row."""
    return rng.choice([ROWS, ROWS + 1, np.iinfo(np.int32).max], shape)


def padded(rng: np.random.Generator, case: Case) -> Array:
    """Bags of 0 to HOTNESS ids, among them empty ones."""
    shape = case.batch, HOTNESS
    length = rng.integers(0, HOTNESS + 1, case.batch)
    length[rng.integers(0, case.batch, 2)] = 0
    there = np.arange(HOTNESS) < length[:, None]
    return np.where(there, rng.integers(0, ROWS, shape), absent(rng, shape))


def idle(rng: np.random.Generator, case: Case) -> Array:
    """One device, another one in each step, has nothing but empty bags."""
    ids = rng.integers(0, ROWS, (case.batch, HOTNESS))
    own = ids[bags_of(case, int(rng.integers(case.devices)))]
    own[:] = absent(rng, own.shape)
    return ids


def owned(rng: np.random.Generator, case: Case) -> Array:
    """All rows are of one device, another one in each step."""
    height = ROWS // case.devices
    return int(rng.integers(case.devices)) * height + rng.integers(0, height, (case.batch, HOTNESS))


KEYS: dict[str, Callable[[np.random.Generator, Case], Array]] = {
    "uniform": lambda rng, case: rng.integers(0, ROWS, (case.batch, HOTNESS)),
    "zipf": lambda rng, case: np.minimum(rng.zipf(1.2, (case.batch, HOTNESS)), ROWS) - 1,
    "one owner": owned,
    "equal": lambda rng, case: np.full((case.batch, HOTNESS), rng.integers(ROWS)),
    "distinct": lambda rng, case: rng.permutation(ROWS)[: case.batch * HOTNESS].reshape(-1, HOTNESS),
    "empty bags": padded,
    "idle device": idle,
    "nothing": lambda rng, case: absent(rng, (case.batch, HOTNESS)),
}
# What does not fit into one round even if keys are dealt out evenly.
CROWDED = ("uniform", "one owner", "distinct", "idle device")


def make_step(tx: Any) -> Callable[..., Any]:
    """A step of training a table and two dense weights."""

    def step(table: Any, state: Any, weights: Any, ids: Any, wanted: Any) -> Any:
        def loss(table: Any, weights: Any) -> Any:
            bags = table.at[ids].get(mode="fill", fill_value=0).mean(1)
            return jnp.square(jnp.tanh(bags @ weights[0]) @ weights[1] - wanted).sum() / 16

        grad, dense = jax.grad(loss, (0, 1))(table, weights)
        added, state = tx.update(grad, state, table)
        weights = jax.tree.map(lambda w, g: w - 0.01 * g, weights, dense)
        return optax.apply_updates(table, added), state, weights

    return step


def start(case: Case) -> Any:
    """Table, state and weights, on the host."""
    rng = np.random.default_rng(0)
    table, *weights = (rng.normal(size=s).astype(case.dtype) for s in ((ROWS, WIDTH), (WIDTH, 3), (3, 2)))
    return jax.tree.map(np.asarray, (table, transformation(case.optimizer).init(table), tuple(weights)))


def batches(kind: str, case: Case, steps: int) -> Iterator[tuple[Array, Array]]:
    """Ids and what is wanted of each bag."""
    rng = np.random.default_rng([list(KEYS).index(kind), case.batch])
    for _ in range(steps):
        ids = KEYS[kind](rng, case).astype({"float32": np.int32, "float64": np.int64}[case.dtype])
        yield ids, rng.normal(size=(case.batch, 2)).astype(case.dtype)


@cache
def transformation(name: str) -> Any:
    return sbp.rows(OPTIMIZERS[name]())


@cache
def one_device(name: str) -> Any:
    return jax.jit(make_step(transformation(name)), compiler_options=HASTY)


class Trained:
    """The program of a case, compiled once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        lying = [S(0)] * len(case.shape)
        self.program = sbp.compile(
            make_step(transformation(case.optimizer)),
            sbp.placement("cpu", shape=case.shape),
            in_sbp=(lying, sbp.AUTO, [B] * len(case.shape), lying, lying),
            options=sbp.Options(hardware=DEAR, exchange=ExchangeOptions(capacity=CAPACITY)),
        )
        ids, wanted = next(batches("uniform", case, 1))
        args = (*start(case), ids, wanted)
        self.plan = self.program.plan(*args)
        self.executable = self.program.lower(*args).compile(HASTY)
        self.tree = jax.tree.structure(args[:3])

    def step(self, state: Any, batch: tuple[Array, Array]) -> Any:
        """One step; only the first has to place the state."""
        args = self.program.place(*state, *batch)
        return jax.tree.unflatten(self.tree, self.executable(*jax.tree.leaves(args)))

    def check_exchanges(self) -> None:
        """Keys and rows travel between table and batch as both lie, there and back, in rounds; keys once."""
        assert self.plan.physical is not None
        computed = [s for s, _ in self.plan.physical.walk() if isinstance(s, Compute)]
        split = (S(0),) * len(self.case.shape)
        lying = {s.node.op: s.strategy.operands for s in computed if s.node.op.startswith("sbp_")}
        for op in ("sbp_lookup", "sbp_update_rows"):
            assert lying[op][0] == lying[op][-1] == split
        meter = read_compiled(self.executable)
        assert meter.wire_bytes == pytest.approx(self.plan.wire_bytes, rel=1e-9)
        assert {c.kind for c in meter.overflow} == {"all_to_all", "all_reduce"}


def rounds(case: Case, ids: Array) -> int:
    """The least rounds that a batch takes: by the most distinct keys that one device sends to one owner."""
    height = ROWS // case.devices
    parts = [np.unique(ids[bags_of(case, d)]) for d in range(case.devices)]
    most = max(int(np.bincount(p[p < ROWS] // height, minlength=1).max()) for p in parts)
    return -(-most // CAPACITY)


def check(case: Case, steps: int) -> None:
    """Trains on one device and on many, with keys of every kind, and compares all that is left."""
    trained = Trained(case)
    if case.devices > 1:
        trained.check_exchanges()
    for kind in KEYS:
        one = many = start(case)
        needed = 0
        for batch in batches(kind, case, steps):
            one = jax.block_until_ready(one_device(case.optimizer)(*one, *batch))
            # Steps that wait for each other in one pool of threads can stop for good where cores are few.
            many = jax.block_until_ready(trained.step(many, batch))
            needed = max(needed, rounds(case, batch[0]))
        assert needed > 1 or kind not in CROWDED or case.devices == 1
        for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(many), strict=True):
            most = TOLERANCE[case.dtype] * float(np.abs(a).max(initial=0))
            where = f"{case}, {kind}: {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(b, a, rtol=0, atol=most, err_msg=where)


QUICK = Case("adagrad", (8,), 29, "float32"), Case("adam", (2, 4), 32, "float32")


def cases(dtype: str, placements: Sequence[tuple[int, ...]]) -> list[Case]:
    """Every optimizer on every placement; both sizes of batches with each of either."""
    pairs = itertools.product(enumerate(OPTIMIZERS), enumerate(placements))
    return [Case(name, shape, BATCHES[(i + j) % 2], dtype) for (i, name), (j, shape) in pairs]


@pytest.mark.some(1)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_twenty_steps(case: Case) -> None:
    check(case, 20)


# Single precision is what most use, double precision shows what is not rounding.
@pytest.mark.slow
@pytest.mark.parametrize("case", cases("float32", PLACEMENTS[-2:]), ids=str)
def test_a_hundred_steps(case: Case) -> None:
    check(case, 100)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", cases("float64", PLACEMENTS), ids=str)
def test_a_hundred_steps_in_double_precision(case: Case) -> None:
    check(case, 100)
