"""What each op does to signatures: one entry per op, by family. Importing this package loads them all."""

from sbp.rules import contract, elementwise, index, linalg, random, reduce, shape, structure, windows
from sbp.rules.registry import REGISTRY, Op, Row, Rule, lookup, register_rule

__all__ = [
    "REGISTRY",
    "Op",
    "Row",
    "Rule",
    "contract",
    "elementwise",
    "index",
    "linalg",
    "lookup",
    "random",
    "reduce",
    "register_rule",
    "shape",
    "structure",
    "windows",
]
