"""Rows, not tables, are trained: the step of a lazy optimizer on the rows that the batch looked up.

The gradient of lookups is a table of zeros to which rows are added. Where that gradient feeds a lazy
optimizer (`sbp.rows`) whose result is added to the table, the three become one op on the ids, the rows and
the table. Anywhere else the lazy optimizer becomes what it means, and the plan says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.lax import GatherScatterMode

from sbp import lazy
from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.errors import Problem, raise_all
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Const, Graph, Node, Operand, Value, make_node, walk
from sbp.passes.program.trace import trace
from sbp.passes.rows import rowwise
from sbp.passes.rows.lookups import (
    Transfer,
    adds_rows,
    adds_rows_of_groups,
    keys_of,
    keys_of_groups,
)
from sbp.rules.update import update_rows_p
from sbp.signature import B, Signature, Split


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Rows that are added to zeros.

    Arguments:
      ids: "..." integers.
      rows: "... d".
      mode: what happens to ids that are out of bounds.
      made: the ops that make ids and rows of what the graph has.
      grouped: whether the ids of a group are rows of its own part of the table.
    """

    ids: Operand
    rows: Operand
    mode: GatherScatterMode
    made: tuple[Node, ...]
    grouped: bool = False


class _NotByRows(Exception):
    """Why a step needs the whole table."""


def train_rows(
    graph: Graph, transfer: Transfer, in_paths: Sequence[str] = ()
) -> tuple[Graph, tuple[str, ...]]:
    """The graph with every lazy optimizer replaced, and a note for each.

    Arguments:
      in_paths: names of the leaves of the arguments.

    Raises:
      ArgumentError: for all strict ones that need the whole table.
    """
    if not any(node.op == lazy.NAME for node in graph.walk()):
        return graph, ()
    pass_ = _Pass(Editor(graph), transfer, [], [], dict(zip(graph.inputs, in_paths, strict=False)))
    nodes = pass_.rewritten(graph.nodes, graph.outputs)
    raise_all(pass_.problems)
    return pass_.editor.finish(nodes), tuple(pass_.notes)


@dataclass(frozen=True)
class _Pass:
    editor: Editor
    transfer: Transfer
    notes: list[str]
    problems: list[Problem]
    names: Mapping[int, str]

    def rewritten(self, nodes: Sequence[Node], outputs: Sequence[Operand]) -> list[Node]:
        """The ops of one body with its lazy optimizers replaced."""
        scope = _Scope(self.editor, nodes, outputs)
        out: list[Node] = []
        for node in nodes:
            if node.op == lazy.NAME:
                out += self.replaced(scope, node)
                continue
            bodies = tuple(replace(b, nodes=tuple(self.rewritten(b.nodes, b.outputs))) for b in node.bodies)
            out.append(replace(node, bodies=bodies))
        return [node for node in out if node.id not in scope.gone]

    def replaced(self, scope: _Scope, node: Node) -> list[Node]:
        """The ops in place of a lazy optimizer."""
        at = f"sbp.rows at {node.source}"
        try:
            made = scope.fused(node, self.transfer)
        except _NotByRows as why:
            if node.params["update"].strict:
                self.problems.append(_dense(at, scope.named(node, self.names), str(why)))
            self.notes.append(f"{at}: the whole table is updated, since {why}")
            return scope.whole(node)
        self.notes.append(f"{at}: only the rows that were looked up are updated")
        return made


def _inner(node: Node) -> Iterator[Node]:
    """The ops inside a loop or a branch."""
    for body in node.bodies:
        yield from walk(body.nodes)


