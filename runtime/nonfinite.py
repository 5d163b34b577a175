"""Programs under `jax_debug_nans` and `jax_debug_infs`: which line of the user made the first such number.

JAX would run the program again op by op on every device, padding included, and knows only the lines of
this package. Here results are looked at as the user knows them, and then the tensors inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sbp import compat
from sbp.errors import NonFiniteError, Problem
from sbp.passes.look.user_lines import clean_scope
from sbp.passes.program.control import CONTROL
from sbp.passes.program.graph import Body, Const, Graph, Node
from sbp.passes.program.names import loop_name
from sbp.runtime.built import Built
from sbp.runtime.pipeline.program import BuiltPipeline
from sbp.runtime.plain import Tensor, evaluate, value_of
from sbp.runtime.probe import CHUNK, probe
from sbp.untyped import Leaf, PyTree

Look: TypeAlias = tuple[str, Callable[[NDArray[Any]], NDArray[np.bool_]]]
"""A kind of number, and which elements of an array are of it."""
# What JAX looks for under which of its settings.
CHECKS: dict[str, Look] = {
    "jax_debug_nans": ("NaN", np.isnan),
    "jax_debug_infs": ("infinity", np.isinf),
}
Looks: TypeAlias = Sequence[Look]
Probe: TypeAlias = Callable[[Sequence[int]], Sequence[Tensor]]
"""The values of some tensors of a graph, whole."""
Found: TypeAlias = tuple[Node, int]
"""An op, and which of its results."""


def run(built: Built | BuiltPipeline, leaves: Sequence[Leaf]) -> PyTree:
    """Runs a built program, and looks at its results.

    Arguments:
      leaves: of a call's arguments.

    Raises:
      NonFiniteError: if a result has such a number; it names the first op that makes one.
    """
    looks = [check for name, check in CHECKS.items() if compat.setting(name)]
    with jax.debug_nans(False), jax.debug_infs(False):
        given = set(built.donate)
        held = [jnp.copy(x) if i in given and isinstance(x, jax.Array) else x for i, x in enumerate(leaves)]
        out = built.run(leaves)
        for path, x in zip(built.traced.out_paths, jax.tree.leaves(out), strict=True):
            if what := _found(x, looks):
                raise NonFiniteError(_problem(built, held, path, what, looks))
    return out


def _found(x: object, looks: Looks) -> str:
    """What of such numbers a tensor has; "" for none, and for a tracer."""
    if isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype"):
        return ""
    if compat.is_key(x.dtype) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return ""
    array = np.asarray(x)
    array = array if array.dtype.kind in "fc" else array.astype(np.float32)
    return " and ".join(what for what, test in looks if test(array).any())


def _problem(
    built: Built | BuiltPipeline, leaves: Sequence[Leaf], path: str, what: str, looks: Looks
) -> Problem:
    """Says where the first one comes from."""
    paths = built.traced.in_paths
    came = [p for p, x in zip(paths, leaves, strict=True) if _found(x, looks)]
    legal = "finite numbers, as jax_debug_nans and jax_debug_infs demand"
    if came:
        more = f" and {len(came) - 1} more" if len(came) > 1 else ""
        fix = "look at what made them, in the step before"
        return Problem("nonfinite", path, what, legal, f"it came in with {came[0]}{more}", fix)
    graph, probe = _probe(built, leaves)
    first = _first(graph, probe, looks)
    fix = "jax.debug.print beside that line; jax.numpy.where before the op, not behind it"
    if first is None:
        why = "the tensors inside are finite when they are fetched"
        return Problem("nonfinite", path, what, legal, why, fix)
    node, v = first
    scope = clean_scope(node.source.scope)
    where = f"{node.source} in {scope}" if scope else str(node.source)
    why = f"the first op whose result has one is {loop_name(node)} at {where}: {graph.values[v]}"
    return Problem("nonfinite", path, what, legal, why, fix)


def _first(graph: Graph, probe: Probe, looks: Looks) -> Found | None:
    """The first op, in the order of the graph, whose result has one; that of a loop's body for a loop."""
    for i in range(0, len(graph.nodes), CHUNK):
        pairs = [(node, v) for node in graph.nodes[i : i + CHUNK] for v in node.outputs]
        for (node, v), x in zip(pairs, probe([v for _, v in pairs]), strict=True):
            if _found(x, looks):
                if not node.bodies:
                    return node, v
                ids = [a for a in node.inputs if not isinstance(a, Const)]
                return _inside(node, dict(zip(ids, probe(ids), strict=True)), looks) or (node, v)
    return None


def _inside(node: Node, env: Mapping[int, Tensor], looks: Looks) -> Found | None:
    """The first op in the body of a loop or a branch, run trip by trip on one device."""
    bodies = {id(b): _jitted(b) for b in node.bodies}
    for body, inputs in CONTROL[node.op].step(node, [value_of(x, env) for x in node.inputs]):
        values = dict(zip(body.inputs, inputs, strict=True))
        values.update(bodies[id(body)](*inputs))
        for n in body.nodes:
            for v in n.outputs:
                if _found(values[v], looks):
                    return (_inside(n, values, looks) if n.bodies else None) or (n, v)
        inputs[:] = [value_of(x, values) for x in body.outputs]
    return None


def _jitted(body: Body) -> Callable[..., dict[int, jax.Array]]:
    """A function of what enters a body that gives all that is made in there."""
    made = [v for n in body.nodes for v in n.outputs]
    run = _run(body.nodes, body.inputs, made)
    return jax.jit(lambda *args: dict(zip(made, run(*args), strict=True)))


def _probe(built: Built | BuiltPipeline, leaves: Sequence[Leaf]) -> tuple[Graph, Probe]:
    """A graph of the program, and how its tensors are had: of one with stages, on one device."""
    if isinstance(built, BuiltPipeline):
        whole = built.traced.graph
        host = [x if compat.is_key(jnp.result_type(x)) else np.asarray(x) for x in (*leaves, *whole.consts)]
        return whole, lambda values: jax.jit(_run(whole.nodes, whole.inputs, values))(*host)
    physical = built.plan.physical
    assert physical is not None
    inputs = [*built.place(leaves), *built.executable[2]]

    def distributed(values: Sequence[int]) -> Sequence[Tensor]:
        known = dict(zip(physical.graph.inputs, inputs, strict=True))
        made = [v for v in values if v not in known]
        if made:
            known.update(zip(made, probe(built, inputs, made), strict=True))
        return [known[v] for v in values]

    return physical.graph, distributed


def _run(nodes: Sequence[Node], inputs: Sequence[int], values: Sequence[int]) -> Callable[..., list[Tensor]]:
    """A function of some tensors that gives others, by the ops between them."""
    return lambda *args: evaluate(nodes, dict(zip(inputs, args, strict=True)), values)
