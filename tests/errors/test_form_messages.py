"""Every message about what is written where signatures belong: where, got, legal, why, try."""

import pytest
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp import AUTO, B, S
from sbp.errors import SignatureError
from sbp.signature import Broadcast
from tests.errors.messages import Messages, check_message
from tests.errors.test_program_messages import LINE, X, double, of

FORMS = "[S(0), B], a PartitionSpec, a NamedSharding, sbp.AUTO or None"
OPEN = "sbp.AUTO (or None) where the compiler may choose"
PREFIX = "signatures are a pytree prefix, so containers must match"
TEXT = "a text is no signature"

MESSAGES: Messages = {
    "prefix of another tree": (
        lambda: of(lambda p: p["w"], {"w": X}, in_sbp=({"v": AUTO},)),
        SignatureError,
        "in_sbp[0]",
        "a dict with keys 'v'",
        "a dict with keys 'w', or one signature for all of it",
        "'v' is not there, 'w' has no entry",
        "{'w': ...} with " + OPEN,
    ),
    "a list for a dict": (
        lambda: of(lambda a: a["p"]["w"], {"p": {"w": X, "b": X}}, in_sbp=({"p": [[S(0), B], AUTO]},)),
        SignatureError,
        "in_sbp[0]['p']",
        "a list of 2",
        "a dict with keys 'b', 'w', or one signature for all of it",
        f"a list of 2 stands for a dict with keys 'b', 'w': {PREFIX}",
        "{'b': ..., 'w': ...} with " + OPEN,
    ),
    "a dict for a list": (
        lambda: of(lambda a: a[0], [X, X, X, X, X], in_sbp=({"w": [S(0), B]},)),
        SignatureError,
        "in_sbp[0]",
        "a dict with keys 'w'",
        "a list of 5, or one signature for all of it",
        f"a dict with keys 'w' stands for a list of 5: {PREFIX}",
        "[..., ..., ..., ..., and so on] with " + OPEN,
    ),
    "a signature in quotes": (
        lambda: of(in_sbp=["B", "S(1)"]),
        SignatureError,
        "in_sbp",
        "['B', 'S(1)']",
        FORMS,
        TEXT,
        "[B, S(1)], without quotes",
    ),
    "an argument's signature in quotes": (
        lambda: of(in_sbp=(["B", "S(1)"],)),
        SignatureError,
        "in_sbp[0]",
        "['B', 'S(1)']",
        FORMS,
        TEXT,
        "[B, S(1)], without quotes",
    ),
    "a signature in quotes in a list as long as what it is for": (
        lambda: of(lambda p: p[0], [X, X], in_sbp=([S(0), "B"],)),
        SignatureError,
        "in_sbp[0]",
        "[S(0), 'B']",
        FORMS,
        TEXT,
        "[S(0), B], without quotes",
    ),
    "a leaf's signature in quotes": (
        lambda: of(lambda p: p["w"], {"w": X}, in_sbp=({"w": "[S(0), B]"},)),
        SignatureError,
        "in_sbp[0]['w']",
        "'[S(0), B]'",
        FORMS,
        TEXT,
        "[S(0), B], without quotes",
    ),
    "a result's signature in quotes": (
        lambda: of(out_sbp=[B, "S0"]),
        SignatureError,
        "out_sbp",
        "[B, 'S0']",
        FORMS,
        TEXT,
        "[B, S(0)], without quotes",
    ),
    "names of axes without PartitionSpec": (
        lambda: of(in_sbp=(("data", None),)),
        SignatureError,
        "in_sbp[0]",
        "('data', None)",
        FORMS,
        TEXT,
        "PartitionSpec('data', None), if these are names of axes",
    ),
    "S without a dim": (
        lambda: sbp.compile(double, LINE, in_sbp=S).plan(X),
        SignatureError,
        "in_sbp",
        repr(S),
        FORMS,
        "S alone does not say which dim is split",
        "S(0) for the first dim, S(1) for the next",
    ),
    "S without a dim in a list": (
        lambda: of(in_sbp=([B, S],)),
        SignatureError,
        "in_sbp[0]",
        repr([B, S]),
        FORMS,
        "S alone does not say which dim is split",
        "[B, S(0)]",
    ),
    "classes for signatures": (
        lambda: of(in_sbp=([Broadcast, S(0)],)),
        SignatureError,
        "in_sbp[0]",
        repr([Broadcast, S(0)]),
        FORMS,
        "Broadcast is a class",
        "[B, S(0)]",
    ),
    "AUTO for an axis": (
        lambda: of(in_sbp=([S(0), AUTO],)),
        SignatureError,
        "in_sbp[0]",
        "[S(0), AUTO]",
        FORMS,
        "None and AUTO are for a whole tensor, not for one axis of the placement",
        "[S(0), B]",
    ),
    "a dim for a signature": (
        lambda: of(in_sbp=([0, None],)),
        SignatureError,
        "in_sbp[0]",
        "[0, None]",
        FORMS,
        "a number does not say that the dim is split; "
        "None and AUTO are for a whole tensor, not for one axis of the placement",
        "[S(0), B]",
    ),
    "PartitionSpec without names": (
        lambda: of(in_sbp=(Spec,)),
        SignatureError,
        "in_sbp[0]",
        repr(Spec),
        FORMS,
        "PartitionSpec alone names no axis",
        "PartitionSpec('data')",
    ),
    "container for a tensor": (
        lambda: of(out_sbp=([S(0), B],)),
        SignatureError,
        "out_sbp",
        "a tuple of 1",
        "one signature",
        f"a tuple of 1 stands for one tensor, float32[8, 8]: {PREFIX}",
        OPEN,
    ),
    "no signature at all": (
        lambda: of(in_sbp=("data",)),
        SignatureError,
        "in_sbp[0]",
        "'data'",
        FORMS,
        TEXT,
        "PartitionSpec('data'), if it is the name of an axis",
    ),
    "something else": (
        lambda: of(in_sbp=(2.5,)),
        SignatureError,
        "in_sbp[0]",
        "2.5",
        FORMS,
        "a float is none of them",
        "sbp.AUTO lets the compiler choose",
    ),
    "a PartitionSpec with the inner axis first": (
        lambda: of(in_sbp=(Spec(("model", "data")),)),
        SignatureError,
        "x: float32[8, 8], in_sbp",
        str(Spec(("model", "data"))),
        "dim 0 split by ('data', 'model')",
        "a signature splits outer axis first; this spec names an inner axis before an outer one",
        "exchange the names, or make a placement with the axes in that order",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])
