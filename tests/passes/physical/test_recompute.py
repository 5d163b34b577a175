"""Programs in which ops run again."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import sbp
from sbp.passes import spec
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.program import Compute
from sbp.passes.physical.recompute import with_copies
from sbp.passes.plan.clusters import RecomputedValue, op_count
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.trace import trace
from tests.passes.plan.cheapest import choose
from tests.passes.plan.test_optimal import problem

PLACE = sbp.placement("cpu", shape=(2,))


def loss(ws: Any, x: Any) -> Any:
    for w, u in ws:
        x = x + jax.nn.softmax(x @ w) @ u
    return (x**2).mean()


X, W, U = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(512, 64), (64, 256), (256, 64)])
GIVEN = problem(trace(jax.grad(loss), ([(W, U)] * 3, X), {}).graph, PLACE)
GRAPH = GIVEN[0].graph
PLAIN = choose(*GIVEN)


def later(ops: tuple[str, ...]) -> dict[int, RecomputedValue]:
    """Every result of some forward ops, made again for the backward."""
    uses, found = GRAPH.consumers(), {}
    for node in GRAPH.nodes:
        users = {n.id for n, _ in uses.get(node.outputs[0], ()) if n.role.undoes}
        if node.op in ops and not node.role.undoes:
            found[node.outputs[0]] = RecomputedValue(PLAIN.strategies[node.id], frozenset(users))
    return {v: r for v, r in found.items() if r.users or len(ops) > 1}


SOFTMAX = ("dot_general", "reduce_max", "max", "broadcast_in_dim", "sub", "exp", "reduce_sum", "div")


def makers_behind(graph: Graph, copy: Node) -> list[Node]:
    """What makes the operands of a copy, and those of what is computed on the spot for it."""
    makers, found, left = graph.producers(), list[Node](), [copy]
    while left:
        node = left.pop()
        own = [makers[x] for x in node.inputs if isinstance(x, int) and x in makers]
        found += own
        left += [n for n in own if n.barrier < 0]
    return found


def test_copies_stand_before_the_first_op_that_needs_them_behind_one_barrier() -> None:
    recomputed = later(("div",))
    made = with_copies(GIVEN[0], replace(PLAIN, recomputed=recomputed))
    graph = made.candidates.graph
    place = {n.id: i for i, n in enumerate(graph.nodes)}
    makers = GRAPH.producers()
    for v, r in recomputed.items():
        own = op_count(GRAPH) + makers[v].id
        copy = graph.nodes[place[own]]
        read = makers_behind(graph, copy)
        held = [n for n in read if n.barrier >= 0]
        assert held and all(n.barrier in made.anchors for n in held) and len({n.barrier for n in held}) == 1
        # What is computed on the spot is a copy too.
        assert all(n.barrier >= 0 or n.id >= 2 * op_count(GRAPH) for n in read)
        users = [graph.nodes[place[u]] for u in r.users if u in place]
        assert users and all(copy.outputs[0] in n.inputs and v not in n.inputs for n in users)
        # What the barrier waits for is made in the backward.
        assert graph.producers()[made.anchors[held[0].barrier]].role.undoes
        assert place[own] < min(place[n.id] for n in users)
        assert copy.source == makers[v].source
    assert {n.id for n in GRAPH.nodes} >= {
        n.id for n in graph.nodes if n.id <= max(makers[v].id for v in makers)
    }


def test_nothing_is_changed_where_nothing_is_recomputed() -> None:
    assert with_copies(GIVEN[0], PLAIN).candidates is GIVEN[0]


def test_less_is_alive_and_more_is_computed() -> None:
    recomputed = later(SOFTMAX)
    plain, made = (
        insert_boxing(GIVEN[0], a, GIVEN[2]) for a in (PLAIN, replace(PLAIN, recomputed=recomputed))
    )
    spec.check_physical(made)
    before, after = (Evaluator(p, GIVEN[2].network) for p in (plain, made))
    assert after.peak_bytes() < 0.8 * before.peak_bytes()
    assert after.seconds() > before.seconds()
    assert sum(isinstance(s, Compute) for s in made.steps) > sum(isinstance(s, Compute) for s in plain.steps)


def masked_loss(ws: Any, x: Any) -> Any:
    seen = jnp.tril(jnp.ones((512, 256), bool))
    for w, u in ws:
        x = x + jax.nn.softmax(jnp.where(seen, x @ w, -1e9)) @ u
    return (x**2).mean()


def test_what_is_computed_where_it_is_read_goes_through_no_barrier() -> None:
    """A mask and the number that is put under it would be written, and kept, only to be read again."""
    given = problem(trace(jax.grad(masked_loss), ([(W, U)] * 3, X), {}).graph, PLACE)
    graph, plain = given[0].graph, choose(*given)
    made, uses, recomputed = graph.producers(), graph.consumers(), {}
    for node in graph.nodes:
        users = {n.id for n, _ in uses.get(node.outputs[0], ()) if n.role.undoes}
        if node.op in ("select_n", "exp", "sub", "div") and not node.role.undoes:
            recomputed[node.outputs[0]] = RecomputedValue(plain.strategies[node.id], frozenset(users))
    copied = with_copies(given[0], replace(plain, recomputed=recomputed)).candidates.graph
    held = {n.inputs[0] for n in copied.nodes if n.barrier >= 0}
    scalars = {v for v in held if isinstance(v, int) and v in made and made[v].op == "broadcast_in_dim"}
    assert held and not {v for v in scalars if all(not isinstance(x, int) for x in made[v].inputs)}
    assert sum(n.op == "broadcast_in_dim" for n in copied.nodes) > sum(
        n.op == "broadcast_in_dim" for n in graph.nodes
    )


def test_what_is_made_again_for_a_loop_over_micro_batches_is_none() -> None:
    def step(w: Any, x: Any) -> Any:
        return sbp.microbatch(loss, 2, batch_args=1)(jax.tree.map(jnp.tanh, w), x)

    given = problem(trace(step, ([(W, U)], X), {}).graph, PLACE)
    graph, plain = given[0].graph, choose(*given)
    (loop,) = (n for n in graph.nodes if n.role.microbatches)
    made = [n for n in graph.nodes if n.op == "tanh"]
    again = {n.outputs[0]: RecomputedValue(plain.strategies[n.id], frozenset([loop.id])) for n in made}
    copied = with_copies(given[0], replace(plain, recomputed=again)).candidates.graph
    assert len(copied.nodes) > len(graph.nodes) and len(made) == 2
    assert [n.op for n in copied.nodes if n.role.microbatches] == ["scan"]
