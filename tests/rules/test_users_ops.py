"""Ops of the user's own: kernels and functions that the compiler takes as one op."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

import sbp
import sbp.rules
from sbp import B, S
from sbp.errors import RuleError
from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.physical.program import Compute

pytestmark = pytest.mark.usefixtures("forgotten")
LINE = sbp.placement("cpu", shape=(8,))
# Ops are slow and sending is free, so that everything that can be split is.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
X = np.random.default_rng(0).integers(-4, 5, (37, 16)).astype(np.float32)
W = np.random.default_rng(1).integers(-4, 5, (16, 24)).astype(np.float32)


def forward_kernel(x: Any, w: Any, out: Any) -> None:
    out[...] = jnp.maximum(x[...] @ w[...], 0)


def backward_kernel(x: Any, w: Any, out: Any, t: Any, dx: Any, dw: Any) -> None:
    masked = jnp.where(out[...] > 0, t[...], 0)
    dx[...] = masked @ w[...].T
    dw[...] = x[...].T @ masked


def forward(x: Any, w: Any) -> Any:
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(forward_kernel, out_shape=shape, interpret=True, name="relu_matmul")(x, w)


def backward(x: Any, w: Any, out: Any, t: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
    call = pl.pallas_call(backward_kernel, out_shape=shapes, interpret=True, name="relu_matmul_grad")
    return call(x, w, out, t)


@jax.custom_vjp
def layer(x: Any, w: Any) -> Any:
    return forward(x, w)


def layer_forward(x: Any, w: Any) -> Any:
    out = forward(x, w)
    return out, (x, w, out)


layer.defvjp(layer_forward, lambda saved, t: tuple(backward(*saved, t)))


def backward_rows(op: Any) -> list[sbp.rules.Row]:
    """By batch, which leaves a sum of weight gradients; by feature, a sum of input gradients."""
    why = "the other dim is summed up here and split over {axes}"
    by_batch = sbp.rules.Row((S(0), B, S(0), S(0)), (S(0), sbp.P), reason=why)
    return [by_batch, sbp.rules.Row((B, S(1), S(1), S(1)), (sbp.P, S(1)), reason=why)]


def backward_local(ctx: Any, x: Any, w: Any, out: Any, t: Any) -> Any:
    """Padded rows must not count."""
    t = ctx.mask(t, ctx.operands[3], (0, 1), 0)
    out = ctx.mask(out, ctx.operands[2], (0, 1), 0)
    x, w = ctx.mask(x, ctx.operands[0], (0,), 0), ctx.mask(w, ctx.operands[1], (1,), 0)
    return backward(x, w, out, t)


def step(x: Any, w: Any) -> Any:
    return jax.value_and_grad(lambda w: jnp.sum(layer(x, w)))(w)


@pytest.mark.parametrize(("x", "w"), [(S(0), B), (B, S(1)), (S(1), S(0))], ids=str)
def test_a_kernel_and_its_gradient(x: Any, w: Any) -> None:
    sbp.register_rule("pallas_call[relu_matmul]", "b _, _ n -> b n", body=lambda ctx, *a: [forward(*a)])
    sbp.register_rule("pallas_call[relu_matmul_grad]", backward_rows, body=backward_local)
    program = sbp.compile(step, LINE, in_sbp=([x], [w]), options=sbp.Options(hardware=SPLITTING))
    for got, want in zip(program(X, W), step(X, W), strict=True):
        np.testing.assert_array_equal(got, want)
    plan = program.plan(X, W)
    assert not any("no rule" in note for note in plan.notes)
    split = [s for s in compute_steps(plan) if s.node.op.startswith("pallas_call")]
    assert len(split) == 2
    assert all(any(nd != (B,) for nd in s.strategy.operands) for s in split)


def test_a_kernel_without_a_rule_runs_whole() -> None:
    program = sbp.compile(step, LINE, in_sbp=([S(0)], [B]))
    for got, want in zip(program(X, W), step(X, W), strict=True):
        np.testing.assert_array_equal(got, want)
    assert any("no rule for pallas_call[relu_matmul]" in note for note in program.plan(X, W).notes)


def compute_steps(plan: sbp.Plan) -> list[Compute]:
    assert plan.physical is not None
    return [s for s, _ in plan.physical.walk() if isinstance(s, Compute)]


def test_a_function_with_a_gradient_of_its_own() -> None:
    @jax.custom_vjp
    def centred(x: Any) -> Any:
        return x - jnp.mean(x, axis=1, keepdims=True)

    centred.defvjp(lambda x: (centred(x), None), lambda _, t: (centred(t),))
    sbp.register_rule(centred, "b _ -> b _")
    program = sbp.compile(lambda x: 2 * centred(sbp.annotate(x, S(0))), LINE, in_sbp=([S(0)],))
    np.testing.assert_allclose(program(X), 2 * centred(X), rtol=1e-6)
    (op,) = [s for s in compute_steps(program.plan(X)) if "centred" in s.node.op]
    assert op.strategy.operands == ((S(0),),)
    assert sbp.verify(program, X).outputs == 1

    def loss(x: Any) -> Any:
        return jnp.sum(centred(x) ** 2)

    graded = sbp.compile(jax.grad(loss), LINE, in_sbp=([S(0)],))
    np.testing.assert_allclose(graded(X), jax.grad(loss)(X), rtol=1e-5)


def scaled(n: float) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def scale(x: Any) -> Any:
        return x * n

    scale.defjvp(lambda primals, tangents: (scale(*primals), tangents[0] * n))
    return scale


def test_functions_of_one_line_are_not_confused() -> None:
    double, triple = scaled(2.0), scaled(3.0)
    sbp.register_rule(double, "a b -> a b")
    program = sbp.compile(lambda x: double(x) + triple(x), LINE, in_sbp=([S(0)],))
    np.testing.assert_array_equal(program(X), 5 * X)
    assert sum("custom_jvp_call" in s.node.op for s in compute_steps(program.plan(X))) == 1


def test_a_call_of_foreign_code_is_known_by_its_target() -> None:
    def foreign(x: Any) -> Any:
        return jax.ffi.ffi_call("my_library_rows", jax.ShapeDtypeStruct(x.shape, x.dtype))(x) + 1

    sbp.register_rule("ffi_call[my_library_rows]", "b _ -> b _")
    plan = sbp.compile(foreign, LINE, in_sbp=([S(0)],), out_sbp=[S(0)]).plan(np.ones((8, 4), np.float32))
    assert not plan.collectives and not plan.notes


def test_a_plain_function_is_refused() -> None:
    def plain(x: Any) -> Any:
        return x

    with pytest.raises(RuleError) as caught:
        sbp.register_rule(plain, "a -> a")
    assert str(caught.value).splitlines() == [
        "register_rule('plain')",
        "  got    a function",
        "  legal  a primitive, its name, a jax.custom_vjp or jax.custom_jvp function",
        "  why    what JAX traces of any other function is its ops; nothing says where it began",
        "  try    jax.custom_vjp around it, or the name of its kernel: 'pallas_call[name]', "
        "'ffi_call[target]'",
    ]


def primitive(name: str, fn: Callable[..., Any]) -> Any:
    """An op of a user's that computes `fn`, as a kernel would."""
    op: Any = Primitive(name)
    op.def_impl(jax.jit(fn))
    op.def_abstract_eval(lambda *args: jax.core.ShapedArray(*_shape_and_type(jax.eval_shape(fn, *args))))
    mlir.register_lowering(op, mlir.lower_fun(fn, multiple_results=False))
    return op


