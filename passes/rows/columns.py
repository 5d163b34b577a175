"""A step of an optimizer on columns of rows: what it sums up over a row is added up over the devices.

Row-wise Adagrad has one number per row, the mean of all its squared gradients. Where a table is split by
columns a device has a part of each row. The step is traced for whole rows, each of its ops runs on the parts
by its rule, and a sum over columns is added up before anything is computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from sbp.communication.joint import results_of
from sbp.communication.protocol import Context
from sbp.compat import core
from sbp.layout import Layout
from sbp.lazy import Update
from sbp.passes.program.graph import Const, Graph, Operand
from sbp.passes.program.trace import trace
from sbp.passes.rows import rowwise
from sbp.rules import Row
from sbp.signature import B, NdSbp, P, Signature, Split


@dataclass(frozen=True)
class ColumnStep:
    """An optimizer's step on some columns of rows.

    Arguments:
      update: the step on whole rows.
      across: how its arguments lie: split by columns, or whole.
      sums: how many of its results are added up over the devices.
    """

    update: Update
    across: tuple[Signature, ...]
    sums: int

    def __call__(self, ctx: Context, width: int, *args: jax.Array) -> list[jax.Array]:
        """What is added to the rows, and their state.

        Arguments:
          ctx: of the op, whose table is split by columns.
          width: of a whole row.
          args: the gradient, "m d", the leaves of the state, the parameter: this device's parts.
        """
        structs = [
            core.struct((*x.shape[:-1], width) if isinstance(s, Split) else x.shape, x.dtype)
            for x, s in zip(args, self.across, strict=True)
        ]
        graph = trace(self.update, structs, {}).graph
        found = rows_of(graph, self.across)
        assert found is not None, "as for the shapes that it was planned for"
        return _Parts(ctx, graph, found, dict(zip(graph.inputs, args, strict=True))).run()


def column_step(update: Update, graph: Graph, across: Sequence[Signature]) -> ColumnStep | None:
    """The step on columns; None if it does more with columns than add them up.

    Arguments:
      graph: the step on whole rows.
      across: how its arguments lie.
    """
    found = rows_of(graph, across)
    if found is None:
        return None
    return ColumnStep(update, tuple(across), sum(P in row.results for row in found.values()))


def rows_of(graph: Graph, across: Sequence[Signature]) -> dict[int, Row] | None:
    """How each op of a step lies, by its id; None if one would have to send more than a sum."""
    walk = rowwise.SplitWalk(graph, dict(zip(graph.inputs, across, strict=True)), adds_up=True)
    return walk.rows if all(map(walk.visit, graph.nodes)) else None


@dataclass(frozen=True)
class _Parts:
    """The ops of a step, on the parts of one device."""

    ctx: Context
    graph: Graph
    rows: dict[int, Row]
    env: dict[int, jax.Array]

    def run(self) -> list[jax.Array]:
        """All ops; the results of the step."""
        ctx, hierarchy = self.ctx, self.ctx.operands[0].hierarchy
        for node in self.graph.nodes:
            row = self.rows[node.id]
            ins = [self.graph.operand(x) for x in node.inputs]
            outs = [self.graph.values[v] for v in node.outputs]
            takes = tuple(
                Layout(x.shape, self.nd(s), hierarchy) for x, s in zip(ins, row.operands, strict=True)
            )
            gives = tuple(
                Layout(x.shape, self.nd(s), hierarchy) for x, s in zip(outs, row.results, strict=True)
            )
            types = [x.dtype for x in ins]
            own = Context(node.primitive, node.params, takes, gives, ctx.coords, ctx.names, types)
            given = [self.part(x, layout) for x, layout in zip(node.inputs, takes, strict=True)]
            body = None if node.rule is None else node.rule.body
            made = results_of([own.bind(*given) if body is None else body(own, *given)])[0]
            for v, x, s in zip(node.outputs, made, row.results, strict=True):
                self.env[v] = ctx.total(x, self.axes) if s == P else x
        return [self.read(x) for x in self.graph.outputs]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that split the columns."""
        table = self.ctx.operands[0]
        return tuple(sorted(table.axes(len(table.shape) - 1)))

    def nd(self, signature: Signature) -> NdSbp:
        """How a tensor lies on all axes."""
        return tuple(signature if a in self.axes else B for a in range(len(self.ctx.operands[0].hierarchy)))

    def read(self, x: Operand) -> jax.Array:
        """A tensor, or a number."""
        return jax.numpy.asarray(np.asarray(x.value, x.dtype)) if isinstance(x, Const) else self.env[x]

    def part(self, x: Operand, layout: Layout) -> jax.Array:
        """A tensor as an op takes it: of what is the same all over, as much as a part has."""
        found = self.read(x)
        return found if found.shape == layout.local else found[tuple(map(slice, layout.local))]
