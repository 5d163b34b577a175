"""Attention by cuDNN: its rows are true, with formulas for its kernels; what it costs; what runs whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import sbp
from sbp import AUTO, B, S
from sbp.compat.ops import assumed_cudnn, has_cudnn
from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.physical.program import Compute
from sbp.rules import Op, lookup
from sbp.rules.registry import valid_rows
from sbp.signature import splits_of
from tests.rules.claims import Sample, applications, false_compositions, false_rows
from tests.rules.samples_attention import (
    BACKWARD,
    FORWARD,
    HOPPER,
    LENGTHS,
    SAMPLES,
    fused,
    gradients,
    half,
    operands,
)

LINE, GRID = sbp.placement("cpu", shape=(4,)), sbp.placement("cpu", shape=(2, 2))
# Ops are slow and sending is free, so that everything that can be split is.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
SHARED = [one for one in SAMPLES if "shared" in one.label or "grouped" in one.label]


@pytest.mark.some(4)
@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_rows_are_true(one: Sample) -> None:
    assert applications(one)
    assert not false_rows(one, one.groups[-1:])


@pytest.mark.some(2)
@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_compositions_are_true(one: Sample) -> None:
    assert not false_compositions(one, (2, 2))


@pytest.mark.parametrize("one", SHARED, ids=str)
def test_heads_of_keys_that_an_outer_axis_could_not_split(one: Sample) -> None:
    assert not false_compositions(one, (4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_on_axes_of_other_sizes(one: Sample) -> None:
    assert not false_rows(one, one.groups[:-1])
    assert not false_compositions(one, (2, 3))


def rows(one: Sample, group: int) -> list[tuple[Any, ...]]:
    """The signatures of queries, keys and the first two results."""
    (app,) = applications(one)
    op = app.op([x.shape for x in app.operands], [x.shape for x in app.results], group)
    return [(r.operands[0], r.operands[1], r.results[:2]) for r in valid_rows(app.node.rule, op)]


def test_keys_are_whole_where_their_heads_do_not_divide() -> None:
    backward = next(one for one in SHARED if one.name == BACKWARD and one.label == "shared-by-four")
    assert (S(2), S(2), (S(2), S(2))) in rows(backward, 2)
    assert (S(2), B, (S(2), sbp.P)) in rows(backward, 4)
    assert {q for q, *_ in rows(backward, 3)} == {S(0), S(1), B}


EXACT = jnp.float32


def plain(*args: Any, **options: Any) -> Any:
    """The attention that JAX writes in ordinary ops, in float32."""
    args = tuple(x.astype(EXACT) for x in args)
    return jax.nn.dot_product_attention(*args, implementation="xla", **options)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("args", "options"),
    [
        (operands(), {"is_causal": True}),
        (operands(8, 2), {"is_causal": True, "local_window_size": (1, 0), "scale": 0.5}),
        ((*operands(8, 4), half(1, 8, 4, 6, seed=3)), {"key_value_seq_lengths": LENGTHS[1]}),
    ],
    ids=["causal", "window", "bias"],
)
def test_the_formulas_are_those_of_jax(args: Any, options: Any) -> None:
    def of(fn: Callable[..., Any]) -> Any:
        out, back = jax.vjp(partial(fn, **options), *args)
        return out, *back(half(*out.shape, seed=9).astype(out.dtype))

    for got, want in zip(of(lambda *a, **o: fused(**o)(*a)), of(plain), strict=True):
        np.testing.assert_allclose(got.astype(EXACT), want.astype(EXACT), rtol=4e-3, atol=4e-3)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("placement", "given"),
    [
        (LINE, AUTO),
        (LINE, [S(0)]),
        (LINE, [S(2)]),
        (LINE, [S(1)]),
        (GRID, [S(0), S(2)]),
        (GRID, [S(2), S(1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_program_gives_what_one_device_gives(placement: sbp.Placement, given: Any, kv_heads: int) -> None:
    args, step = operands(8, kv_heads, batch=3), gradients(is_causal=True)
    program = sbp.compile(step, placement, in_sbp=given, options=sbp.Options(hardware=SPLITTING))
    for got, want in zip(program(*args), step(*args), strict=True):
        np.testing.assert_allclose(got.astype(EXACT), want.astype(EXACT), rtol=4e-3, atol=4e-3)
    steps = kernels(program.plan(*args))
    assert len(steps) == 2
    assert all(any(splits_of(nd, d) for nd in s.strategy.operands for d in (0, 1, 2)) for s in steps)


def kernels(plan: sbp.Plan) -> list[Compute]:
    assert plan.physical is not None
    found = [s for s, _ in plan.physical.walk() if isinstance(s, Compute)]
    return [s for s in found if s.node.op in (FORWARD, BACKWARD)]


QUERY = jax.ShapeDtypeStruct((16, 4096, 16, 64), jnp.bfloat16)
KEYS = jax.ShapeDtypeStruct((16, 4096, 8, 64), jnp.bfloat16)
H100 = sbp.placement("h100", shape=(8,))


def loss(*args: Any, **options: Any) -> Any:
    """No context of its own: the compiler knows what it plans for."""
    out = jax.nn.dot_product_attention(*args, **{"implementation": "cudnn", **options})
    return out.astype(EXACT).sum()


def step(*args: Any) -> Any:
    return jax.grad(partial(loss, is_causal=True), argnums=(0, 1, 2))(*args)


@pytest.mark.parametrize("given", [S(0), S(2)], ids=str)
def test_it_is_planned_and_lowered_without_a_gpu(given: Any) -> None:
    program = sbp.compile(step, H100, in_sbp=[given])
    plan = program.plan(QUERY, KEYS, KEYS)
    assert [s.strategy.operands[0] for s in kernels(plan)] == [(given,), (given,)]
    assert plan.notes == ()
    assert plan.wire_bytes == 0
    # Operands and gradients, two results and their gradients, and cuDNN's sums: no scores.
    assert plan.memory_bytes < 10 * QUERY.size * 2 / 8
    text = program.lower(QUERY, KEYS, KEYS).as_text()
    of_device = "2x4096x16x64" if given == S(0) else "16x4096x2x64"
    for target in ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("):
        (line,) = [line for line in text.splitlines() if target in line]
        assert f"tensor<{of_device}xbf16>" in line


def test_what_it_costs() -> None:
    def op(name: str, n: int, **changed: Any) -> Op:
        shapes = [QUERY.shape, KEYS.shape, KEYS.shape, *[(0,)] * 7]
        shapes += [(16, 16, 4096), QUERY.shape, QUERY.shape] if n > 10 else []
        params = {"layout": 0, "mask_type": cudnn.MaskType.NO_MASK, "sliding_window_length": None, **changed}
        results = [QUERY.shape, KEYS.shape, KEYS.shape] if n > 10 else [QUERY.shape]
        dtypes = tuple(EXACT if i == 10 else jnp.bfloat16 for i in range(n))
        dtypes = tuple(map(jnp.dtype, dtypes))
        return Op(
            name, tuple(shapes), tuple(results), dtypes, dtypes[: len(results)], params, 1, tuple(shapes)
        )

    forward, backward, one = lookup(FORWARD), lookup(BACKWARD), 2.0 * 16 * 16 * 4096 * 4096 * 64
    assert forward is not None
    assert backward is not None
    assert forward.flops(op(FORWARD, 10)) == 2 * one
    assert backward.flops(op(BACKWARD, 13)) == 5 * one
    causal = op(FORWARD, 10, mask_type=cudnn.MaskType.CAUSAL)
    assert forward.flops(causal) == pytest.approx(one, rel=1e-3)
    window = op(FORWARD, 10, mask_type=cudnn.MaskType.CAUSAL, sliding_window_length=512)
    assert forward.flops(window) == pytest.approx(2 * one / 8, rel=0.07)
    assert forward.traffic(op(FORWARD, 10)) == 2 * 2 * (QUERY.size + KEYS.size)
    statistics = 4 * 16 * 16 * 4096
    assert backward.traffic(op(BACKWARD, 13)) == 4 * 2 * (QUERY.size + KEYS.size) + statistics


def private(query: Any, keys: Any, **options: Any) -> Any:
    """What JAX's own function has beside the public one."""
    with assumed_cudnn(HOPPER):
        return cudnn.dot_product_attention(query, keys, keys, **options)


