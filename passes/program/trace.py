"""JAX function -> logical graph: calls are inlined, checkpoints become barriers, each op keeps its line.

Whether two traces are of one program: then what was built of one serves the other.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from sbp.annotation import Pin, annotate_p
from sbp.compat import core
from sbp.compat.core import Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn
from sbp.compat.exact_keys import key_of
from sbp.compat.mesh import user_mesh
from sbp.compat.untyped import TreeDef
from sbp.passes.program import one_hot
from sbp.passes.program.control import CONTROL
from sbp.passes.program.effects import without_effects
from sbp.passes.program.expand import expansion, is_passed, plain_params
from sbp.passes.program.graph import (
    Body,
    Const,
    Graph,
    Node,
    Operand,
    Source,
    Value,
    make_node,
    number_nodes,
    used_nodes,
)
from sbp.passes.program.unshard import asked_of
from sbp.rules import lookup

REMAT = ("remat2", "checkpoint")


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """The logical graph of one call.

    Arguments:
      graph: the graph.
      in_paths: a name per argument leaf, such as `params['w']`.
      out_tree, out_paths: the results' pytree and a name per leaf.
      source: where the function is defined.
    """

    graph: Graph
    in_paths: tuple[str, ...]
    out_tree: TreeDef
    out_paths: tuple[str, ...]
    source: Source = field(default_factory=Source)


class Builder:
    """Collects values and nodes while equations are walked.

    Arguments:
      values: those that a graph has already.
    """

    def __init__(self, values: Sequence[Value] = ()) -> None:
        self.values = list(values)
        self.nodes: list[Node] = []
        self.const_ids: list[int] = []
        self.consts: list[jax.Array] = []
        # The object is held with its value's id: a dead one's address could be given to another array.
        self.known: dict[int, tuple[ArrayLike, int]] = {}
        self.barriers = 0

    def value(self, aval: Aval, name: str) -> int:
        self.values.append(Value(len(self.values), tuple(map(int, aval.shape)), aval.dtype, name))
        return len(self.values) - 1

    def const(self, array: ArrayLike, name: str = "") -> Operand:
        """A closed-over array: a scalar stays in place, anything else becomes an input, once per object."""
        if np.ndim(array) == 0 and not core.is_key(jax.numpy.result_type(array)):
            return Const(array, jax.numpy.result_type(array))
        if id(array) not in self.known:
            # A copy of a NumPy array: what its owner writes into it later is not this program's.
            held = array if isinstance(array, jax.Array) else jax.numpy.array(array)
            self.const_ids.append(self.value(held.aval, name or f"const{len(self.consts)}"))
            self.consts.append(held)
            self.known[id(array)] = array, self.const_ids[-1]
        return self.known[id(array)][1]

    def inline(
        self, jaxpr: Jaxpr, consts: Sequence[ArrayLike], args: Sequence[Operand], at: Source
    ) -> list[Operand]:
        """Walks one jaxpr; `at` is the line and scope of the call that holds it."""
        env: dict[Atom, Operand] = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, (self.const(c) for c in consts), strict=True))

        def read(atom: Atom) -> Operand:
            if isinstance(atom, core.Literal):
                return self.const(atom.val) if np.ndim(atom.val) else Const(atom.val, _aval(atom).dtype)
            return env[atom]

        for eqn in jaxpr.eqns:
            source = _source(eqn, at)
            outs = self.results(eqn, [read(a) for a in eqn.invars], source)
            pin = asked_of(eqn, source.scope, core.is_of_jax(jaxpr))
            if pin is not None:
                outs = [self.annotate(x, pin, source) for x in outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def results(self, eqn: JaxprEqn, inputs: list[Operand], source: Source) -> list[Operand]:
        """The results of one equation."""
        if is_passed(eqn):
            return inputs[-len(eqn.outvars) :]
        if eqn.primitive.name == "cond" and isinstance(inputs[0], Const):
            taken = eqn.params["branches"][int(np.asarray(inputs[0].value))]
            return self.inline(*core.sub_jaxpr({"jaxpr": taken}, "jaxpr"), inputs[1:], source)
        meant = self.expansion(eqn, inputs)
        if meant is not None:
            return self.inline(*core.sub_jaxpr({"jaxpr": meant}, "jaxpr"), inputs, source)
        target = core.target_of(eqn.primitive.name, eqn.params)
        if eqn.primitive.name in core.CALLS and not _has_rule(eqn, target):
            return self.call(eqn, inputs, source)
        return self.node(eqn, inputs, source, target)

    def annotate(self, x: Operand, pin: Pin, source: Source) -> Operand:
        """A value behind an annotation; a scalar that stands in the program has none."""
        if isinstance(x, Const):
            return x
        made = self.value(self.values[x], self.values[x].name)
        self.nodes.append(make_node(len(self.nodes), annotate_p, (x,), (made,), {"pin": pin}, source))
        return made

    def expansion(self, eqn: JaxprEqn, inputs: Sequence[Operand]) -> ClosedJaxpr | None:
        """What an equation stands for, if it is written in other ops."""
        if eqn.primitive.name == one_hot.SCATTER and one_hot.is_zero(inputs[0], self.nodes):
            return one_hot.one_hot_scatter(eqn)
        return expansion(eqn)

    def call(self, eqn: JaxprEqn, inputs: list[Operand], source: Source) -> list[Operand]:
        body, consts = core.sub_jaxpr(eqn.params, core.CALLS[eqn.primitive.name])
        source = replace(source, info=core.inside_call(source.info, eqn))
        if eqn.primitive.name in REMAT and eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            inputs = self.barrier(inputs, source)
        return self.inline(body, consts, inputs, source)

    def barrier(self, inputs: list[Operand], source: Source) -> list[Operand]:
        """Keeps the recomputation apart from the forward, as JAX's own lowering of a checkpoint does."""
        self.barriers += 1
        primitive = core.barrier_primitive()
        out: list[Operand] = []
        for x in inputs:
            if isinstance(x, Const) or core.is_key(self.values[x].dtype):
                out.append(x)
                continue
            v = self.value(self.values[x], self.values[x].name)
            self.nodes.append(
                make_node(len(self.nodes), primitive, (x,), (v,), {}, source, barrier=self.barriers)
            )
            out.append(v)
        return out

    def node(self, eqn: JaxprEqn, inputs: list[Operand], source: Source, target: str) -> list[Operand]:
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return self.barrier(inputs, source)
        holds = CONTROL[name].bodies if name in CONTROL else ()
        bodies = tuple(self.body(j, source) for key in holds for j in _listed(eqn.params[key]))
        outs = tuple(self.value(v.aval, name) for v in eqn.outvars)
        self.nodes.append(
            make_node(
                len(self.nodes),
                eqn.primitive,
                inputs,
                outs,
                plain_params(eqn.params),
                source,
                bodies=bodies,
                target=target,
            )
        )
        return list(outs)

    def body(self, inner: Jaxpr | ClosedJaxpr, at: Source) -> Body:
        """The graph of a loop's body or of a branch."""
        jaxpr, consts = core.sub_jaxpr({"jaxpr": inner}, "jaxpr")
        at = replace(at, info=core.inside_loop(at.info))
        outside, self.nodes = self.nodes, []
        inputs = tuple(self.value(v.aval, "carried") for v in jaxpr.invars)
        outputs = self.inline(jaxpr, consts, inputs, at)
        nodes, self.nodes = self.nodes, outside
        return Body(inputs, tuple(nodes), tuple(outputs))


