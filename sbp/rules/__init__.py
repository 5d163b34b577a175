"""What each op does to signatures: one entry per op, by family. Importing this package loads them all."""

from sbp.rules import (
    attention,
    contract,
    elementwise,
    index,
    linalg,
    ordered,
    random,
    reduce,
    shape,
    shift,
    structure,
    update,
    windows,
)
from sbp.rules.entry import Matmul, Op, Row, Rule
from sbp.rules.lookups import add_rows_p, lookup_p
from sbp.rules.registry import REGISTRY, lookup, register_rule
from sbp.talk.local import Talk

__all__ = [
    "REGISTRY",
    "Matmul",
    "Op",
    "Row",
    "Rule",
    "Talk",
    "add_rows_p",
    "attention",
    "contract",
    "elementwise",
    "index",
    "linalg",
    "lookup",
    "lookup_p",
    "ordered",
    "random",
    "reduce",
    "register_rule",
    "shape",
    "shift",
    "structure",
    "update",
    "windows",
]
