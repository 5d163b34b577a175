"""Infinities, NaN and -0.0 on eight devices, through the real collectives, against one device."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import sbp
from sbp import B, P, S
from sbp.communication import bits
from sbp.hardware.catalogue import Hardware, Link, hardware_for
from sbp.layout import local_shape
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move, itemsize, wire_bytes
from sbp.passes.boxing.paths import Boxing
from sbp.passes.physical.owners import mark_owners
from sbp.passes.physical.program import Box
from sbp.runtime.lower.collectives import apply_move
from sbp.signature import Partial
from tests.rules.special import special_parts, unlike

LINE = sbp.placement("cpu", shape=(8,))
GRID = sbp.placement("cpu", shape=(2, 4))
ODD = np.array([np.inf, -np.inf, np.nan, -0.0, 0.0, 1.5, -2.0], np.float32)
# Ops are slow and sending is free, so that everything that can be split is.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
Array = np.ndarray[Any, Any]


def odd(*shape: int, seed: int = 0) -> Array:
    """Floats of which most are special."""
    return np.random.default_rng(seed).choice(ODD, shape)


def assert_alike(got: Any, want: Any, close: float, signs: bool = True) -> None:
    """Equal in NaN, infinities and values, and in the signs of zeros with `signs`."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        wrong = unlike(np.asarray(a), np.asarray(b), close, signs)
        assert not wrong, wrong


TYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.complex64, np.int32, np.uint8]


