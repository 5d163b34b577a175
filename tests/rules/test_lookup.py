"""Lookups of rows and sums into rows: their rows are true, and what a plan says of the exchange is sent."""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import GatherScatterMode

import sbp
from sbp import B, S
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.rules import add_rows_p, lookup_p
from sbp.runtime.hlo.meter import read_compiled
from tests.rules import claims
from tests.rules.claims import Sample, applications, false_compositions, false_rows
from tests.rules.samples_lookup import SAMPLES, TIGHT, WIDE

LINE, GRID = sbp.placement("cpu", shape=(8,)), sbp.placement("cpu", shape=(2, 4))
# Nothing but bytes counts.
SPARING = sbp.Options(hardware=BYTES_ONLY)


@pytest.mark.some(4)
@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_rows_are_true(one: Sample) -> None:
    assert applications(one)
    assert not false_rows(one, one.groups[-1:])


@pytest.mark.some(2)
@pytest.mark.parametrize("one", [one for one in SAMPLES if one.pairs], ids=str)
def test_compositions_are_true(one: Sample) -> None:
    assert not false_compositions(one, (2, 3))


@pytest.mark.full
@pytest.mark.parametrize("one", TIGHT, ids=str)
def test_they_are_with_little_room(one: Sample) -> None:
    assert not false_rows(one, one.groups[-1:])
    assert not false_compositions(one, (2, 3))


@pytest.mark.some(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("one", WIDE, ids=str)
def test_rows_are_true_of_wide_types(one: Sample) -> None:
    assert not false_rows(one, one.groups)


@pytest.mark.slow
@pytest.mark.parametrize("one", [one for one in (*SAMPLES, *TIGHT) if one.pairs > 1], ids=str)
def test_on_axes_of_other_sizes(one: Sample) -> None:
    assert not false_rows(one, one.groups[:-1])
    assert not false_compositions(one, (2, 2))


def how(**changed: Any) -> Any:
    """Parameters of both ops."""
    fills = GatherScatterMode.FILL_OR_DROP
    return {"mode": fills, "fill_value": None, "capacity": None, "wire_dtype": None, **changed}


V, D, N = 1 << 13, 4, 256
RNG = np.random.default_rng(0)
TABLE = RNG.integers(-4, 5, (V, D)).astype(np.float32)
IDS = RNG.integers(0, V, N).astype(np.int32)


def step(table: Any, ids: Any, **changed: Any) -> Any:
    """Rows, and the table with their doubles added."""
    (rows,) = lookup_p.bind(table, ids, **how(**changed))
    (after,) = add_rows_p.bind(table, ids, 2 * rows, **how(**changed))
    return rows, after


class CompiledProgram:
    """A program compiled in haste; tables, ids and results are split by dim 0 along every axis."""

    def __init__(self, fn: Any, place: sbp.Placement, *args: Any) -> None:
        nd = [S(0)] * len(place.shape)
        self.program = sbp.compile(fn, place, in_sbp=(nd,) * len(args), out_sbp=nd, options=SPARING)
        self.plan = self.program.plan(*args)
        self.compiled = self.program.lower(*args).compile(claims.HASTY)

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*self.program.place(*args))

    @property
    def sent(self) -> float:
        """Bytes of the first rounds, as compiled."""
        return read_compiled(self.compiled).wire_bytes


@cache
def stepped(place: sbp.Placement, capacity: int | None) -> CompiledProgram:
    """`step`, compiled."""
    return CompiledProgram(lambda table, ids: step(table, ids, capacity=capacity), place, TABLE, IDS)


@pytest.mark.some(1)
@pytest.mark.parametrize(("place", "capacity"), [(LINE, None), (GRID, 4)], ids=str)
def test_the_plan_says_what_is_sent(place: sbp.Placement, capacity: int | None) -> None:
    built = stepped(place, capacity)
    reasons = {c.reason.split(";")[0] for c in built.plan.collectives if c.kind == "all_to_all"}
    assert reasons == {
        f"sbp_lookup: keys of {V} rows travel to the devices that own the rows",
        f"sbp_lookup: rows of {V} travel to the devices that look them up",
        f"sbp_add_rows: sums by key travel to the devices that own the {V} rows",
    }
    # Of two legs a reduction says whether rounds follow, of one leg the keys bring that along.
    told = {"all_reduce"} if len(place.shape) > 1 else set()
    assert {c.kind for c in built.plan.collectives} == {"all_to_all", *told}
    assert built.sent == pytest.approx(built.plan.wire_bytes, rel=1e-9)
    for got, want in zip(built(TABLE, IDS), step(TABLE, IDS), strict=True):
        np.testing.assert_array_equal(got, want)


def test_skewed_keys_are_all_served() -> None:
    """The same program with all keys of one owner, one key only, the last rows, and none in bounds."""
    built = stepped(GRID, 4)
    for ids in (IDS % (V // 8), np.full_like(IDS, V - 1), np.arange(V - N, V, dtype=np.int32), -1 - IDS):
        for got, want in zip(built(TABLE, ids), step(TABLE, ids), strict=True):
            np.testing.assert_array_equal(got, want)


def test_keys_of_two_tables_travel_once() -> None:
    def both(one: Any, two: Any, ids: Any) -> Any:
        return [lookup_p.bind(t, ids, **how(capacity=8))[0] for t in (one, two)]

    args = TABLE, TABLE + 1, IDS
    built = CompiledProgram(both, LINE, *args)
    assert [(c.kind, c.tensor) for c in built.plan.collectives] == [
        ("all_to_all", "ids"),
        ("all_to_all", "one"),
        ("all_to_all", "two"),
    ]
    assert built.sent == pytest.approx(built.plan.wire_bytes, rel=1e-9)
    for got, want in zip(built(*args), both(*args), strict=True):
        np.testing.assert_array_equal(got, want)


def test_rows_travel_in_half_the_bytes() -> None:
    def bytes_of_rows(wire: str | None) -> tuple[float, Any]:
        built = CompiledProgram(
            lambda table, ids: lookup_p.bind(table, ids, **how(wire_dtype=wire)), LINE, table, IDS
        )
        assert built.sent == pytest.approx(built.plan.wire_bytes, rel=1e-9)
        (sent,) = (c.wire_bytes for c in built.plan.collectives if c.tensor == "table")
        return sent, built(table, IDS)[0]

    table = TABLE / 3
    full, exact = bytes_of_rows(None)
    half, rounded = bytes_of_rows("bfloat16")
    assert half == full / 2
    np.testing.assert_array_equal(exact, table[IDS])
    short = jnp.asarray(table).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(rounded, np.asarray(short)[IDS])


def test_a_table_on_every_device_needs_no_exchange() -> None:
    program = sbp.compile(
        lambda t, i: lookup_p.bind(t, i, **how())[0], LINE, in_sbp=([B], [S(0)]), out_sbp=[S(0)]
    )
    assert not program.plan(TABLE, IDS).collectives
    np.testing.assert_array_equal(program(TABLE, IDS), TABLE[IDS])
