"""A scan over layers, cut into stages: each a scan over its slice of the stacked weights.

The scan over all layers becomes one scan per stage, one after the other; its transpose, which runs the other
way, likewise. Every stack (`stacks`) becomes a part per stage, arguments and results of the program too: so a
stage has the weights, the sums of gradients and the optimizer's state of its own layers and of no others.
Where an op takes a stack whole, its parts are put together again; where one that was whole is wanted in
parts, it is sliced. What is computed is the same, addends of sums over all layers in another order.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sbp.compat import core
from sbp.passes.pipeline.op_placement import loop_of
from sbp.passes.pipeline.stacks import LayerStacks, layer_params, stacks_of
from sbp.passes.program.control import loop_params
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, Source, Value, number_nodes
from sbp.passes.program.trace import TracedProgram, prune
from sbp.signature import Signature, Split


@dataclass(frozen=True, slots=True)
class LeafPart:
    """A leaf of the program that was cut, or a part of it.

    Arguments:
      leaf: its position in the program as it was.
      begin, end: the layers that it has; None for a leaf that is whole.
    """

    leaf: int
    begin: int | None = None
    end: int | None = None


@dataclass(frozen=True)
class UnstackedScan:
    """A program whose scan over layers was cut.

    Arguments:
      ins, outs: what its arguments and results are of the program as it was.
      layers: the number of layers of each part.
    """

    traced: TracedProgram
    ins: tuple[LeafPart, ...]
    outs: tuple[LeafPart, ...]
    layers: tuple[int, ...]


def layers_of(graph: Graph) -> int | None:
    """How many layers the scan has that can be cut into stages; None if there is none."""
    found = stacks_of(graph)
    return None if found is None else found.layers


def unstack(traced: TracedProgram, layers: Sequence[int]) -> UnstackedScan:
    """A program with its scan over layers cut into scans of so many layers each.

    Arguments:
      layers: of each part, in order; their sum is what the scan has.
    """
    stacks = stacks_of(traced.graph)
    assert stacks is not None and sum(layers) == stacks.layers
    return _Writer(traced, stacks, tuple(layers)).run()


@dataclass
class _Writer:
    """Writes the program anew.

    Arguments:
      parts: per stack, the value of every part.
      joined: per value that is made in parts and wanted whole, what is all of it.
      out: the ops of the graph or body that is being written.
    """

    traced: TracedProgram
    stacks: LayerStacks
    layers: tuple[int, ...]
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    joined: dict[int, Operand] = field(default_factory=dict)
    out: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.traced.graph
        self.editor, self.loop, self.makers = Editor(graph), loop_of(graph), graph.producers()
        self.spans = list(pairwise([sum(self.layers[:i]) for i in range(len(self.layers) + 1)]))

    def run(self) -> UnstackedScan:
        """The program, cut."""
        traced, graph = self.traced, self.traced.graph
        count = len(traced.in_paths)
        ins = [p for i, v in enumerate(graph.inputs[:count]) for p in self.leaf(i, v)]
        outs = [p for i, x in enumerate(graph.outputs) for p in self.leaf(i, x)]
        inputs = [x for v in graph.inputs[:count] for x in self.entering_values(v)]
        self.write(graph.nodes)
        outputs = [y for x in graph.outputs for y in self.leaving_values(x)]
        values, closed = tuple(self.editor.builder.values), graph.inputs[count:]
        made = prune(Graph(values, (*inputs, *closed), graph.consts, tuple(self.out), tuple(outputs)))
        cut = replace(
            traced,
            graph=replace(made, nodes=number_nodes(made.nodes)),
            in_paths=tuple(_path(traced.in_paths[p.leaf], p) for p in ins),
            out_paths=tuple(_path(traced.out_paths[p.leaf], p) for p in outs),
        )
        return UnstackedScan(cut, tuple(ins), tuple(outs), self.layers)

    def is_stack(self, x: Operand) -> bool:
        """Whether an operand lies in parts."""
        return not isinstance(x, Const) and x in self.stacks.values

    def leaf(self, i: int, x: Operand) -> list[LeafPart]:
        """A leaf, or its parts."""
        return [LeafPart(i, a, b) for a, b in self.spans] if self.is_stack(x) else [LeafPart(i)]

    # -- values

    def entering_values(self, v: int) -> tuple[int, ...]:
        """What enters the program or the loop's body in place of a value."""
        return self.part_values(v) if self.is_stack(v) else (v,)

    def leaving_values(self, x: Operand) -> tuple[Operand, ...]:
        """What leaves in place of an operand."""
        return self.parts_of(x) if self.is_stack(x) else (self.one(x),)

    def part_values(self, v: int) -> tuple[int, ...]:
        """New values for the parts of a stack that is made in parts."""
        like = self.editor.builder.values[v]
        self.parts[v] = tuple(
            self.value(replace(like, shape=(b - a, *like.shape[1:]), name=f"{like.name}[{a}:{b}]"))
            for a, b in self.spans
        )
        return self.parts[v]

    def value(self, like: Value) -> int:
        """A new value like another one."""
        values = self.editor.builder.values
        values.append(replace(like, id=len(values)))
        return len(values) - 1

    def parts_of(self, x: Operand) -> tuple[Operand, ...]:
        """A stack in parts: sliced, where it is made whole."""
        assert not isinstance(x, Const)
        if x in self.parts:
            return self.parts[x]
        slices = [
            self.emit(partial(lax.slice_in_dim, start_index=a, limit_index=b), [x]) for a, b in self.spans
        ]
        return tuple(slices)

    def one(self, x: Operand) -> Operand:
        """An operand whole: put together, where it is made in parts."""
        if isinstance(x, Const):
            return x
        if x in self.parts and x not in self.joined:
            self.joined[x] = self.emit(_together, self.parts[x])
        return self.joined.get(x, x)

    def emit(self, fn: Callable[..., jax.Array], operands: Sequence[Operand]) -> Operand:
        """What a function makes of operands, by ops that are written now."""
        first = self.makers.get(operands[0]) if isinstance(operands[0], int) else None
        nodes, (made,) = self.editor.emit(fn, operands, Source() if first is None else first.source)
        self.out += nodes
        return made

    # -- ops

    def write(self, nodes: Sequence[Node]) -> None:
        """Writes ops behind those that are there."""
        for node in nodes:
            if node is self.loop:
                self.write_loop(node)
            elif node.id in self.stacks.scans:
                self.write_scan(node)
            elif node.id in self.stacks.rows:
                self.write_parts(node)
            else:
                self.out.append(replace(node, inputs=tuple(map(self.one, node.inputs))))

    def write_parts(self, node: Node) -> None:
        """An op on stacks as one for each part; sums over all layers are added up."""
        row = self.stacks.rows[node.id]
        split = [s == Split(0) for s in row.operands]
        ins = [self.parts_of(x) if s else self.one(x) for x, s in zip(node.inputs, split, strict=True)]
        made = [self.results(v, s) for v, s in zip(node.outputs, row.results, strict=True)]
        for j, layers in enumerate(self.layers):
            inputs = tuple(x[j] if isinstance(x, tuple) else x for x in ins)
            outputs = tuple(own[j] for own in made)
            self.out.append(replace(node, inputs=inputs, outputs=outputs, params=layer_params(node, layers)))
        for v, s, own in zip(node.outputs, row.results, made, strict=True):
            if s != Split(0):
                self.joined[v] = self.emit(_added, own)

    def results(self, v: int, s: Signature) -> tuple[int, ...]:
        """New values for a result: its parts, or the summands that the parts of the layers give."""
        if s == Split(0):
            return self.part_values(v)
        like = self.editor.builder.values[v]
        return tuple(self.value(like) for _ in self.layers)

    def write_scan(self, scan: Node) -> None:
        """A scan through stacks as one for each part; what is carried goes from one to the next."""
        consts, carry = core.scan_counts(scan.params, len(scan.inputs))
        fixed = [self.one(x) for x in scan.inputs[:consts]]
        carried = [self.one(x) for x in scan.inputs[consts : consts + carry]]
        sliced = [self.parts_of(x) for x in scan.inputs[consts + carry :]]
        stacked = [self.part_values(v) for v in scan.outputs[carry:]]
        order = range(len(self.layers))
        for j in reversed(order) if scan.params["reverse"] else order:
            last = j == (0 if scan.params["reverse"] else order[-1])
            ends = scan.outputs[:carry]
            # The last part gives what the whole gave.
            given = ends if last else tuple(self.value(self.editor.builder.values[v]) for v in ends)
            self.out.append(
                replace(
                    scan,
                    inputs=(*fixed, *carried, *(x[j] for x in sliced)),
                    outputs=(*given, *(x[j] for x in stacked)),
                    params={**loop_params(scan.params, consts, carry), "length": self.layers[j]},
                    bodies=tuple(self.copy_body(b, {}) for b in scan.bodies),
                )
            )
            carried = list(given)

    def copy_body(self, body: Body, new: dict[int, int]) -> Body:
        """A body with values of its own."""

        def fresh(v: int) -> int:
            new[v] = self.value(self.editor.builder.values[v])
            return new[v]

        def read(x: Operand) -> Operand:
            return x if isinstance(x, Const) else new[x]

        inputs, nodes = tuple(map(fresh, body.inputs)), list[Node]()
        for n in body.nodes:
            ins = tuple(map(read, n.inputs))
            bodies = tuple(self.copy_body(b, new) for b in n.bodies)
            nodes.append(replace(n, inputs=ins, outputs=tuple(map(fresh, n.outputs)), bodies=bodies))
        return Body(inputs, tuple(nodes), tuple(map(read, body.outputs)))

    def write_loop(self, loop: Node) -> None:
        """The loop over micro-batches, with parts in place of the stacks that enter and leave it."""
        (body,) = loop.bodies
        n_const, n_carry = core.scan_counts(loop.params, len(loop.inputs))
        ends = n_const, n_const + n_carry
        ins = [
            self.parts_of(x) if self.is_stack(v) else (self.one(x),)
            for x, v in zip(loop.inputs, body.inputs, strict=True)
        ]
        outs = [self.part_values(v) if self.is_stack(v) else (v,) for v in loop.outputs]
        entering = [self.entering_values(v) for v in body.inputs]
        before, self.out = self.out, []
        self.write(body.nodes)
        left = [
            self.parts_of(x) if self.is_stack(v) else (self.one(x),)
            for x, v in zip(body.outputs, loop.outputs, strict=True)
        ]
        inside, self.out = self.out, before
        consts, carry = (sum(map(len, ins[a:b])) for a, b in ((0, ends[0]), ends))
        self.out.append(
            replace(
                loop,
                inputs=_flat(ins),
                outputs=_flat(outs),
                params=loop_params(loop.params, consts, carry),
                bodies=(Body(_flat(entering), tuple(inside), _flat(left)),),
            )
        )


T = TypeVar("T")


def _flat(groups: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(x for group in groups for x in group)


def _together(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts)


def _added(*parts: jax.Array) -> jax.Array:
    return functools.reduce(lax.add, parts)


def _path(path: str, part: LeafPart) -> str:
    """The name of a leaf, or of some of its layers.

    >>> _path("params['w']", LeafPart(0, 2, 4)), _path("step", LeafPart(1))
    ("params['w'][2:4]", 'step')
    """
    return path if part.begin is None else f"{path}[{part.begin}:{part.end}]"
