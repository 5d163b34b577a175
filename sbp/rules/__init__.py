"""What each op does to signatures: one entry per op, by family. Importing this package loads them all."""

from sbp.rules import (
    contract,
    elementwise,
    index,
    linalg,
    ordered,
    random,
    reduce,
    shape,
    structure,
    windows,
)
from sbp.rules.registry import REGISTRY, Op, Row, Rule, Talk, lookup, register_rule

__all__ = [
    "REGISTRY",
    "Op",
    "Row",
    "Rule",
    "Talk",
    "contract",
    "elementwise",
    "index",
    "linalg",
    "lookup",
    "ordered",
    "random",
    "reduce",
    "register_rule",
    "shape",
    "structure",
    "windows",
]