def _has_rule(eqn: JaxprEqn, target: str) -> bool:
    """Whether a call is of a function that the user registered as an op."""
    found = lookup(f"{eqn.primitive.name}[{target}]") if target else None
    return found is not None and (found.function is None or core.is_call_of(found.function, eqn))


def _aval(atom: Atom) -> Aval:
    return atom.aval


def _listed(x: Any) -> Sequence[Any]:
    return x if isinstance(x, tuple | list) else (x,)


def _source(eqn: JaxprEqn, at: Source) -> Source:
    """The user's line of an equation, else that of the call around it; scopes are joined."""
    own = core.user_line(eqn.source_info)
    line = own or ((at.file, at.line) if at.file else core.any_line(eqn.source_info))
    scope = "/".join(s for s in (at.scope, core.scope_of(eqn.source_info)) if s)
    info = core.inlined_source(at.info, eqn.source_info, own is not None or not at.file)
    return Source(*(line or ("", 0)), scope, info)


def trace(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], static: Sequence[int] = ()
) -> TracedProgram:
    """The logical graph of `fn(*args, **kwargs)`.

    Arguments:
      args, kwargs: arrays, `ShapeDtypeStruct`s or Python scalars in pytrees.
      static: positions of arguments that are not traced.

    >>> import jax.numpy as jnp
    >>> print(trace(lambda x: jnp.sin(x) * 2, [jnp.ones(3)], {}).graph.nodes[0].op)
    sin
    """
    with user_mesh():
        closed, shapes = jax.make_jaxpr(fn, static_argnums=tuple(static), return_shape=True)(*args, **kwargs)
    closed = without_effects(closed)
    dynamic = tuple(a for i, a in enumerate(args) if i not in static)
    in_paths = leaf_paths(fn, dynamic, kwargs, [i for i in range(len(args)) if i not in static])
    b = Builder()
    inputs = [b.value(v.aval, path) for v, path in zip(closed.jaxpr.invars, in_paths, strict=True)]
    outs = b.inline(*core.without_unused(closed), inputs, Source())
    flat, out_tree = jax.tree.flatten(shapes)
    out_paths = tuple(
        "result" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]
    )
    assert len(flat) == len(outs)
    graph = Graph(tuple(b.values), tuple(inputs + b.const_ids), tuple(b.consts), tuple(b.nodes), tuple(outs))
    return TracedProgram(clone_sources(prune(graph)), in_paths, out_tree, out_paths, definition_of(fn))


