"""What the tests of messages to authors of rules, bodies and declarations share."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import sbp
from sbp import S
from sbp.hardware.catalogue import Hardware, Link
from sbp.rules import Communication, register_rule
from tests.errors.messages import Call
from tests.rules.test_users_ops import primitive

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
TALKS = f"the communication of 'authors_double' {AT}"
REGISTER = "register_rule('authors_double')"
SIGNATURES = "S(dim), B, P, P('max') or P('min')"
LIST = "an op may have several results, so a body always returns a list"
EACH = "return one array per result, in their order"
SHARD = "ctx.results[0].local is the shape of a shard, padding included"


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
        register_rule(DOUBLE, rows, body=body, **options)
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
    return planned("a b -> a b", communication=lambda ctx: [Communication(**{**known, **talk})])


def sending(ctx: Any, x: Any) -> list[Any]:
    """What a neighbour has, and what all have."""
    return [x + 0 * ctx.shift(x, [0], 1) + 0 * ctx.gather(x, [0])[0]]


def permutes(ctx: Any) -> Iterator[Communication]:
    yield Communication("permute", (0,), 48, 0, "the row before is needed; it lies over {axes}")
