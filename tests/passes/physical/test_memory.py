"""What a device holds at its peak: each idea in one small program, and the sweep by a slow count."""

import random
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import sbp
from sbp import B, P, S
from sbp.hardware.catalogue import hardware_for
from sbp.passes.boxing.links import Network
from sbp.passes.explain.memory import live_at_peak
from sbp.passes.physical.evaluate import HOLES, Evaluator, donations
from sbp.passes.physical.fusion import Fusing, KernelOp, ShardSizes, op_of
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.memory import Spaces, alive
from sbp.signature import NdSbp

ONE = sbp.placement("h100", shape=(1,))
N = 2048
SQUARE = 4 * N * N
"""Bytes of a matrix."""


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def squares(fn: Any, *args: Any, donate: Any = (), on: Any = ONE, in_sbp: Any = sbp.AUTO) -> float:
    """What is alive at the peak in matrices of N x N; what is smaller than a tenth is forgotten."""
    plan = sbp.compile(fn, on, in_sbp=in_sbp, donate_argnums=donate).plan(*args)
    donated = range(len(jax.tree.leaves(args[0]))) if donate == 0 else ()
    live = sum(x.bytes for x in live_at_peak(plan, donated))
    assert live <= plan.memory_bytes <= (1 + HOLES) * live
    return round(live / SQUARE, 1)


X = floats(N, N)


@dataclass(frozen=True)
class Sizes:
    """Sizes of made-up tensors."""

    known: dict[int, float]

    def bytes(self, version: tuple[int, NdSbp]) -> float:
        return self.known[version[0]]

    def shape(self, value: int) -> tuple[int, ...]:
        return ()


def counted(ops: list[KernelOp], kept: set[int], size: dict[int, float]) -> float:
    """The peak of what is neither held from the beginning nor kept, by asking after every op of every tensor
    whether anybody still needs it."""
    there, most = set[int](), 0.0
    for i, op in enumerate(ops):
        there |= {v for v, _ in op.writes} - kept
        most = max(most, sum(size[v] for v in there))
        there &= {v for later in ops[i + 1 :] for v, _ in later.reads}
    return most


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_what_a_slow_count_finds(seed: int) -> None:
    draw = random.Random(seed)
    known, ops = list(range(4)), list[KernelOp]()
    for _ in range(30):
        fresh = [len(known) + k for k in range(draw.choice([1, 1, 2]))]
        read = [(v, ()) for v in draw.sample(known[-8:], 2)]
        ops.append(KernelOp(Fusing.CALL, read, [(v, ()) for v in fresh], product=True))
        known += fresh
    # Nothing is dropped: everything is read in the end, by an op that makes nothing.
    ops.append(KernelOp(Fusing.CALL, [(v, ()) for v in known if draw.random() < 0.2], ()))
    needed = set[int]()
    for op in reversed(ops):
        if not op.writes or needed & {v for v, _ in op.writes}:
            needed |= {v for v, _ in op.reads}
    kept = set(draw.sample(sorted(needed - set(range(4))), 3))
    ops = [op for op in ops if not op.writes or (needed | kept) & {v for v, _ in op.writes}]
    size = {v: float(draw.randrange(1, 100)) for v in known}
    versions = [(v, ()) for v in kept]
    spaces = Spaces({}, frozenset(versions))
    sizes = cast("ShardSizes", Sizes(size))
    k = kernels(ops, sizes, versions, [(v, ()) for v in range(4)])
    found = alive(k, sizes, spaces)
    assert sum(x.bytes for x in found) == counted(ops, kept, size)
    assert len({x.version for x in found}) == len(found)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        # The argument and the result; what is in between is in registers.
        (lambda x: jnp.sin(jnp.cos(x) + 1) * 2, 2),
        (lambda x: jnp.square(jnp.sin(x)).sum(), 1),
        # Of a chain of products the last operand and the new result are there, beside argument and result.
        (lambda x: (((x @ x) @ x) @ x).sum(), 3),
        # An element-wise op writes over its operand, a transposed one cannot.
        (lambda x: (jnp.tanh(x @ x) @ x).sum(), 3),
        (lambda x: (jnp.tanh((x @ x).T) @ x).sum(), 3),
        # A softmax reads a row before it writes it, and so not over it.
        (lambda x: (jax.nn.softmax(jnp.tanh(x @ x) @ x) @ x).sum(), 3),
        # Scattered into in place.
        (lambda x: (x @ x).at[0].set(x[0]).sum(), 2),
    ],
)
def test_what_is_there(fn: Any, expected: float) -> None:
    assert squares(fn, X) == expected


