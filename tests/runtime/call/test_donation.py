"""Donated memory: nobody else's is given away, and what is gone is refused, as under `jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp import B, S
from sbp.errors import DonationError
from sbp.runtime.call.donation import Owners, buffers, layouts_of, own_copy

ONE = sbp.placement("cpu", shape=(1,))
LINE = sbp.placement("cpu", shape=(8,))
STAGES = sbp.placement("cpu", shape=(2, 1))
WHOLE = NamedSharding(LINE.mesh, Spec())
ROWS = NamedSharding(LINE.mesh, Spec("x"))
NAMES = ("a", "b", "c")


def fresh() -> jax.Array:
    return jnp.arange(1024.0) + 0


def wrong(leaves: list[Any], donate: tuple[int, ...]) -> list[tuple[str, str]]:
    found = Owners(donate).check(leaves, layouts_of(leaves), lambda: NAMES)
    return [(p.where, p.got) for p in found]


def test_an_array_is_donated_once() -> None:
    x, y = jnp.ones(3), jnp.ones(3)
    assert wrong([x, y, 2.0], (0, 1)) == []
    assert wrong([x, x, y], ()) == wrong([x, x, y], (2,)) == []
    twice = [("b: float32[3]", "the same array as a")]
    assert wrong([x, x, y], (0,)) == wrong([x, x, y], (1,)) == twice
    assert len(wrong([x, x, x], (0,))) == 2
    # Numbers are one object, and own no memory.
    assert wrong([2.0, 2.0, x], (0, 1, 2)) == []


ALIASES: dict[str, Callable[[jax.Array], tuple[Any, Any]]] = {
    "put where it is": lambda x: (x, jax.device_put(x, x.sharding)),
    "a shard": lambda x: ((y := jax.device_put(x, WHOLE)), y.addressable_shards[3].data),
    "a view of another shape": lambda x: ((y := jax.device_put(x, ROWS)), y.addressable_data(5)),
    "copies of one device's": lambda x: (jax.device_put(x, WHOLE), jax.device_put(x, WHOLE)),
    "assembled from shards": lambda x: (
        (y := jax.device_put(x, ROWS)),
        jax.make_array_from_single_device_arrays(x.shape, ROWS, [s.data for s in y.addressable_shards]),
    ),
    "keys": lambda x: ((k := jax.random.split(jax.random.key(0), 8)), jax.device_put(k, k.sharding)),
}


@pytest.mark.parametrize("name", ALIASES)
def test_memory_of_two_leaves_is_not_donated(name: str) -> None:
    """XLA refuses some of these, and waits for ever or crashes where only some devices share."""
    a, b = ALIASES[name](fresh())
    assert buffers(a) & buffers(b)
    assert wrong([a, b], ()) == []
    (found,) = wrong([a, b], (0,))
    assert found == (f"b: {b.dtype}{list(b.shape)}", "an array in the memory of a")
    assert len(wrong([a, b], (1,))) == 1


@pytest.mark.parametrize("where", [ONE, LINE], ids=str)
@pytest.mark.parametrize("nd", [B, S(0)], ids=str)
def test_programs_refuse_it_and_the_arrays_live_on(where: sbp.Placement, nd: Any) -> None:
    program = sbp.compile(lambda a, b: (a + b["k"], b["k"].sum()), where, in_sbp=nd, donate_argnums=0)
    x = fresh()
    for y in (x, jax.device_put(x, x.sharding)):
        with pytest.raises(DonationError):
            program(x, {"k": y})
    np.testing.assert_array_equal(program(x, {"k": jnp.copy(x)})[0], 2 * np.arange(1024.0))
    # Also later on, where all leaves are in place and only their layouts are new.
    a, b = (program.place(fresh(), {"k": fresh()})[0] for _ in range(2))
    program(a, {"k": b})
    with pytest.raises(DonationError):
        program(b, {"k": jax.device_put(b, b.sharding)})
    assert not b.is_deleted()


@pytest.mark.parametrize("where", [ONE, LINE], ids=str)
@pytest.mark.parametrize("nd", [B, S(0)], ids=str)
def test_a_donated_array_that_is_closed_over(where: sbp.Placement, nd: Any) -> None:
    x = fresh()
    program = sbp.compile(lambda a: a + x, where, in_sbp=nd, donate_argnums=0)
    reference = jax.jit(lambda a: a + x, donate_argnums=0)
    reference(fresh())  # it has its own copy of x from here on
    np.testing.assert_array_equal(program(x), 2 * np.arange(1024.0))
    assert x.is_deleted()
    with pytest.raises(DonationError, match="a\n"):
        program(x)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        reference(x)
    for step in (program, reference):
        np.testing.assert_array_equal(step(jnp.ones(1024)), np.arange(1024.0) + 1)


def test_what_is_gone_is_named_where_all_leaves_are_in_place() -> None:
    program = sbp.compile(lambda p, x: ({k: a + x.sum() for k, a in p.items()}, x), LINE, donate_argnums=0)
    state, x = program.place({"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, jnp.ones(8))
    for _ in range(3):
        before, (state, _) = state, program(state, x)
    with pytest.raises(DonationError, match="whose memory is gone") as caught:
        program({**state, "b": before["b"]}, x)
    assert [p.where for p in caught.value.problems] == ["p['b']"]
    assert not state["w"].is_deleted()


def test_a_closed_over_array_that_another_program_takes() -> None:
    x = fresh()
    program = sbp.compile(lambda a: a + x, LINE, in_sbp=B)
    program(jnp.ones(1024))
    jax.jit(lambda y: y * 2, donate_argnums=0)(x)
    np.testing.assert_array_equal(program(jnp.ones(1024)), np.arange(1024.0) + 1)


def test_a_closed_over_array_that_is_gone_before_the_first_call() -> None:
    x = fresh()
    program = sbp.compile(lambda a: a + x, LINE)
    program.plan(jnp.ones(1024))
    x.delete()
    with pytest.raises(DonationError, match="closes over"):
        program(jnp.ones(1024))


def test_a_numpy_array_that_is_closed_over_is_as_it_was() -> None:
    x = np.ones(1024, np.float32)
    program = sbp.compile(lambda a: a + x, LINE)
    program.plan(jnp.ones(1024))
    x[:] = 7
    np.testing.assert_array_equal(program(jnp.ones(1024)), np.full(1024, 2.0))


def test_stages_keep_what_they_close_over() -> None:
    first, last = STAGES.split(0)
    x = fresh()

    def step(a: Any, b: Any) -> Any:
        with sbp.on(first):
            y = a * x
        with sbp.on(last):
            return y + b * x

    program = sbp.compile(step, STAGES, donate_argnums=0)
    np.testing.assert_array_equal(program(x, jnp.ones(1024)), np.arange(1024.0) ** 2 + np.arange(1024.0))
    assert x.is_deleted()
    np.testing.assert_array_equal(program(jnp.ones(1024), jnp.ones(1024)), 2 * np.arange(1024.0))
    y = fresh()
    with pytest.raises(DonationError, match="in the memory of a"):
        program(y, jax.device_put(y, y.sharding))


@pytest.mark.parametrize("sharding", [WHOLE, ROWS], ids=["whole", "rows"])
def test_an_own_copy_shares_no_memory(sharding: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    for x in (fresh(), jax.device_put(fresh(), sharding), np.arange(1024.0), keys):
        made = own_copy(x, sharding, "x")
        assert made.sharding.is_equivalent_to(sharding, 1)
        assert not isinstance(x, jax.Array) or not buffers(x) & buffers(made)


def test_layouts_that_are_known_are_not_looked_at_again() -> None:
    owners, x, y = Owners((0,)), jax.device_put(fresh(), ROWS), jax.device_put(fresh(), ROWS)
    layouts = layouts_of([x, y])
    assert owners.check([x, y], layouts, lambda: NAMES) == []
    assert all(a is b for a, b in zip(owners.layouts, layouts, strict=True))
    assert len(owners.check([x, x], layouts_of([x, x]), lambda: NAMES)) == 1
    other = NamedSharding(LINE.mesh, Spec("x"))
    assert len(owners.check([x, z := jax.device_put(x, other)], layouts_of([x, z]), lambda: NAMES)) == 1


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_what_xla_has_no_use_for_is_gone_all_the_same() -> None:
    program = sbp.compile(lambda a, b: (a * 2, b.sum()), LINE, donate_argnums=(0, 1))
    for _ in range(3):
        moved = jnp.ones(8), jnp.ones((3, 8))
        there = program.place(jnp.ones(8), jnp.ones((3, 8)))
        program(*moved), program(*there)
        assert all(x.is_deleted() for x in (*moved, *there))
