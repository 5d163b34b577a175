"""Rows, not tables, are trained: the step of a lazy optimizer on the rows that the batch looked up.

The gradient of lookups is a table of zeros to which rows are added. Where that gradient feeds a lazy
optimizer (`sbp.rows`) whose result is added to the table, the three become one op on the ids, the rows and
the table. Anywhere else the lazy optimizer becomes what it means, and the plan says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from sbp import lazy
from sbp.compat import core
from sbp.errors import Problem, raise_all
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Const, Graph, Node, Operand, Value, make_node, walk
from sbp.passes.program.trace import trace
from sbp.passes.rows import rowwise
from sbp.passes.rows.branches import flat_branches
from sbp.passes.rows.choices import branch_on_flags
from sbp.passes.rows.columns import ColumnStep, column_step
from sbp.passes.rows.gradient_accumulation import stack_rows
from sbp.passes.rows.gradients import AddedRows, Gradients, NotByRows, is_same
from sbp.passes.rows.kept_sums import add_rows_to_sums, is_sum
from sbp.passes.rows.lookups import Transfer
from sbp.passes.rows.measures import RESULTS, row_measure
from sbp.rules.row_sums import sum_rows_p
from sbp.rules.update import update_rows_p
from sbp.signature import B, Signature, Split
from sbp.text.units import bytes_text

BY_ROWS = "only the rows that were looked up are updated"


def train_rows(
    graph: Graph, transfer: Transfer, in_paths: Sequence[str] = (), *, strict: bool = False
) -> tuple[Graph, tuple[str, ...]]:
    """The graph with every lazy optimizer replaced, and a note for each.

    Arguments:
      in_paths: names of the leaves of the arguments.
      strict: whether what may not be finite gives what it gives on one device.

    Raises:
      ArgumentError: for all strict ones that need the whole table.
    """
    if not any(node.op == lazy.NAME for node in graph.walk()):
        return graph, ()
    graph = branch_on_flags(add_rows_to_sums(rows_of_loops(graph)), strict=strict)
    names = dict(zip(graph.inputs, in_paths, strict=False))
    pass_ = _Pass(Editor(graph), transfer, [], [], names, strict)
    nodes = pass_.rewritten(graph.nodes, graph.outputs)
    raise_all(pass_.problems)
    return pass_.editor.finish(nodes), tuple(pass_.notes)


def rows_of_loops(graph: Graph) -> Graph:
    """The graph in which loops hand out the rows of gradients that lazy optimizers take.

    A program with stages is made so as a whole: a stage runs the trips of its loop by itself.
    """
    lazy_steps = any(node.op == lazy.NAME for node in graph.walk())
    return stack_rows(flat_branches(graph)) if lazy_steps else graph


@dataclass(frozen=True)
class _Pass:
    editor: Editor
    transfer: Transfer
    notes: list[str]
    problems: list[Problem]
    names: Mapping[int, str]
    strict: bool

    def rewritten(
        self, nodes: Sequence[Node], outputs: Sequence[Operand], how_often: str = "in each step"
    ) -> list[Node]:
        """The ops of one body with its lazy optimizers replaced, and what is measured of their gradients."""
        scope = _Scope(self.editor, nodes, outputs, self.strict)
        steps = {node.id: self.replace_step(scope, node, how_often) for node in nodes if node.op == lazy.NAME}
        out: list[Node] = []
        for node in nodes:
            made = steps.get(node.id) or scope.row_measure(node, self.transfer)
            if made is not None:
                out += made
                continue
            inside = "where the branch is taken" if node.op == "cond" else how_often
            bodies = tuple(
                replace(b, nodes=tuple(self.rewritten(b.nodes, b.outputs, inside))) for b in node.bodies
            )
            out.append(replace(node, bodies=bodies))
        return [node for node in out if node.id not in scope.gone]

    def replace_step(self, scope: _Scope, node: Node, how_often: str) -> list[Node]:
        """The ops in place of a lazy optimizer."""
        at = f"sbp.rows at {node.source}"
        try:
            made = scope.row_step(node, self.transfer)
        except NotByRows as why:
            if node.params["update"].strict:
                self.problems.append(_dense(at, scope.table_name(node, self.names), str(why)))
            size = bytes_text(scope.written_bytes(node))
            self.notes.append(f"{at}: {lazy.WHOLE}, {size} with its state {how_often}, since {why}")
            return scope.whole(node)
        done = "rows are added to a sum that is kept" if is_sum(node) else BY_ROWS
        self.notes.append(f"{at}: {done}")
        return made


def _inner(node: Node) -> Iterator[Node]:
    """The ops inside a loop or a branch."""
    for body in node.bodies:
        yield from walk(body.nodes)


class _Scope:
    """The ops of one body, by what they make and what uses it; `gone` are those that others replace."""

    def __init__(
        self, editor: Editor, nodes: Sequence[Node], outputs: Sequence[Operand], strict: bool
    ) -> None:
        self.editor, self.outputs = editor, outputs
        self.maker = {v: node for node in nodes for v in node.outputs}
        self.gradients = Gradients(editor, self.maker, strict)
        self.tables: dict[int, Operand] = {}
        """By the op that adds up a gradient: the table that is trained with it."""
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

    def written_bytes(self, node: Node) -> float:
        """What a step on the whole table writes: that, and its state."""
        written = map(self.editor.operand, node.outputs)
        return float(sum(math.prod(x.shape) * core.itemsize(x.dtype) for x in written))

    def row_step(self, node: Node, transfer: Transfer) -> list[Node]:
        """The step on rows alone.

        Raises:
          NotByRows: if it needs the whole table.
        """
        addition, table = self.addition(node)
        parts = self.gradients.parts(node.inputs[0])
        columns, across = _columns(node, [self.editor.operand(x) for x in node.inputs])
        params = {
            "update": node.params["update"],
            "columns": columns,
            "column_step": across,
            "additive": _additive(node, [self.editor.operand(x) for x in node.inputs]),
            **_exchange(parts, transfer),
        }
        state = node.inputs[1 : len(node.outputs)]
        inputs = (table, *state, *(p.ids for p in parts), *(p.rows for p in parts))
        outputs = (addition.outputs[0], *node.outputs[1:])
        self.gone.add(addition.id)
        self.tables |= {p.scatter: table for p in parts}
        step = make_node(node.id, update_rows_p, inputs, outputs, params, node.source)
        return [*(n for p in parts for n in p.makers), step]

    def row_measure(self, node: Node, transfer: Transfer) -> list[Node] | None:
        """The ops in place of a reduction of a gradient by rows; None for all others."""
        found = row_measure(self.gradients, node) if self.tables else None
        if found is None:
            return None
        tables = {self.tables.get(p.scatter) for p in found.parts}
        table = tables.pop()
        if table is None or tables or self.follows(table, node):
            return None
        params = {"measure": found.measure, **_exchange(found.parts, transfer)}

        def run(*operands: jax.Array) -> jax.Array:
            return RESULTS[node.op](sum_rows_p.bind(*operands, **params)[0])

        operands = table, *(p.ids for p in found.parts), *(p.rows for p in found.parts)
        made, results = self.editor.emit(run, operands, node.source)
        self.editor.substitute(node.outputs, results)
        return [*(n for p in found.parts for n in p.makers), *made]

    def follows(self, x: Operand, node: Node) -> bool:
        """Whether an operand is made after an op."""
        maker = None if isinstance(x, Const) else self.maker.get(x)
        return maker is not None and self.position[maker.id] > self.position[node.id]

    def addition(self, node: Node) -> tuple[Node, Operand]:
        """The op that adds what the optimizer gives to the table, and the table.

        Raises:
          NotByRows: if there is none, or if it is not all that is done with it.
        """
        added = node.outputs[0]
        users = self.users.get(added, [])
        if len(users) != 1 or added in self.outputs or users[0].op != "add":
            raise NotByRows("its result is not just added to the table")
        first, second = users[0].inputs
        table = second if first == added else first
        if self.editor.operand(table).shape != self.editor.operand(added).shape:
            raise NotByRows("its result is not just added to the table")
        if node.params["update"].has_param and node.inputs[-1] != table:
            raise NotByRows(
                "its result is added to something else than the parameter that the optimizer was given"
            )
        if self.follows(table, node):
            raise NotByRows("the table that its result is added to is not known yet")
        return users[0], table

    def table_name(self, node: Node, names: Mapping[int, str]) -> str:
        """What the user calls the table of a lazy optimizer, with its type and shape."""
        added = next((u for u in self.users.get(node.outputs[0], ()) if u.op == "add"), None)
        tables = [
            *(x for x in (added.inputs if added else ()) if x != node.outputs[0]),
            *(node.inputs[-1:] if node.params["update"].has_param else []),
        ]
        found = (names.get(y) for x in tables if not isinstance(y := self.origin(x), Const))
        value = self.editor.operand(node.inputs[0])
        name = next((name for name in found if name), "a table")
        return f"{name}: {value.dtype}[{', '.join(map(str, value.shape))}]"

    def origin(self, x: Operand) -> Operand:
        """What an operand is, behind ops that hand it on or only shape it."""
        node = None if isinstance(x, Const) else self.maker.get(x)
        return (
            self.origin(node.inputs[0]) if node is not None and (is_same(node) or node.op == "reshape") else x
        )


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


def _exchange(parts: Sequence[AddedRows], transfer: Transfer) -> dict[str, Any]:
    """How keys and rows travel, as parameters of an op."""
    return {
        "modes": tuple(p.mode for p in parts),
        "grouped": all(p.grouped for p in parts),
        "capacity": transfer.capacity,
        "wire_dtype": transfer.wire_dtype,
        "samples": (),
    }


def _columns(
    node: Node, operands: Sequence[Value | Const]
) -> tuple[tuple[Signature, ...] | None, ColumnStep | None]:
    """How the state lies where the table is split by columns, and the step there if it adds columns up.

    No way for the state to lie if the step mixes columns otherwise.

    Arguments:
      operands: the gradient, the leaves of the state, and the parameter if it is given.

    Raises:
      NotByRows: if the step mixes rows.
    """
    update, grad = node.params["update"], operands[0]
    state, params = operands[1 : len(node.outputs)], 1 if update.has_param else 0
    by_row: list[Signature] = [Split(0) if lazy.by_row(x.shape, grad.shape) else B for x in state]
    if not _apart(update, operands, [Split(0), *by_row, *[Split(0)] * params]):
        raise NotByRows("its update is not known to treat every row by itself")
    last = len(grad.shape) - 1
    across: list[Signature] = [Split(last) if x.shape == grad.shape else B for x in state]
    lying = [Split(last), *across, *[Split(last)] * params]
    if last == 0:
        return None, None
    if _apart(update, operands, lying):
        return tuple(across), None
    structs = [core.struct(x.shape, x.dtype) for x in operands]
    step = column_step(update, trace(update, structs, {}).graph, lying)
    return (None if step is None else tuple(across)), step


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
