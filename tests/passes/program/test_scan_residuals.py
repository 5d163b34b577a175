"""What scans over checkpointed layers keep of what their transposes compute again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.passes import spec
from sbp.passes.pipeline.op_placement import loop_of
from sbp.passes.program.graph import Graph, speaks, used_nodes
from sbp.passes.program.scan_residuals import (
    RecomputedScan,
    ScanPair,
    computes_twice,
    keep_in_scans,
    scan_pairs,
)
from sbp.passes.program.trace import trace
from tests.passes.pipeline.scanned import BATCH, LAYERS, PARTS, WIDTH, arguments, step_of


def products(graph: Graph) -> list[int]:
    """How many products the scan and its transpose have, in each layer."""
    loop = loop_of(graph)
    nodes = graph.nodes if loop is None else loop.bodies[0].nodes
    return [sum(m.op == "dot_general" for m in n.bodies[0].nodes) for n in nodes if n.op == "scan"]


def test_only_products_that_the_gradient_needs_are_computed_twice() -> None:
    """Of two products the second is needed by nothing: JAX leaves it out."""
    graph = trace(step_of(), arguments(), {}).graph
    loop = loop_of(graph)
    assert loop is not None and products(graph) == [2, 5]
    (pair,) = scan_pairs(graph, loop.bodies[0].nodes)
    (one,) = pair.twice
    assert one.held_bytes == 4 * LAYERS * BATCH // PARTS * 2 * WIDTH
    assert pair.choose_residuals(0.5) == () and pair.choose_residuals(1.0) == (one,)


def test_what_is_kept_is_not_computed_again() -> None:
    graph = trace(step_of(), arguments(), {}).graph
    kept = keep_in_scans(graph, 1.0)
    spec.check_graph(kept)
    assert products(kept) == [2, 4] and not computes_twice(kept)
    assert keep_in_scans(graph, 0.0) is graph


def test_constants_of_the_layers_are_known_on_both_sides() -> None:
    """JAX computes what does not depend on the layer before the scan, and again inside of its transpose."""

    def loss(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            turned = x * jnp.cos(jnp.arange(8.0) / 3)
            return jnp.tanh(jnp.sin(turned @ w) @ w), None

        return jnp.sum(lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0])

    graph = trace(jax.grad(loss), (jnp.ones((3, 8, 8)), jnp.ones((2, 8))), {}).graph
    before, after = products(graph), products(keep_in_scans(graph, 1.0))
    assert computes_twice(graph) and after[0] == before[0] and after[1] == before[1] - 2


def test_without_checkpoints_nothing_is_computed_twice() -> None:
    graph = trace(step_of(checkpoint=False), arguments(), {}).graph
    assert not computes_twice(graph) and products(keep_in_scans(graph, 1.0)) == products(graph)


@pytest.mark.parametrize("parts", [1, 4])
def test_results_stay_the_same(parts: int) -> None:
    args, step = arguments(), step_of(parts)
    at = sbp.placement("cpu", shape=(4,))
    some = [sbp.compile(step, at, options=sbp.Options(scan_kept=share))(*args) for share in (0.0, 1.0)]
    for one, other in zip(*map(jax.tree.leaves, some), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_what_speaks_in_an_inner_loop_is_not_unused() -> None:
    """Less is left in a body once it reads what was kept; what is printed there is printed all the same."""

    def chatter(x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda i, c: (jax.debug.print("heard"), c)[1], x)

    graph = trace(chatter, [jnp.ones(3)], {}).graph
    assert used_nodes(graph.nodes, ()) == tuple(n for n in graph.nodes if speaks(n)) != ()


def test_what_is_kept_saves_the_most_arithmetic() -> None:
    """Not the results that are made first: a wide product of a narrow operand is left out for a narrow one of
    a wide operand, made later."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        wide = jnp.tanh(x @ w["wide"])
        return x + jnp.tanh(jnp.tanh(wide @ w["narrow"]) @ w["last"]), None

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0])

    shapes = {"wide": (3, 4, 32), "narrow": (3, 32, 4), "last": (3, 4, 4)}
    w = {k: jnp.ones(s) for k, s in shapes.items()}
    graph = trace(jax.grad(loss), (w, jnp.ones((2, 4))), {}).graph
    (pair,) = scan_pairs(graph, graph.nodes)
    width = {t: graph.values[t.first].shape[-1] for t in pair.twice}
    wide, narrow, last = pair.twice
    # Two take as much arithmetic; one of them takes an eighth of the bytes.
    assert [width[t] for t in pair.twice] == [32, 4, 4] and wide.flops == narrow.flops > last.flops
    assert [pair.choose_residuals(share) for share in (0.05, 0.1, 0.9)] == [(), (narrow,), (wide, narrow)]
    assert pair.choose_residuals(0.5) == (narrow, last) and pair.choose_residuals(1.0) == pair.twice


def test_of_many_products_some_are_found_at_once() -> None:
    """No more choices are carried on than there are room and sense for."""
    many = tuple(RecomputedScan(i, i, 1.0 + i * 1e-3, i, 1.0 + (i * 7919 % 64) * 1e-3) for i in range(64))
    none = None
    pair = ScanPair(none, none, many)  # type: ignore[arg-type]
    kept = pair.choose_residuals(0.5)
    assert sum(t.held_bytes for t in kept) <= 0.5 * sum(t.held_bytes for t in many)
    assert sum(t.flops for t in kept) >= 0.5 * sum(t.flops for t in many)
