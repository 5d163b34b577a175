"""What is added up over micro-batches, kept apart: a sum for each stage that adds to it.

The gradient of a weight that several stages use (a tied embedding) is a sum over stages. Inside the loop each
stage adds up its own part, and waits for no other one; they meet once, after the last micro-batch.

JAX gives the gradients of all layers as a stack, which is then added to the sum of earlier micro-batches. For
that the stack is written and read, and takes memory beside the sum. If the scan takes slices of the sum, adds
its results to them, and stacks these, there is no such stack, and the sum is changed in place
(program/control.py).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.annotation import scope_of
from sbp.compat import core
from sbp.passes.pipeline.op_placement import OpPlacements, loop_of
from sbp.passes.pipeline.order import Order
from sbp.passes.program.control import ADDS, loop_params
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, Source, Value, number_nodes, walk

SCALES = "mul"
SELECTS = "select_n"
WIDENS = "convert_element_type"

Factor: TypeAlias = tuple[str, Operand]
"""`SCALES` and what a value is multiplied by, or `SELECTS` and the flags where zero stands in its place."""
Addend: TypeAlias = tuple[Operand, tuple[Factor, ...]]
"""A value, and what is done with it before it is added, in order."""
Home: TypeAlias = tuple[int, int]
"""A placement, and a stage on it."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A carried value that is only added to.

    Arguments:
      carry: which.
      addends: what is added, of the loop's body, with what is done with it first.
      additions: the ops that add them up.
    """

    carry: int
    addends: tuple[Addend, ...]
    additions: tuple[Node, ...]


def split_sums(graph: Graph, where: OpPlacements, order: Order) -> Graph:
    """The graph with sums of several stages kept apart inside the loop over micro-batches."""
    loop = loop_of(graph)
    if loop is None:
        return graph
    n_const, n_carry = core.scan_counts(loop.params, len(loop.inputs))
    (body,) = loop.bodies
    found = sums_of(body, body.inputs[n_const : n_const + n_carry])
    makers = {v: n.id for n in body.nodes for v in n.outputs}

    def home(x: Operand) -> Home:
        """The placement and the stage of an addend."""
        if isinstance(x, Const) or x not in makers:
            return 0 if isinstance(x, Const) else where.home(x), 0
        place = where.home(x)
        return place, order.parts[makers[x], place].at

    homes = {s.carry: _homes(s, home) for s in found}
    torn = [s for s in found if len(homes[s.carry]) > 1]
    if not torn:
        return graph
    return _Rewriting(Editor(graph), where, loop, n_const, n_carry, homes).run(torn)


def sums_of(body: Body, carried: Sequence[int]) -> list[Sum]:
    """The carried values that are only added to."""
    makers = {v: n for n in body.nodes for v in n.outputs}
    read = [x for n in walk(body.nodes) for x in n.inputs] + [x for b in _bodies(body) for x in b.outputs]
    uses = Counter(x for x in read if not isinstance(x, Const))
    return [s for k, v in enumerate(carried) if (s := _sum(body.outputs[k], v, k, makers, uses)) is not None]


def _bodies(body: Body) -> list[Body]:
    return [body, *(b for n in walk(body.nodes) for b in n.bodies)]


def _homes(s: Sum, home: Callable[[Operand], Home]) -> dict[Home, list[Addend]]:
    """The addends of each stage."""
    out: dict[Home, list[Addend]] = {}
    for addend in s.addends:
        out.setdefault(home(addend[0]), []).append(addend)
    return out


def _sum(
    out: Operand, carried: int, k: int, makers: Mapping[int, Node], uses: Mapping[int, int]
) -> Sum | None:
    """The sum that a carried value is, if it is one."""
    last = None if isinstance(out, Const) else makers.get(out)
    if last is None or last.op not in ADDS or carried not in last.inputs or uses[carried] != 1:
        return None
    gone = [last]

    def addends(x: Operand) -> list[Addend]:
        """What is added up to `x`; of a cast, a product or a selection, if there is more than one."""
        node = None if isinstance(x, Const) else makers.get(x)
        if node is None or isinstance(x, Const) or uses[x] != 1:
            return [(x, ())]
        if node.op in ADDS:
            gone.append(node)
            return [y for operand in node.inputs for y in addends(operand)]
        if node.op == WIDENS and len(below := addends(node.inputs[0])) > 1:
            gone.append(node)
            return below
        if node.op == SCALES:
            for one, other in (node.inputs, node.inputs[::-1]):
                if len(below := addends(one)) > 1:
                    gone.append(node)
                    return [(y, (*factors, (SCALES, other))) for y, factors in below]
        clears = node.op == SELECTS and len(node.inputs) == 3 and _zero(node.inputs[2], makers)
        if clears and len(below := addends(node.inputs[1])) > 1:
            gone.append(node)
            return [(y, (*factors, (SELECTS, node.inputs[0]))) for y, factors in below]
        return [(x, ())]

    first, second = last.inputs
    return Sum(k, tuple(addends(second if first == carried else first)), tuple(gone))


def _zero(x: Operand, makers: Mapping[int, Node]) -> bool:
    """Whether an operand is known to be zero all over."""
    if isinstance(x, Const):
        return not np.any(np.asarray(x.value))
    node = makers.get(x)
    return node is not None and node.op == "broadcast_in_dim" and _zero(node.inputs[0], makers)


def _with(x: jax.Array, factor: str, by: jax.Array) -> jax.Array:
    """An addend after what is done with it."""
    return x * by if factor == SCALES else jnp.where(by, jnp.zeros((), x.dtype), x)


@dataclass
class _Rewriting:
    editor: Editor
    where: OpPlacements
    loop: Node
    n_const: int
    n_carry: int
    homes: Mapping[int, Mapping[Home, Sequence[Addend]]]

    def run(self, sums: Sequence[Sum]) -> Graph:
        """The graph with a carried value for each stage of each of the sums."""
        loop, (body,) = self.loop, self.loop.bodies
        gone = {n.id for s in sums for n in s.additions}
        nodes = [n for n in body.nodes if n.id not in gone]
        enters, leaves, begins, results = list[int](), list[Operand](), list[Operand](), list[int]()
        before, after = list[Node](), list[Node]()
        outs, ends = list(loop.outputs), list(body.outputs)
        for s in sums:
            parts = self.homes[s.carry]
            carried, result = body.inputs[self.n_const + s.carry], loop.outputs[s.carry]
            outs[s.carry] = self.like(result)
            total: Operand = outs[s.carry]
            first = min(parts)
            for at, addends in sorted(parts.items()):
                source = self.source(at[0])
                if at == first:
                    made, end = self.add_ops(carried, addends, source)
                    ends[s.carry] = end
                else:
                    enters.append(self.like(carried))
                    results.append(self.like(result))
                    value = self.editor.operand(carried)
                    zeros, (zero,) = self.editor.emit(lambda v=value: jnp.zeros(v.shape, v.dtype), [], source)
                    made, end = self.add_ops(enters[-1], addends, source)
                    leaves.append(end)
                    begins.append(zero)
                    before += zeros
                    meet, (total,) = self.editor.emit(lax.add, [total, results[-1]], self.source(first[0]))
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
        value = self.editor.builder.values[v]
        return self.editor.builder.value(value, value.name)

    def source(self, at: int) -> Source:
        """The line of the loop, and the scope of a placement."""
        return replace(self.loop.source, scope=scope_of(self.where.placements[at]))

    def add_ops(self, carried: int, addends: Sequence[Addend], source: Source) -> tuple[list[Node], Operand]:
        """The ops that add to a carried value."""

        def fn(total: jax.Array, *xs: jax.Array) -> jax.Array:
            rest = iter(xs)
            terms = []
            for _, factors in addends:
                term = next(rest)
                for factor, _ in factors:
                    term = _with(term, factor, next(rest))
                terms.append(term.astype(total.dtype))
            return total + sum(terms[1:], start=terms[0])

        operands = [y for x, factors in addends for y in (x, *(by for _, by in factors))]
        made, (end,) = self.editor.emit(fn, [carried, *operands], source)
        return made, end


@dataclass(frozen=True, slots=True)
class _Found:
    """A sum that a scan can add to.

    Arguments:
      carried: the sum as it enters the body of the loop over micro-batches.
      add: the op that adds to it.
      scan: the id of the scan.
      result: which of its results is added.
    """

    carried: int
    add: Node
    scan: int
    result: int


def add_inside(graph: Graph) -> Graph:
    """The graph whose scans add their stacks to the sums over micro-batches."""
    loop = loop_of(graph)
    if loop is None:
        return graph
    (body,) = loop.bodies
    n_const, n_carry = core.scan_counts(loop.params, len(loop.inputs))
    found = _sums(graph, body, body.inputs[n_const : n_const + n_carry])
    if not found:
        return graph
    values, gone = list(graph.values), {f.add.id for f in found}
    nodes = [n for n in body.nodes if n.id not in gone]
    for i, n in enumerate(nodes):
        for f in (f for f in found if f.scan == n.id):
            nodes[i] = _adding(nodes[i], f, values)
    whole = replace(loop, bodies=(replace(body, nodes=tuple(nodes)),))
    outer = number_nodes(whole if n is loop else n for n in graph.nodes)
    return replace(graph, values=tuple(values), nodes=outer)


def _sums(graph: Graph, body: Body, carried: tuple[int, ...]) -> list[_Found]:
    """The carried values to which a stack of a scan is added and nothing else."""
    makers = {v: n for n in body.nodes for v in n.outputs}
    uses = _uses(body)
    found = list[_Found]()
    for v, out in zip(carried, body.outputs, strict=False):
        add = None if isinstance(out, Const) else makers.get(out)
        if add is None or add.op not in ADDS or v not in add.inputs or uses[v] != 1:
            continue
        x = add.inputs[1 - add.inputs.index(v)]
        scan = None if isinstance(x, Const) else makers.get(x)
        if scan is None or isinstance(x, Const) or scan.op != "scan" or uses[x] != 1:
            continue
        _, carry = core.scan_counts(scan.params, len(scan.inputs))
        result, mine = scan.outputs.index(x), scan.bodies[0]
        made = mine.outputs[result]
        same = (graph.values[x].shape, graph.values[x].dtype) == (
            graph.values[v].shape,
            graph.values[v].dtype,
        )
        if result >= carry and same and not isinstance(made, Const):
            found.append(_Found(v, add, scan.id, result))
    return found


def _uses(body: Body) -> Mapping[int, int]:
    """How often a body and those inside it use each value."""
    every = [body, *(b for n in walk(body.nodes) for b in n.bodies)]
    read: list[Operand] = [
        *(x for n in walk(body.nodes) for x in n.inputs),
        *(x for b in every for x in b.outputs),
    ]
    return Counter(x for x in read if not isinstance(x, Const))


def _adding(scan: Node, f: _Found, values: list[Value]) -> Node:
    """A scan that adds a slice of a sum to one of its results."""
    (body,) = scan.bodies
    consts, carry = core.scan_counts(scan.params, len(scan.inputs))
    made = body.outputs[f.result]
    assert not isinstance(made, Const)
    before, after = len(values), len(values) + 1
    values += [replace(values[made], id=i) for i in (before, after)]
    first = f.add.inputs.index(f.carried) == 0
    add = replace(f.add, inputs=(before, made) if first else (made, before), outputs=(after,))
    outs = tuple(after if k == f.result else x for k, x in enumerate(body.outputs))
    return replace(
        scan,
        inputs=(*scan.inputs, f.carried),
        outputs=tuple(f.add.outputs[0] if k == f.result else v for k, v in enumerate(scan.outputs)),
        params=loop_params(scan.params, consts, carry),
        bodies=(Body((*body.inputs, before), (*body.nodes, add), outs),),
    )
