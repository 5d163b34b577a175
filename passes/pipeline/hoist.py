"""Casts of weights, out of the loop over micro-batches: once per step, not once per micro-batch.

Inside one program XLA does that by itself; the pieces of a pipeline are programs of their own. A scan over
layers casts a slice at a time: there the stack is cast as a whole, and the scan takes slices of that. So
weights are gathered in the type in which they are used, once, and a device holds them in no other one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from sbp import compat
from sbp.passes.pipeline.where import loop_of
from sbp.passes.program.control import loop_params
from sbp.passes.program.graph import Const, Graph, Node, Value, numbered, walk

CASTS = ("convert_element_type",)


def hoist_casts(graph: Graph) -> Graph:
    """The graph with every cast of what the loop only reads before the loop."""
    loop = loop_of(graph)
    if loop is None:
        return graph
    (body,) = loop.bodies
    n_const, _ = compat.scan_counts(loop.params, len(loop.inputs))
    hoisting = _Hoisting(list(graph.values))
    fixed, inside = set(body.inputs[:n_const]), list[Node]()
    for node in body.nodes:
        casts, left = hoisting.lifted(node, fixed, slices=True) if node.op == "scan" else ([], node)
        fixed.update(v for n in casts for v in n.outputs)
        inside += [*casts, left]
    whole = replace(loop, bodies=(replace(body, nodes=tuple(inside)),))
    every = {x for x in loop.inputs if not isinstance(x, Const)}
    casts, whole = hoisting.lifted(whole, every, slices=False)
    if not casts:
        return graph
    nodes = [m for n in graph.nodes for m in ((*casts, whole) if n is loop else (n,))]
    return replace(graph, values=tuple(hoisting.values), nodes=numbered(nodes))


@dataclass
class _Hoisting:
    """Takes casts out of loops.

    Arguments:
      made: per value outside and dtype, the cast of it that is there.
    """

    values: list[Value]
    made: dict[tuple[int, str], int] = field(default_factory=dict)

    def lifted(self, loop: Node, fixed: Collection[int], slices: bool) -> tuple[list[Node], Node]:
        """Casts that are to stand before a loop, and the loop without them.

        Arguments:
          fixed: values outside whose casts may stand there.
          slices: whether what the loop takes slices of is cast too, to types that are not wider: a stack of
            wide ones takes more than a slice at a time.
        """
        (body,) = loop.bodies
        n_const, n_carry = compat.scan_counts(loop.params, len(loop.inputs))
        end = n_const + n_carry
        outer: dict[
            int | None, tuple[int, bool]
        ] = {}  # per value inside, that outside, and whether it is a slice
        for i, (v, x) in enumerate(zip(body.inputs, loop.inputs, strict=True)):
            if (i < n_const or (slices and i >= end)) and not isinstance(x, Const) and x in fixed:
                outer[v] = x, i >= end
        casts, kept = list[Node](), list[Node]()
        entering: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for node in body.nodes:
            inner = node.inputs[0] if node.op in CASTS else None
            source, is_slice = (None, False) if isinstance(inner, Const) else outer.get(inner, (None, False))
            if source is None or (slices and self.widens(node)):
                kept.append(node)
                continue
            once = self.cast(node, source, casts)
            (v,) = node.outputs
            outer[v] = once, is_slice
            entering[is_slice].append((v, once))
        if not any(entering.values()):
            return [], loop
        read = {x for n in walk(kept) for x in n.inputs if not isinstance(x, Const)}
        read |= {x for n in walk(kept) for b in n.bodies for x in b.outputs if not isinstance(x, Const)}
        read |= {x for x in body.outputs if not isinstance(x, Const)}
        wired = list(zip(body.inputs, loop.inputs, strict=True))
        # What only a cast read does not enter any more, whatever is carried does.
        consts = [p for p in (*wired[:n_const], *entering[False]) if p[0] in read]
        stacks = [p for p in wired[end:] if p[0] in read or p[0] not in outer]
        every = [*consts, *wired[n_const:end], *stacks, *(p for p in entering[True] if p[0] in read)]
        inside = replace(body, inputs=tuple(v for v, _ in every), nodes=tuple(kept))
        whole = replace(
            loop,
            inputs=tuple(x for _, x in every),
            params=loop_params(loop.params, len(consts), n_carry),
            bodies=(inside,),
        )
        return casts, whole

    def widens(self, node: Node) -> bool:
        """Whether a cast gives more bytes than it takes."""
        (before,), (after,) = node.inputs, node.outputs
        assert not isinstance(before, Const)
        return compat.itemsize(self.values[after].dtype) > compat.itemsize(self.values[before].dtype)

    def cast(self, node: Node, source: int, casts: list[Node]) -> int:
        """The cast of a value outside, which is added to others unless it is there."""
        dtype = self.values[node.outputs[0]].dtype
        known = self.made.get((source, str(dtype)))
        if known is not None:
            return known
        value = self.values[node.outputs[0]]
        once = replace(value, id=len(self.values), shape=self.values[source].shape)
        self.values.append(once)
        self.made[source, str(dtype)] = once.id
        casts.append(replace(node, inputs=(source,), outputs=(once.id,)))
        return once.id