@pytest.mark.parametrize("dtype", TYPES)
def test_reductions_keep_what_is_special(dtype: Any) -> None:
    """Of sums the sign of zero only where one device has each element, and the others zeros."""
    rng, value = np.random.default_rng(1), odd(8, 3)
    with np.errstate(invalid="ignore"):
        value = (np.nan_to_num(value) if np.dtype(dtype).kind in "iu" else value).astype(dtype)
    ops = ("sum",) if dtype == np.complex64 else ("sum", "max", "min")
    box = Boxing(value.shape, value.dtype, Network(LINE, hardware_for("cpu")), frozenset(ops), (0, 1))
    jobs = []
    for op, owned in [("sum", True), *((op, False) for op in ops)]:
        parts = np.stack(special_parts(value, op, 8, owned, rng))
        jobs += [(parts, move, owned) for to in (B, S(0)) for move in box.path((Partial(op),), (to,))]

    def device(*parts: Any) -> list[Any]:
        at = [lax.axis_index("x")]
        moved = zip(parts, jobs, strict=True)
        return [
            apply_move(x[0], move, value.shape, (8,), ("x",), at, owned=owned and move.old == P)[None]
            for x, (_, move, owned) in moved
        ]

    starts = [parts for parts, move, _ in jobs if isinstance(move.old, Partial)]
    assert len(starts) == len(jobs), "each is a single collective"
    spec = PartitionSpec("x")
    mapped = jax.shard_map(device, mesh=LINE.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for out, (_, move, owned) in zip(jax.jit(mapped)(*starts), jobs, strict=True):
        got = np.asarray(out)
        assert got.shape[1:] == local_shape(value.shape, move.after, (8,))
        whole = np.concatenate(list(got)) if isinstance(move.after[0], type(S(0))) else got[-1]
        signs = owned or move.old != P
        assert not unlike(whole, value, 1e-2 if dtype == ml_dtypes.bfloat16 else 0.0, signs), move


@pytest.mark.parametrize(("shape", "dim"), [((8,), 0), ((8, 3), 0), ((3, 16), 1), ((3, 8, 5), 1)], ids=str)
def test_short_floats_of_one_device_each_travel_in_words_of_32_bits(shape: tuple[int, ...], dim: int) -> None:
    """XLA on GPUs adds up 16-bit integers as 32-bit ones, for twice the bytes."""
    rng = np.random.default_rng(0)
    value = rng.choice(ODD, shape).astype(ml_dtypes.bfloat16)
    owner = rng.integers(0, 8, shape)
    parts = np.stack([np.where(owner == d, value, ml_dtypes.bfloat16(0)) for d in range(8)])

    def device(x: Any) -> Any:
        return bits.owned_scatter(x[0], ("x",), dim, 8), bits.owned_sum(x[0], ("x",))

    spec = PartitionSpec("x")
    outs = PartitionSpec(*[None] * dim, "x"), PartitionSpec()
    jitted = jax.jit(
        jax.shard_map(device, mesh=LINE.mesh, in_specs=spec, out_specs=outs, check_vma=False),
    )
    for got in jitted(parts):
        assert not unlike(np.asarray(got), value, 0.0, signs=True)
    text = jitted.lower(parts).compiler_ir("hlo").as_hlo_text()
    sent = re.findall(r"= (\w+)\[[\d,]*\]\S* (?:reduce-scatter|all-reduce)\(", text)
    assert sent == ["u32", "u32"]


def moved_only(x: Any, i: Any) -> Any:
    """Rows of a split table on their way: nothing is computed."""
    rows = jnp.concatenate([x[i], lax.dynamic_slice_in_dim(x, i[0], 2, 0)], axis=0)
    return jnp.where(jnp.arange(rows.shape[1]) % 2 == 0, rows, rows[::-1]).T.reshape(-1)


def looped(x: Any, i: Any) -> Any:
    """A carried sum of which each element stays one device's."""
    first = lax.dynamic_slice_in_dim(x, i[0], 3, 0)
    return lax.scan(lambda c, _: (jnp.roll(c, 1, 1), c[0]), first, None, length=3)


MOVED: dict[str, Callable[..., Any]] = {
    "lookups and slices": moved_only,
    "a loop": looped,
    "one row": lambda x, i: x[3],
    "a slice of a few rows": lambda x, i: x[5:9],
    "wider": lambda x, i: x[i].astype(jnp.bfloat16).astype(jnp.float32),
    "of a kernel's taps": lambda x, i: lax.dynamic_index_in_dim(x, i[1], 0, keepdims=False)[::2],
}


@pytest.mark.some(4)
@pytest.mark.parametrize("devices", [LINE, GRID], ids=str)
@pytest.mark.parametrize("name", MOVED)
def test_bit_for_bit_where_nothing_is_computed(name: str, devices: sbp.Placement) -> None:
    x, i = odd(16, 6, seed=3), np.array([3, 11, 5])
    signature = [S(0)] if devices is LINE else [S(0), S(0)]
    whole = [B] * devices.ndim
    program = sbp.compile(MOVED[name], devices, in_sbp=(signature, whole), options=sbp.Options(check=True))
    assert_alike(program(x, i), jax.jit(MOVED[name])(x, i), 0.0)
    plan = program.plan(x, i)
    sums = [c for c in plan.collectives if P in c.before and c.kind in ("all_reduce", "reduce_scatter")]
    assert plan.physical is not None
    owned = [box.owned for box, _ in plan.physical.boxes() if box.move.old == P and box.move.is_collective]
    assert len(owned) == len(sums) and all(owned)


def test_a_sum_that_is_computed_with_is_added_up() -> None:
    """A lookup plus a reduction is on no single device any more."""
    program = sbp.compile(lambda x, i: x[i].sum(1) + x.sum(), LINE, in_sbp=([S(0)], [B]))
    x, i = np.ones((16, 4), np.float32), np.array([3, 11])
    physical = program.plan(x, i).physical
    assert physical is not None
    assert not any(box.owned for box, _ in mark_owners(physical).boxes() if box.move.kind == "all_reduce")
    np.testing.assert_array_equal(program(x, i), [68, 68])


REDUCED: dict[str, Callable[..., Any]] = {
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "of all": lambda x: (x.max(), x.min()),
    "increasing": lambda x: jnp.exp(x.max(0)) + jnp.tanh(x.min(0)),
    "beside another": lambda x: jnp.maximum(x.max(0), x[0]),
    "clamped": lambda x: jnp.clip(x.min(0), -1, 1),
    "short": lambda x: x.astype(jnp.bfloat16).max(0),
    "argmax": lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 0)),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "cumulative": lambda x: (lax.cummax(x, 0), lax.cumsum(x, 0), lax.cumlogsumexp(x, 0)),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", REDUCED)
def test_extrema_keep_nan(name: str) -> None:
    x = odd(16, 12, seed=5)
    x[:, ::4] = np.random.default_rng(2).normal(size=(16, 3))
    program = sbp.compile(REDUCED[name], LINE, in_sbp=([S(0)],), options=sbp.Options(hardware=SPLITTING))
    assert_alike(program(x), jax.jit(REDUCED[name])(x), 1e-6, signs=False)


