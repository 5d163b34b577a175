"""The sparse exchange on devices against NumPy: no key is lost or given twice, whatever the keys are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sbp import view
from sbp.communication.delivery import deliver_rows
from sbp.communication.exchange import fetch_rows
from sbp.communication.extents import extent
from sbp.communication.joint import run_alone
from sbp.communication.keys import NO_KEY, rank_keys, rows_or_zeros
from sbp.communication.legs import Exchange, default_capacity, legs
from sbp.communication.protocol import Context
from sbp.layout import Layout
from sbp.signature import B, NdSbp, P, S

Array = np.ndarray[Any, Any]
HASTY: dict[str, Any] = {"xla_backend_optimization_level": 0}
ROWS, KEYS, WIDTH = 37, 45, 2


@dataclass(frozen=True)
class Case:
    """Which placement axes split the rows of a table, and which its keys; and the room of a bucket.

    Arguments:
      rows, keys: how many there are.
    """

    hierarchy: tuple[int, ...]
    by_rows: tuple[int, ...]
    by_keys: tuple[int, ...]
    capacity: int | None = None
    rows: int = ROWS
    keys: int = KEYS
    wire: str | None = None
    planned: bool = False

    def nd(self, axes: tuple[int, ...], other: tuple[int, ...] = ()) -> NdSbp:
        """Split along `axes`, a sum along `other`."""
        return tuple(S(0) if a in axes else P if a in other else B for a in range(len(self.hierarchy)))

    @property
    def table(self) -> Layout:
        return Layout((self.rows, WIDTH), self.nd(self.by_rows), self.hierarchy)

    @property
    def ids(self) -> Layout:
        return Layout((self.keys,), self.nd(self.by_keys), self.hierarchy)

    @property
    def exchange(self) -> Exchange:
        axes = tuple(a for a in self.by_rows if a in self.by_keys)
        rows, keys = extent(self.table, 0), self.ids.local[0]
        return Exchange(rows, axes, keys, self.capacity, self.wire, self.planned)

    @property
    def found(self) -> NdSbp:
        """How looked-up rows lie."""
        return self.nd(self.by_keys, self.by_rows)

    @property
    def summed(self) -> NdSbp:
        """How a table of sums lies."""
        return self.nd(self.by_rows, self.by_keys)


LINE = Case((8,), (0,), (0,))
GRID = Case((2, 4), (0, 1), (0, 1))
CASES = [
    LINE,
    replace(LINE, capacity=1),
    replace(LINE, capacity=3),
    replace(LINE, capacity=2, rows=3),
    replace(LINE, capacity=2, keys=5),
    replace(LINE, capacity=1, keys=8 * 45, planned=True),
    GRID,
    replace(GRID, capacity=1),
    replace(GRID, capacity=2, rows=5),
    replace(GRID, capacity=1, keys=8 * 29, planned=True),
    Case((2, 4), (0,), (0,), 2),
    Case((2, 4), (0,), (0, 1), 2),
    Case((2, 4), (1,), (0, 1), 2),
    Case((2, 4), (0, 1), (0,), 3),
    Case((2, 4), (0, 1), (1,), 2),
]


def name(case: Case) -> str:
    shape = "x".join(map(str, case.hierarchy))
    sizes = f"{case.keys}-of-{case.rows}"
    room = f"{case.capacity}{'-planned' * case.planned}"
    return f"{shape}-rows{case.by_rows}-keys{case.by_keys}-{sizes}-room-{room}".replace(" ", "")


def step(state: dict[str, Any], at: Any, sums: Any) -> dict[str, Any]:
    """A plain sum, a step that is not linear, and how often rows are given at all."""
    flags: dict[str, Any] = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    after = state["trained"].at[at].add(-sums / jnp.sqrt(1 + sums * sums), **flags)
    return {
        "sums": state["sums"].at[at].add(sums, **flags),
        "trained": after,
        "given": state["given"].at[at].add(1, **flags),
        "rounds": state["rounds"] + 1,
        "ordered": state["ordered"] & jnp.all(jnp.where(at[1:] < after.shape[0], at[1:] > at[:-1], True)),
    }


class Machine:
    """Lookup and delivery of one case, compiled once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.places = list(view.coordinates(case.hierarchy))
        self.served: list[int] = []
        names = [f"a{i}" for i in range(len(case.hierarchy))]
        devices = np.array(jax.devices()[: len(self.places)]).reshape(case.hierarchy)
        spec, k = PartitionSpec(*names), len(case.hierarchy)
        layouts = case.table, case.ids

        def device(*xs: Any) -> Any:
            coords = [lax.axis_index(n) for n in names]
            ctx = Context(None, {}, layouts, (), coords, names)
            out = self.body(ctx, *(x.reshape(x.shape[k:]) for x in xs))
            return jax.tree.map(lambda y: y.reshape((1,) * k + y.shape), out)

        mapped = jax.shard_map(
            device, mesh=Mesh(devices, names), in_specs=spec, out_specs=spec, check_vma=False
        )
        self.program = jax.jit(mapped, compiler_options=HASTY)

    def body(self, ctx: Context, table: Any, keys: Any, rows: Any) -> Any:
        case = self.case
        real = lax.iota(np.int32, keys.shape[0]) < ctx.length(case.ids, 0)
        keys = jnp.where(real, keys, NO_KEY)

        def serve(at: Any) -> Any:
            jax.debug.callback(lambda _: self.served.append(1), at)
            return table.at[at].get(mode="fill", fill_value=0)

        state = {
            "sums": jnp.zeros_like(table),
            "trained": table,
            "given": jnp.zeros(table.shape[0], np.int32),
            "rounds": jnp.int32(0),
            "ordered": jnp.bool_(True),
        }
        found = run_alone(fetch_rows(ctx, case.exchange, keys, serve))
        return found, run_alone(deliver_rows(ctx, case.exchange, keys, rows, state, step))

    def run(self, table: Array, keys: Array, rows: Array) -> tuple[Any, Any]:
        """Shards of what is found and of the state after delivery, by device."""
        case = self.case
        lying = zip((table, keys, rows), (case.table.nd, case.ids.nd, case.ids.nd), strict=True)
        shards = [view.split(x, nd, case.hierarchy) for x, nd in lying]
        stacked = [np.stack([s[c] for c in self.places]) for s in shards]
        self.served.clear()
        out = self.program(*(x.reshape(*case.hierarchy, *x.shape[1:]) for x in stacked))
        jax.effects_barrier()
        found, state = jax.tree.map(lambda y: {c: np.asarray(y)[c] for c in self.places}, out)
        return found, state

    def checked(self, keys: Array) -> dict[str, Any]:
        """Runs with these keys and compares everything with NumPy; the state by device."""
        case = self.case
        rng = np.random.default_rng(len(keys))
        table = rng.normal(size=(case.rows, WIDTH)).astype(np.float32)
        rows = rng.integers(-4, 5, size=(len(keys), WIDTH)).astype(np.float32)
        found, state = self.run(table, keys, rows)
        real = keys != NO_KEY
        want = np.where(real[:, None], table[np.where(real, keys, 0)], 0)
        got = view.join(found, want.shape, case.found, case.hierarchy)
        np.testing.assert_array_equal(got, want)
        sums = np.zeros_like(table)
        np.add.at(sums, keys[real], rows[real])
        got = view.join(state["sums"], sums.shape, case.summed, case.hierarchy)
        np.testing.assert_array_equal(got, sums)
        assert all(state["ordered"].values())
        if set(case.by_keys) <= set(case.by_rows):
            given = np.zeros(case.rows, np.int32)
            given[keys[real]] = 1
            got = view.join(state["given"], given.shape, case.table.nd, case.hierarchy)
            np.testing.assert_array_equal(got, given)
            trained = table - sums / np.sqrt(1 + sums * sums)
            got = view.join(state["trained"], trained.shape, case.table.nd, case.hierarchy)
            np.testing.assert_allclose(got, trained, rtol=1e-5, atol=1e-6)
        return dict(state)


