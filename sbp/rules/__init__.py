"""How each op acts on signatures: one entry per op, by family. Importing this package registers them all.

In: an application of an op. Out: its valid signatures, its work, and what its body sends. Used by: the
compiler and the runtime, through `lookup`.
"""

from sbp.communication.protocol import Communication
from sbp.rules import (
    attention,
    contract,
    elementwise,
    index,
    linalg,
    random,
    reduce,
    row_sums,
    shape,
    shift,
    structure,
    update,
    windows,
)
from sbp.rules.entry import Matmul, Op, Row, Rule
from sbp.rules.lookups import add_rows_p, lookup_p
from sbp.rules.registry import REGISTRY, lookup, register_rule

__all__ = [
    "REGISTRY",
    "Communication",
    "Matmul",
    "Op",
    "Row",
    "Rule",
    "add_rows_p",
    "attention",
    "contract",
    "elementwise",
    "index",
    "linalg",
    "lookup",
    "lookup_p",
    "random",
    "reduce",
    "register_rule",
    "row_sums",
    "shape",
    "shift",
    "structure",
    "update",
    "windows",
]
