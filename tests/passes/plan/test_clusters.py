"""What stands for ops that run again."""

import jax.numpy as jnp

from sbp.passes.plan.clusters import op_count
from sbp.passes.program.trace import trace


def test_a_copy_has_an_id_that_no_op_has() -> None:
    graph = trace(lambda x: jnp.cos(jnp.sin(x)), (1.0,), {}).graph
    ids = {n.id for n in graph.walk()}
    copies = {op_count(graph) + i for i in ids}
    assert op_count(graph) == len(ids) == len(copies) and ids.isdisjoint(copies)