class _Scope:
    """The ops of one body, by what they make and what uses it; `gone` are those that others replace."""

    def __init__(self, editor: Editor, nodes: Sequence[Node], outputs: Sequence[Operand]) -> None:
        self.editor, self.outputs = editor, outputs
        self.maker = {v: node for node in nodes for v in node.outputs}
        self.position = {node.id: i for i, node in enumerate(nodes)}
        self.users: dict[int, list[Node]] = {}
        for node in nodes:
            read = [*node.inputs, *(x for n in _inner(node) for x in n.inputs)]
            for x in dict.fromkeys(x for x in read if not isinstance(x, Const)):
                self.users.setdefault(x, []).append(node)
        self.gone: set[int] = set()

    def whole(self, node: Node) -> list[Node]:
        """What a lazy optimizer means, on the whole table."""
        update = node.params["update"]
        made, results = self.editor.emit(
            lambda *args: lazy.dense(*args, update=update), node.inputs, node.source
        )
        self.editor.substitute(node.outputs, results)
        return made

    def fused(self, node: Node, transfer: Transfer) -> list[Node]:
        """The step on rows alone.

        Raises:
          _NotByRows: if it needs the whole table.
        """
        addition, table = self.addition(node)
        parts = self.parts(node.inputs[0])
        columns = _columns(node, [self.editor.operand(x) for x in node.inputs])
        params = {
            "update": node.params["update"],
            "modes": tuple(p.mode for p in parts),
            "columns": columns,
            "additive": _additive(node, [self.editor.operand(x) for x in node.inputs]),
            "grouped": all(p.grouped for p in parts),
            "capacity": transfer.capacity,
            "wire_dtype": transfer.wire_dtype,
            "samples": (),
        }
        state = node.inputs[1 : len(node.outputs)]
        inputs = (table, *state, *(p.ids for p in parts), *(p.rows for p in parts))
        outputs = (addition.outputs[0], *node.outputs[1:])
        self.gone.add(addition.id)
        step = make_node(node.id, update_rows_p, inputs, outputs, params, node.source)
        return [*(n for p in parts for n in p.made), step]

    def addition(self, node: Node) -> tuple[Node, Operand]:
        """The op that adds what the optimizer gives to the table, and the table.

        Raises:
          _NotByRows: if there is none, or if it is not all that is done with it.
        """
        added = node.outputs[0]
        users = self.users.get(added, [])
        if len(users) != 1 or added in self.outputs or users[0].op != "add":
            raise _NotByRows("its result is not just added to the table")
        first, second = users[0].inputs
        table = second if first == added else first
        if self.editor.operand(table).shape != self.editor.operand(added).shape:
            raise _NotByRows("its result is not just added to the table")
        if node.params["update"].has_param and node.inputs[-1] != table:
            raise _NotByRows(
                "its result is added to something else than the parameter that the optimizer was given"
            )
        maker = None if isinstance(table, Const) else self.maker.get(table)
        if maker is not None and self.position[maker.id] > self.position[node.id]:
            raise _NotByRows("the table that its result is added to is not known yet")
        return users[0], table

    def parts(self, grad: Operand) -> tuple[AddedRows, ...]:
        """The rows that a gradient is the sum of.

        Raises:
          _NotByRows: if it is not known to be one.
        """
        node = None if isinstance(grad, Const) else self.maker.get(grad)
        if node is None:
            raise _NotByRows("its gradient comes from outside")
        if _is_same(node):
            return self.parts(node.inputs[0])
        if node.op in ("add_any", "add"):
            return tuple(p for x in node.inputs for p in self.parts(x))
        if node.op in ("neg", "convert_element_type"):
            return tuple(self.each(p, node, ()) for p in self.parts(node.inputs[0]))
        if node.op in ("mul", "div"):
            return self.scaled(node)
        if node.op == "reshape":
            return (self.groups(node),)
        shapes = [self.editor.operand(x).shape for x in node.inputs]
        if not adds_rows(node, shapes) or not self.zero(node.inputs[0]):
            raise _NotByRows(f"its gradient does not come only from lookups: {node.op} at {node.source}")
        made, ids = keys_of(self.editor, node.inputs[1], node.source)
        mode = GatherScatterMode.from_any(node.params["mode"])
        return (AddedRows(ids, node.inputs[2], mode, tuple(made)),)

    def groups(self, reshape: Node) -> AddedRows:
        """The rows of tables in a stack, "groups rows ...", which the gradient has one after the other."""
        node = self.source(reshape.inputs[0])
        if node is not None:
            shapes = [self.editor.operand(x).shape for x in node.inputs]
            stack, flat = shapes[0], self.editor.operand(reshape.outputs[0]).shape
            merged = len(stack) > 2 and flat == (stack[0] * stack[1], *stack[2:])
            if merged and adds_rows_of_groups(node, shapes) and self.zero(node.inputs[0]):
                clips = GatherScatterMode.from_any(node.params["mode"]) == GatherScatterMode.CLIP
                made, ids = keys_of_groups(self.editor, node.inputs[1], stack, clips, node.source)
                return AddedRows(ids, node.inputs[2], GatherScatterMode.FILL_OR_DROP, tuple(made), True)
        raise _NotByRows(f"its gradient does not come only from lookups: reshape at {reshape.source}")

    def named(self, node: Node, names: Mapping[int, str]) -> str:
        """What the user calls the table of a lazy optimizer, with its type and shape."""
        added = next((u for u in self.users.get(node.outputs[0], ()) if u.op == "add"), None)
        tables = [x for x in (added.inputs if added else ()) if x != node.outputs[0]]
        tables += node.inputs[-1:] if node.params["update"].has_param else []
        found = (names.get(y) for x in tables if not isinstance(y := self.behind(x), Const))
        value = self.editor.operand(node.inputs[0])
        name = next((name for name in found if name), "a table")
        return f"{name}: {value.dtype}[{', '.join(map(str, value.shape))}]"

    def behind(self, x: Operand) -> Operand:
        """What an operand is, behind ops that hand it on or only shape it."""
        node = None if isinstance(x, Const) else self.maker.get(x)
        return (
            self.behind(node.inputs[0])
            if node is not None and (_is_same(node) or node.op == "reshape")
            else x
        )

    def source(self, x: Operand) -> Node | None:
        """The op that makes an operand, behind those that hand it on."""
        node = None if isinstance(x, Const) else self.maker.get(x)
        return self.source(node.inputs[0]) if node is not None and _is_same(node) else node

    def scaled(self, node: Node) -> tuple[AddedRows, ...]:
        """The rows of a gradient that is multiplied or divided by a number."""
        first, second = (self.scalar(x) for x in node.inputs)
        by, of = (second, 0) if second is not None else (first, 1)
        if by is None or (node.op == "div" and of == 1):
            raise _NotByRows(f"its gradient does not come only from lookups: {node.op} at {node.source}")
        # Zero times infinity is NaN, in every row of a table.
        number = np.asarray(by.value, np.float64) if isinstance(by, Const) else np.float64("nan")
        if not np.isfinite(number) or (node.op == "div" and number == 0):
            raise _NotByRows(f"its gradient is scaled by a number that may not be finite: {node.source}")
        return tuple(self.each(p, node, (by,)) for p in self.parts(node.inputs[of]))

    def each(self, part: AddedRows, node: Node, scalars: tuple[Operand, ...]) -> AddedRows:
        """The same rows after an op that treats every element alike."""
        run = _EACH[node.op](self.editor.operand(node.outputs[0]).dtype)
        made, (rows,) = self.editor.emit(run, [part.rows, *scalars], node.source)
        return replace(part, rows=rows, made=(*part.made, *made))

    def scalar(self, x: Operand) -> Operand | None:
        """The number that an operand is, or is made of; None if it is a tensor."""
        if not self.editor.operand(x).shape:
            return x
        node = None if isinstance(x, Const) else self.maker.get(x)
        return self.scalar(node.inputs[0]) if node is not None and node.op == "broadcast_in_dim" else None

    def zero(self, x: Operand) -> bool:
        """Whether an operand is known to be zero all over."""
        number = self.scalar(x)
        return isinstance(number, Const) and not np.any(np.asarray(number.value))