def test_short_maxima_are_sent_in_pieces() -> None:
    """Compared in a collective they take 32 bits; sent in pieces and compared at home, their own 16."""
    n, network = 1 << 20, Network(LINE, hardware_for("cpu"))
    box = Boxing((n,), np.dtype(np.float16), network, frozenset(["max"]), (0,))
    direct = Move("all_reduce", (0,), (Partial("max"),), (B,), Partial("max"), B)
    assert wire_bytes(direct, (n,), itemsize(direct, box.dtype), (8,)) == 2 * 7 / 8 * n * 4
    assert [m.kind for m in box.path(direct.before, direct.after)] == ["all_to_all", "all_gather"]
    program = sbp.compile(lambda x: x.max(0), LINE, in_sbp=([S(0)],), out_sbp=[B])
    assert program.plan(jax.ShapeDtypeStruct((16, n), np.float16)).wire_bytes == 2 * 7 / 8 * n * 2


def scaled(t: Any, i: Any, s: Any) -> Any:
    return (t[i] * s).sum(-1)


def rescaled(x: Any, w: Any, s: Any) -> Any:
    return (jax.nn.relu(x) @ w) / s


FACTORS: dict[str, tuple[Callable[..., Any], Any, Sequence[Any]]] = {
    "rows of a table times infinity": (
        scaled,
        ([S(0)], [B], [B]),
        (np.ones((16, 4), np.float32), np.arange(5), np.full((5, 4), np.inf, np.float32)),
    ),
    "a product by zero": (
        rescaled,
        ([S(1)], [S(0)], [B]),
        (np.eye(3, 16, dtype=np.float32), np.ones((16, 4), np.float32), np.zeros((), np.float32)),
    ),
    "rows of a table by zero": (
        lambda t, i, s: (t[i] / s).sum(-1),
        ([S(0)], [B], [B]),
        (np.ones((16, 4), np.float32), np.arange(5), np.zeros((5, 4), np.float32)),
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_strict_is_as_one_device_where_a_factor_is_not_finite(name: str) -> None:
    fn, in_sbp, args = FACTORS[name]
    want = np.asarray(jax.jit(fn)(*args))
    usual = sbp.compile(fn, LINE, in_sbp=in_sbp)
    strict = sbp.compile(fn, LINE, in_sbp=in_sbp, options=sbp.Options(strict_nonfinite=True))
    assert not unlike(np.asarray(strict(*args)), want, 0.0)
    (note,) = [n for n in strict.plan(*args).notes if "strict_nonfinite" in n]
    more = strict.plan(*args).wire_bytes - usual.plan(*args).wire_bytes
    assert f"{more:+,.0f} bytes on the wire" in note
    if unlike(np.asarray(usual(*args)), want, 0.0):
        (said,) = [n for n in usual.plan(*args).notes if "strict_nonfinite" in n]
        assert "multiplied before they are added up" in said and "test_special_values.py" in said


def test_the_default_differs_where_it_says_so() -> None:
    """The example of the docs: zeros of other devices' rows times infinity."""
    fn, in_sbp, args = FACTORS["rows of a table times infinity"]
    assert np.isnan(np.asarray(sbp.compile(fn, LINE, in_sbp=in_sbp)(*args))).all()
    assert np.isposinf(np.asarray(jax.jit(fn)(*args))).all()


def test_integers_wait_even_if_strict() -> None:
    """They are never infinite: nothing is different, and nothing sent in addition."""
    options = sbp.Options(strict_nonfinite=True)
    program = sbp.compile(lambda x, s: (x.sum(0) * s).sum(), LINE, in_sbp=([S(0)], [B]), options=options)
    x, s = np.arange(64, dtype=np.int32).reshape(16, 4), np.int32(3)
    assert program(x, s) == 3 * x.sum()
    assert "+0 bytes on the wire" in "\n".join(program.plan(x, s).notes)


def test_a_move_says_whose_its_elements_are() -> None:
    program = sbp.compile(lambda x, i: x[i], LINE, in_sbp=([S(0)], [B]))
    physical = program.plan(np.ones((16, 4), np.float32), np.arange(3)).physical
    assert physical is not None
    (box,) = [s for s in physical.steps if isinstance(s, Box)]
    assert (box.move.kind, box.owned) == ("all_reduce", True)
