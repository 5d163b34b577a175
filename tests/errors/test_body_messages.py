"""Every message to the author of a body or a talk, whole."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sbp import S
from sbp.errors import KINDS, RuleError
from sbp.rules import Row
from tests.errors.messages import Messages, check_message, kinds
from tests.errors.rule_authors import (
    AT,
    BODY,
    EACH,
    LIST,
    SHARD,
    TALKS,
    X,
    permutes,
    planned,
    run,
    said,
    sending,
)

pytestmark = pytest.mark.usefixtures("forgotten")

BODIES: Messages = {
    "an array and no list": (
        run(lambda ctx, x: 2 * x),
        RuleError,
        BODY,
        "float32[2, 6]",
        "a list of 1 array",
        LIST,
        "return [y]",
    ),
    "nothing": (
        run(lambda ctx, x: None),
        RuleError,
        BODY,
        "a NoneType",
        "a list of 1 array",
        LIST,
        "return [y]",
    ),
    "too few results": (
        run(lambda ctx, x: []),
        RuleError,
        BODY,
        "a list of 0 arrays",
        "a list of 1 array",
        "a body returns a shard of every result",
        EACH,
    ),
    "another shape": (
        run(lambda ctx, x: [x[:1]]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "float32[1, 6]",
        "float32[2, 6]",
        "float32[16, 6] has the signature [S(0)] on 8 devices",
        SHARD,
    ),
    "another dtype": (
        run(lambda ctx, x: [x.astype(jnp.int32)]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "int32[2, 6]",
        "float32[2, 6]",
        "float32[16, 6] has the signature [S(0)] on 8 devices",
        "y.astype('float32')",
    ),
    "no array": (
        run(lambda ctx, x: ["x"]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "a str",
        "float32[2, 6]",
        "float32[16, 6] has the signature [S(0)] on 8 devices",
        SHARD,
    ),
    "an op that is no other on its shards": (
        run(None, lambda op: [Row((S(0),), (S(1),))]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "float32[2, 6]",
        "float32[16, 1]",
        "float32[16, 6] has the signature [S(1)] on 8 devices",
        "body=: a body of its own, with the parameters of a shard (ctx.bind(*args, shape=...))",
    ),
    "a body that sends more than it declares": (
        run(sending, communication=permutes),
        RuleError,
        BODY,
        "all_gather over 'x'",
        "permute over 'x'",
        "the plan would neither show nor price it",
        "communication=: a function of the same Context, yielding sbp.rules.Communication('all_gather', ...)",
    ),
    "a body that sends, and declares nothing": (
        run(lambda ctx, x: [ctx.total(x, [0]) - x]),
        RuleError,
        BODY,
        "all_reduce over 'x'",
        "none: the rule declares nothing",
        "the plan would neither show nor price it",
        "communication=: a function of the same Context, yielding sbp.rules.Communication('all_reduce', ...)",
    ),
}

DECLARED: Messages = {
    "a reason that nothing fills in": (
        said(reason="needs {x} over {axes}"),
        RuleError,
        f"Communication(reason=...) of 'authors_double' {AT}",
        "'needs {x} over {axes}'",
        "{axes}, or no place",
        "nothing fills in {x}: a plan knows the names of the axes alone",
        "write numbers into the text (an f-string with {{axes}}), and braces of its own twice",
    ),
    "a reason with an open brace": (
        said(reason="needs {axes"),
        RuleError,
        f"Communication(reason=...) of 'authors_double' {AT}",
        "'needs {axes'",
        "{axes}, or no place",
        "nothing fills in a brace that is not closed: a plan knows the names of the axes alone",
        "write numbers into the text (an f-string with {{axes}}), and braces of its own twice",
    ),
    "a kind that is nearly one": (
        said(kind="allgather"),
        RuleError,
        f"Communication(kind=...) of 'authors_double' {AT}",
        "'allgather'",
        "all_reduce, all_gather, reduce_scatter, all_to_all, permute",
        "the plan lists it among the collectives of these kinds",
        "did you mean 'all_gather'?",
    ),
    "a kind that is none": (
        said(kind="psum"),
        RuleError,
        f"Communication(kind=...) of 'authors_double' {AT}",
        "'psum'",
        "all_reduce, all_gather, reduce_scatter, all_to_all, permute",
        "the plan lists it among the collectives of these kinds",
        "'all_reduce' for a sum, 'permute' to a neighbour",
    ),
    "fewer than no bytes": (
        said(wire_bytes=-4),
        RuleError,
        f"Communication(wire_bytes=...) of 'authors_double' {AT}",
        "-4",
        "0 or more bytes",
        "it is what one device sends",
        "0 for nothing: the plan then leaves it out",
    ),
    "an operand that is not there": (
        said(operand=1),
        RuleError,
        TALKS,
        "operand=1",
        "an operand, 0..0",
        "the op has 1",
        "the position of the operand that is sent",
    ),
    "an axis that is not there": (
        said(axes=(0, 1)),
        RuleError,
        TALKS,
        "axes=(0, 1)",
        "axes of the placement, 0..0",
        "the placement has 1",
        "such as layout.axes(dim)",
    ),
    "no list of communications": (
        planned("a b -> a b", communication=lambda ctx: None),
        RuleError,
        TALKS,
        "None",
        "a list of sbp.rules.Communication",
        "the plan lists each, with its bytes",
        "return [talk], or yield it; [] for none",
    ),
}
MESSAGES: Messages = {**BODIES, **DECLARED}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_whole_message(name: str) -> None:
    check_message(*MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_it_is_a_rule_error(name: str) -> None:
    assert {KINDS[kind] for kind, _ in kinds(MESSAGES[name][0])} == {RuleError}


def test_what_is_declared_may_be_said() -> None:
    def body(ctx: Any, x: Any) -> list[Any]:
        return [2 * x + 0 * ctx.shift(x, [0], 1)]

    np.testing.assert_array_equal(run(body, communication=permutes)(), 2 * X)
