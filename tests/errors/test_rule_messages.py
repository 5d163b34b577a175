"""Every message to the author of a rule, a body or a talk, whole."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import KINDS, RuleError
from sbp.hardware import Hardware, Link
from sbp.rules import Row, Talk, register_rule
from tests.errors.messages import Call, Messages, check_message, kinds
from tests.rules.test_users_ops import primitive

pytestmark = pytest.mark.usefixtures("forgotten")
LINE = sbp.placement("cpu", shape=(8,))
# Ops are slow and sending is free, so that everything that can be split is.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)
OPTIONS = sbp.Options(hardware=SPLITTING)
X = np.ones((16, 6), np.float32)
DOUBLE = primitive("authors_double", lambda x: 2 * x)
PRODUCT = primitive("authors_product", lambda x, w: x @ w)
AT = "at {line}"
RULE = f"the rule of 'authors_double' {AT}"
BODY = f"the body of 'authors_double' {AT}"
TALKS = f"the talks of 'authors_double' {AT}"
REGISTER = "register_rule('authors_double')"
SIGNATURES = "S(dim), B, P, P('max') or P('min')"
LIST = "an op may have several results, so a body always returns a list"
EACH = "return one array per result, in their order"
SHARD = "local.results[0].local is the shape of a shard, padding included"


def model(x: Any) -> Any:
    return DOUBLE.bind(sbp.annotate(x, [S(0)]))


def planned(rows: Any, **options: Any) -> Call:
    """The plan of a program whose op has such a rule."""

    def call() -> Any:
        register_rule(DOUBLE, rows, **options)
        return sbp.compile(model, LINE, options=OPTIONS).plan(X)

    return call


def run(body: Callable[..., Any] | None, rows: Any = "a b -> a b", **options: Any) -> Call:
    """A run of a program whose op has such a body."""

    def call() -> Any:
        register_rule(DOUBLE, rows, local=body, **options)
        return sbp.compile(model, LINE, options=OPTIONS)(X)

    return call


def listed(row: Any) -> Call:
    """A plan with a rule of this one row."""
    return planned(lambda op: [row])


def text(letters: str, **options: Any) -> Call:
    """A rule of letters is registered."""
    return lambda: register_rule(DOUBLE, letters, **options)


def said(**talk: Any) -> Call:
    """A plan with a rule that declares this."""
    known: dict[str, Any] = {"kind": "permute", "axes": (0,), "wire_bytes": 8, "operand": 0, "reason": "so"}
    return planned("a b -> a b", talks=lambda local: [Talk(**{**known, **talk})])


def talking(local: Any, x: Any) -> list[Any]:
    """What a neighbour has, and what all have."""
    return [x + 0 * local.shifted(x, [0], 1) + 0 * local.gathered(x, [0])[0]]


def permutes(local: Any) -> Iterator[Talk]:
    yield Talk("permute", (0,), 48, 0, "the row before is needed; it lies over {axes}")


ROWS: Messages = {
    "one row and no list": (
        planned(lambda op: Row((B,), (B,))),
        RuleError,
        RULE,
        "(B,) -> (B,)",
        "a list of rows, or a generator",
        "a rule lists every signature that is valid, as many as there are",
        "return [row], or yield it",
    ),
    "no rows": (
        planned(lambda op: None),
        RuleError,
        RULE,
        "None",
        "a list of rows, or a generator",
        "a rule lists every signature that is valid, as many as there are",
        "return [row], or yield it",
    ),
    "what is no row": (
        listed(((S(0),), (S(0),))),
        RuleError,
        RULE,
        "((S(0),), (S(0),))",
        "sbp.rules.Row(operands, results), with a tuple of signatures each",
        "a rule returns rows, one for each signature that is valid",
        "from sbp.rules import Row",
    ),
    "a list in a row": (
        listed(Row([S(0)], (S(0),))),  # type: ignore[arg-type]
        RuleError,
        RULE,
        "[S(0)] -> (S(0),)",
        "a tuple of signatures",
        "the operands of a row are a list; rows are compared and remembered",
        "operands=(S(0),)",
    ),
    "a signature and no tuple": (
        listed(Row((S(0),), S(0))),  # type: ignore[arg-type]
        RuleError,
        RULE,
        "(S(0),) -> S(0)",
        "a tuple of signatures",
        "the results of a row are a Split; rows are compared and remembered",
        "results=(S(0),)",
    ),
    "no signature in a row": (
        listed(Row((S,), (B,))),  # type: ignore[arg-type]
        RuleError,
        RULE,
        "(<class 'sbp.signature.Split'>,) -> (B,)",
        SIGNATURES,
        "the type Split among the operands is no signature of one axis",
        "such as (S(0), B)",
    ),
    "too many signatures": (
        listed(Row((S(0), B), (S(0),))),
        RuleError,
        RULE,
        "(S(0), B) -> (S(0),)",
        "1 operands -> 1 results",
        "a row has one signature per operand and per result",
        "see the table of ops for examples",
    ),
    "a split of a dim that is not there": (
        listed(Row((S(0),), (S(2),))),
        RuleError,
        RULE,
        "(S(0),) -> (S(2),)",
        "S(0)..S(1), B or P",
        "S(2) splits a dim that result 0, of shape (16, 6), does not have",
        "count dims from 0",
    ),
    "a split of a dim from behind": (
        listed(Row((S(-1),), (S(1),))),
        RuleError,
        RULE,
        "(S(-1),) -> (S(1),)",
        "S(0)..S(1), B or P",
        "S(-1) splits a dim that operand 0, of shape (16, 6), does not have",
        "S(1): rows count dims from 0",
    ),
    "a reason with an unknown place": (
        listed(Row((S(0),), (S(0),), reason="{rows} are split")),
        RuleError,
        f"the rule of 'authors_double', Row(reason=...) {AT}",
        "'{rows} are split'",
        "{axes}, or no place",
        "nothing fills in {rows}: a plan knows the names of the axes alone",
        "write numbers into the text (an f-string with {{axes}}), and braces of its own twice",
    ),
    "letters that do not fit": (
        planned("a -> a"),
        RuleError,
        RULE,
        "(16, 6) -> (16, 6)",
        "one letter per dim, one size per letter",
        "('a',) for a shape of 2 dims",
        "`_` for a dim that must be whole",
    ),
}

TEXTS: Messages = {
    "no arrow": (
        text("a b"),
        RuleError,
        REGISTER,
        "'a b'",
        "one '->', such as \"b k, k n -> b n\"",
        "the arrow stands between the letters of the operands and those of the results",
        "'b -> b' for an op of rows",
    ),
    "a letter that no operand has": (
        text("a b -> a c"),
        RuleError,
        REGISTER,
        "'a b -> a c'",
        "letters of the operands in the results",
        "nothing says which part of 'c' a device makes: no operand has it",
        "`_` for a dim that is made whole, or a body of your own: local=",
    ),
    "an unknown letter is reduced": (
        text("a b -> a", reduced={"k": "sum"}),
        RuleError,
        REGISTER,
        "reduced={'k': 'sum'}",
        "letters that a result of 'a b -> a' lacks: b",
        "'k' is in no operand",
        "a letter of the operands that is reduced",
    ),
    "a letter that stays is reduced": (
        text("a b -> a b", reduced={"a": "sum"}),
        RuleError,
        REGISTER,
        "reduced={'a': 'sum'}",
        "letters that a result of 'a b -> a b' lacks: there are none",
        "every result has 'a'",
        "a letter of the operands that is reduced",
    ),
    "a reduction that is none": (
        text("a b -> a", reduced={"b": "mean"}),
        RuleError,
        REGISTER,
        "reduced={'b': 'mean'}",
        "'sum', 'max', 'min'",
        "devices put their parts together by one of these",
        "a mean is a sum that a body of your own divides; without the letter the dim stays whole",
    ),
    "linear in an operand that is not there": (
        text("a b, b -> a b", linear=(3,)),
        RuleError,
        REGISTER,
        "linear=(3,)",
        "positions of operands: 0, 1",
        "'a b, b -> a b' has 2 operands",
        "positions count from 0; leave linear out where the op is not linear",
    ),
}

BODIES: Messages = {
    "an array and no list": (
        run(lambda local, x: 2 * x),
        RuleError,
        BODY,
        "float32[2, 6]",
        "a list of 1 array",
        LIST,
        "return [y]",
    ),
    "nothing": (
        run(lambda local, x: None),
        RuleError,
        BODY,
        "a NoneType",
        "a list of 1 array",
        LIST,
        "return [y]",
    ),
    "too few results": (
        run(lambda local, x: []),
        RuleError,
        BODY,
        "a list of 0 arrays",
        "a list of 1 array",
        "a body returns a shard of every result",
        EACH,
    ),
    "another shape": (
        run(lambda local, x: [x[:1]]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "float32[1, 6]",
        "float32[2, 6]",
        "float32[16, 6] lies as [S(0)] on 8 devices",
        SHARD,
    ),
    "another dtype": (
        run(lambda local, x: [x.astype(jnp.int32)]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "int32[2, 6]",
        "float32[2, 6]",
        "float32[16, 6] lies as [S(0)] on 8 devices",
        "y.astype('float32')",
    ),
    "no array": (
        run(lambda local, x: ["x"]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "a str",
        "float32[2, 6]",
        "float32[16, 6] lies as [S(0)] on 8 devices",
        SHARD,
    ),
    "an op that is no other on its shards": (
        run(None, lambda op: [Row((S(0),), (S(1),))]),
        RuleError,
        f"the body of 'authors_double', result 0 {AT}",
        "float32[2, 6]",
        "float32[16, 1]",
        "float32[16, 6] lies as [S(1)] on 8 devices",
        "local=: a body of its own, with the parameters of a shard (local.bind(*args, shape=...))",
    ),
    "a body that talks of more than it says": (
        run(talking, talks=permutes),
        RuleError,
        BODY,
        "all_gather over 'x'",
        "permute over 'x'",
        "the plan would neither show nor price it",
        "talks=: a function of the same Local that yields sbp.rules.Talk('all_gather', ...)",
    ),
    "a body that talks, and says nothing": (
        run(lambda local, x: [local.total(x, [0]) - x]),
        RuleError,
        BODY,
        "all_reduce over 'x'",
        "none: the rule declares nothing",
        "the plan would neither show nor price it",
        "talks=: a function of the same Local that yields sbp.rules.Talk('all_reduce', ...)",
    ),
}

DECLARED: Messages = {
    "a reason that nothing fills in": (
        said(reason="needs {x} over {axes}"),
        RuleError,
        f"Talk(reason=...) of 'authors_double' {AT}",
        "'needs {x} over {axes}'",
        "{axes}, or no place",
        "nothing fills in {x}: a plan knows the names of the axes alone",
        "write numbers into the text (an f-string with {{axes}}), and braces of its own twice",
    ),
    "a reason with an open brace": (
        said(reason="needs {axes"),
        RuleError,
        f"Talk(reason=...) of 'authors_double' {AT}",
        "'needs {axes'",
        "{axes}, or no place",
        "nothing fills in a brace that is not closed: a plan knows the names of the axes alone",
        "write numbers into the text (an f-string with {{axes}}), and braces of its own twice",
    ),
    "a kind that is nearly one": (
        said(kind="allgather"),
        RuleError,
        f"Talk(kind=...) of 'authors_double' {AT}",
        "'allgather'",
        "all_reduce, all_gather, reduce_scatter, all_to_all, permute",
        "the plan lists it among the collectives of these kinds",
        "did you mean 'all_gather'?",
    ),
    "a kind that is none": (
        said(kind="psum"),
        RuleError,
        f"Talk(kind=...) of 'authors_double' {AT}",
        "'psum'",
        "all_reduce, all_gather, reduce_scatter, all_to_all, permute",
        "the plan lists it among the collectives of these kinds",
        "'all_reduce' for a sum, 'permute' to a neighbour",
    ),
    "fewer than no bytes": (
        said(wire_bytes=-4),
        RuleError,
        f"Talk(wire_bytes=...) of 'authors_double' {AT}",
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
    "no list of talks": (
        planned("a b -> a b", talks=lambda local: None),
        RuleError,
        TALKS,
        "None",
        "a list of sbp.rules.Talk",
        "the plan lists each, with its bytes",
        "return [talk], or yield it; [] for none",
    ),
}
MESSAGES: Messages = {**ROWS, **TEXTS, **BODIES, **DECLARED}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_whole_message(name: str) -> None:
    check_message(*MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_it_is_a_rule_error(name: str) -> None:
    assert {KINDS[kind] for kind, _ in kinds(MESSAGES[name][0])} == {RuleError}


def test_all_that_is_wrong_with_a_text_is_said_at_once() -> None:
    wrong = text("a b, b -> a c", reduced={"k": "mean"}, linear=(0, 2))
    assert kinds(wrong) == [("rule", REGISTER)] * 4


def test_all_rows_that_are_wrong_are_said_at_once() -> None:
    rows = [Row((S(0),), (S(2),)), Row((S(0),), (S(0),)), Row((S(-1),), (B, B))]
    assert len(kinds(planned(lambda op: rows))) == 3


def test_a_body_may_make_what_no_operand_has() -> None:
    text("a b -> a c", local=lambda local, x: [x])()


def test_what_is_declared_may_be_said() -> None:
    def body(local: Any, x: Any) -> list[Any]:
        return [2 * x + 0 * local.shifted(x, [0], 1)]

    np.testing.assert_array_equal(run(body, talks=permutes)(), 2 * X)


@pytest.mark.parametrize("shape", [(1, 4), (0, 4)], ids=str)
def test_a_dim_of_one_or_none_stays_whole(shape: tuple[int, ...]) -> None:
    register_rule(DOUBLE, lambda op: [Row((S(0),), (S(0),))])
    x = np.ones(shape, np.float32)
    np.testing.assert_array_equal(sbp.compile(DOUBLE.bind, LINE, options=OPTIONS)(x), 2 * x)


def test_sizes_of_letters_are_compared_with_the_line_in_the_message() -> None:
    register_rule(PRODUCT, "a b, c b -> a c")
    program = sbp.compile(lambda x, w: PRODUCT.bind(x, w), LINE, options=OPTIONS)
    check_message(
        lambda: program.plan(X, np.ones((6, 3), np.float32)),
        RuleError,
        f"the rule of 'authors_product' {AT}",
        "(16, 6), (6, 3) -> (16, 3)",
        "one letter per dim, one size per letter",
        "factor 'b' is 6 in one place and 3 in another",
        "`_` for a dim that must be whole",
    )
