"""Lookups of rows: gathers and scatters that read or add whole rows by their position along dim 0.

They become ops of their own, `sbp_lookup` and `sbp_add_rows`, whose rules offer the sparse exchange.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from sbp.communication.lookups import narrow_ids
from sbp.communication.wire import overflows
from sbp.errors import Problem
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Graph, Node, Operand, Source, make_node
from sbp.rules.lookups import add_rows_p, lookup_p
from sbp.signature import NdSbp, Split


@dataclass(frozen=True, slots=True)
class Transfer:
    """How rows travel.

    Arguments:
      capacity: keys that one device sends to one owner at a time; None to go by the batch.
      wire_dtype: the dtype in which rows travel; None for their own.
    """

    capacity: int | None = None
    wire_dtype: str | None = None


def _by_rows(
    shapes: Sequence[Sequence[int]],
    mapped: Sequence[int],
    removed: Sequence[int],
    batching: Sequence[int],
    window: Sequence[int],
) -> bool:
    """Whether whole rows of dim 0 are meant: one index each, and the row's dims last.

    Arguments:
      shapes: of the table, the indices, and the rows.
      mapped, removed, batching, window: the dims of `GatherDimensionNumbers`.
    """
    table, indices, rows = shapes
    return (
        len(table) > 1
        and tuple(mapped) == (0,)
        and tuple(removed) == (0,)
        and not batching
        and tuple(window) == tuple(range(len(indices) - 1, len(rows)))
        and tuple(rows[len(indices) - 1 :]) == tuple(table[1:])
    )


def reads_rows(node: Node, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a gather looks up rows.

    Arguments:
      shapes: of the table, the indices, and the result.
    """
    if node.op != "gather":
        return False
    dn = node.params["dimension_numbers"]
    return _by_rows(
        shapes, dn.start_index_map, dn.collapsed_slice_dims, dn.operand_batching_dims, dn.offset_dims
    )


def adds_rows(node: Node, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a scatter adds rows to a table.

    Arguments:
      shapes: of the table, the indices, and the rows; more are not looked at.
    """
    if node.op != "scatter-add":
        return False
    dn = node.params["dimension_numbers"]
    window, removed = dn.update_window_dims, dn.inserted_window_dims
    return _by_rows(shapes[:3], dn.scatter_dims_to_operand_dims, removed, dn.operand_batching_dims, window)


def adds_rows_of_groups(node: Node, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a scatter adds rows to tables of equal size in a stack, each group of ids to its own.

    Arguments:
      shapes: of the stack, "groups rows ...", the indices, "groups ... 1", and the rows.
    """
    if node.op != "scatter-add":
        return False
    dn = node.params["dimension_numbers"]
    stack, indices, rows = shapes[:3]
    return (
        len(stack) > 2
        and tuple(dn.scatter_dims_to_operand_dims) == tuple(dn.inserted_window_dims) == (1,)
        and tuple(dn.operand_batching_dims) == tuple(dn.scatter_indices_batching_dims) == (0,)
        and tuple(dn.update_window_dims) == tuple(range(len(indices) - 1, len(rows)))
        and tuple(rows[len(indices) - 1 :]) == tuple(stack[2:])
    )


def keys_of_groups(
    editor: Editor, indices: Operand, stack: Sequence[int], clips: bool, source: Source
) -> tuple[list[Node], Operand]:
    """The ops that make ids in the whole stack of those in its groups, and the ids; -1 is out of bounds."""
    height = stack[1]

    def flat(indices: jax.Array) -> jax.Array:
        ids = narrow_ids(lax.squeeze(indices, (indices.ndim - 1,)))
        ids = jnp.clip(ids, 0, height - 1) if clips else ids
        first = lax.broadcasted_iota(np.int32, ids.shape, 0) * np.int32(height)
        return jnp.where((ids >= 0) & (ids < height), ids.astype(np.int32) + first, np.int32(-1))

    made, (ids,) = editor.emit(flat, [indices], source)
    return made, ids


def mark_lookups(graph: Graph, transfer: Transfer) -> Graph:
    """The graph with every lookup of rows, and every addition of rows, as an op of its own."""
    if not any(node.op in ("gather", "scatter-add") for node in graph.walk()):
        return graph
    editor = Editor(graph)
    return editor.finish(_marked(editor, graph.nodes, transfer))


def _marked(editor: Editor, nodes: Sequence[Node], transfer: Transfer) -> list[Node]:
    """The ops of one body, its lookups marked; ids are made once of the same indices."""
    out: list[Node] = []
    known: dict[Operand, int] = {}
    for node in nodes:
        if _makes_ids(editor, node):
            (indices,) = node.inputs
            if indices in known:
                editor.substitute(node.outputs, [known[indices]])
                continue
            known[indices] = node.outputs[0]
        shapes = [editor.operand(x).shape for x in (*node.inputs, *node.outputs)]
        primitive = lookup_p if reads_rows(node, shapes) else add_rows_p if adds_rows(node, shapes) else None
        if primitive is None:
            bodies = tuple(replace(b, nodes=tuple(_marked(editor, b.nodes, transfer))) for b in node.bodies)
            out.append(replace(node, bodies=bodies) if bodies else node)
            continue
        table, indices, *rows = node.inputs
        if indices not in known:
            made, ids = keys_of(editor, indices, node.source)
            out += made
            known[indices] = ids
        params = {
            "mode": GatherScatterMode.from_any(node.params["mode"]),
            "fill_value": node.params.get("fill_value"),
            "capacity": transfer.capacity,
            "wire_dtype": transfer.wire_dtype,
            "samples": (),
        }
        inputs = (table, known[indices], *rows)
        out.append(make_node(node.id, primitive, inputs, node.outputs, params, node.source))
    return out


def check_wire(graph: Graph, lying: Iterable[tuple[Node, Sequence[NdSbp]]]) -> Iterator[Problem]:
    """What is wrong with the type in which rows travel: those of a split table could overflow in it.

    Arguments:
      lying: ops, and how their operands lie.
    """
    for node, operands in lying:
        wire = node.params.get("wire_dtype")
        if wire is None or Split(0) not in operands[0]:
            continue
        dtype = graph.operand(node.inputs[0]).dtype
        if overflows(dtype, wire):
            yield Problem(
                "argument",
                f"ExchangeOptions(dtype={wire!r}), a lookup at {node.source}",
                f"rows of {dtype}",
                f"{str(dtype)!r}, or None for the table's own",
                f"{dtype} has larger exponents than {wire}: its largest numbers would become infinite",
                "a table of float32, or leave the option out",
            )


def _makes_ids(editor: Editor, node: Node) -> bool:
    """Whether an op is the one that `keys_of` makes."""
    last = len(editor.operand(node.inputs[0]).shape) - 1 if node.op == "squeeze" else 0
    return node.op == "squeeze" and tuple(node.params["dimensions"]) == (last,)


def keys_of(editor: Editor, indices: Operand, source: Source) -> tuple[list[Node], int]:
    """The ops that make plain ids of index vectors of one entry, and the ids."""
    made, _ = editor.emit(lambda i: lax.squeeze(i, (i.ndim - 1,)), [indices], source)
    return made, made[-1].outputs[0]