machine = cache(Machine)


def zipf(rng: np.random.Generator, case: Case) -> Array:
    return np.minimum(rng.zipf(1.3, case.keys), case.rows) - 1


KINDS: dict[str, Callable[[np.random.Generator, Case], Array]] = {
    "uniform": lambda rng, case: rng.integers(0, case.rows, case.keys),
    "zipf": zipf,
    "zipf from behind": lambda rng, case: case.rows - 1 - zipf(rng, case),
    "one owner": lambda rng, case: rng.integers(0, max(1, case.rows // 8), case.keys),
    "equal": lambda rng, case: np.full(case.keys, case.rows - 1),
    "distinct": lambda rng, case: rng.permutation(np.arange(case.keys) % case.rows),
    "in order": lambda rng, case: np.sort(rng.integers(0, case.rows, case.keys)),
    "few": lambda rng, case: np.where(
        rng.random(case.keys) < 0.2, rng.integers(0, case.rows, case.keys), NO_KEY
    ),
    "none": lambda rng, case: np.full(case.keys, NO_KEY),
}


def draws(case: Case, times: int = 3) -> Iterator[tuple[str, Array]]:
    for kind, make in KINDS.items():
        for seed in range(times):
            yield f"{kind} {seed}", make(np.random.default_rng([seed, case.rows]), case).astype(np.int32)


@pytest.mark.some(4)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_no_key_is_lost_or_given_twice(case: Case) -> None:
    """Rows equal those of the table, sums those of NumPy, and each row is given at most once."""
    for what, keys in draws(case):
        try:
            machine(case).checked(keys)
        except AssertionError as e:
            raise AssertionError(f"{what}: {keys.tolist()}\n{e}") from e


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_full_bucket_takes_more_rounds(capacity: int) -> None:
    """Every device has the same distinct keys, all of one owner: so many rounds, and one that found out."""
    case = replace(LINE, capacity=capacity)
    each = -(-case.keys // 8)
    keys = np.concatenate([np.arange(each, dtype=np.int32) % 5] * 8)[: case.keys]
    state = machine(case).checked(keys)
    rounds = -(-5 // capacity)
    assert set(map(int, state["rounds"].values())) == {1 + rounds}
    assert len(machine(case).served) == 8 * rounds


def test_rounds_are_as_few_as_the_bounds_allow() -> None:
    """Two devices whose keys interleave: a round goes on up to the first device that has no more room."""
    case = replace(LINE, capacity=3)
    keys = np.full(case.keys, NO_KEY)
    keys[0:5], keys[6:10] = [0, 1, 2, 3, 4], [0, 2, 3, 4]
    state = machine(case).checked(keys)
    # One that finds out. Below 3: [0, 1, 2] of the one and [0, 2] of the other; then [3, 4] of both.
    assert set(map(int, state["rounds"].values())) == {3}


def test_one_round_is_enough_where_buckets_hold_all() -> None:
    assert all(leg.fits for case in (LINE, GRID) for leg in legs(case.exchange))
    state = machine(LINE).checked(np.zeros(KEYS, np.int32))
    assert set(map(int, state["rounds"].values())) == {1}
    assert len(machine(LINE).served) == 8


def test_the_room_of_a_bucket() -> None:
    assert default_capacity(0, 8) == 0 and default_capacity(7, 8) == 7
    for group in (2, 8, 64):
        for keys in (1, 100, 1000, 100_000):
            room = default_capacity(keys, group)
            assert room == keys or (room % 8 == 0 and room * group > 1.25 * keys)
    big = Exchange(extent(Layout((1 << 20, 8), (S(0), S(0)), (2, 4)), 0), (0, 1), 4096)
    assert [(leg.keys, leg.capacity, leg.fits) for leg in legs(big)] == [
        (4096, 2568, False),
        (5136, 1288, False),
    ]
    # There are never more distinct keys than an owner has rows.
    few = Exchange(extent(Layout((100, 8), (S(0),), (8,)), 0), (0,), 4096)
    assert [(leg.capacity, leg.fits) for leg in legs(few)] == [(13, True)]


@pytest.mark.full
def test_sums_of_short_floats_are_rounded_once() -> None:
    """Adding ones to a bfloat16 one by one stops at 256, adding 300 to 1200 gives 1504."""
    case = replace(LINE, keys=8 * 300, rows=9)
    table, rows = (np.asarray(jnp.ones((n, WIDTH), jnp.bfloat16)) for n in (case.rows, case.keys))
    _, state = machine(case).run(table, np.full(case.keys, 4, np.int32), rows)
    sums = view.join(state["sums"], table.shape, case.table.nd, case.hierarchy).astype(np.float32)
    assert sums[4].tolist() == [2400, 2400] and np.count_nonzero(sums) == WIDTH


@pytest.mark.full
def test_rows_travel_in_a_narrower_type() -> None:
    """On two legs they are rounded as if there were one; sums of whole numbers are exact."""
    case = replace(GRID, capacity=4, wire="bfloat16")
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    keys = rng.integers(0, ROWS, KEYS).astype(np.int32)
    rows = np.ones((KEYS, WIDTH), np.float32)
    found, state = machine(case).run(table, keys, rows)
    rounded = np.asarray(jnp.asarray(table).astype(jnp.bfloat16).astype(np.float32))
    assert not np.array_equal(rounded, table)
    got = view.join(found, rows.shape, case.found, case.hierarchy)
    np.testing.assert_array_equal(got, rounded[keys])
    counts = np.bincount(keys, minlength=ROWS)
    got = view.join(state["sums"], table.shape, case.summed, case.hierarchy)
    np.testing.assert_array_equal(got, np.stack([counts] * WIDTH, 1))


@pytest.mark.parametrize("below", [40, (1 << 31) - 2])
def test_ranks_of_keys(below: int) -> None:
    """Whether key and place fit in one number or not."""
    rng = np.random.default_rng(below)
    for keys in (rng.integers(0, below, 300), rng.integers(0, 40, 300), np.full(300, below), np.zeros(0)):
        keys = keys.astype(np.int32)
        ordered, new, ranks = map(np.asarray, rank_keys(jnp.asarray(keys), below))
        once, want = np.unique(keys, return_inverse=True)
        np.testing.assert_array_equal(ranks, want)
        np.testing.assert_array_equal(ordered, np.sort(keys))
        np.testing.assert_array_equal(ordered[new], once)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_rows_of_several_lines(dtype: str) -> None:
    """Numbers that are not finite are read like any others, and no place moves."""
    table = np.arange(5 * 70).reshape(5, 70).astype(dtype)
    if dtype != "int32":
        table[1], table[2] = np.nan, np.inf
    got = np.asarray(rows_or_zeros(jnp.asarray(table), jnp.array([1, 5, 4, 2, 1])))
    want = np.concatenate([table, np.zeros_like(table[:1])])[[1, 5, 4, 2, 1]]
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
