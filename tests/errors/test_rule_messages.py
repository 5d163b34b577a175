"""Every message to the author of a rule, whole: its rows, or its text of letters."""

import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import KINDS, RuleError
from sbp.rules import Row, register_rule
from tests.errors.messages import Messages, check_message, kinds
from tests.errors.rule_authors import (
    AT,
    DOUBLE,
    LINE,
    OPTIONS,
    PRODUCT,
    REGISTER,
    RULE,
    SIGNATURES,
    X,
    listed,
    planned,
    text,
)

pytestmark = pytest.mark.usefixtures("forgotten")

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
    "a second rule": (
        lambda: register_rule("sin", lambda op: [Row((B,), (B,))]),
        RuleError,
        "register_rule('sin')",
        "a second rule",
        "one rule per op",
        "'sin' already has a rule in 'elementwise'",
        "replace=True, if you mean to replace it",
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
        "`_` for a dim that is made whole, or a body of your own: body=",
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
        "'sum', 'max', 'min', 'prod', 'and', 'or', 'xor'",
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

MESSAGES: Messages = {**ROWS, **TEXTS}


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
    text("a b -> a c", body=lambda ctx, x: [x])()


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
