"""Every entry of `CONTROL` is true: its ports cover the op, and it runs as JAX does, stepped and lowered."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.program.control import CONTROL, Port, ports, trips
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.passes.program.trace import trace
from sbp.runtime.lower.reference_interpreter import evaluate, value_of
from sbp.signature import Signature
from tests.passes.program.stepped import STEPS

LINE, ONE = sbp.placement("cpu", shape=(8,)), sbp.placement("cpu", shape=(1,))
# Ops are slow and sending is free, so that what can be split is, inside bodies too.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
# Whole numbers, so that sums are exact in any order.
X = np.random.default_rng(0).integers(-3, 4, (16, 8)).astype(np.float32)
W = np.random.default_rng(1).integers(-1, 2, (5, 8)).astype(np.float32)
SPLIT = {"over eight, by rows": (LINE, S(0)), "over eight, by columns": (LINE, S(1)), "on one": (ONE, B)}


def scan(**how: Any) -> Callable[..., Any]:
    """A loop that reads a constant, carries two values, takes slices, and leaves two stacks."""

    def run(x: Any, w: Any) -> Any:
        fixed = 2 * w[0]

        def body(carry: Any, row: Any) -> Any:
            h, n = carry
            h = jnp.minimum(h * row + fixed, 50.0)
            return (h, n + 1), (h.sum(), h[0] - row)

        return lax.scan(body, (x, jnp.int32(0)), w, **how)

    return run


def no_slices(x: Any, w: Any) -> Any:
    return lax.scan(lambda h, _: (h + w[1], None), x, None, length=3)


def no_carry(x: Any, w: Any) -> Any:
    return lax.scan(lambda _, row: (None, x * row), None, w)


def no_trip(x: Any, w: Any) -> Any:
    return lax.scan(lambda h, row: (h + row, h[0]), x, w[:0])


def passed_on(x: Any, w: Any) -> Any:
    """What enters leaves as it is, in another place; and a scalar of the program leaves too."""
    return lax.scan(lambda c, row: ((c[1], c[0]), (row, 1.0)), (x, 2 * x), w)


def counted(x: Any, w: Any) -> Any:
    """A loop whose test and whose body have constants of their own."""
    most, by = 40 + w[0, 0], w[1]

    def body(c: Any) -> Any:
        n, h, largest = c
        return n + 1, h + by, jnp.maximum(largest, jnp.abs(h).max())

    return lax.while_loop(lambda c: (c[0] < 6) & (c[2] < most), body, (jnp.int32(0), x, jnp.float32(0)))


def never(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda c: c[0] > 9, lambda c: (c[0] + 1, c[1] * w[0]), (jnp.int32(0), x))


def fori(x: Any, w: Any) -> Any:
    """Of a length that only the data say."""
    rows = jnp.asarray(w)
    return lax.fori_loop(0, jnp.int32(jnp.abs(w).sum()) % 4 + 1, lambda i, h: h + rows[i], x)


def branches(which: int) -> Callable[..., Any]:
    """One of three, which differ in what they read and in what leaves them as it is."""

    def run(x: Any, w: Any) -> Any:
        index = jnp.int32(which) + jnp.int32(w.sum() * 0)
        every = (
            lambda x, w: (x + w[0], x.sum()),
            lambda x, w: (x, jnp.float32(1)),
            lambda x, w: (jnp.maximum(x, w[1]), w.max()),
        )
        return lax.switch(index, every, x, w)

    return run


def chosen(x: Any, w: Any) -> Any:
    return lax.cond(w.sum() > 1e6, lambda x: (x + 1, x), lambda x: (2 * x, x - w[0]), x)


def nested(x: Any, w: Any) -> Any:
    """A branch and a loop inside a loop."""

    def body(h: Any, row: Any) -> Any:
        h = lax.cond(row[0] > 0, lambda h: h + row, lambda h: h - 1, h)
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + row), (0, h))[1], row.sum()

    return lax.scan(body, x, w)


# Per entry of CONTROL the programs that have it as an op.
PROGRAMS: dict[str, dict[str, Callable[..., Any]]] = {
    "scan": {
        "forward": scan(),
        "reverse": scan(reverse=True),
        "unrolled": scan(unroll=2),
        "reverse, unrolled whole": scan(reverse=True, unroll=5),
        "no slices": no_slices,
        "no carry": no_carry,
        "no trip": no_trip,
        "passed on": passed_on,
        "nested": nested,
    },
    "while": {"counted": counted, "never": never, "fori": fori},
    "cond": {**{f"branch {k}": branches(k) for k in (-7, 0, 1, 2, 9)}, "chosen": chosen},
}
EACH = [pytest.param(op, fn, id=f"{op}: {name}") for op, fns in PROGRAMS.items() for name, fn in fns.items()]


def control(op: str, fn: Callable[..., Any]) -> tuple[Graph, Node]:
    """The graph of a program, and its loop or branch."""
    graph = trace(fn, (X, W), {}).graph
    return graph, next(n for n in graph.nodes if n.op == op)


def test_every_entry_has_programs() -> None:
    assert PROGRAMS.keys() == CONTROL.keys()


@pytest.mark.parametrize(("op", "fn"), EACH)
def test_ports_cover_the_op(op: str, fn: Callable[..., Any]) -> None:
    graph, node = control(op, fn)
    every = ports(node)
    assert sorted(p.operand for p in every if p.operand is not None) == list(range(len(node.inputs)))
    assert sorted(p.result for p in every if p.result is not None) == list(range(len(node.outputs)))
    assert sorted(v for p in every for v in p.enters) == sorted(v for b in node.bodies for v in b.inputs)
    for k, body in enumerate(node.bodies):
        left = [x for p in every for x in p.left_by(k)]
        assert sorted(map(str, left)) == sorted(map(str, body.outputs))
    for p in every:
        outer = [node.inputs[p.operand]] if p.operand is not None else []
        outer += [node.outputs[p.result]] if p.result is not None else []
        assert_alike(graph, p, outer)


def assert_alike(graph: Graph, port: Port, outer: Sequence[Operand]) -> None:
    """One tensor crosses at a port: of one shape and dtype inside, and outside but for the loop's own dim."""
    inside = {(graph.operand(x).shape, graph.operand(x).dtype) for x in (*port.enters, *port.leaves)}
    outside = {(graph.operand(x).shape[port.stacked :], graph.operand(x).dtype) for x in outer}
    assert len(inside) == 1 or (not inside and port.whole)
    assert not inside or outside <= inside