def step(state: Any, x: Any) -> Any:
    return state * 0.9 + x, jnp.tanh(state @ x).sum()


def test_a_result_takes_the_space_of_a_donated_argument() -> None:
    assert squares(lambda s, x: s * 0.9 + x, X, X) == 3
    assert squares(lambda s, x: s * 0.9 + x, X, X, donate=0) == 2
    assert squares(step, X, X) == 4


def test_what_is_still_read_is_copied() -> None:
    """The new value is there while the old one is still read: XLA puts it elsewhere, and copies."""

    def fn(s: Any, x: Any) -> Any:
        new = s @ x
        return new, ((new @ x) * s).sum()

    assert squares(fn, X, X, donate=0) == squares(fn, X, X) == 4


def test_another_shape_or_signature_has_no_space() -> None:
    halves = [S(0)], [S(1)]
    on = sbp.placement("h100", shape=(2,))
    assert squares(lambda x: (x + 1).sum(0), X, donate=0) == 1
    same = sbp.compile(lambda x: x + 1, on, in_sbp=(halves[0],), out_sbp=halves[0], donate_argnums=0).plan(X)
    other = sbp.compile(lambda x: x + 1, on, in_sbp=(halves[0],), out_sbp=halves[1], donate_argnums=0).plan(X)
    assert same.memory_bytes == SQUARE / 2 < other.memory_bytes


def test_a_sum_is_reduced_in_place() -> None:
    on = sbp.placement("h100", shape=(2,))

    def fn(x: Any, w: Any) -> Any:
        return jnp.tanh(sbp.annotate(x @ w, [B])).sum()

    # Columns times rows: a sum of parts, whole on every device afterwards. Where things overlap, gathering so
    # small operands makes a shorter step.
    options = sbp.Options(hardware=replace(hardware_for("h100"), platform="serial"))
    plan = sbp.compile(fn, on, in_sbp=([S(1)], [S(0)]), options=options).plan(X, X)
    assert plan.physical is not None
    moves = [b.move for b, _ in plan.physical.boxes() if b.move.before == (P,)]
    assert [m.kind for m in moves] == ["all_reduce"]
    assert plan.memory_bytes == pytest.approx((2 + HOLES) * SQUARE, rel=0.01)


LAYERS = 16


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()


def test_a_loop_carries_in_place_and_holds_one_slice() -> None:
    """Its argument, the carried value with the next one, and a slice of the weights."""
    assert squares(scanned, floats(LAYERS, N, N), X) == LAYERS + 1 + 3


def test_what_a_loop_stacks_is_there_once() -> None:
    """For the gradient each trip leaves what it computed, and makes a gradient of its own."""
    w, x = floats(LAYERS, N, N), X
    gradient = squares(jax.grad(scanned), w, x)
    # Weights, their gradient, x, two stacks of activations (three on older lines of JAX), some matrices more.
    assert 4 * LAYERS + 1 <= gradient <= 5 * LAYERS + 8
    # The gradient is stacked while the weights are still read: they are no space for it.
    assert squares(jax.grad(scanned), w, x, donate=0) == gradient


