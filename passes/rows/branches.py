"""Lazy steps in branches: the step is taken in any case, on a gradient that is zero where it should not be.

A lazy step leaves rows without a gradient as they are, and their state too. So where one branch takes the
step and the others give nothing, as in `optax.apply_if_finite`, there need be no branch. XLA would copy whole
tables into it and out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import lazy
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, speaks
from sbp.passes.rows.gradients import Gradients


def flat_branches(graph: Graph) -> Graph:
    """The graph in which lazy steps are in no branch, as far as that changes nothing."""
    editor = Editor(graph)
    nodes = _flat(editor, graph.nodes)
    return editor.finish(nodes) if editor.instead else graph


def _flat(editor: Editor, nodes: Sequence[Node]) -> list[Node]:
    """The ops of one body, with such branches replaced."""
    out: list[Node] = []
    for node in nodes:
        bodies = tuple(replace(b, nodes=tuple(_flat(editor, b.nodes))) for b in node.bodies)
        node = editor.with_new_operands(replace(node, bodies=bodies)) if bodies else node
        out += (node.op == "cond" and _Branches.of(editor, node).flat()) or [node]
    return out


@dataclass(frozen=True)
class _Branches:
    """A choice between branches.

    Arguments:
      at: the number of the branch that takes steps.
      steps: the steps; none where not just one branch has any.
    """

    editor: Editor
    node: Node
    at: int
    steps: tuple[Node, ...]

    @staticmethod
    def of(editor: Editor, node: Node) -> _Branches:
        """Those of an op."""
        steps = [tuple(n for n in body.nodes if n.op == lazy.NAME) for body in node.bodies]
        having = [k for k, own in enumerate(steps) if own]
        at = having[0] if len(having) == 1 else -1
        return _Branches(editor, node, at, steps[at] if at >= 0 else ())

    def flat(self) -> list[Node] | None:
        """The ops of all branches, with the results chosen; None where the branches have to stay."""
        if not self.steps or any(speaks(n) for body in self.node.bodies for n in body.nodes):
            return None
        results = [self.of_step(k) for k in range(len(self.node.outputs))]
        tables = {self.shape(step.inputs[0]) for step in self.steps}
        chosen = [k for k, x in enumerate(results) if x is None]
        if any(self.shape(self.node.outputs[k]) in tables for k in chosen):
            return None  # a choice between tables is what a branch is better at
        edit, node = self.editor, self.node
        made, (which,) = edit.emit(self.clamp_index, node.inputs[:1], node.source)
        for body in node.bodies:
            edit.substitute(body.inputs, node.inputs[1:])
            made += self.step_ops(body, which) if body is node.bodies[self.at] else body.nodes
        for k, v in enumerate(node.outputs):
            x = results[k]
            if x is None:
                cases = [body.outputs[k] for body in node.bodies]
                ops, (x,) = edit.emit(lax.select_n, [which, *cases], node.source)
                made += ops
            edit.substitute([v], [x])
        return made

    def of_step(self, k: int) -> Operand | None:
        """The result of a step that a result is, where the others are what a step without a gradient gives;
        None for all else."""
        inside = [
            Gradients(self.editor, {v: n for n in b.nodes for v in n.outputs}) for b in self.node.bodies
        ]
        x = inside[self.at].origin(self.node.bodies[self.at].outputs[k])
        step = next((n for n in self.steps if x in n.outputs), None)
        if step is None:
            return None
        place, table = step.outputs.index(x), self.shape(step.inputs[0])
        before = None if place == 0 else self.outer_value(self.at, step.inputs[place])
        if place and not lazy.by_row(self.shape(x), table):
            return None
        for j, body in enumerate(self.node.bodies):
            other = body.outputs[k]
            same = (
                inside[j].zero(other)
                if place == 0
                else self.outer_value(j, inside[j].origin(other)) == before
            )
            if j != self.at and not same:
                return None
        return x

    def outer_value(self, j: int, x: Operand) -> Operand | None:
        """What a value that enters a branch is outside; None for others."""
        inputs = self.node.bodies[j].inputs
        return self.node.inputs[1 + inputs.index(x)] if not isinstance(x, Const) and x in inputs else None

    def step_ops(self, body: Body, which: Operand) -> list[Node]:
        """The ops of the branch with the steps, whose gradients are zero where another one is chosen."""
        out: list[Node] = []

        def kept(which: jax.Array, grad: jax.Array) -> jax.Array:
            return jnp.where(which == np.int32(self.at), grad, jnp.zeros((), grad.dtype))

        for node in body.nodes:
            if node in self.steps:
                made, (grad,) = self.editor.emit(kept, [which, node.inputs[0]], node.source)
                out += made
                node = replace(node, inputs=(grad, *node.inputs[1:]))
            out.append(node)
        return out

    def clamp_index(self, index: jax.Array) -> jax.Array:
        """The number of the branch that is taken."""
        return lax.clamp(np.int32(0), index, np.int32(len(self.node.bodies) - 1))

    def shape(self, x: Operand) -> tuple[int, ...]:
        """The shape of an operand."""
        return self.editor.operand(x).shape