def _dense(where: str, table: str, why: str) -> Problem:
    """What is wrong with a step that was to be on rows alone."""
    return Problem(
        "argument",
        where,
        f"{table}, updated whole",
        'a step on rows that were looked up, for sbp.rows(..., dense="error")',
        why,
        "a table whose gradient is of lookups alone, and a step that is just added to it; or "
        'dense="note", which says so in the plan',
    )


_EACH: dict[str, Callable[[DType], Callable[..., jax.Array]]] = {
    "neg": lambda dtype: lambda rows: -rows,
    "convert_element_type": lambda dtype: lambda rows: rows.astype(dtype),
    "mul": lambda dtype: lambda rows, number: rows * number,
    "div": lambda dtype: lambda rows, number: rows / number,
}


def _columns(node: Node, operands: Sequence[Value | Const]) -> tuple[Signature, ...] | None:
    """How the state lies where the table is split by columns, or None if the step mixes columns.

    Arguments:
      operands: the gradient, the leaves of the state, and the parameter if it is given.

    Raises:
      _NotByRows: if the step mixes rows.
    """
    update, grad = node.params["update"], operands[0]
    state, params = operands[1 : len(node.outputs)], 1 if update.has_param else 0
    by_row: list[Signature] = [Split(0) if lazy.by_row(x.shape, grad.shape) else B for x in state]
    if not _apart(update, operands, [Split(0), *by_row, *[Split(0)] * params]):
        raise _NotByRows("its update is not known to treat every row by itself")
    last = len(grad.shape) - 1
    across: list[Signature] = [Split(last) if x.shape == grad.shape else B for x in state]
    ok = last > 0 and _apart(update, operands, [Split(last), *across, *[Split(last)] * params])
    return tuple(across) if ok else None


