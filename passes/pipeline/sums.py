"""What is added up over micro-batches, kept apart: a sum for each placement that adds to it.

The gradient of a weight that several stages use (a tied embedding) is a sum over stages. Inside the loop each
stage adds up its own part; they meet once, after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp import compat
from sbp.annotation import scope_of
from sbp.passes.edit import Editor
from sbp.passes.graph import Body, Const, Graph, Node, Operand, Source
from sbp.passes.pipeline.where import Where, loop_of

ADDS = ("add", "add_any")
WIDENS = "convert_element_type"


@dataclass(frozen=True, slots=True)
class Sum:
    """A carried value that is only added to.

    Arguments:
      carry: which.
      addends: what is added, of the loop's body.
      gone: the ops that add them up.
    """

    carry: int
    addends: tuple[Operand, ...]
    gone: tuple[Node, ...]


def split_sums(graph: Graph, where: Where) -> Graph:
    """The graph with sums of several placements kept apart inside the loop over micro-batches."""
    loop = loop_of(graph)
    if loop is None:
        return graph
    n_const, n_carry = compat.scan_counts(loop.params, len(loop.inputs))
    (body,) = loop.bodies
    found = sums_of(body, body.inputs[n_const : n_const + n_carry])
    torn = [s for s in found if len(_places(s, where)) > 1]
    return _Rewriting(Editor(graph), where, loop, n_const, n_carry).run(torn) if torn else graph


def sums_of(body: Body, carried: Sequence[int]) -> list[Sum]:
    """The carried values that are only added to."""
    return [s for k, v in enumerate(carried) if (s := _sum(body, v, k)) is not None]


def _places(s: Sum, where: Where) -> dict[int, list[Operand]]:
    """The addends of each placement."""
    out: dict[int, list[Operand]] = {}
    for x in s.addends:
        out.setdefault(0 if isinstance(x, Const) else where.home(x), []).append(x)
    return out


def _sum(body: Body, carried: int, k: int) -> Sum | None:
    """The sum that a carried value is, if it is one."""
    makers = {v: n for n in body.nodes for v in n.outputs}
    uses: dict[int, int] = {}
    for x in (*(x for n in body.nodes for x in n.inputs), *body.outputs):
        if not isinstance(x, Const):
            uses[x] = uses.get(x, 0) + 1
    out = body.outputs[k]
    last = None if isinstance(out, Const) else makers.get(out)
    if last is None or last.op not in ADDS or carried not in last.inputs or uses[carried] != 1:
        return None
    gone = [last]

    def addends(x: Operand) -> list[Operand]:
        node = None if isinstance(x, Const) else makers.get(x)
        if node is None or node.op not in (*ADDS, WIDENS) or isinstance(x, Const) or uses[x] != 1:
            return [x]
        if node.op == WIDENS and len(below := addends(node.inputs[0])) == 1:
            return [x] if below == [node.inputs[0]] else below
        gone.append(node)
        return [y for operand in node.inputs for y in addends(operand)]

    first, second = last.inputs
    return Sum(k, tuple(addends(second if first == carried else first)), tuple(gone))


@dataclass
class _Rewriting:
    editor: Editor
    where: Where
    loop: Node
    n_const: int
    n_carry: int

    def run(self, sums: Sequence[Sum]) -> Graph:
        """The graph with a carried value for each placement of each of the sums."""
        loop, (body,) = self.loop, self.loop.bodies
        gone = {n.id for s in sums for n in s.gone}
        nodes = [n for n in body.nodes if n.id not in gone]
        enters, leaves, begins, results = list[int](), list[Operand](), list[Operand](), list[int]()
        before, after = list[Node](), list[Node]()
        outs, ends = list(loop.outputs), list(body.outputs)
        for s in sums:
            parts = _places(s, self.where)
            carried, result = body.inputs[self.n_const + s.carry], loop.outputs[s.carry]
            outs[s.carry] = self.like(result)
            total: Operand = outs[s.carry]
            first = min(parts)
            for at, addends in sorted(parts.items()):
                source = self.source(at)
                if at == first:
                    made, end = self.added(carried, addends, source)
                    ends[s.carry] = end
                else:
                    enters.append(self.like(carried))
                    results.append(self.like(result))
                    value = self.editor.operand(carried)
                    zeros, (zero,) = self.editor.emit(lambda v=value: jnp.zeros(v.shape, v.dtype), [], source)
                    made, end = self.added(enters[-1], addends, source)
                    leaves.append(end)
                    begins.append(zero)
                    before += zeros
                    meet, (total,) = self.editor.emit(lax.add, [total, results[-1]], self.source(first))
                    after += meet
                nodes += made
            self.editor.substitute([result], [total])
        cut, n = self.n_const + self.n_carry, self.n_carry
        whole = Body(
            (*body.inputs[:cut], *enters, *body.inputs[cut:]),
            tuple(nodes),
            (*ends[:n], *leaves, *ends[n:]),
        )
        wired = replace(
            loop,
            inputs=(*loop.inputs[:cut], *begins, *loop.inputs[cut:]),
            outputs=(*outs[:n], *results, *outs[n:]),
            bodies=(whole,),
            params=loop_params(loop.params, self.n_const, n + len(enters)),
        )
        outer: list[Node] = []
        for node in self.editor.graph.nodes:
            outer += [*before, wired, *after] if node is loop else [node]
        return self.editor.finish(outer)

    def like(self, v: int) -> int:
        """A new value like another."""
        value = self.editor.operand(v)
        return self.editor.builder.value(value, value.name)

    def source(self, at: int) -> Source:
        """The line of the loop, and the scope of a placement."""
        return replace(self.loop.source, scope=scope_of(self.where.placements[at]))

    def added(self, carried: int, addends: Sequence[Operand], source: Source) -> tuple[list[Node], Operand]:
        """The ops that add to a carried value."""

        def fn(total: Any, *xs: Any) -> Any:
            terms = [x.astype(total.dtype) for x in xs]
            whole = terms[0]
            for x in terms[1:]:
                whole = whole + x
            return total + whole

        made, (end,) = self.editor.emit(fn, [carried, *addends], source)
        return made, end


def loop_params(params: Mapping[str, Any], consts: int, carry: int) -> dict[str, Any]:
    """The parameters of a loop with other numbers of operands; the loop itself is its body from now on."""
    kept = {name: params[name] for name in ("length", "reverse", "unroll")}
    return {**kept, "num_consts": consts, "num_carry": carry}
