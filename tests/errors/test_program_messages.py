"""Every message about signatures and annotations of a program: where, got, legal, why, try."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp import AUTO, B, P, S, annotate
from sbp.errors import AnnotationError, SignatureError
from tests.errors.messages import Messages, check_message, kinds

GRID = sbp.placement("cpu", shape=(2, 4))
LINE = sbp.placement("cpu", shape=(8,))
WIDE = sbp.placement("cpu", shape=(4, 2))
X = np.ones((8, 8), np.float32)
CHOOSE = "count dims from 0; sbp.AUTO lets the compiler choose"
OWN = "all ops of this program run on one placement; stages are marked by sbp.on of several"


def double(x: Any) -> Any:
    return x * 2


def of(fn: Any = double, *args: Any, on: Any = GRID, **options: Any) -> Any:
    """The plan of a function; most errors come before anything is compiled."""
    return sbp.compile(fn, on, **options).plan(*(args or (X,)))


MESSAGES: Messages = {
    "signature longer than the placement": (
        lambda: of(in_sbp=([S(0), B, B],)),
        SignatureError,
        "x: float32[8, 8], in_sbp",
        "[S(0), B, B]: 3 signatures",
        "2: one per axis of cpu(data=2 x model=4) (data, model)",
        "the list is longer than the placement",
        "for example [S(0), B]",
    ),
    "signature shorter than the placement": (
        lambda: of(out_sbp=[S(0)]),
        SignatureError,
        "result: float32[8, 8], out_sbp",
        "[S(0)]: 1 signature",
        "2: one per axis of cpu(data=2 x model=4) (data, model)",
        "the list is shorter than the placement",
        "for example [S(0), B]",
    ),
    "split of a dim that does not exist": (
        lambda: of(in_sbp=([S(2), B],)),
        SignatureError,
        "x: float32[8, 8], in_sbp",
        "[S(2), B]",
        "S(0)..S(1) or B",
        "S(2) splits a dim that a tensor of 2 dims does not have",
        CHOOSE,
    ),
    "split of a scalar": (
        lambda: of(double, 3.0, in_sbp=([S(0), B],)),
        SignatureError,
        "x: float32[], in_sbp",
        "[S(0), B]",
        "B: a scalar has no dims",
        "S(0) splits a dim that a tensor of 0 dims does not have",
        CHOOSE,
    ),
    "P on an argument": (
        lambda: of(in_sbp=([P, B],)),
        SignatureError,
        "x: float32[8, 8], in_sbp",
        "[P, B]",
        "S(dim) or B",
        "P never crosses the boundary of a program: a jax.Array holds whole values",
        "B, or annotate(x, [P, ...]) inside the model",
    ),
    "P on booleans": (
        lambda: of(lambda x: annotate(x > 0, [P, B])),
        SignatureError,
        "annotate(...) at {line}: bool[8, 8]",
        "[P, B]",
        "S(dim) or B",
        "P of a boolean means nothing: it cannot be reduced",
        "B",
    ),
    "P on a key": (
        lambda: of(lambda k: jax.random.bits(annotate(k, [P, B])), jax.random.key(0)),
        SignatureError,
        "annotate(...) at {line}: key<fry>[]",
        "[P, B]",
        "S(dim) or B",
        "P of a PRNG key means nothing: it cannot be reduced",
        "B",
    ),
    "wrong number of signatures": (
        lambda: of(in_sbp=(AUTO, AUTO)),
        SignatureError,
        "in_sbp",
        "2 entries",
        "1: one per positional argument that is not static",
        "double takes x",
        "sbp.AUTO (or None) for an argument leaves it open",
    ),
    "an argument without an entry": (
        lambda: sbp.compile(lambda x, y, z=1: x @ y, GRID, in_sbp=(AUTO,)).plan(X, y=X),
        SignatureError,
        "in_sbp",
        "1 entry",
        "2..3: one per positional argument that is not static",
        "<lambda> takes x, y, z: y has no entry",
        "sbp.AUTO (or None) for an argument leaves it open",
    ),
    "an entry for an argument that has no position": (
        lambda: sbp.compile(lambda x, *, y: x @ y, GRID, in_sbp=(AUTO, AUTO)).plan(X, y=X),
        SignatureError,
        "in_sbp",
        "2 entries",
        "1: one per positional argument that is not static",
        "<lambda> takes x",
        "in_sbp={'y': ...}: a dict goes by name, and y has no position",
    ),
    "an entry for no parameter": (
        lambda: of(lambda params: params["w"], {"w": X}, in_sbp={"w": AUTO}),
        SignatureError,
        "in_sbp['w']",
        "'w'",
        "'params': a dict goes by the names of parameters",
        "<lambda> has no parameter of that name",
        "in_sbp=({'w': ...},) for an argument that is a dict",
    ),
    "an entry for a static argument": (
        lambda: sbp.compile(lambda x, n: x, GRID, static_argnums=1, in_sbp={"n": AUTO}).plan(X, 3),
        SignatureError,
        "in_sbp['n']",
        "an entry for a static argument",
        "'x': a dict goes by the names of parameters",
        "a static argument is a Python value and has no signature",
        "in_sbp=({'n': ...},) for an argument that is a dict",
    ),
    "an ordered callback": (
        lambda: of(lambda x: (jax.debug.callback(print, x, ordered=True), x)[1]),
        AnnotationError,
        "debug_callback at {line}",
        "ordered=True",
        "ordered=False, or a placement of one device",
        "JAX keeps the order of callbacks on one device only, and cpu(data=2 x model=4) has 8",
        "leave ordered=True out: the callback still runs once per step, with the whole value",
    ),
    "an ordered print inside a loop": (
        lambda: of(
            lambda x: jax.lax.fori_loop(0, 2, lambda i, c: (jax.debug.print("", ordered=True), c)[1], x)
        ),
        AnnotationError,
        "debug_print at {line}",
        "ordered=True",
        "ordered=False, or a placement of one device",
        "JAX keeps the order of callbacks on one device only, and cpu(data=2 x model=4) has 8",
        "leave ordered=True out: the callback still runs once per step, with the whole value",
    ),
    "a NamedSharding of another mesh": (
        lambda: of(in_sbp=(NamedSharding(Mesh(np.array(jax.devices("cpu")), ("x",)), Spec("x")),)),
        SignatureError,
        "x: float32[8, 8], in_sbp",
        str(NamedSharding(Mesh(np.array(jax.devices("cpu")), ("x",)), Spec("x"))),
        "a sharding on cpu(data=2 x model=4)",
        "the sharding's mesh has other axes, or other devices, or another order",
        "sbp.compile(fn, sbp.Placement.from_mesh(mesh), ...)",
    ),
    "conflicting annotations": (
        lambda: of(lambda x: annotate(annotate(x + 1, [S(0), B]), [B, S(0)])),
        AnnotationError,
        "annotate(...) at {line}: float32[8, 8]",
        "[B, S(0)], and [S(0), B] at {line}",
        "one signature for one tensor",
        "both annotations are on the same tensor, with no op between them",
        "drop one; the compiler inserts boxing between ops",
    ),
    "an annotation on another placement": (
        lambda: of(lambda x: annotate(x, [S(0)], placement=LINE)),
        AnnotationError,
        "annotate(...) at {line}: float32[8, 8]",
        "cpu(x=8)",
        "cpu(data=2 x model=4)",
        OWN,
        "leave placement= and sbp.on out, or compile on that placement",
    ),
    "an annotation that the op does not admit": (
        lambda: of(lambda x: annotate(jnp.sin(x), [P]), on=sbp.placement("cpu", shape=(2,))),
        AnnotationError,
        "annotate(...) at {line}: float32[8, 8], made by sin at {line}",
        "[P]",
        "[B] takes {cost}; "
        "[S(0)] takes {cost}, then {cost} and 128 B sent to make it whole; "
        "[S(1)] takes {cost}, then {cost} and 128 B sent to make it whole",
        "sin has no signature that leaves P: only a reduction over a split dim makes a P",
        "[B], or annotate the result of the reduction itself",
    ),
    "a sum that arrives": (
        lambda: of(lambda x: annotate(x, [P]), on=sbp.placement("cpu", shape=(3,))),
        AnnotationError,
        "annotate(...) at {line}: float32[8, 8], argument x",
        "[P]",
        "[B] takes {cost}",
        "it arrives as whole values: only a reduction over a split dim makes a P",
        "[B], or annotate the result of the reduction itself",
    ),
    "a constraint on axes that are not there": (
        lambda: of(lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(LINE.mesh, Spec("x")))),
        AnnotationError,
        "with_sharding_constraint at {line}: float32[8, 8]",
        "(x -)",
        "axes of cpu(data=2, model=4)",
        "no axis of the placement is called 'x'",
        "the placement's names of axes, or sbp.Options(constraints='ignore') if you cannot change the code",
    ),
    "an annotation by names that are not there": (
        lambda: of(lambda x: annotate(x * 2, Spec("z"))),
        AnnotationError,
        "annotate at {line}: float32[8, 8]",
        "(z -)",
        "axes of cpu(data=2, model=4)",
        "no axis of the placement is called 'z'",
        "the placement's names of axes",
    ),
    "a constraint of a mesh of other sizes": (
        lambda: of(lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(WIDE.mesh, Spec("data")))),
        AnnotationError,
        "with_sharding_constraint at {line}: float32[8, 8]",
        "(data -)",
        "axes of cpu(data=2, model=4)",
        "its mesh has data=4, model=2",
        "a mesh with the placement's axes: placement.mesh, or sbp.Options(constraints='ignore') if you "
        "cannot change the code",
    ),
    "a constraint with an inner axis before an outer one": (
        lambda: of(lambda x: annotate(x * 2, Spec(("model", "data")))),
        AnnotationError,
        "annotate at {line}: float32[8, 8]",
        "(model/data -)",
        "axes of cpu(data=2, model=4)",
        "dim 0 is split by an inner axis before an outer one",
        "('data', 'model'), or a placement with the axes in that order",
    ),
    "an axis twice": (
        lambda: of(lambda x: annotate(x * 2, Spec("data", "data"))),
        AnnotationError,
        "annotate at {line}: float32[8, 8]",
        "(data data)",
        "axes of cpu(data=2, model=4)",
        "'data' stands there twice",
        "each axis in one place",
    ),
    "unreduced where nothing is reduced": (
        lambda: of(lambda x: jnp.tanh(annotate(x * 2, Spec("data", unreduced={"model"}))) * x),
        AnnotationError,
        "annotate(...) at {line}: float32[8, 8], made by mul at {line}",
        "[S(0), P]",
        "{choices}",
        "mul has no signature that leaves P: only a reduction over a split dim makes a P",
        "[B, B], or annotate the result of the reduction itself",
    ),
    "unreduced at the boundary": (
        lambda: of(in_sbp=(Spec("data", unreduced={"model"}),)),
        SignatureError,
        "x: float32[8, 8], in_sbp",
        str(Spec("data", unreduced={"model"})),
        "axes that split dims",
        "unreduced axes are P, which never crosses the boundary: a jax.Array holds whole values",
        "the spec without unreduced=, or annotate(x, spec) inside the model",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])


def test_signatures_of_arguments_are_reported_even_if_tracing_fails() -> None:
    wrong = sbp.compile(lambda a: annotate(a, [S(7), B]), GRID, in_sbp=([S(3), B],))
    assert kinds(lambda: wrong.plan(X)) == [("signature", "a"), ("signature", "annotate(x")]
    broken = sbp.compile(lambda a: a.no_such_thing, GRID, in_sbp=([S(3), B],))
    assert kinds(lambda: broken.plan(X)) == [("signature", "a")]
    with pytest.raises(AttributeError, match="no_such_thing"):
        sbp.compile(lambda a: a.no_such_thing, GRID).plan(X)
