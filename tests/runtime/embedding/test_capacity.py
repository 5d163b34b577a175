"""The room of an exchange: planned from a batch, and again where others are not like it; one for all."""

import warnings
from typing import Any
from unittest.mock import NonCallableMock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import S
from sbp.communication.extents import extent
from sbp.communication.key_samples import KeySample, with_planned_capacity
from sbp.communication.legs import Exchange, default_capacity, legs
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.layout import Layout
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.hlo.meter import read_compiled
from sbp.runtime.lower import key_counts, sampling
from sbp.runtime.lower.key_counts import EVERY, FIRST_CALLS, KeyCounts
from sbp.runtime.lower.sampling import ids_of, is_known, whole
from tests.options import options_of

Array = np.ndarray[Any, Any]
LINE, GRID = sbp.placement("cpu", shape=(8,)), sbp.placement("cpu", shape=(2, 4))
ROWS, WIDTH, KEYS = 1 << 13, 2, 2048
TX = sbp.rows(optax.sgd(0.1))
SHARE = KEYS // 64


def step(table: Any, state: Any, ids: Any) -> Any:
    def loss(table: Any) -> Any:
        return jnp.square(table.at[ids].get(mode="fill", fill_value=0)).mean()

    value, grad = jax.value_and_grad(loss)(table)
    added, state = TX.update(grad, state, table)
    return table + added, state, value


def look_up(table: Any, ids: Any) -> Any:
    return table.at[ids].get(mode="fill", fill_value=0)


def program_of(fn: Any = look_up, on: sbp.Placement = LINE, **options: Any) -> sbp.Program:
    lying = [S(0)] * on.ndim
    signatures = (lying, lying) if fn is look_up else (lying, None, lying)
    return sbp.compile(fn, on, in_sbp=signatures, options=options_of(hardware=BYTES_ONLY, **options))