def test_dropout_runs_whole_and_the_plan_says_so() -> None:
    program = sbp.compile(partial(private, dropout_rate=0.1), H100, in_sbp=[S(0)])
    plan = program.plan(QUERY, QUERY)
    (only,) = kernels(plan)
    assert set(only.strategy.operands) == {(B,)}
    assert any(n.startswith(f"{FORWARD} runs whole: which weights it drops depends on") for n in plan.notes)


def test_packed_sequences_are_split_by_heads_alone() -> None:
    lengths, starts = (
        jnp.full((16, 2), 2048, jnp.int32),
        jnp.tile(jnp.array([0, 2048, 4096], jnp.int32), (16, 1)),
    )

    def packed(query: Any, keys: Any) -> Any:
        options = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": starts, "kv_offsets": starts}
        return private(query, keys, mask_type=cudnn.MaskType.PADDING, **options)

    (only,) = kernels(sbp.compile(packed, H100, in_sbp=[S(0)]).plan(QUERY, QUERY))
    assert only.strategy.operands[0] == (S(2),)


def test_jax_is_asked_for_the_chip_of_the_placement() -> None:
    wide = jax.ShapeDtypeStruct((8, 128, 8, 256), jnp.bfloat16)
    sbp.compile(loss, H100).plan(wide, wide, wide)
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        sbp.compile(loss, sbp.placement("a100", shape=(8,))).plan(wide, wide, wide)
    assert cudnn.check_compute_capability.__module__ == cudnn.__name__


@pytest.mark.skipif(has_cudnn(), reason="cuDNN is here")
def test_on_cpus_jax_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="cuDNN"):
        sbp.compile(loss, LINE).plan(QUERY, KEYS, KEYS)
