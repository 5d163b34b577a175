"""Steps that a flag takes back: their gradient is zero where it does so, or they become a branch.

Such a step is written as if it were always taken. Its results are then selected, or multiplied by zero or
one, as in `optax.MultiSteps`, and where a loss scale leaves out a step. On a gradient by rows nothing has to
be selected: a lazy step leaves rows without a gradient as they are. Any other step goes over the whole table,
and as a branch it does so only where the flag takes it. XLA runs both branches in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import lazy
from sbp.compat import core
from sbp.compat.untyped import optimization_barrier
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Const, Graph, Node, Operand, speaks
from sbp.passes.rows.flag_numbers import FlagNumbers
from sbp.passes.rows.gradients import Gradients, NotByRows, is_same


def branch_on_flags(graph: Graph, *, strict: bool = False) -> Graph:
    """The graph in which no flag takes back a lazy step, as far as that changes nothing.

    Arguments:
      strict: whether a product with zero may be NaN.
    """
    editor = Editor(graph)
    nodes = _branched(editor, graph.nodes, graph.outputs, strict)
    return editor.finish(nodes) if editor.instead else graph


def _branched(editor: Editor, nodes: Sequence[Node], outputs: Sequence[Operand], strict: bool) -> list[Node]:
    """The ops of one body; what replaces a step and its choices stands in front of what uses it first."""
    body, before = _Ops(editor, tuple(nodes), tuple(outputs), strict), dict[int, list[Node]]()
    for step in nodes:
        if step.op == lazy.NAME:
            cases = (_Choice(body, step, taken).replacement() for taken in (True, False))
            at, made = next((x for x in cases if x is not None), (0, []))
            before.setdefault(at, []).extend(made)
    out: list[Node] = []
    for i, node in enumerate(nodes):
        inside = (replace(b, nodes=tuple(_branched(editor, b.nodes, b.outputs, strict))) for b in node.bodies)
        out += [*before.get(i, ()), replace(node, bodies=tuple(inside))]
    return out


@dataclass(frozen=True)
class _Ops:
    """The ops of one body, and what makes and uses each value."""

    editor: Editor
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]
    strict: bool

    @cached_property
    def position(self) -> Mapping[int, int]:
        """Where each value is made."""
        return {v: i for i, node in enumerate(self.nodes) for v in node.outputs}

    @cached_property
    def uses(self) -> Mapping[Operand, list[int]]:
        """Where each value is used."""
        found: dict[Operand, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for x in _read(node):
                found.setdefault(x, []).append(i)
        return found

    @cached_property
    def gradients(self) -> Gradients:
        """The gradients of this body."""
        return Gradients(self.editor, {v: n for n in self.nodes for v in n.outputs}, self.strict)

    @cached_property
    def flags(self) -> FlagNumbers:
        """The flags of this body."""
        return FlagNumbers(self.editor, self.gradients.maker)

    def shape(self, x: Operand) -> tuple[int, ...]:
        """The shape of an operand."""
        return self.editor.operand(x).shape


def _read(node: Node) -> set[Operand]:
    """What an op reads, and what ops inside it do."""
    inside = (x for b in node.bodies for n in b.nodes for x in _read(n))
    return {x for x in (*node.inputs, *inside) if not isinstance(x, Const)}


@dataclass(frozen=True)
class _Chosen:
    """What an op gives that chooses by a flag.

    Arguments:
      on: what it is where the step is taken, times a number.
      factor: that number.
      off: what it is elsewhere; None for zero.
    """

    on: Operand
    factor: float
    off: Operand | None


_UNKNOWN: Operand = Const(np.nan, np.dtype(np.float32))
"""What stands for a value that is not known, or that nobody sees."""

_LINEAR = frozenset(("add", "add_any", "convert_element_type", "mul", "neg"))


@dataclass
class _Choice:
    """A lazy step, and what is done to its results until a flag has taken it back.

    Arguments:
      taken: what the flag says where the step is taken.
      off: values that hold something of the step, and what they are where it is not taken; None for zero.
      idle: what the same are where the step is taken on a gradient of zero.
      inside: the ops on the step's results.
      chosen: by value, those of them that choose.
      ends: values behind the last choice, and what they are where the step is not taken.
    """

    ops: _Ops
    step: Node
    taken: bool
    flag: int = -1
    off: dict[Operand | None, Operand | None] = field(default_factory=dict)
    idle: dict[Operand | None, Operand | None] = field(default_factory=dict)
    inside: list[Node] = field(default_factory=list)
    chosen: dict[int, _Chosen] = field(default_factory=dict)
    ends: dict[int, Operand] = field(default_factory=dict)

    def replacement(self) -> tuple[int, list[Node]] | None:
        """The ops in place of the step and its choices, and where they stand; None where it has to stay."""
        if not self.follows():
            return None
        try:
            self.ops.gradients.parts(self.step.inputs[0])
        except NotByRows:
            return self.branch()
        return self.masked_step()

    def by_row(self, x: Operand) -> bool:
        """Whether a value has a line per row of the table."""
        return lazy.by_row(self.ops.shape(x), self.ops.shape(self.step.inputs[0]))

    def follows(self) -> bool:
        """Whether all that the step gives goes through a choice, and the table is among it."""
        ops, step = self.ops, self.step
        self.off.update(dict.fromkeys(step.outputs, _UNKNOWN))
        state = [x if self.by_row(x) else _UNKNOWN for x in step.inputs[1 : len(step.outputs)]]
        self.idle.update(zip(step.outputs, [None, *state], strict=True))
        for node in ops.nodes[ops.position[step.outputs[0]] + 1 :]:
            if self.reads(node):
                if not self.adds(node):
                    return False
                self.inside.append(node)
        table = ops.shape(step.inputs[0])
        return self.off.keys().isdisjoint(ops.outputs) and any(ops.shape(v) == table for v in self.ends)

    def reads(self, node: Node) -> bool:
        """Whether an op reads something of the step."""
        return not self.off.keys().isdisjoint(_read(node))

    def adds(self, node: Node) -> bool:
        """Whether it is known what an op on something of the step gives; if so that is noted."""
        if node.bodies or len(node.outputs) != 1 or speaks(node):
            return False
        (out,), chosen = node.outputs, self.choice(node)
        if chosen is not None:
            self.chosen[out] = chosen
            off = self.off.get(chosen.off, chosen.off)
            self.idle[out] = self.idle.get(chosen.on, chosen.on) if chosen.factor == 1 else _UNKNOWN
        elif node.op in _LINEAR or is_same(node):
            off, self.idle[out] = (self.after(node, known) for known in (self.off, self.idle))
        else:
            return False
        if off is None or off is _UNKNOWN:
            self.off[out] = off
        else:
            self.ends[out] = off
        return True

    def after(self, node: Node, known: Mapping[Operand | None, Operand | None]) -> Operand | None:
        """What a linear op gives, or one that hands on, where its operands are known."""
        given = [known.get(x, x) for x in node.inputs]
        if is_same(node):
            return given[0]
        if node.op in ("add", "add_any"):
            terms = [x for x in given if x is not None]
            single = len(terms) == 1 and not isinstance(terms[0], Const)
            return terms[0] if single else _UNKNOWN if terms else None
        numbers = [self.ops.gradients.scalar(x) is not None for x in node.inputs]
        return None if all(x is None or n for x, n in zip(given, numbers, strict=True)) else _UNKNOWN

    def choice(self, node: Node) -> _Chosen | None:
        """What an op chooses by the flag of the step; the first choice says which flag that is."""
        if node.op == "select_n" and len(node.inputs) == 3 and not self.ops.shape(node.inputs[0]):
            which = self.cases(node.inputs[0])
            if which is not None:
                off, on = (node.inputs[1 + int(k)] for k in which)
                return _Chosen(on, 1, off)
        if node.op == "mul" and not self.ops.strict:
            for by, of in (node.inputs, node.inputs[::-1]):
                factors = self.cases(by, (0, 1))
                if factors is not None:
                    return _Chosen(of, factors[1], of if factors[0] else None)
        return None

    def cases(self, x: Operand, off: Sequence[float] = ()) -> tuple[float, float] | None:
        """A number where the step is not taken, and where it is; None if another flag says so, or none.

        Arguments:
          off: what the first of them may be; () for anything.
        """
        found = self.ops.flags.number(x)
        if found is None or self.flag not in (-1, found.flag):
            return None
        first, second = (float(np.asarray(n)) for n in (found.cases if self.taken else found.cases[::-1]))
        if off and first not in off:
            return None
        self.flag = found.flag
        return first, second

    def masked_step(self) -> tuple[int, list[Node]] | None:
        """The step on a gradient that is zero where it is not taken, in place of choices between tables."""
        ops, origin, step = self.ops, self.ops.gradients.origin, self.step
        tables = {v: c.on for v, c in self.chosen.items() if self.by_row(v)}
        for v, off in self.ends.items():
            idle = self.idle[v]
            if self.by_row(v) and (idle is None or idle is _UNKNOWN or origin(idle) != origin(off)):
                return None
        at = ops.position[step.outputs[0]]
        if ops.position.get(self.flag, -1) > at or any(self.chosen[v].factor != 1 for v in tables):
            return None

        def kept(flag: jax.Array, grad: jax.Array) -> jax.Array:
            return jnp.where(flag == np.bool_(self.taken), grad, jnp.zeros((), grad.dtype))

        made, (grad,) = ops.editor.emit(kept, [self.flag, step.inputs[0]], step.source)
        new = ops.editor.builder.value
        results = [new(core.struct(x.shape, x.dtype), "rows") for x in map(ops.editor.operand, step.outputs)]
        ops.editor.substitute(step.outputs, results)
        ops.editor.substitute([*tables], [*tables.values()])
        return at, [*made, replace(step, inputs=(grad, *step.inputs[1:]), outputs=tuple(results))]

    def branch(self) -> tuple[int, list[Node]] | None:
        """The step, and what is done to its results, in a branch."""
        ops, others = self.ops, self.others()
        ends = {**self.ends, **{v: c.off for v, c in others.items() if c.off is not None}}
        region = _Region((self.step, *self.inside), self.chosen, others, ends)
        at = min([*[i for v in ends for i in ops.uses.get(v, ())], max(ops.position[v] for v in ends)])
        if any(ops.position.get(x, -1) >= at for x in (*region.inputs, self.flag)):
            return None

        def run(flag: jax.Array, *operands: jax.Array) -> list[jax.Array]:
            known = dict(zip(region.inputs, operands, strict=True))
            results: list[jax.Array] = lax.cond(
                flag == np.bool_(self.taken), region.step_results, region.other_results, known
            )
            return results

        made, results = ops.editor.emit(run, [self.flag, *region.inputs], self.step.source)
        ops.editor.substitute([*ends], results)
        return at, made

    def others(self) -> dict[int, _Chosen]:
        """What else the flag chooses between tables, as the sum that begins anew behind a step."""
        found, table = dict[int, _Chosen](), self.ops.shape(self.step.inputs[0])
        for node in self.ops.nodes:
            if len(node.outputs) != 1 or self.ops.shape(node.outputs[0]) != table or self.reads(node):
                continue
            chosen = None if node.outputs[0] in self.ends else self.choice(node)
            if chosen is not None and chosen.off is not None:
                found[node.outputs[0]] = chosen
        return found


@dataclass(frozen=True)
class _Region:
    """What runs where a step is taken, and what stands for it elsewhere.

    Arguments:
      nodes: the step, and the ops on its results.
      chosen: those of them that choose, by what they give.
      others: other choices that go with the step.
      ends: all that leaves, and what it is where the step is not taken.
    """

    nodes: tuple[Node, ...]
    chosen: Mapping[int, _Chosen]
    others: Mapping[int, _Chosen]
    ends: Mapping[int, Operand]

    @cached_property
    def inputs(self) -> list[int]:
        """What comes from elsewhere."""
        inside = {v for node in self.nodes for v in node.outputs}
        read = [
            *(x for node in self.nodes for x in self.operands(node)),
            *(c.on for c in self.others.values()),
        ]
        found = dict.fromkeys((*read, *self.ends.values()))
        return [x for x in found if not isinstance(x, Const) and x not in inside]

    def operands(self, node: Node) -> Sequence[Operand]:
        """What an op reads where the step is taken."""
        chosen = self.chosen.get(node.outputs[0])
        return node.inputs if chosen is None else [chosen.on]

    def step_results(self, known: Mapping[int, jax.Array]) -> list[jax.Array]:
        """What leaves where the step is taken."""
        values = dict(known)
        for node in self.nodes:
            chosen, given = self.chosen.get(node.outputs[0]), [_value(values, x) for x in self.operands(node)]
            if chosen is not None:
                values[node.outputs[0]] = _times(given[0], chosen)
            else:
                results = core.bind(node.primitive, given, dict(node.params))
                values.update(zip(node.outputs, results, strict=True))
        done = [values[v] for v in self.ends if v not in self.others]
        # Without a barrier XLA could write a sum anew while the step reads it, and so makes a copy.
        done, sums = optimization_barrier((done, [_value(values, c.on) for c in self.others.values()]))
        return [*done, *map(_times, sums, self.others.values())]

    def other_results(self, known: Mapping[int, jax.Array]) -> list[jax.Array]:
        """What leaves where it is not."""
        return [_value(known, x) for x in self.ends.values()]


def _value(known: Mapping[int, jax.Array], x: Operand) -> jax.Array:
    """What an operand is."""
    return jnp.asarray(x.value, x.dtype) if isinstance(x, Const) else known[x]


def _times(x: jax.Array, chosen: _Chosen) -> jax.Array:
    """A value by the factor that a flag chooses."""
    return x if chosen.factor == 1 else x * np.asarray(chosen.factor, x.dtype)
