"""Annotations in the compiler: honoured where they stand, under every transformation, uneven sizes too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import AUTO, B, P, S, annotate
from sbp.errors import AnnotationError, PlacementError, SbpError, SignatureError
from sbp.passes.face import Plan
from sbp.passes.physical.program import Compute
from sbp.signature import NdSbp, format_sbp

GRID = sbp.placement("cpu", shape=(2, 4))
LINE = sbp.placement("cpu", shape=(8,))
M = jax.ShapeDtypeStruct((16, 16), np.float32)
PRODUCT: dict[str, Any] = {"in_sbp": ([S(1), B], [S(0), B])}


def plan(fn: Any, *args: Any, on: Any = GRID, **signatures: Any) -> Plan:
    return sbp.compile(fn, on, **signatures, options=sbp.Options(check=True)).plan(*args)


def pinned(found: Plan) -> list[NdSbp]:
    """The signatures of the annotated tensors, in order of execution."""
    assert found.physical is not None
    steps = [s for s, _ in found.physical.walk() if isinstance(s, Compute) and s.node.op == "sbp_annotate"]
    return [s.strategy.results[0] for s in steps]


def test_a_sum_stays_a_sum_until_it_is_needed() -> None:
    def f(a: Any, b: Any) -> Any:
        return annotate(annotate(a @ b, [P, B]) * 2.0 - annotate(a @ b, [P, B]), [P, B])

    found = plan(f, M, M, **PRODUCT, out_sbp=[B, B])
    assert pinned(found) == [(P, B)] * 2  # the product is written twice and made once
    (only,) = found.collectives
    assert (only.kind, only.before, only.after, only.axes) == ("all_reduce", (P, B), (B, B), ("data",))


@pytest.mark.parametrize(
    "name", ["grad", "vmap", "jit", "scan", "cond", "checkpoint", "forward mode", "inside vmap of grad"]
)
def test_annotations_are_honoured_under_every_transformation(name: str) -> None:
    def note(x: Any) -> Any:
        return annotate(jnp.sin(x), [S(0), B], grad=[B, S(0)])

    def row(x: Any) -> Any:
        return annotate(jnp.sin(x), [B, S(0)])

    case: dict[str, tuple[Any, list[NdSbp]]] = {
        "grad": (jax.grad(lambda x: (note(x) ** 2).sum()), [(S(0), B), (B, S(0))]),
        "vmap": (jax.vmap(row), [(B, S(1))]),
        "jit": (jax.jit(note), [(S(0), B)]),
        "scan": (lambda x: lax.scan(lambda c, r: (row(c + r), None), x[0], x)[0], [(B, S(0))]),
        "cond": (lambda x: lax.cond(x[0, 0] > 0, note, lambda y: y, x), [(S(0), B)]),
        "checkpoint": (
            jax.grad(lambda x: (jax.checkpoint(lambda y: jnp.sin(note(y)))(x) ** 2).sum()),
            [(S(0), B), (S(0), B), (B, S(0))],
        ),
        "forward mode": (lambda x: jax.jvp(note, (x,), (x,)), [(S(0), B)]),
        "inside vmap of grad": (jax.vmap(jax.grad(lambda x: (row(x) ** 2).sum())), [(B, S(1))]),
    }
    fn, expected = case[name]
    assert sorted(pinned(plan(fn, M)), key=str) == sorted(expected, key=str)


def test_an_argument_may_lie_otherwise_inside() -> None:
    found = plan(lambda w: annotate(w, [B, B]) * 2, M, in_sbp=([S(0), B],), out_sbp=[B, B])
    assert found.in_sbp == ((S(0), B),)
    assert [c.kind for c in found.collectives] == ["all_gather"]


UNEVEN = {
    "vocabulary": ((257, 4), LINE, [S(0)], (B,), "dim 0 of size 257 does not divide by 8: ", 264),
    "fewer rows than devices": ((3, 4), LINE, [S(0)], (B,), "dim 0 of size 3 does not divide by 8: ", 8),
    "one row": ((1, 4), LINE, [S(0)], (B,), "dim 0 of size 1 does not divide by 8: ", 8),
    "nested": ((10, 4), GRID, [S(0), S(0)], (S(0), B), "[S(0), S(0)] is [S(0), B] at rest, ", 16),
    "two dims": ((7, 8), GRID, [S(0), S(1)], (B, S(1)), "dim 0 of size 7 does not divide by 2: ", 8),
}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("side", ["in_sbp", "out_sbp"])
def test_uneven_signatures_are_whole_at_rest_and_noted(name: str, side: str) -> None:
    shape, on, given, rest, text, padded = UNEVEN[name]
    signatures = {side: (given,)} if side == "in_sbp" else {side: given}
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    program = sbp.compile(lambda x: jnp.sin(x) * 2, on, **signatures, options=sbp.Options(check=True))
    found = program.plan(x)
    assert (found.in_sbp if side == "in_sbp" else found.out_sbp) == (rest,)
    (note,) = found.notes
    assert note.startswith("x:" if side == "in_sbp" else "result:")
    assert text in note
    assert f"{format_sbp(given)} is {format_sbp(rest)} at rest, " in note
    assert note.endswith(f"; a size of {padded} would stay split")
    np.testing.assert_allclose(program(x), np.sin(x) * 2, rtol=1e-6)


def test_an_annotation_splits_an_uneven_argument_inside() -> None:
    x = np.random.default_rng(0).normal(size=(257, 4)).astype(np.float32)
    program = sbp.compile(lambda x: annotate(jnp.sin(annotate(x, S(0))), S(0)), LINE, out_sbp=B)
    assert [c.kind for c in program.plan(x).collectives] == ["all_gather"]
    np.testing.assert_allclose(program(x), np.sin(x), rtol=1e-6)


def test_dims_with_nothing_to_split_are_whole_at_rest() -> None:
    empty = jax.ShapeDtypeStruct((0, 8), np.float32)
    for signatures in ({"in_sbp": ([S(0), B],)}, {"out_sbp": [S(0), B]}):
        found = plan(lambda x: x + 1, empty, **signatures)
        assert (found.in_sbp, found.out_sbp, found.notes) == (((B, B),), ((B, B),), ())


def test_a_sum_that_nobody_makes_names_what_is_legal_and_what_it_costs() -> None:
    with pytest.raises(AnnotationError) as caught:
        plan(lambda a: annotate(jnp.sin(a), [P, B]), M)
    (problem,) = caught.value.problems
    choices = problem.legal.split("; ")
    assert choices[0].startswith("[B, B] takes ")
    half = next(c for c in choices if c.startswith("[S(0), B] takes "))
    # Half of 1 kB is on the other device of a pair.
    assert half.endswith(" and 512 B sent to make it whole")
    assert problem.why == "sin has no signature that leaves P: only a reduction over a split dim makes a P"


def test_alternatives_are_sorted_and_the_rest_is_counted() -> None:
    with pytest.raises(AnnotationError) as caught:
        plan(lambda a, b: annotate(a @ b, [P("max"), B]), M, M)
    choices = caught.value.problems[0].legal.split("; ")
    assert any(c.startswith("[P, B] takes ") for c in choices)
    assert choices[-1] == "and 8 more, each slower"


def test_a_dim_too_short_to_be_summed_over_both_axes_is_a_problem() -> None:
    """Two rows over 4 x 2: the outer axis sums them, and leaves one row, with nothing left to sum over."""
    grid, rows = sbp.placement("cpu", shape=(4, 2)), jax.ShapeDtypeStruct((2, 16), np.float32)
    plan(lambda a: annotate(a.sum(0), [P, B]), rows, on=grid)
    with pytest.raises(AnnotationError) as caught:
        plan(lambda a: annotate(a.sum(0), [P, P]), rows, on=grid)
    (problem,) = caught.value.problems
    assert problem.got == "[P, P]"
    assert problem.why.startswith("reduce_sum has no signature that leaves [P, P]: only a reduction over")
    assert "[P, S(0)] takes " in problem.legal


def test_siblings_may_differ_but_a_chain_may_not() -> None:
    plan(lambda a: (annotate(a * 2, [S(0), B]), annotate(a * 2, [B, S(0)])), M)
    plan(lambda a: annotate(annotate(a * 2, [S(0), B]), [S(0), B]), M)
    with pytest.raises(AnnotationError, match="both annotations are on the same tensor"):
        plan(lambda a: annotate(annotate(a * 2, [S(0), B]), [B, S(0)]), M)


def test_all_annotations_are_checked_at_once_with_the_signatures() -> None:
    def f(a: Any, b: Any) -> Any:
        c = annotate(a @ b, [S(0)])
        d = annotate(c > 0, [P, B])
        return annotate(jnp.sin(c) * d, [S(0), B], grad=[B])

    with pytest.raises(SbpError) as caught:
        plan(f, M, M, in_sbp=([S(4), B], AUTO), out_sbp=[S(0), B, B])
    wheres = [p.where.split(" at ")[0].split(":")[0] for p in caught.value.problems]
    assert wheres == ["a", "result", *["annotate(...)"] * 2, "annotate(..., grad=...)"]


def test_a_wrong_gradient_annotation_is_reported_once() -> None:
    with pytest.raises(SignatureError) as caught:
        plan(jax.grad(lambda a: (annotate(a, [S(0), B], grad=[S(0)]) ** 2).sum()), M)
    assert len(caught.value.problems) == 1


def on_line(x: Any) -> Any:
    with sbp.on(LINE):
        return jnp.sin(x) * 2


def test_ops_of_another_placement_are_one_problem() -> None:
    with sbp.on(GRID):
        plan(lambda x: x + 1, M)
    with pytest.raises(PlacementError) as refused:
        plan(jax.grad(lambda x: on_line(x).sum()), M)
    (problem,) = refused.value.problems
    assert (problem.where, problem.got) == ("sbp.on(cpu(x=8))", "ranks [0, 1, 2, 3, 4, 5, 6, 7]")
    with pytest.raises(AnnotationError) as caught:
        plan(lambda x: annotate(x, [S(0)], placement=LINE), M)
    assert caught.value.problems[0].got == "cpu(x=8)"


def test_ops_that_talk_to_the_host_are_noted() -> None:
    def f(x: Any) -> Any:
        jax.debug.callback(lambda s: None, x.sum())
        return jax.pure_callback(lambda a: a, x, x)

    notes = plan(f, M).notes
    (note,) = (n for n in notes if n.endswith(" runs on each of the 8 devices"))
    assert note.startswith("pure_callback at test_pins.py:")
    assert not any(" runs on each " in n for n in plan(f, M, on=sbp.placement("cpu", shape=(1,))).notes)


def test_a_callback_that_changes_the_host_is_refused() -> None:
    """It would run once per device, and each would get an answer of its own."""

    def f(x: Any) -> Any:
        return x + jax.experimental.io_callback(lambda a: a, jax.ShapeDtypeStruct((), x.dtype), x.sum())

    with pytest.raises(AnnotationError) as caught:
        plan(f, M)
    (problem,) = caught.value.problems
    assert problem.where.startswith("io_callback at test_pins.py:")
    assert problem.why == "it would run once per device, and each device would get an answer of its own"
    assert "jax.debug.callback (runs once)" in problem.legal
    assert problem.fix == "call it outside the program, and pass its result as an argument"