def deep(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.square(x).sum()


def train(ws: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(deep)(ws, x))


def centred(ws: Any, x: Any) -> Any:
    for w in ws:
        x = x @ w
        x = x - x.mean(0)
    return jnp.square(x).sum()


def test_a_step_frees_what_it_has_used() -> None:
    """Each activation lives until its weight's gradient is there, which the update takes at once."""
    # Weights and activations, and at most a few more.
    assert 2 * LAYERS < squares(train, [X] * LAYERS, X, donate=0) <= 2 * LAYERS + 5


def test_products_that_hide_collectives_keep_what_they_read() -> None:
    """A mean over the batch is a collective that the next product waits for; gradients of weights hide it."""
    on = sbp.placement("h100", shape=(2,))
    asked = [B], [S(0)]
    # Collectives that cost next to nothing, so that none is saved by computing the mean everywhere.
    flat = sbp.Options(hardware=replace(hardware_for("h100"), chip=""))
    program = sbp.compile(jax.grad(centred), on, in_sbp=asked, options=flat)
    plan = program.plan([X] * LAYERS, floats(64 * N, N))
    assert plan.physical is not None
    short = replace(plan.hardware, memory_bytes=1.0)
    saving = Evaluator(plan.physical, Network(plan.placement, short))
    # Where memory is short, XLA does not: then a gradient of an activation is gone once it is used.
    assert plan.memory_bytes > saving.peak_bytes() + LAYERS / 2 * 32 * SQUARE
    # Sections keep to that order, where it is of use.
    enough = replace(plan.hardware, memory_bytes=saving.peak_bytes())
    assert Evaluator(plan.physical, Network(plan.placement, enough)).sections is not None
    assert saving.sections is None


def test_results_that_are_numbers_or_arguments() -> None:
    assert squares(lambda x: (x, 1.0), X) == 2
    assert squares(lambda x: (x, 1.0), X, donate=0) == 1
    plan = sbp.compile(lambda x: (x + 1, x + 1), ONE, donate_argnums=0).plan(X)
    assert plan.physical is not None and len(donations(plan.physical, [0])) == 1


def test_rows_and_the_state_of_their_optimizer_are_updated_in_place() -> None:
    """A table and its sums of squares, which are donated; and rows of the batch, which are few."""
    on, tx = sbp.placement("h100", shape=(8,)), sbp.rows(optax.adagrad(0.1))

    def train_rows(table: Any, state: Any, ids: Any) -> Any:
        grad = jax.grad(lambda t: jnp.square(t[ids]).sum())(table)
        added, state = tx.update(grad, state, table)
        return optax.apply_updates(table, added), state

    table, ids = floats(1 << 20, 128), jax.ShapeDtypeStruct((1024,), jnp.int32)
    in_sbp = [S(0)], sbp.AUTO, [S(0)]
    program = sbp.compile(train_rows, on, in_sbp=in_sbp, donate_argnums=(0, 1))
    plan = program.plan(table, jax.eval_shape(tx.init, table), ids)
    assert plan.memory_bytes == pytest.approx(2 * 4 * (1 << 20) * 128 / 8, rel=0.05)


def test_what_an_exchange_of_rows_holds_is_counted() -> None:
    """Rows of a table that is split by rows: what is sent and what is received, beside table and result."""
    on, ids = sbp.placement("h100", shape=(8,)), jax.ShapeDtypeStruct((1 << 19,), jnp.int32)
    plan = sbp.compile(lambda t, i: t[i], on, in_sbp=([S(0)], [S(0)])).plan(floats(1 << 20, 128), ids)
    [exchange] = [s for s, _ in plan.physical.walk() if getattr(s, "rows", ())]  # type: ignore[union-attr]
    held = op_of(exchange, plan.physical).held_bytes  # type: ignore[arg-type]
    table, result = 4 * 128 * (1 << 20) / 8, 4 * 128 * (1 << 19) / 8
    assert held > 2 * result
    assert plan.memory_bytes == pytest.approx(table + result + held, rel=0.02)


SIDE, DEPTH = 1024, 4
MASK = SIDE * SIDE


def peak_bytes(second: Any) -> float:
    """The bytes at the peak, which is between two scans; the second body makes a mask too."""

    def fn(ws: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((SIDE, SIDE), bool))

        def layer(x: Any, w: Any) -> Any:
            return jnp.where(mask, x @ w, 0), None

        x, _ = jax.lax.scan(layer, x, ws)
        between = jnp.sort(jnp.concatenate([x] * 8), 0)[:SIDE]

        def again(x: Any, w: Any) -> Any:
            return jnp.where(second(), x @ w, 0), None

        return jax.lax.scan(again, between, ws)[0]

    ws, x = (
        jax.ShapeDtypeStruct((DEPTH, SIDE, SIDE), "float32"),
        jax.ShapeDtypeStruct((SIDE, SIDE), "float32"),
    )
    return sbp.compile(fn, ONE).plan(ws, x).memory_bytes


def test_what_is_made_of_a_value_twice_is_named_once() -> None:
    """Sixty doublings have as many paths as a chessboard has grains."""

    def fn(x: Any) -> Any:
        made = jnp.arange(SIDE, dtype=x.dtype)
        for _ in range(60):
            made = jnp.sin(made) * made
        return jax.lax.scan(lambda x, _: (x + made, None), x, None, length=2)[0]

    assert sbp.compile(fn, ONE).plan(jax.ShapeDtypeStruct((SIDE,), "float32")).memory_bytes > 0


def test_a_mask_that_a_later_loop_makes_again_stays() -> None:
    same = peak_bytes(lambda: jnp.tril(jnp.ones((SIDE, SIDE), bool)))
    other = peak_bytes(lambda: jnp.tril(jnp.ones((SIDE, SIDE), bool), -1))
    assert same - other == pytest.approx(MASK, rel=0.05)  # and the holes between
