"""Measures of gradients by rows: norms of them and checks of them, which are sums over their rows.

A reduction over all elements of a gradient by rows needs no table: each owner of rows measures those that
were looked up, their duplicates added up, and the others count for nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.passes.program.graph import Const, Node, Operand
from sbp.passes.rows.gradients import AddedRows, Gradients

_COUNTS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "reduce_sum": lambda x: x,
    "reduce_and": lambda x: (~x).astype(np.int32),
    "reduce_or": lambda x: x.astype(np.int32),
}
"""What is summed up for each reduction,"""

RESULTS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "reduce_sum": lambda total: total,
    "reduce_and": lambda total: total == 0,
    "reduce_or": lambda total: total > 0,
}
"""and what that says."""


@dataclass(frozen=True, eq=False)
class Measure:
    """What a reduction sums up of rows: ops that treat every element by itself.

    Arguments:
      reduction: one of `RESULTS`.
      nodes: the ops, in order.
      of: the gradient.
      result: what is reduced.
      numbers: what stands for operands that are one number all over.
    """

    reduction: str
    nodes: tuple[Node, ...]
    of: int
    result: int
    numbers: Mapping[int, Const] = field(default_factory=dict)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Of each element of some rows, what counts."""
        known = {self.of: rows}

        def value(x: Operand) -> jax.Array:
            if isinstance(x, Const) or x not in known:
                number = x if isinstance(x, Const) else self.numbers[x]
                return jnp.broadcast_to(jnp.asarray(number.value, number.dtype), rows.shape)
            return known[x]

        for node in self.nodes:
            given = [value(x) for x in node.inputs]
            (known[node.outputs[0]],) = core.bind(node.primitive, given, dict(node.params))
        return _COUNTS[self.reduction](known[self.result])

    def skips_zeros(self, dtype: DType) -> bool:
        """Whether elements of a type that are zero count for nothing."""
        with jax.ensure_compile_time_eval():
            return not np.any(np.asarray(self(jnp.zeros((1,), dtype))))


@dataclass(frozen=True)
class MeasuredRows:
    """A measure, and the rows of the gradient that it is of."""

    measure: Measure
    parts: tuple[AddedRows, ...]


def row_measure(gradients: Gradients, node: Node) -> MeasuredRows | None:
    """What a reduction measures of a gradient by rows; None for other ops, and other gradients."""
    if node.op not in RESULTS or len(node.params["axes"]) != len(gradients.shape(node.inputs[0])):
        return None
    search = _Search(gradients)
    if isinstance(node.inputs[0], Const) or not search.follows(node.inputs[0]) or search.of is None:
        return None
    measure = Measure(node.op, tuple(search.nodes), search.of, node.inputs[0], search.numbers)
    skips = measure.skips_zeros(gradients.editor.operand(search.of).dtype)
    return MeasuredRows(measure, search.parts) if skips else None


@dataclass
class _Search:
    """The ops between a gradient and what is reduced."""

    gradients: Gradients
    of: int | None = None
    parts: tuple[AddedRows, ...] = ()
    nodes: list[Node] = field(default_factory=list)
    numbers: dict[int, Const] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def follows(self, x: Operand) -> bool:
        """Whether an operand is made of one gradient by rows and of numbers, each element by itself."""
        if isinstance(x, Const) or x in self.seen:
            return True
        self.seen.add(x)
        number = self.gradients.number(x)
        if number is not None:
            self.numbers[x] = number
            return True
        node = self.gradients.maker.get(x)
        if self.begins(x):
            return True
        if node is None or node.rule is None or not node.rule.pointwise or len(node.outputs) != 1:
            return False
        if not all(map(self.follows, node.inputs)):
            return False
        self.nodes.append(node)
        return True

    def begins(self, x: int) -> bool:
        """Whether an operand is the gradient; there may be one."""
        parts = self.gradients.rows(x)
        if parts is None or self.of not in (None, x):
            return False
        self.of, self.parts = x, parts
        return True
