"""Gradients that a loop adds up: the loop hands out rows, and they are added to a table once, behind it.

Micro-batches, and every scan that accumulates, carry the sum of their gradients: a table of zeros to which
each trip adds rows. Where a lazy optimizer takes that sum, the rows of all trips are stacked instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sbp import lazy
from sbp.compat import core
from sbp.passes.program.control import ADDS, loop_params
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, used_nodes
from sbp.passes.rows.gradients import AddedRows, Gradients
from sbp.passes.rows.lookups import adds_rows
from sbp.rules.update import added_rows


def stack_rows(graph: Graph) -> Graph:
    """The graph in which loops hand out the rows of gradients that lazy optimizers take."""
    editor = Editor(graph)
    nodes = _stacked(editor, graph.nodes)
    return editor.finish(nodes) if editor.instead else graph


def _stacked(editor: Editor, nodes: Sequence[Node]) -> list[Node]:
    """The ops of one body, with such loops replaced."""
    maker = {v: node for node in nodes for v in node.outputs}
    taken = _behind_steps(nodes)
    out: list[Node] = []
    for node in nodes:
        bodies = tuple(replace(b, nodes=tuple(_stacked(editor, b.nodes))) for b in node.bodies)
        node = replace(node, bodies=bodies) if bodies else node
        # A pipeline runs the trips of its loop itself.
        is_whole = node.op == "scan" and all(n.role.part is None for n in node.bodies[0].nodes)
        sums = _sums(editor, maker, node, taken) if is_whole else {}
        out += _handing_out(editor, node, sums) if sums else [node]
    return out


def _behind_steps(nodes: Sequence[Node]) -> set[int]:
    """What the gradients of lazy steps are made of, element by element."""
    maker = {v: node for node in nodes for v in node.outputs}
    left: list[Operand] = [node.inputs[0] for node in nodes if node.op == lazy.NAME]
    found = set[int]()
    while left:
        x = left.pop()
        if isinstance(x, Const) or x in found:
            continue
        found.add(x)
        rule = maker[x].rule if x in maker else None
        if rule is not None and (rule.pointwise or rule.identity):
            left += maker[x].inputs
    return found


def _sums(
    editor: Editor, maker: Mapping[int, Node], loop: Node, taken: set[int]
) -> dict[int, tuple[AddedRows, ...]]:
    """The rows that each trip adds to what a loop carries, by its position; of what is taken alone."""
    consts, carry = core.scan_counts(loop.params, len(loop.inputs))
    around, found = Gradients(editor, maker), dict[int, tuple[AddedRows, ...]]()
    for k in range(carry):
        if loop.outputs[k] in taken and around.zero(loop.inputs[consts + k]):
            rows = _Trip(editor, loop.bodies[0], loop.bodies[0].inputs[consts + k]).rows(k)
            found |= {} if rows is None else {k: rows}
    return found


@dataclass(frozen=True)
class _Trip:
    """A trip of a loop that adds to something that it carries.

    Arguments:
      carried: what that is when the trip begins.
    """

    editor: Editor
    body: Body
    carried: int

    def rows(self, k: int) -> tuple[AddedRows, ...] | None:
        """The rows that are added to what leaves at position `k`; None if that is not all that happens."""
        gradients = Gradients(self.editor, {v: node for node in self.body.nodes for v in node.outputs})
        found = self.added_rows(gradients, self.body.outputs[k])
        others = [x for i, x in enumerate(self.body.outputs) if i != k]
        made = (n for part in found or () for n in part.makers)
        left = used_nodes(
            (*self.body.nodes, *made), [*others, *(x for p in found or () for x in (p.ids, p.rows))]
        )
        read = {*others, *(x for node in left for x in node.inputs)}
        return None if self.carried in read or any(p.grouped for p in found or ()) else found

    def added_rows(self, gradients: Gradients, x: Operand) -> tuple[AddedRows, ...] | None:
        """The rows that were added to what is carried; None if it is something else."""
        if gradients.origin(x) == self.carried:
            return ()
        node = gradients.source(x)
        if node is None:
            return None
        if node.op in ADDS:
            for own, other in (node.inputs, node.inputs[::-1]):
                before = self.added_rows(gradients, own)
                rows = None if before is None else gradients.rows(other)
                if before is not None and rows is not None:
                    return (*before, *rows)
        elif adds_rows(node, [gradients.shape(y) for y in node.inputs]):
            before = self.added_rows(gradients, node.inputs[0])
            return None if before is None else (*before, gradients.added_rows(node))
        return None


def _handing_out(editor: Editor, loop: Node, sums: Mapping[int, tuple[AddedRows, ...]]) -> list[Node]:
    """A loop that hands out rows in place of their sums, and the ops that add them up."""
    (body,), length = loop.bodies, int(loop.params["length"])
    consts, carry = core.scan_counts(loop.params, len(loop.inputs))
    parts = [part for each in sums.values() for part in each]
    given = [x for each in sums.values() for x in (*(p.ids for p in each), *(p.rows for p in each))]
    gone, stacks = {consts + k for k in sums}, list[int]()
    for x in map(editor.operand, given):
        stacks.append(editor.builder.value(core.struct((length, *x.shape), x.dtype), "rows"))
    outputs = (*(x for k, x in enumerate(body.outputs) if k not in sums), *given)
    nodes = used_nodes((*body.nodes, *(n for part in parts for n in part.makers)), outputs)
    inputs = tuple(x for i, x in enumerate(body.inputs) if i not in gone)
    made = [
        replace(
            loop,
            inputs=tuple(x for i, x in enumerate(loop.inputs) if i not in gone),
            outputs=(*(v for k, v in enumerate(loop.outputs) if k not in sums), *stacks),
            params=loop_params(loop.params, consts, carry - len(sums)),
            bodies=(Body(inputs, nodes, outputs),),
        )
    ]
    left = iter(stacks)
    for k, each in sums.items():
        like = editor.operand(loop.outputs[k])
        run = partial(added_rows, like.shape, like.dtype, [part.mode for part in each])
        ops, results = editor.emit(run, [next(left) for _ in range(2 * len(each))], loop.source)
        editor.substitute([loop.outputs[k]], results)
        made += ops
    return made
