"""Which tensors of a program are written to memory: each idea of fusion in one small program."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp.passes.physical.fusion import Fusing, ShardSizes, op_of
from sbp.passes.physical.kernels import Kernels, kernels
from sbp.passes.program.graph import Const

ONE = sbp.placement("h100", shape=(1,))
N = 512


def merged(fn: Any, *shapes: tuple[int, ...]) -> Kernels:
    """The kernels of a function of float32 tensors, on one device."""
    plan = sbp.compile(fn, ONE).plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    p = plan.physical
    assert p is not None
    kept = [(x, nd) for x, nd in zip(p.graph.outputs, p.outputs, strict=True) if not isinstance(x, Const)]
    held = list(zip(p.graph.inputs, p.inputs, strict=True))
    return kernels([op_of(s, p) for s in p.steps], ShardSizes(p), kept, held)


def written(fn: Any, *shapes: tuple[int, ...]) -> list[str]:
    """The ops whose results lie in memory, but for small ones."""
    k = merged(fn, *shapes)
    return [k.ops[t.maker].name for t in k.tensors if t.maker >= 0 and t.bytes > 4 * N]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.sin(jnp.cos(x) + 1) * 2, ["mul"]),
        # Views are free, also of what is written.
        (lambda x: (x @ x).T.reshape(-1, 2 * N), ["dot_general"]),
        (lambda x: (lax.sort(x).T @ x).sum(), ["sort", "dot_general"]),
        # A reduction computes what it reads, and so does a scatter.
        (lambda x: jnp.square(jnp.exp(x)).sum(), []),
        (lambda x: jnp.zeros_like(x).at[0].set(x[1] * 2), ["scatter"]),
        # What follows a product is computed wherever it is read.
        (lambda x: jnp.tanh(x @ x).sum() + jnp.sin(x @ x.T).sum(), ["dot_general", "dot_general"]),
        # A broadcast is nothing, until somebody reads it from memory.
        (lambda x: (x + jnp.arange(N)[:, None]).max(), []),
        (lambda x: jnp.broadcast_to(x[:1], (N, N)) @ x, ["dot_general"]),
        (lambda x: x[: N // 2].sum() + jnp.concatenate([x, x]).sum(), []),
        # Rows and their reduction are one kernel, and so is another reduction behind it. Loops and reductions
        # of the same rows compute what both give; for anything else it is written, unless somebody else reads
        # a reduction.
        (lambda x: [f(scaled(centred(x))).sum() for f in (jnp.sin, jnp.cos)], ["div"]),
        (lambda x: [f(x - x.max(-1, keepdims=True)).sum() for f in (jnp.sin, jnp.cos)], ["sub"]),
        (lambda x: jnp.tanh(centred(x)), ["tanh"]),
        (lambda x: (jnp.tanh(centred(x)), jnp.sin(centred(x)).sum(-1)), ["tanh"]),
        (lambda x: [f(centred(x)) for f in (jnp.tanh, jnp.sin)], ["tanh", "sin"]),
        (lambda x: jnp.sin(centred(x)).sum(0), ["sub"]),
        (lambda x: (jnp.sin(x - x.max(0)).sum(), jnp.cos(x)), ["cos"]),
    ],
    ids=itertools.count(),
)
def test_what_is_written(fn: Any, expected: list[str]) -> None:
    assert written(fn, (N, N)) == expected


def centred(x: Any) -> Any:
    return x - x.max(-1, keepdims=True)


def scaled(x: Any) -> Any:
    return x / x.sum(-1, keepdims=True)


def halved(x: Any) -> Any:
    half = x.astype(jnp.bfloat16)
    return half @ half


def relu_twice(h: Any, x: Any) -> Any:
    """A product of what is element-wise of another product, which is read again."""
    return (jax.nn.relu(h) @ x).sum() + jnp.sin(h).sum()


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        # Of one tensor, scalars, and rows of an argument.
        (lambda x, b: jnp.exp(jnp.tanh(x)) @ x, ["dot_general"]),
        (lambda x, b: (jnp.tanh(x).T @ x).sum(), ["dot_general"]),
        (lambda x, b: relu_twice(x @ x, x), ["dot_general", "dot_general"]),
        (lambda x, b: relu_twice(x @ x + b, x), ["dot_general", "dot_general"]),
        (lambda x, b: jnp.tanh(lax.sort(x)) @ x, ["sort", "dot_general"]),
        # Rows that are made first are no argument, and two tensors are more than one.
        (lambda x, b: (lax.sort(x) + jnp.sin(b)) @ x, ["sort", "add", "dot_general"]),
        (lambda x, b: (lax.sort(x) + jnp.sin(x)) @ x, ["sort", "add", "dot_general"]),
        # Fewer bytes than are read: rounding is done once, unless it is of arguments that nobody else reads.
        (lambda x, b: halved(lax.sort(x)), ["sort", "convert_element_type", "dot_general"]),
        (lambda x, b: halved(x), ["dot_general"]),
        # A softmax reads its rows twice.
        (lambda x, b: jax.nn.softmax(x) @ x, ["div", "dot_general"]),
    ],
    ids=itertools.count(),
)
def test_what_a_product_computes_of_its_operands(fn: Any, expected: list[str]) -> None:
    """As programs compiled for H100s show."""
    assert written(fn, (N, N), (N,)) == expected


@pytest.mark.parametrize(("operands", "readers", "expected"), [(2, 3, 0), (2, 4, 1), (1, 9, 0), (4, 2, 1)])
def test_a_tensor_of_many_is_written_for_many(operands: int, readers: int, expected: int) -> None:
    """`r` readers that compute it from `o` tensors read `r o`, else `o + 1 + r` are moved."""

    def fn(*xs: Any) -> Any:
        made = sum(xs[1:], jnp.sin(xs[0]))
        of = [lambda a, b, k=k: lax.max(a * (k + 1.0), b) for k in range(readers)]
        return [lax.reduce(made, -1.0, f, (k % 2,)).sum() for k, f in enumerate(of)]

    assert (expected == 1) == (readers * operands > operands + 1 + readers)
    assert len(written(fn, *[(N, N)] * operands)) == expected


def test_who_reads_a_merged_tensor_reads_its_operands() -> None:
    """And element by element only if every op on the way is."""
    k = merged(lambda x: (jnp.tanh(x @ x) + 1, jnp.tanh(x @ x.T)[::-1]), (N, N))
    straight = {
        k.ops[i].name: over
        for t in k.tensors
        if t.maker >= 0
        for i, over in t.readers.items()
        if i < k.end and k.ops[t.maker].name == "dot_general"
    }
    assert straight == {"add": True} or straight == {"add": True, "tanh": True}
    # A product is written as it is read.
    for turned, over in ((lambda x: (x @ x).T, True), (lambda x: lax.sort(x @ x).T, False)):
        across = merged(lambda x, turned=turned: jnp.exp(turned(x)), (N, N))
        *_, made = [t for t in across.tensors if t.maker >= 0 and across.ops[t.maker].kind is Fusing.CALL]
        assert list(made.readers.values()) == [over]


def test_what_nobody_needs_is_no_kernel() -> None:
    def fn(x: Any) -> Any:
        lax.sort(x)
        return x + 1

    k = merged(fn, (N, N))
    assert sum(k.runs(i) for i in range(len(k.ops))) == 1


def test_what_a_barrier_lets_through_waits_for_all_that_enters_it() -> None:
    """Also what reads alone a product that was there long before; and what enters is written."""

    def held(x: Any, y: Any) -> Any:
        early, late = lax.optimization_barrier((x @ x, jnp.cos(y @ y)))
        return jnp.sin(early), late @ y

    k = merged(held, (N, N), (N, N))
    names = [op.name for op in k.ops]
    enters = {i for i, name in enumerate(names) if name in ("dot_general", "cos")}
    reader = names.index("sin")
    assert names.index("cos") in k.makers[reader]
    assert set(k.makers[reader]) <= enters
    assert "cos" in [k.ops[t.maker].name for t in k.tensors if t.maker >= 0]
