"""A flash attention in Pallas, declared as an op by batch and heads: any signature gives the numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import sbp
from sbp import AUTO, S
from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.physical.program import Compute
from sbp.rules import Matmul, Op, Row
from sbp.signature import Split

pytestmark = pytest.mark.usefixtures("forgotten")

LINE, GRID = sbp.placement("cpu", shape=(4,)), sbp.placement("cpu", shape=(2, 4))
# Ops are slow and sending is free, so that everything that can be split is.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
BLOCK, LOW = 8, -1e30
NAMES = ("pallas_call[flash]", "pallas_call[flash_back]")


def scores(q: Any, k: Any, i: Any) -> Any:
    """Of all queries with a block of keys; causal."""
    found = q @ k[pl.ds(i * BLOCK, BLOCK), :].T * q.shape[-1] ** -0.5
    at = i * BLOCK + lax.broadcasted_iota(jnp.int32, found.shape, 1)
    return jnp.where(at <= lax.broadcasted_iota(jnp.int32, found.shape, 0), found, LOW)


def forward_kernel(q: Any, k: Any, v: Any, out: Any, total: Any) -> None:
    q = q[...]

    def block(i: Any, carry: Any) -> Any:
        top, weight, mixed = carry
        s = scores(q, k, i)
        new = jnp.maximum(top, s.max(-1))
        w, old = jnp.exp(s - new[:, None]), jnp.exp(top - new)
        return new, weight * old + w.sum(-1), mixed * old[:, None] + w @ v[pl.ds(i * BLOCK, BLOCK), :]

    start = jnp.full(q.shape[0], 2 * LOW), jnp.zeros(q.shape[0]), jnp.zeros(q.shape)
    top, weight, mixed = lax.fori_loop(0, k.shape[0] // BLOCK, block, start)
    out[...], total[...] = mixed / weight[:, None], top + jnp.log(weight)


def backward_kernel(q: Any, k: Any, v: Any, out: Any, total: Any, g: Any, dq: Any, dk: Any, dv: Any) -> None:
    q, g, total = q[...], g[...], total[...][:, None]
    shared = jnp.sum(g * out[...], -1, keepdims=True)

    def block(i: Any, found: Any) -> Any:
        rows = pl.ds(i * BLOCK, BLOCK)
        w = jnp.exp(scores(q, k, i) - total)
        dv[rows, :] = w.T @ g
        ds = w * (g @ v[rows, :].T - shared) * q.shape[-1] ** -0.5
        dk[rows, :] = ds.T @ q
        return found + ds @ k[rows, :]

    dq[...] = lax.fori_loop(0, k.shape[0] // BLOCK, block, jnp.zeros(q.shape))


def call(kernel: Any, results: Any, args: Any, name: str) -> Any:
    """A program per row of the batch and head."""

    def spec(x: Any) -> Any:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h: (b, h, *[0] * (len(x.shape) - 2)))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    run = pl.pallas_call(
        kernel,
        shapes,
        grid=args[0].shape[:2],
        in_specs=[spec(x) for x in args],
        out_specs=[spec(x) for x in shapes],
        interpret=True,
        name=name,
    )
    return run(*args)


def forward(q: Any, k: Any, v: Any) -> Any:
    return call(forward_kernel, (q, q[..., 0]), (q, k, v), "flash")


def backward(q: Any, k: Any, v: Any, *saved: Any) -> Any:
    return call(backward_kernel, (q, k, v), (q, k, v, *saved), "flash_back")


@jax.custom_vjp
def attend(q: Any, k: Any, v: Any) -> Any:
    return forward(q, k, v)[0]


def attend_forward(q: Any, k: Any, v: Any) -> Any:
    out, total = forward(q, k, v)
    return out, (q, k, v, out, total)


attend.defvjp(attend_forward, lambda saved, g: tuple(backward(*saved, g)))


def products(count: int) -> Any:
    def matmul(op: Op) -> Matmul:
        b, h, s, e = op.shapes[0]
        return Matmul(count * b * h, s, op.shapes[1][2], e, op.dtypes[:2])

    return matmul


def by_hand(op: Op) -> list[Row]:
    """Letters can say it; so can rows: batch and heads are dims 0 and 1 of all."""
    n, m = len(op.shapes), len(op.results)
    return [Row((Split(d),) * n, (Split(d),) * m) for d in (0, 1)]


def register(rows: Any = None, **options: Any) -> None:
    x = "b h _ _"
    texts = f"{x}, {x}, {x} -> {x}, b h _", f"{x}, {x}, {x}, {x}, b h _, {x} -> {x}, {x}, {x}"
    bodies = (lambda ctx, *args: forward(*args)), (lambda ctx, *args: backward(*args))
    for name, text, body, count in zip(NAMES, texts, bodies, (2, 5), strict=True):
        sbp.register_rule(name, rows or text, body=body, matmul=products(count), **options)


def step(q: Any, k: Any, v: Any) -> Any:
    return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(attend(*a))), argnums=(0, 1, 2))(q, k, v)


def operands(batch: int, heads: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (batch, heads, 16, 4)) for key in keys)


def kernels(plan: sbp.Plan) -> list[Compute]:
    assert plan.physical is not None
    found = [s for s, _ in plan.physical.walk() if isinstance(s, Compute)]
    return [s for s in found if s.node.op in NAMES]


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.full
def test_the_kernel_is_an_attention() -> None:
    args = operands(2, 3)

    def plain(*args: Any) -> Any:
        return jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in args), is_causal=True).swapaxes(1, 2)

    want = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(plain(*a))), argnums=(0, 1, 2))(*args)
    close(step(*args), want)


@pytest.mark.some(2)
@pytest.mark.parametrize("shape", [(4, 4), (3, 5)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("placement", "given"),
    [
        (LINE, AUTO),
        pytest.param(LINE, [S(0)], marks=pytest.mark.slow),
        (LINE, [S(1)]),
        pytest.param(LINE, [S(2)], marks=pytest.mark.slow),
        (GRID, [S(0), S(1)]),
        pytest.param(GRID, [S(1), S(0)], marks=pytest.mark.slow),
        pytest.param(GRID, [S(0), S(0)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_signature_gives_what_one_device_gives(
    placement: sbp.Placement, given: Any, shape: tuple[int, int]
) -> None:
    register()
    args = operands(*shape)
    program = sbp.compile(step, placement, in_sbp=given, options=sbp.Options(hardware=SPLITTING))
    close(program(*args), step(*args))
    plan = program.plan(*args)
    assert not any("no rule" in note for note in plan.notes)
    steps = kernels(plan)
    assert len(steps) == 2
    for s in steps:
        # By batch or by heads, all operands alike, along every axis.
        assert len(set(s.strategy.operands)) == 1
        assert all(x in (S(0), S(1)) for x in s.strategy.operands[0])


def test_rows_by_hand_say_the_same() -> None:
    register(by_hand)
    args = operands(4, 4)
    program = sbp.compile(step, LINE, in_sbp=[S(1)])
    close(program(*args), step(*args))
    assert [s.strategy.operands[0] for s in kernels(program.plan(*args))] == [(S(1),), (S(1),)]


def test_without_a_rule_it_runs_whole_and_the_plan_says_so() -> None:
    args = operands(4, 4)
    program = sbp.compile(step, LINE, in_sbp=[S(0)])
    close(program(*args), step(*args))
    plan = program.plan(*args)
    assert all(nd == (sbp.B,) for s in kernels(plan) for nd in s.strategy.operands)
    for name in NAMES:
        assert any(note.startswith(f"no rule for {name}: gathered") for note in plan.notes)


def test_work_traffic_and_memory_are_what_is_declared() -> None:
    """Of a plan for a GPU that need not be here."""
    args = [jax.ShapeDtypeStruct((16, 16, 4096, 64), jnp.float32)] * 3
    placement = sbp.placement("h100", shape=(8,))
    register()
    plain = sbp.compile(step, placement, in_sbp=[S(0)]).plan(*args)
    one = 2 * 2 * 16 * 4096 * 4096 * 64
    rule_flops = [s.node.rule.flops(op_of(s)) for s in kernels(plain)]
    assert rule_flops == [2 * one, 5 * one]
    assert plain.memory_bytes < 2 * 16 * 4096 * 4096 * 4  # of scores, were they there
    for name in NAMES:
        del sbp.rules.REGISTRY[name]
    register(traffic=lambda op: 1e12, body_bytes=lambda local: 3e9)
    heavy = sbp.compile(step, placement, in_sbp=[S(0)]).plan(*args)
    assert (
        heavy.seconds - plain.seconds
        > 0.9 * 2e12 / sbp.hardware.CATALOGUE["h100"].memory_bytes_per_second / 2
    )
    assert heavy.memory_bytes - plain.memory_bytes == pytest.approx(3e9, rel=0.2)


def op_of(step: Compute) -> Op:
    """A kernel on a shard of two rows of the batch."""
    b, *rest = 2, 16, 4096, 64
    shape, n = (b, *rest), len(step.node.inputs)
    dtypes = (jnp.dtype(jnp.float32),) * n
    return Op(step.node.op, (shape,) * n, (shape,), dtypes, dtypes[:1], step.node.params, 1, (shape,) * n)