def _additive(node: Node, operands: Sequence[Value | Const]) -> bool:
    """Whether the steps of addends of a gradient add up to the step of their sum."""
    update, grad, state = node.params["update"], operands[0], operands[1 : len(node.outputs)]
    if any(lazy.by_row(x.shape, grad.shape) for x in state):
        return False
    graph = trace(update, [core.struct(x.shape, x.dtype) for x in operands], {}).graph
    used = {x for n in graph.walk() for x in n.inputs if not isinstance(x, Const)} | set(graph.outputs)
    param = {graph.inputs[len(state) + 1]} if update.has_param else set()
    return not param & used and rowwise.additive(graph)


def _apart(update: lazy.Update, operands: Sequence[Value | Const], lying: Sequence[Signature]) -> bool:
    """Whether a step treats by itself whatever stands at one place of the dims that are split.

    Its ops are asked, and its numbers: they may not change with the size of those dims.
    """

    def traced(longer: int) -> Graph:
        shapes = [
            tuple(n + longer * (s == Split(d)) for d, n in enumerate(x.shape))
            for x, s in zip(operands, lying, strict=True)
        ]
        avals = [core.struct(s, x.dtype) for s, x in zip(shapes, operands, strict=True)]
        return trace(update, avals, {}).graph

    graph = traced(0)
    results = rowwise.along(graph, dict(zip(graph.inputs, lying, strict=False)))
    return results == list(lying[: len(graph.outputs)]) and _numbers(graph) == _numbers(traced(1))


def _numbers(graph: Graph) -> list[tuple[str, ...]]:
    """The ops of a function with the numbers that stand in them."""
    lines = [(node.op, node.inputs) for node in graph.nodes]
    return [
        (op, *(str(x.value) for x in xs if isinstance(x, Const))) for op, xs in [*lines, ("", graph.outputs)]
    ]


def _is_same(node: Node) -> bool:
    """Whether an op gives back what it is given."""
    return node.rule is not None and node.rule.identity
