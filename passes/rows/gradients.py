"""Gradients by rows: what a table's gradient is the sum of, as far as it comes from lookups.

The gradient of lookups is a table of zeros to which rows are added. Ops that treat all its elements alike, by
a number at the most, do so to those rows. Where a number is not finite, rows that nobody looked up stay zero
(docs/decisions/0004).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from sbp.compat.untyped import DType
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Const, Node, Operand
from sbp.passes.rows.lookups import adds_rows, adds_rows_of_groups, keys_of, keys_of_groups


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Rows that are added to zeros.

    Arguments:
      ids: "..." integers.
      rows: "... d".
      mode: what happens to ids that are out of bounds.
      makers: the ops that make ids and rows of what the graph has.
      scatter: the op that adds them.
      grouped: whether the ids of a group are rows of its own part of the table.
    """

    ids: Operand
    rows: Operand
    mode: GatherScatterMode
    makers: tuple[Node, ...]
    scatter: int
    grouped: bool = False


class NotByRows(Exception):
    """Why a step needs the whole table."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of one body of ops.

    Arguments:
      maker: the op that makes each value.
      strict: whether numbers of the run may not scale rows, since they may not be finite.
    """

    editor: Editor
    maker: Mapping[int, Node]
    strict: bool = False

    def parts(self, grad: Operand) -> tuple[AddedRows, ...]:
        """The rows that a gradient is the sum of.

        Raises:
          NotByRows: if it is not known to be one.
        """
        node = None if isinstance(grad, Const) else self.maker.get(grad)
        if node is None:
            raise NotByRows(
                "its gradient is a table: an argument, a sum that the program keeps, or made outside of a "
                "loop or branch"
            )
        if is_same(node):
            return self.parts(node.inputs[0])
        if node.op in ("add_any", "add"):
            return tuple(p for x in node.inputs for p in self.parts(x))
        if node.op in ("neg", "convert_element_type"):
            return tuple(self.each(p, node, ()) for p in self.parts(node.inputs[0]))
        if node.op in ("mul", "div"):
            return self.scaled_rows(node)
        if node.op == "select_n":
            return self.selected_rows(node)
        if node.op == "reshape":
            return (self.groups(node),)
        if not adds_rows(node, list(map(self.shape, node.inputs))):
            raise NotByRows(f"its gradient does not come only from lookups: {node.op} at {node.source}")
        before = () if self.zero(node.inputs[0]) else self.parts(node.inputs[0])
        return (*before, self.added_rows(node))

    def added_rows(self, node: Node) -> AddedRows:
        """The rows that an op adds to a table."""
        made, ids = keys_of(self.editor, node.inputs[1], node.source)
        mode = GatherScatterMode.from_any(node.params["mode"])
        return AddedRows(ids, node.inputs[2], mode, tuple(made), node.id)

    def groups(self, reshape: Node) -> AddedRows:
        """The rows of tables in a stack, "groups rows ...", which the gradient has one after the other."""
        node = self.source(reshape.inputs[0])
        if node is not None:
            stack, flat = (self.editor.operand(x).shape for x in (node.outputs[0], reshape.outputs[0]))
            merged = len(stack) > 2 and flat == (stack[0] * stack[1], *stack[2:])
            found = self.of_groups(node) if merged else None
            if found is not None:
                return found
        raise NotByRows(f"its gradient does not come only from lookups: reshape at {reshape.source}")

    def rows(self, grad: Operand) -> tuple[AddedRows, ...] | None:
        """The rows that a gradient is the sum of, also of a stack of tables; None if it is not known to be
        one."""
        stack = self.source(grad)
        grouped = None if stack is None else self.of_groups(stack)
        if grouped is not None:
            return (grouped,)
        try:
            return self.parts(grad)
        except NotByRows:
            return None

    def of_groups(self, node: Node) -> AddedRows | None:
        """The rows that an op adds to a stack of zeros, "groups rows ..."."""
        shapes = list(map(self.shape, node.inputs))
        if not adds_rows_of_groups(node, shapes) or not self.zero(node.inputs[0]):
            return None
        clips = GatherScatterMode.from_any(node.params["mode"]) == GatherScatterMode.CLIP
        made, ids = keys_of_groups(self.editor, node.inputs[1], shapes[0], clips, node.source)
        mode = GatherScatterMode.FILL_OR_DROP
        return AddedRows(ids, node.inputs[2], mode, tuple(made), node.id, grouped=True)

    def source(self, x: Operand) -> Node | None:
        """The op that makes an operand, behind those that hand it on."""
        origin = self.origin(x)
        return None if isinstance(origin, Const) else self.maker.get(origin)

    def origin(self, x: Operand) -> Operand:
        """What an operand is, behind ops that hand it on."""
        node = None if isinstance(x, Const) else self.maker.get(x)
        return self.origin(node.inputs[0]) if node is not None and is_same(node) else x

    def scaled_rows(self, node: Node) -> tuple[AddedRows, ...]:
        """The rows of a gradient that is multiplied or divided by a number."""
        first, second = (self.scalar(x) for x in node.inputs)
        by, of = (second, 0) if second is not None else (first, 1)
        if by is None or (node.op == "div" and of == 1):
            raise NotByRows(f"its gradient does not come only from lookups: {node.op} at {node.source}")
        # Zero times infinity is NaN, in every row of a table.
        unknown = np.float64("nan" if self.strict else 1.0)
        number = np.asarray(by.value, np.float64) if isinstance(by, Const) else unknown
        if not np.isfinite(number) or (node.op == "div" and number == 0):
            raise NotByRows(f"its gradient is scaled by a number that may not be finite: {node.source}")
        return tuple(self.each(p, node, (by,)) for p in self.parts(node.inputs[of]))

    def selected_rows(self, node: Node) -> tuple[AddedRows, ...]:
        """The rows of one of several gradients of the same lookups, or of zeros, by one flag for all."""
        which = self.scalar(node.inputs[0])
        cases = [None if self.zero(x) else self.parts(x) for x in node.inputs[1:]]
        parts = next((case for case in cases if case is not None), ())
        lookups = {tuple(p.scatter for p in case) for case in cases if case is not None}
        if which is None or len(lookups) != 1:
            raise NotByRows(f"its gradient does not come only from lookups: {node.op} at {node.source}")
        run, out = partial(_chosen, cases=[case is not None for case in cases]), []
        for k, part in enumerate(parts):
            given = [case[k] for case in cases if case is not None]
            made, (rows,) = self.editor.emit(run, [which, *(x.rows for x in given)], node.source)
            out.append(replace(part, rows=rows, makers=(*(n for x in given for n in x.makers), *made)))
        return tuple(out)

    def each(self, part: AddedRows, node: Node, scalars: tuple[Operand, ...]) -> AddedRows:
        """The same rows after an op that treats every element alike."""
        run = _EACH[node.op](self.editor.operand(node.outputs[0]).dtype)
        made, (rows,) = self.editor.emit(run, [part.rows, *scalars], node.source)
        return replace(part, rows=rows, makers=(*part.makers, *made))

    def scalar(self, x: Operand) -> Operand | None:
        """The number that an operand is, or is made of; None if it is a tensor."""
        if not self.editor.operand(x).shape:
            return x
        node = None if isinstance(x, Const) else self.maker.get(x)
        return self.scalar(node.inputs[0]) if node is not None and node.op == "broadcast_in_dim" else None

    def shape(self, x: Operand) -> tuple[int, ...]:
        """The shape of an operand."""
        return self.editor.operand(x).shape

    def number(self, x: Operand) -> Const | None:
        """The number that a tensor is all over, if it is known before the run."""
        if self.zero(x):
            return Const(0, self.editor.operand(x).dtype)
        number = self.scalar(x)
        return number if isinstance(number, Const) else None

    def zero(self, x: Operand) -> bool:
        """Whether an operand is known to be zero all over."""
        if isinstance(x, Const):
            return not np.any(np.asarray(x.value))
        node = self.source(x)
        keeps = node is not None and node.op in _KEEP_ZERO and node.params.get("y", 1) > 0
        return node is not None and keeps and all(map(self.zero, node.inputs))


def _chosen(which: jax.Array, *given: jax.Array, cases: Sequence[bool]) -> jax.Array:
    """The rows of one case.

    Arguments:
      given: the rows of those that have any.
      cases: which have; the others are zero.
    """
    rows = iter(given)
    return lax.select_n(which, *(next(rows) if has else jnp.zeros_like(given[0]) for has in cases))


_KEEP_ZERO = frozenset(
    ("abs", "add", "broadcast_in_dim", "convert_element_type", "integer_pow", "mul", "neg", "square")
)

_EACH: dict[str, Callable[[DType], Callable[..., jax.Array]]] = {
    "neg": lambda dtype: lambda rows: -rows,
    "convert_element_type": lambda dtype: lambda rows: rows.astype(dtype),
    "mul": lambda dtype: lambda rows, number: rows * number,
    "div": lambda dtype: lambda rows, number: rows / number,
}


def is_same(node: Node) -> bool:
    """Whether an op gives back what it is given."""
    return node.rule is not None and node.rule.identity