def definition_of(fn: Callable[..., Any]) -> Source:
    """Where a function is defined, as far as Python knows."""
    info = core.definition(fn)
    file, line = (core.any_line(info) if info is not None else None) or ("", 0)
    return Source(file, line, info=info)


def leaf_paths(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], at: Sequence[int]
) -> tuple[str, ...]:
    """A readable name per argument leaf, with the function's own parameter names where it has them."""
    import inspect

    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    out = []
    for path, _ in jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))[0]:
        top, which, *rest = path
        if top.idx == 0:
            i = at[which.idx]
            head = names[i] if i < len(names) else f"args[{i}]"
        else:
            head = str(which.key)
        out.append(head + jax.tree_util.keystr(tuple(rest)))
    return tuple(out)


def prune(graph: Graph) -> Graph:
    """Drops ops whose results nobody uses and that have no effect."""
    return replace(graph, nodes=used_nodes(graph.nodes, graph.outputs))


def clone_sources(graph: Graph) -> Graph:
    """Gives every user its own copy of a tensor made from scalars (zeros, iota): each may lie its own way."""
    values = list(graph.values)
    nodes = _cloned(graph.nodes, graph.outputs, values)
    return replace(graph, values=tuple(values), nodes=number_nodes(nodes))


def _cloned(nodes: Sequence[Node], results: Sequence[Operand], values: list[Value]) -> list[Node]:
    """The ops of one graph or body with cloned sources; new values are appended to `values`."""
    outputs = {x for x in results if not isinstance(x, Const)}
    sources = {
        node.outputs[0]: node
        for node in nodes
        if len(node.outputs) == 1 and not node.bodies and all(isinstance(x, Const) for x in node.inputs)
    }
    out: list[Node] = []
    for node in nodes:
        if node.outputs and node.outputs[0] in sources and node.outputs[0] not in outputs:
            continue
        inputs: list[Operand] = []
        for x in node.inputs:
            if not isinstance(x, Const) and x in sources and x not in outputs:
                values.append(replace(values[x], id=len(values)))
                out.append(replace(sources[x], outputs=(len(values) - 1,)))
                x = len(values) - 1
            inputs.append(x)
        bodies = tuple(replace(b, nodes=tuple(_cloned(b.nodes, b.outputs, values))) for b in node.bodies)
        same = not bodies and tuple(inputs) == node.inputs
        out.append(node if same else replace(node, inputs=tuple(inputs), bodies=bodies))
    return out


def is_same_program(a: TracedProgram, b: TracedProgram) -> bool:
    """Whether two traces say the same, to the last bit of what stands in them.

    A function that is held as a parameter of an op is compared by identity, and so is a closed-over array.

    >>> import numpy as np
    >>> from sbp.passes.program.trace import trace
    >>> def times(k): return trace(lambda x: x * k, [np.ones(3)], {})
    >>> is_same_program(times(2.0), times(2.0)), is_same_program(times(2.0), times(3.0))
    (True, False)
    """
    return (
        (a.in_paths, a.out_paths, a.out_tree) == (b.in_paths, b.out_paths, b.out_tree)
        and a.graph == b.graph
        and list(map(id, a.graph.consts)) == list(map(id, b.graph.consts))
        and all(_said(x) == _said(y) for x, y in zip(a.graph.walk(), b.graph.walk(), strict=True))
        and _scalars(a.graph) == _scalars(b.graph)
    )


def _said(node: Node) -> Hashable:
    """What the equality of ops leaves out: parameters. Bodies say what the jaxprs of loops do."""
    bodies = CONTROL[node.op].bodies if node.op in CONTROL else ()
    return key_of({k: v for k, v in node.params.items() if k not in bodies})


def _scalars(graph: Graph) -> list[Hashable]:
    """The scalars that stand in a graph."""

    def read() -> Iterable[Operand]:
        for node in graph.walk():
            yield from node.inputs
            yield from (x for body in node.bodies for x in body.outputs)
        yield from graph.outputs

    return [key_of(x.value) for x in read() if isinstance(x, Const)]