@pytest.mark.parametrize(("op", "fn"), EACH)
def test_bodies_are_the_parameters_of_that_name(op: str, fn: Callable[..., Any]) -> None:
    _, node = control(op, fn)
    held = [node.params[name] for name in CONTROL[op].bodies]
    assert len(node.bodies) == sum(len(x) if isinstance(x, tuple | list) else 1 for x in held)


def stepped(graph: Graph, args: Sequence[Any]) -> tuple[list[Any], int]:
    """The results of a program whose loops and branches run body by body, and how many bodies ran."""
    known: dict[int, Any] = dict(zip(graph.inputs, [*args, *graph.consts], strict=True))
    ran = 0
    for node in graph.nodes:
        if not node.bodies:
            results = evaluate([node], known, node.outputs)
        else:
            results, n = joined(node, [value_of(x, known) for x in node.inputs])
            ran += n
        known.update(zip(node.outputs, results, strict=True))
    return [value_of(x, known) for x in graph.outputs], ran


def joined(node: Node, args: list[Any]) -> tuple[list[Any], int]:
    """What leaves through the ports: carried values of the last trip, and stacks of all trips."""
    every, last, stacks, ran = ports(node), dict[int, Any](), dict[int, list[Any]](), 0
    for p in every:
        if p.result is not None and p.operand is not None:
            last[p.result] = args[p.operand]
        elif p.result is not None:
            stacks[p.result] = []
    for body, inputs in STEPS[node.op](node, list(args)):
        k, ran = [b is body for b in node.bodies].index(True), ran + 1
        known = dict(zip(body.inputs, inputs, strict=True))
        made = [v for n in body.nodes for v in n.outputs]
        known.update(zip(made, evaluate(body.nodes, known, made), strict=True))
        inputs[:] = [value_of(x, known) for x in body.outputs]
        for p in every:
            for x in p.left_by(k) if p.result is not None else []:
                assert p.result is not None
                last[p.result] = value_of(x, known)
                if p.stacked:
                    stacks[p.result].append(last[p.result])
    down = -1 if node.params.get("reverse") else 1
    whole = {r: np.stack(xs[::down]) for r, xs in stacks.items() if xs}
    return [whole.get(i, last.get(i)) for i in range(len(node.outputs))], ran


@pytest.mark.some(6)
@pytest.mark.parametrize(("op", "fn"), [e for e in EACH if e.id != "scan: no trip"])
def test_steps_give_what_the_function_gives(op: str, fn: Callable[..., Any]) -> None:
    graph, node = control(op, fn)
    got, ran = stepped(graph, (X, W))
    assert_equal(got, fn(X, W))
    known = CONTROL[op].trips(node)
    if known is None:
        assert ran % 2 and trips(node) == 1  # the test runs once more than the body
    else:
        assert ran == known == trips(node)


def test_no_trip_takes_no_step() -> None:
    _, node = control("scan", no_trip)
    assert trips(node) == 0 and not list(STEPS["scan"](node, [X, W[:0]]))


@pytest.mark.some(14)
@pytest.mark.parametrize("how", SPLIT)
@pytest.mark.parametrize(("op", "fn"), EACH)
def test_lowered_it_gives_what_the_function_gives(op: str, fn: Callable[..., Any], how: str) -> None:
    place, nd = SPLIT[how]
    signatures: tuple[list[Signature], list[Signature]] = ([nd], [B])
    program = sbp.compile(fn, place, in_sbp=signatures, options=sbp.Options(hardware=SPLITTING, check=True))
    assert_equal(jax.tree.leaves(program(X, W)), fn(X, W))


def assert_equal(got: Sequence[Any], want: Any) -> None:
    leaves = jax.tree.leaves(want)
    assert len(got) == len(leaves)
    for x, y in zip(got, leaves, strict=True):
        assert np.shape(x) == y.shape
        np.testing.assert_array_equal(x, y)


def test_an_index_out_of_range_is_the_nearest_branch() -> None:
    _, node = control("cond", branches(0))
    for index, nearest in ((-7, 0), (9, 2)):
        ((body, _),) = STEPS["cond"](node, [np.int32(index), X, W])
        assert body is node.bodies[nearest]


def test_a_constant_may_leave() -> None:
    """The scalar that `passed_on` stacks is no value of the body."""
    _, node = control("scan", passed_on)
    assert any(isinstance(x, Const) for p in ports(node) for x in p.leaves)
