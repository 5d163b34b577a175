"""What goes through memory, before anything is split: chains of ops cost what they move once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.kernel_merges import KernelMerges, merge_ops
from sbp.passes.program.trace import trace

ONE = sbp.placement("cpu", shape=(1,))
N = 1024
BYTES = 4.0 * N * N
# One byte takes one second, and nothing else takes any.
MEMORY = Hardware("memory", ((8, 1e30),), 1e30, 1.0, 1e30, (Link(1 << 60, 1e30, 0.0),), 1.0)


def of(fn: Any, *shapes: tuple[int, ...]) -> tuple[Any, KernelMerges]:
    graph = trace(fn, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], {}).graph
    return graph, merge_ops(graph)


def moved(fn: Any, *shapes: tuple[int, ...]) -> float:
    """Bytes, in squares of N."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    plan = sbp.compile(fn, ONE, options=sbp.Options(hardware=MEMORY)).plan(*args)
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(ONE, MEMORY)).seconds() / BYTES


def normed(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True))


@pytest.mark.parametrize(
    ("fn", "operands", "squares"),
    [
        (lambda x: jnp.tanh(jnp.exp(x) + 1) * 2, 1, 2),
        (lambda x, y: jnp.tanh(x * y) + x, 2, 3),  # x is read by one kernel, once
        (lambda x: (jnp.exp(x) + 1).sum(), 1, 1),
        (lambda x: jax.nn.softmax(x), 1, 2),
        (normed, 1, 2),
        # The sums of a batch norm are those of one kernel.
        (lambda x: (x.sum(0), (x * x).sum(0)), 1, 1),
        # A product reads memory and writes it; what follows it reads that again.
        (lambda x: jnp.tanh(x @ x), 1, 4),
        (lambda x: x.T.reshape(-1), 1, 0),
        (lambda x: x[: N // 4] * 2, 1, 0.5),
        (lambda x: x.at[0].set(1.0), 1, 0),  # in place: a row
        (lambda x: jnp.zeros_like(x).at[0].set(x[1]), 1, 1),  # the zeros are written
    ],
)
def test_what_is_moved(fn: Any, operands: int, squares: float) -> None:
    assert moved(fn, *[(N, N)] * operands) == pytest.approx(squares, abs=0.02)


def test_what_is_written_lives_until_it_was_read() -> None:
    def fn(x: Any, w: Any) -> Any:
        a = x @ w
        b = jnp.tanh(a) @ w
        return b @ w + a

    graph, merged = of(fn, (N, N), (N, N))
    lives = {life.value: life for life in merged.lives}
    at = {v: merged.times[node.id] for node in graph.nodes for v in node.outputs}
    end = max(last for _, last in merged.times.values())
    assert all((lives[v].start, lives[v].end) == (0, end) for v in graph.inputs)
    first, second, third = (n.outputs[0] for n in graph.nodes if n.op == "dot_general")
    # An op's operands are boxed first. The sum at the end reads it.
    assert (lives[first].start, lives[first].end) == (at[first][0] + 1, end)
    assert lives[second].end == at[third][1]
    assert lives[graph.outputs[0]].end == end


def test_a_result_takes_the_space_of_an_operand_that_ends() -> None:
    graph, merged = of(lambda x, w: jnp.sort(jnp.exp(x @ w)), (N, N), (N, N))
    lives, end = {life.value: life for life in merged.lives}, merged.times
    product, exp = graph.nodes[0], graph.nodes[1]
    assert lives[exp.outputs[0]].start == end[exp.id][1] == lives[product.outputs[0]].end


def test_bodies_of_loops_have_times_of_their_own() -> None:
    def fn(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w, None), x, ws)[0]

    graph, merged = of(fn, (3, N, N), (N, N))
    (loop,) = [n for n in graph.nodes if n.bodies]
    inner = {v for n in loop.bodies[0].nodes for v in n.outputs}
    lives = {life.value: life for life in merged.lives}
    assert inner & lives.keys() and loop.outputs[0] in lives
    (around,) = [life for v, life in lives.items() if v == loop.outputs[0]]
    assert all(around.start <= lives[v].start < lives[v].end <= around.end for v in inner & lives.keys())


def test_what_convolutions_copy_is_there_from_the_first_to_the_last_that_reads_it() -> None:
    """Kernels, and images that are padded more on one side than on the other."""

    def loss(w: Any, x: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=dims)
        return jnp.square(y).mean()

    graph, merged = of(jax.grad(loss), (3, 3, 8, 16), (2, 32, 32, 8))
    forward, gradient = (n for n in graph.nodes if n.op == "conv_general_dilated")
    kernel, image = sorted(merged.operand_copies, key=lambda c: c.value)
    assert [(c.value, c.node, c.operand) for c in (kernel, image)] == [
        (graph.inputs[0], forward.id, 1),
        (graph.inputs[1], forward.id, 0),
    ]
    assert (kernel.factor, image.factor) == (1.0, pytest.approx((33 / 32) ** 2))
    start, end, last = *merged.times[forward.id], merged.times[gradient.id][1]
    assert (kernel.start, kernel.end) == (start + 1, end)
    assert (image.start, image.end) == (start + 1, last)