def _shape_and_type(x: Any) -> tuple[Any, Any]:
    return x.shape, x.dtype


def product_flops(op: Any) -> float:
    return 2.0 * op.shapes[0][1] * math.prod(op.results[0])


# Per op of one line: what it computes, its letters, what a reduction removes, where it is linear, and whether
# the reduced letter can be split unevenly. None of them has a body: the line is enough.
ONE_LINE: dict[str, tuple[Callable[..., Any], str, dict[str, str], tuple[int, ...], bool]] = {
    "product": (lambda x, w: x @ w, "b k, k n -> b n", {"k": "sum"}, (0, 1), True),
    "weighted": (lambda x, w: x @ jnp.exp(w), "b k, k n -> b n", {"k": "sum"}, (0,), True),
    "powers": (lambda x, w: jnp.exp(x) @ jnp.exp(w), "b k, k n -> b n", {"k": "sum"}, (), False),
    "largest": (lambda x, w: (x[..., None] + w).max(1), "b k, k n -> b n", {"k": "max"}, (), False),
}


@pytest.mark.parametrize("size", [10, 16])
@pytest.mark.parametrize("name", ONE_LINE)
def test_a_line_of_letters_is_enough(name: str, size: int) -> None:
    """Padding of a reduced letter is NaN here: the logarithm of what no device wrote."""
    fn, letters, reduced, linear, uneven = ONE_LINE[name]
    op = primitive(f"one_line_{name}", fn)
    sbp.register_rule(op, letters, reduced=reduced, linear=linear, flops=product_flops)

    def model(x: Any, w: Any) -> Any:
        split = sbp.annotate(jnp.log(x), [S(1)]), sbp.annotate(jnp.log(w) - 1, [S(0)])
        return op.bind(*split)

    rng = np.random.default_rng(size)
    x, w = (rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((3, size), (size, 2)))
    options = sbp.Options(hardware=SPLITTING)
    program = sbp.compile(model, LINE, options=options)
    np.testing.assert_allclose(program(x, w), model(x, w), rtol=1e-5)
    (used,) = [s for s in compute_steps(program.plan(x, w)) if s.node.op == op.name]
    split = used.strategy.operands == ((S(1),), (S(0),))
    assert split == (uneven or size % 8 == 0)


def test_a_function_of_one_line_masks_its_padding() -> None:
    @jax.custom_jvp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defjvp(lambda primals, tangents: (product(*primals), tangents[0] @ primals[1]))
    letters = "b k, k n -> b n"
    sbp.register_rule(product, letters, reduced={"k": "sum"}, linear=(0, 1), flops=product_flops)

    def model(x: Any, w: Any) -> Any:
        return product(sbp.annotate(jnp.log(x), [S(1)]), sbp.annotate(jnp.log(w), [S(0)]))

    x, w = np.full((3, 10), 2, np.float32), np.full((10, 2), 3, np.float32)
    program = sbp.compile(model, LINE, options=sbp.Options(hardware=SPLITTING))
    np.testing.assert_allclose(program(x, w), model(x, w), rtol=1e-5)
    (used,) = [s for s in compute_steps(program.plan(x, w)) if "product" in s.node.op]
    assert used.strategy.operands == ((S(1),), (S(0),))
