"""Rows on their way: routes against the definition of a split; and slices along a sequence that is split."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, P, S
from sbp.communication.extents import Extent, coordinates_along
from sbp.communication.route import Layer, Route, find_route, route_pays
from sbp.communication.route_sides import held_reversed, operand_side, result_side
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.runtime.hlo.meter import read_compiled

Array = np.ndarray[Any, Any]
NOTHING = -1
HIERARCHIES = ((2,), (3,), (8,), (2, 3), (3, 2, 2))


def shard(line: Array, dim: Extent, at: tuple[int, ...]) -> Array:
    """The rows of a device, `NOTHING` in the padding."""
    first, valid = dim.offset(at), dim.valid(at)
    return np.concatenate([line[first : first + valid], np.full(dim.local - valid, NOTHING)])


def followed(way: Route, wide: list[Array]) -> list[Array]:
    """What every device has after a route, from what it held: `NOTHING` where nothing came."""
    out = [np.full(way.height, NOTHING) for _ in wide]
    for layer in way.layers:
        got = sent(layer, wide) if layer.pairs else wide
        for mine, rows, (at, to, count) in zip(out, got, layer.takes, strict=True):
            assert at >= 0 and at + count <= len(rows) and to >= 0 and to + count <= way.height
            mine[to : to + count] = rows[at : at + count]
    return out


def sent(layer: Layer, wide: list[Array]) -> list[Array]:
    """One exchange: nobody sends or gets twice, and what is sent lies within what a device holds."""
    sources, targets = zip(*layer.pairs, strict=True)
    assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
    got = [np.full(layer.rows, NOTHING) for _ in wide]
    for source, target in layer.pairs:
        assert source != target and 0 <= layer.sends[source] <= len(wide[source]) - layer.rows
        got[target] = wide[source][layer.sends[source] :][: layer.rows]
    return got


def sub(rng: random.Random, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a for a in axes if rng.random() < 0.8)


@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_every_result_gets_its_rows(hierarchy: tuple[int, ...]) -> None:
    """Operands end to end, results anywhere on their line; some axes split only one of them."""
    rng, every = random.Random(str(hierarchy)), tuple(range(len(hierarchy)))
    for _ in range(150):
        parts = [Extent(rng.randint(0, 20), sub(rng, every), hierarchy) for _ in range(rng.randint(1, 4))]
        ends = np.cumsum([0, *(p.size for p in parts)])
        total = int(ends[-1])
        cut = rng.randint(-4, total), rng.randint(0, total // 2)
        outs = [(rng.randint(-4, total), Extent(rng.randint(0, 20), sub(rng, every), hierarchy)) for _ in cut]
        way = find_route(
            tuple(operand_side(p, -int(e)) for p, e in zip(parts, ends, strict=False)),
            tuple(result_side(out, start) for start, out in outs),
        )
        places = coordinates_along(way.axes, hierarchy)
        line = np.arange(total)
        wide = [
            np.concatenate([shard(line[e : e + p.size], p, at) for p, e in zip(parts, ends, strict=False)])
            for at in places
        ]
        for at, got in zip(places, followed(way, wide), strict=True):
            first = 0
            for start, out in outs:
                rows = np.arange(out.valid(at)) + start + out.offset(at)
                want = np.where((rows >= 0) & (rows < total), rows, NOTHING)
                np.testing.assert_array_equal(got[first : first + len(rows)], want)
                first += out.local


@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_every_row_of_a_sum_comes_from_one_device(hierarchy: tuple[int, ...]) -> None:
    """Results that are sums along some axes: nothing is sent along these."""
    rng, every = random.Random(str(hierarchy)), tuple(range(len(hierarchy)))
    for _ in range(100):
        base, partial = Extent(rng.randint(2, 30), every, hierarchy), sub(rng, every)
        out = Extent(rng.randint(1, base.size), tuple(a for a in every if a not in partial), hierarchy)
        start = rng.randint(0, base.size - out.size)
        way = find_route((operand_side(base, start),), (result_side(out, 0, partial),))
        places = coordinates_along(every, hierarchy)
        ends = followed(way, [shard(np.arange(base.size), base, at) for at in places])
        for at in places:
            alike = [i for i, b in enumerate(places) if all(b[a] == at[a] for a in out.axes)]
            rows = np.stack([ends[i] for i in alike])[:, : out.valid(at)]
            assert (np.sum(rows != NOTHING, axis=0) == 1).all()
            np.testing.assert_array_equal(rows.max(0), np.arange(out.valid(at)) + start + out.offset(at))
        for layer in way.rounds:
            assert all(places[s][a] == places[t][a] for s, t in layer.pairs for a in partial)


@pytest.mark.parametrize(
    ("size", "start", "step", "sent_rows", "rounds"),
    [
        (64, 1, 1, 1, 1),  # the next token
        (64, 0, 1, 0, 0),  # all but the last
        (64, 5, 1, 5, 1),
        (64, 8, 1, 8, 1),  # a whole shard
        (64, 11, 1, 8, 2),  # one and a part: a shard in all
        (64, 0, 2, 0, 0),  # every second row, an even shard of each
        (60, 1, 3, 2, 1),  # chunks of 8 rows have 2 or 3 of them
        (64, 32, 1, 8, 2),  # the last half, by two senders' worth for each sender
    ],
)
def test_a_shift_sends_what_it_must(size: int, start: int, step: int, sent_rows: int, rounds: int) -> None:
    base = Extent(size, (0,), (8,))
    rows = 32 if start == 32 else -(-(size - start) // step)
    out = Extent(rows + (start if start < 32 and step == 1 else 0), (0,), (8,))
    operands, results = (operand_side(base, start, step),), (result_side(out),)
    way = find_route(operands, results)
    assert (way.sent_rows, len(way.rounds)) == (sent_rows, rounds)
    assert route_pays(way, operands, results)


def test_a_reversal_is_one_exchange() -> None:
    even, uneven = Extent(64, (0,), (8,)), Extent(61, (0,), (8,))
    assert [r.pairs for r in find_route((held_reversed(even),), (result_side(even),)).rounds] == [
        tuple((i, 7 - i) for i in (7, 6, 5, 4, 3, 2, 1, 0))
    ]
    assert find_route((held_reversed(uneven),), (result_side(uneven),)).sent_rows <= 2 * uneven.local


def test_a_few_rows_for_many_devices_are_gathered() -> None:
    """All from one device, one after the other: too many exchanges."""
    base, out = Extent(4096, (0,), (64,)), Extent(64, (0,), (64,))
    operands, results = (operand_side(base),), (result_side(out),)
    assert not route_pays(find_route(operands, results), operands, results)


LINE = sbp.placement("cpu", shape=(8,))
GRID = sbp.placement("cpu", shape=(2, 4))
# Nothing but bytes counts, so that short sequences are split as long ones are.
SPARING = sbp.Options(hardware=BYTES_ONLY)
BATCH, LENGTH, WIDTH = 2, 64, 8
ROW = 4 * BATCH * WIDTH
SCALAR = 7.0  # bytes of an all-reduce of one float over eight devices
LAST = 2 * 7 / 8 * ROW  # of one row

PROGRAMS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "all but the last": (lambda x: jnp.sum(jnp.sin(x[:, :-1])), SCALAR),
    "all but the first": (lambda x: jnp.sum(jnp.sin(x[:, 1:])), ROW + SCALAR),
    "predict the next": (lambda x: jnp.sum(jnp.sin(x[:, :-1]) * x[:, 1:]), ROW + SCALAR),
    "difference": (lambda x: jnp.sum(jnp.diff(x, axis=1) ** 2), ROW + SCALAR),
    "roll": (lambda x: jnp.roll(x, 1, axis=1), ROW + LAST),
    "shift right": (lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))), ROW),
    "shift left": (lambda x: jnp.concatenate([x[:, 1:], jnp.ones_like(x[:, :1])], 1), ROW),
    "the last": (lambda x: x[:, -1], LAST),
    "backwards": (lambda x: x[:, ::-1], LENGTH / 8 * ROW),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_split_sequence(name: str) -> None:
    """Equal to one device, and what is sent is what the plan says: a row, not the sequence."""
    fn, wire_bytes = PROGRAMS[name]
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    out = [S(1)] if fn(x).shape == x.shape else [B]
    program = sbp.compile(fn, LINE, in_sbp=([S(1)],), out_sbp=out, options=SPARING)
    assert program.plan(x).wire_bytes == pytest.approx(wire_bytes)
    compiled = program.lower(x).compile({"xla_backend_optimization_level": 0})
    assert read_compiled(compiled).wire_bytes == pytest.approx(wire_bytes)
    np.testing.assert_allclose(program(x), fn(x), rtol=1e-5, atol=1e-5)


def next_token(x: Any, here: Callable[[Any], Any]) -> Any:
    """A slice, whose gradient is a padding."""
    return jnp.sum(jnp.sin(here(x[:, 1:])) * here(x[:, :-1]) ** 2)


def turned_halves(x: Any, here: Callable[[Any], Any]) -> Any:
    """A split, whose gradient is a concatenation, and one whose gradient are slices."""
    a, b = map(here, jnp.split(x, [x.shape[1] // 2], 1))
    return jnp.sum(jnp.sin(here(jnp.concatenate([b, -a, here(x[:, :3])], 1))) ** 2)


@pytest.mark.some(3)
@pytest.mark.parametrize("fn", [next_token, turned_halves], ids=lambda f: f.__name__)
@pytest.mark.parametrize("length", [24, 21])
@pytest.mark.parametrize("signature", [[S(1), S(1)], [S(0), S(1)], [S(1), B]], ids=str)
def test_gradients_on_two_axes(fn: Callable[..., Any], length: int, signature: Any) -> None:
    """Everything pinned along the sequence, uneven lengths too: rows move, nothing is gathered on the way."""

    def here(x: Any) -> Any:
        return sbp.annotate(x, signature, grad=signature)

    def step(x: Any) -> Any:
        return jax.value_and_grad(lambda x: fn(here(x), here))(x)

    x = np.random.default_rng(0).normal(size=(4, length, 3)).astype(np.float32)
    program = sbp.compile(step, GRID, options=SPARING)
    plan = program.plan(x)
    assert not any(c.kind == "all_gather" and "leaves as" not in c.reason for c in plan.collectives)
    assert any(c.kind == "permute" for c in plan.collectives)
    for got, want in zip(jax.tree.leaves(program(x)), jax.tree.leaves(step(x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_plan_says_who_needs_which_rows() -> None:
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), np.float32)
    program = sbp.compile(lambda x: jnp.sum(jnp.sin(x[:, 3:])), LINE, in_sbp=([S(1)],), options=SPARING)
    (c,) = (c for c in program.plan(x).collectives if c.kind == "permute")
    assert c.reason.startswith("slice: rows of dim 1 move, and 3 rows of the device after are needed; it is")
    assert (c.tensor, c.before, c.wire_bytes) == ("x", (S(1),), 3 * ROW)


def test_one_row_of_a_split_dim_leaves_a_sum() -> None:
    """The class token: only its device has it, and the next product is one of summands."""
    x, w = np.ones((4, LENGTH, 16), np.float32), np.ones((16, 4), np.float32)
    program = sbp.compile(lambda x, w: x[:, 0] @ w, LINE, in_sbp=([S(1)], [B]), options=SPARING)
    (c,) = program.plan(x, w).collectives
    assert (c.kind, c.before, c.shape) == ("all_reduce", (P,), (4, 4))
    assert "rows of dim 1 of operand 0 are sliced out here" in c.reason or "dot_general" in c.reason
    np.testing.assert_allclose(program(x, w), x[:, 0] @ w, rtol=1e-5)