TABLE: Array = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
FEW = (np.arange(KEYS) % 16 * (ROWS // 16)).astype(np.int32)
SHAPES = jax.eval_shape(lambda: (TABLE, FEW))


def real(seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, ROWS, KEYS).astype(np.int32)


def looked_up(program: sbp.Program, first: Array, calls: int) -> list[str]:
    """The warnings of some calls with one batch and then real ones, each of which finds its rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(calls):
            ids = first if i == 0 else real(i)
            found = np.asarray(program(TABLE, ids))
            np.testing.assert_array_equal(found, np.where(ids[:, None] < ROWS, TABLE[ids % ROWS], 0))
    return [str(w.message) for w in caught]


@pytest.mark.full
@pytest.mark.parametrize("number", [0, ROWS], ids=["zeros", "no ids"])
def test_a_warm_up_says_nothing_of_the_room(number: int) -> None:
    """The room is that of a plan without a batch, more than an even share."""
    program = program_of(count_keys=True)
    assert looked_up(program, np.full(KEYS, number, np.int32), FIRST_CALLS + 2) == []
    assert max(c.most_rounds for c in program.key_counts()) <= 2
    assert program.plan(*SHAPES).wire_bytes == program_of().plan(*SHAPES).wire_bytes


def check_planned_again(program: sbp.Program, warned: list[str], args: Any) -> None:
    """One warning, a note, and rooms from a later batch."""
    assert len(warned) == 1
    assert (
        "the first batch was not like later ones" in warned[0]
        and "ExchangeOptions(capacity=...)" in warned[0]
    )
    plan = program.plan(*args)
    assert len([n for n in plan.notes if "planned again" in n and n in warned[0]]) == 1
    assert plan.physical is not None
    found = [node.params["samples"] for node in plan.physical.graph.walk() if ids_of(node)]
    assert found and all(s.again for samples in found for s in samples)
    (built,) = program._built.values()
    assert isinstance(built.key_counts, KeyCounts) and not built.key_counts.watches


@pytest.mark.parametrize("on", [LINE, GRID], ids=str)
def test_a_room_too_small_is_noticed_and_planned_once_more(on: sbp.Placement) -> None:
    """The first batch has few ids; until that is noticed, later rounds have room for an even share."""
    program, calls = program_of(on=on, count_keys=True), EVERY + FIRST_CALLS
    warned = looked_up(program, FEW, calls)
    check_planned_again(program, warned, SHAPES)
    assert "sbp_lookup at test_capacity.py" in warned[0]
    (count,) = program.key_counts()
    assert count.calls == calls and count.given_keys == count.served_keys == KEYS * calls
    assert count.most_rounds <= (3 if on is LINE else 6)


@pytest.mark.full
def test_training_goes_on_where_it_was() -> None:
    """State that was left to the compiler lies as before, and tables end as on one device."""
    program, tx = program_of(step), TX
    table, state = TABLE, tx.init(TABLE)
    wanted, lay = np.array(TABLE), []
    reference = jax.jit(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(FIRST_CALLS + 2):
            ids = FEW if i == 0 else real(i)
            table, state, _ = jax.block_until_ready(program(table, state, ids))
            wanted = reference(wanted, state, ids)[0]
            lay.append(table.sharding)
    check_planned_again(program, [str(w.message) for w in caught], (table, state, FEW))
    assert "sbp_update_rows at test_capacity.py" in str(caught[0].message)
    np.testing.assert_allclose(table, wanted, rtol=1e-5, atol=1e-6)
    assert len(set(lay)) == 1


def test_what_is_like_the_first_batch_is_not_planned_again() -> None:
    program = program_of()
    assert looked_up(program, real(0), EVERY + 2) == []
    assert not [n for n in program.plan(*SHAPES).notes if "again" in n]


def test_a_room_that_was_asked_for_stays() -> None:
    program = program_of(capacity=2)
    assert looked_up(program, FEW, FIRST_CALLS + 2) == []
    (built,) = program._built.values()
    assert built.key_counts is None


def test_ids_that_no_argument_tells_are_reported() -> None:
    """They come out of a loop, so that no batch can be looked at; all of them are of one owner."""

    def looped(table: Any, ids: Any) -> Any:
        halved, _ = jax.lax.scan(lambda x, _: (x // 2, None), ids, None, length=3)
        return table[halved]

    program = sbp.compile(looped, LINE, in_sbp=([S(0)], [S(0)]), options=sbp.Options(hardware=BYTES_ONLY))
    ids = np.arange(KEYS, dtype=np.int32) * 4
    with pytest.warns(UserWarning, match=r"(?s)had keys for \d+ rounds.*even share.*capacity="):
        for _ in range(3):
            np.testing.assert_array_equal(jax.block_until_ready(program(TABLE, ids)), TABLE[ids // 8])
    for _ in range(FIRST_CALLS + 1):
        program(TABLE, ids)
    assert sum("even share" in n for n in program.plan(TABLE, ids).notes) == 1


@pytest.mark.full
def test_looking_at_rounds_costs_no_collective() -> None:
    """The program that counts sends what the one sends that does not, and the host waits for nothing."""
    program = program_of()
    args = program.place(TABLE, real())
    (built,) = program._built.values()
    assert isinstance(built, CompiledProgram)
    counting = built.key_counts
    assert isinstance(counting, KeyCounts) and counting.watches
    plain, counted = (read_compiled(built.jit(LINE.mesh, c).lower(*args).compile()) for c in (None, counting))
    assert plain.by_kind() == counted.by_kind()
    waits = NonCallableMock(is_ready=lambda: False, is_fully_addressable=True)
    counting.add(waits)
    assert counting.last_counts is waits and counting.crowded_exchanges() == []
    assert counting.last_counts is waits
    program(*args)
    assert counting.pending_counts == []


# --- rooms ------------------------------------------------------------------------------------------------


def exchange_of(keys: int, hierarchy: tuple[int, ...] = (8,)) -> tuple[Exchange, Layout]:
    axes, lying = tuple(range(len(hierarchy))), tuple(S(0) for _ in hierarchy)
    table = Layout((ROWS, WIDTH), lying, hierarchy)
    ids = Layout((keys,), lying, hierarchy)
    return Exchange(extent(table, 0), axes, ids.local[0]), ids


@pytest.mark.parametrize("hierarchy", [(8,), (2, 4)])
@pytest.mark.parametrize("ids", [FEW, np.zeros(KEYS, np.int32), real(), np.sort(real()), np.arange(KEYS)])
def test_whatever_the_batch_two_rounds_take_an_even_share(ids: Array, hierarchy: tuple[int, ...]) -> None:
    exchange, lies = exchange_of(KEYS, hierarchy)
    for again in (False, True):
        found = with_planned_capacity(exchange, (KeySample(ids, again),), (lies,))
        for leg in legs(found):
            share = exchange.even_share(leg.group)
            assert leg.later_capacity >= min(share, leg.chunk)
            assert not again or leg.capacity >= min(share, leg.chunk)
            assert leg.keys >= leg.capacity


def test_a_batch_like_the_next_has_the_room_that_it_fills() -> None:
    """Ids of which many are equal need less than an even share: no byte more is sent for them."""
    ids = np.minimum(np.random.default_rng(0).zipf(1.5, KEYS), ROWS) - 1
    exchange, lies = exchange_of(KEYS)
    (leg,) = legs(with_planned_capacity(exchange, (KeySample(ids * 2039 % ROWS),), (lies,)))
    most = max(np.bincount(np.unique(part) // leg.chunk).max() for part in np.split(ids * 2039 % ROWS, 8))
    assert leg.capacity == most + int(most**0.5) // 2 < SHARE <= leg.later_capacity
    assert legs(exchange)[0].capacity == default_capacity(KEYS // 8, 8)


# --- processes --------------------------------------------------------------------------------------------


def part_of_an_array() -> Any:
    """An array of which other processes have parts: reading it here is an error."""
    away = NonCallableMock(spec=jax.Array, is_fully_addressable=False)
    assert isinstance(away, jax.Array)
    return away


def test_shapes_are_not_looked_at() -> None:
    assert is_known(real()) and is_known(jnp.zeros(3)) and is_known(part_of_an_array())
    assert not is_known(jax.ShapeDtypeStruct((3,), np.int32))


def test_what_lies_in_several_processes_is_brought_together(monkeypatch: pytest.MonkeyPatch) -> None:
    away, asked = part_of_an_array(), []

    def together(x: Any, tiled: bool) -> Array:
        asked.append((x, tiled))
        return real()

    monkeypatch.setattr(sampling.multihost_utils, "process_allgather", together)
    np.testing.assert_array_equal(whole(away), real())
    assert asked == [(away, True)]


def test_processes_conclude_before_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of several processes are added up on the devices, and judged when the next call is looked at."""
    monkeypatch.setattr(key_counts, "most_of_all", lambda away: away)
    counting = KeyCounts(keys=False, watches=True, calls=FIRST_CALLS - 1)
    away = NonCallableMock(is_fully_addressable=False, addressable_data=lambda _: np.ones((1, 0, 1)))
    counting.add(away)
    assert counting.last_counts is away
    for _ in range(FIRST_CALLS, EVERY - 1):
        assert counting.crowded_exchanges() == [] and counting.last_counts is away
        counting.add(away)
    assert counting.crowded_exchanges() == [] and counting.last_counts is None
