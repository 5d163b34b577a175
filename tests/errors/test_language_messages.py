"""Every message of the language, whole: where, what was given, what is legal, why, and what to try."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from sbp.annotation import annotate
from sbp.errors import (
    KINDS,
    AnnotationError,
    ArgumentError,
    Problem,
    SbpError,
    SignatureError,
    raise_all,
)
from sbp.signature import AUTO, B, P, Partial, S, parse_sbp
from tests.errors.messages import Messages, check_message, kinds

X = jnp.ones((3, 4))
PARTIAL = (
    "P(...)",
    'P, P("sum"), P("max"), P("min"), P("prod"), P("and"), P("or"), P("xor")',
    "P is the Partial signature: shards that reduce to the tensor",
)
SPEC = "did you mean jax.sharding.PartitionSpec({})? It is accepted in in_sbp"
ANNOTATION = "S(dim), B or P, or a list of them, one per placement axis; or a PartitionSpec"
MATRIX = "annotate(x: float32[3, 4], {}=...)"

MESSAGES: Messages = {
    "a split of no integer": (
        lambda: S("batch"),  # type: ignore[arg-type]
        SignatureError,
        "S(...)",
        "S('batch')",
        "an integer dim: S(0), S(1), S(-1), ...; or S(AUTO)",
        "a split names the dim of the tensor that is cut",
        "give the position of the dim",
    ),
    "a split of a truth value": (
        lambda: S(True),
        SignatureError,
        "S(...)",
        "S(True)",
        "an integer dim: S(0), S(1), S(-1), ...; or S(AUTO)",
        "a split names the dim of the tensor that is cut",
        "give the position of the dim",
    ),
    "P taken for a PartitionSpec": (
        lambda: P("data"),
        SignatureError,
        PARTIAL[0],
        "P('data')",
        *PARTIAL[1:],
        SPEC.format("'data'"),
    ),
    "P taken for a PartitionSpec of two axes": (
        lambda: P(None, "model"),
        SignatureError,
        PARTIAL[0],
        "P(None, 'model')",
        *PARTIAL[1:],
        SPEC.format("None, 'model'"),
    ),
    "P called with nothing": (
        lambda: P(),
        SignatureError,
        PARTIAL[0],
        "P()",
        *PARTIAL[1:],
        SPEC.format(""),
    ),
    "a partial of no name": (
        lambda: Partial(3),  # type: ignore[arg-type]
        SignatureError,
        PARTIAL[0],
        "P(3)",
        *PARTIAL[1:],
        "name the reduction",
    ),
    "a text that is no signature": (
        lambda: parse_sbp("[S(0), Q]"),
        SignatureError,
        "a signature in text form",
        "'[S(0), Q]'",
        "S(dim), B, P, P(max), P(min), separated by commas",
        "nothing legal starts at ' Q'",
        'for example "[S(0), B]"',
    ),
    "an annotation in quotes": (
        lambda: annotate(X, "S(0)"),
        SignatureError,
        MATRIX.format("signature"),
        "'S(0)'",
        ANNOTATION,
        "a text is no signature",
        "S(0), without quotes",
    ),
    "an annotation by the name of an axis": (
        lambda: annotate(X, "data"),
        SignatureError,
        MATRIX.format("signature"),
        "'data'",
        ANNOTATION,
        "a text is no signature",
        "PartitionSpec('data'), if it is the name of an axis",
    ),
    "an annotation without a dim": (
        lambda: annotate(X, [B, S]),
        SignatureError,
        MATRIX.format("signature"),
        "[B, <class 'sbp.signature.Split'>]",
        ANNOTATION,
        "S alone does not say which dim is split",
        "[B, S(0)]",
    ),
    "an annotation with a hole": (
        lambda: annotate(X, B, grad=[S(0), None]),
        SignatureError,
        MATRIX.format("grad"),
        "[S(0), None]",
        ANNOTATION,
        "None and AUTO are for a whole tensor, not for one axis of the placement",
        "[S(0), B]",
    ),
    "an annotation that leaves the dim open": (
        lambda: annotate(X, [B, S(AUTO)]),
        SignatureError,
        MATRIX.format("signature"),
        "[B, S(AUTO)]",
        ANNOTATION,
        "S(AUTO) is of an argument or a result, in in_sbp or out_sbp",
        "S(dim), or no annotation",
    ),
    "a split of a dim that is not there": (
        lambda: annotate(X, [S(0), S(2)]),
        SignatureError,
        MATRIX.format("signature"),
        "[S(0), S(2)]",
        "dims -2..1",
        "S(2) splits a dim that a tensor of 2 dims does not have",
        "count dims from 0",
    ),
    "a split of a dim before the first": (
        lambda: annotate(X, B, grad=S(-3)),
        SignatureError,
        MATRIX.format("grad"),
        "[S(-3)]",
        "dims -2..1",
        "S(-3) splits a dim that a tensor of 2 dims does not have",
        "count dims from 0",
    ),
    "a split of a scalar": (
        lambda: annotate(jnp.float32(1), S(0)),
        SignatureError,
        "annotate(x: float32[], signature=...)",
        "[S(0)]",
        "B (a scalar has no dims)",
        "S(0) splits a dim that a tensor of 0 dims does not have",
        "count dims from 0",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_whole_message(name: str) -> None:
    check_message(*MESSAGES[name])
    assert KINDS[kinds(MESSAGES[name][0])[0][0]] is MESSAGES[name][1]


def problem(kind: str, where: str = "here") -> Problem:
    return Problem(kind, where, "a", "b", "c", "d")


def test_empty_lines_are_left_out() -> None:
    short = Problem("argument", "f(x)", "3", "", "no reason", "")
    assert str(short).splitlines() == ["f(x)", "  got    3", "  why    no reason"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_exception_carries_every_problem(kind: str) -> None:
    first, second = problem(kind, "here"), replace(problem(kind, "there"), got="e")
    with pytest.raises(KINDS[kind]) as caught:
        raise_all([first, second, first])
    assert caught.value.problems == (first, second)
    assert str(caught.value) == f"2 problems\n{first}\n{second}"
    assert isinstance(caught.value, ValueError)


def test_what_is_wrong_in_many_places_is_said_once() -> None:
    places = [problem("signature", f"params[{i}]") for i in range(60)]
    with pytest.raises(KINDS["signature"]) as caught:
        raise_all(places)
    assert caught.value.problems == tuple(places)
    assert str(caught.value).splitlines() == [
        "params[0]",
        "params[1]",
        "params[2]",
        "and 57 more, all alike",
        *str(places[0]).splitlines()[1:],
    ]
    with pytest.raises(KINDS["signature"], match=r"^params\[0\]\nparams\[1\]\n  got "):
        raise_all(places[:2])


def test_problems_of_several_kinds_raise_the_common_class() -> None:
    with pytest.raises(SbpError) as caught:
        raise_all([problem("signature"), problem("argument")])
    assert type(caught.value) is SbpError
    raise_all([])


def test_every_class_has_a_kind() -> None:
    # A model may have errors of its own.
    ours, left = set[type[SbpError]](), [SbpError]
    while left:
        found = [c for c in left.pop().__subclasses__() if c.__module__.startswith("sbp.")]
        ours.update(found)
        left += found
    assert set(KINDS.values()) == ours
    assert {AnnotationError, ArgumentError} < set(KINDS.values())
