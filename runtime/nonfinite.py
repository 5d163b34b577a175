"""Programs under `jax_debug_nans` and `jax_debug_infs`: which line of the user made the first such number.

JAX would run the program again op by op on every device, padding included, and knows only the lines of this
package. Here results are looked at as the user knows them, and so are the tensors inside if there is something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sbp import compat
from sbp.errors import NonFiniteError, Problem
from sbp.passes.graph import Const, Graph, Node
from sbp.passes.names import loop_name
from sbp.passes.picture import clean_scope
from sbp.runtime.lower import lower
from sbp.runtime.pipeline.program import BuiltPipeline
from sbp.runtime.verify import CHUNK, with_outputs

# What JAX looks for under which of its settings.
CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "jax_debug_nans": ("NaN", np.isnan),
    "jax_debug_infs": ("infinity", np.isinf),
}
Probe: TypeAlias = Callable[[Sequence[int]], Sequence[Any]]
"""The values of some tensors of a graph, whole."""


def run(built: Any, leaves: Sequence[Any]) -> Any:
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


def _found(x: Any, looks: Sequence[tuple[str, Callable[[Any], Any]]]) -> str:
    """What of such numbers a tensor has; "" for none, and for a tracer."""
    if isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype"):
        return ""
    if compat.is_key(x.dtype) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return ""
    array = np.asarray(x)
    array = array if array.dtype.kind in "fc" else array.astype(np.float32)
    return " and ".join(what for what, test in looks if test(array).any())


def _problem(built: Any, leaves: Sequence[Any], path: str, what: str, looks: Any) -> Problem:
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


def _first(graph: Graph, probe: Probe, looks: Any) -> tuple[Node, int] | None:
    """The first op, in the order of the graph, whose result has one, and which of its results."""
    for i in range(0, len(graph.nodes), CHUNK):
        pairs = [(node, v) for node in graph.nodes[i : i + CHUNK] for v in node.outputs]
        for pair, x in zip(pairs, probe([v for _, v in pairs]), strict=True):
            if _found(x, looks):
                return pair
    return None


def _probe(built: Any, leaves: Sequence[Any]) -> tuple[Graph, Probe]:
    """A graph of the program, and how its tensors are had: of one with stages, on one device."""
    if isinstance(built, BuiltPipeline):
        whole = built.traced.graph
        return whole, lambda values: _on_one_device(whole, leaves, values)
    physical = built.plan.physical
    assert physical is not None
    inputs = [*built.place(leaves), *built.executable[2]]

    def distributed(values: Sequence[int]) -> Sequence[Any]:
        probed = with_outputs(physical, values)
        found: Sequence[Any] = lower(probed, probed.placement.mesh, ())(*inputs)
        return found

    return physical.graph, distributed


def _on_one_device(graph: Graph, leaves: Sequence[Any], values: Sequence[int]) -> Sequence[Any]:
    def run(*inputs: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
        for node in graph.nodes:
            args = [np.asarray(x.value, x.dtype) if isinstance(x, Const) else env[x] for x in node.inputs]
            barrier = node.barrier >= 0
            out = [args[0]] if barrier else compat.bind(node.primitive, args, dict(node.params))
            env.update(zip(node.outputs, out, strict=True))
        return [env[v] for v in values]

    host = [x if compat.is_key(jnp.result_type(x)) else np.asarray(x) for x in leaves]
    found: Sequence[Any] = jax.jit(run)(*host, *graph.consts)
    return found
