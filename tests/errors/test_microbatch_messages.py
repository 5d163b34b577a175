"""Every message about parts of a batch, whole."""

from typing import Any

import jax.numpy as jnp
import pytest

import sbp
from sbp.errors import ArgumentError
from tests.errors.messages import Call, Messages, check_message

X, Y = jnp.zeros((6, 2)), jnp.zeros((4, 2))


def total(x: Any, y: Any) -> Any:
    return x.sum() + y.sum()


def rowless(x: Any, y: Any) -> Any:
    return jnp.zeros(5)


def called(fn: Any, n: Any, at: Any = 0, reduce: Any = "mean") -> Call:
    return lambda: sbp.microbatch(fn, n, batch_args=at, reduce=reduce)(X, Y)


WHERE = "microbatch(total, {}, ...)"
MESSAGES: Messages = {
    "no number of parts": (
        called(total, 0),
        ArgumentError,
        WHERE.format(0),
        "n=0",
        "an integer of at least 1",
        "a batch has parts",
        "n=4",
    ),
    "no such argument": (
        called(total, 2, 2),
        ArgumentError,
        WHERE.format(2),
        "batch_args=(2,)",
        "positions 0..1",
        "batch_args are positions of arguments of the call",
        "batch_args=1",
    ),
    "a batch that the parts do not divide": (
        called(total, 4),
        ArgumentError,
        WHERE.format(4),
        "args[0] of shape [6, 2]",
        "dim 0 a multiple of 4",
        "all parts have the same shape",
        "n=3, or a batch of 8",
    ),
    "batches of two sizes": (
        called(total, 2, (0, 1)),
        ArgumentError,
        WHERE.format(2),
        "args[0] has 6 rows, args[1] has 4 rows",
        "one size of batch",
        "a part has the same rows of every batch argument",
        "check batch_args",
    ),
    "no such way to combine": (
        called(total, 2, 0, "max"),
        ArgumentError,
        WHERE.format(2),
        "reduce='max'",
        "'mean', 'sum', 'rows', or a function that gives a part's weight",
        "results of the parts are combined",
        'reduce="mean"',
    ),
    "a result without rows": (
        called(rowless, 2, 0, "rows"),
        ArgumentError,
        'microbatch(..., reduce="rows")',
        "a result of shape [5] of each of 2 parts",
        "dim 0 of size 3",
        'with "rows" a result has a row per row of the batch',
        '"mean" or "sum" for it',
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])
