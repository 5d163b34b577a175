"""When values are used: soon after they are made, and again much later."""

from typing import Any

import jax
import jax.numpy as jnp

import sbp
from sbp.passes.plan.later import LaterUses, is_plain
from sbp.passes.plan.room import RoomModel
from sbp.passes.program.graph import Graph
from sbp.passes.program.trace import trace
from tests.passes.plan.test_optimal import problem

PLACE = sbp.placement("cpu", shape=(2,))
X = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def graph_of(fn: Any, *args: Any) -> Graph:
    return trace(fn, args, {}).graph


def test_ops_with_one_result_that_do_nothing_besides_may_run_again() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(lambda y: None, x)
        y = jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)[0]
        a, b = jnp.split(jnp.sin(y), 2)
        return jax.pure_callback(lambda z: z, X, jnp.concatenate([a, b]) @ x)

    plain = {n.op: is_plain(n) for n in graph_of(fn, X).nodes}
    assert plain["sin"] and plain["dot_general"] and plain["concatenate"]
    assert not plain["scan"] and not plain["split"] and not plain["pure_callback"]


def test_a_value_is_wanted_again_after_the_longest_time_without_a_reader() -> None:
    def fn(x: Any, ws: list[Any]) -> Any:
        y = first = x @ ws[0]
        for w in ws:
            y = jnp.tanh(y @ w) @ w
        return y * first

    model = RoomModel(*problem(graph_of(fn, X, [X] * 6), PLACE), 1.0)
    model.build()
    uses, first = LaterUses(model), model.graph.nodes[0].outputs[0]
    early, late, reads = uses.divided(first)
    assert {uses.by_id[u.user].op for u in early} == {"dot_general"}
    assert {uses.by_id[u.user].op for u in late} == {"mul"}
    assert reads == [model.when(u) for u in late]
    span = uses.wanted_later()[first]
    assert (span.start, span.until) == reads[0] and max(model.when(u)[1] for u in early) < span.start
