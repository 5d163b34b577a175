"""Tables with a copy for each group of devices that are cut further between steps, and gathered for use."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from sbp import S
from sbp.passes.explain.rest_lines import argument_bytes
from sbp.runtime import embedding as em

GRID = sbp.placement("cpu", shape=(2, 4), axes=("data", "model"))
TABLES = em.Collection((em.FeatureConfig("user", em.TableConfig("users", 4000, 16)),), multiple=8)


def trained(*, cut: bool) -> tuple[sbp.Plan, Any]:
    """The plan, and what three steps leave of the table and its state."""
    used, split = TABLES.in_sbp(GRID, axes=("model",)), [S(0), S(0)]
    rest = TABLES.in_sbp(GRID) if cut else used
    tx = sbp.rows(optax.adagrad(0.1))

    def loss(params: Any, ids: Any) -> Any:
        params = {name: sbp.annotate(x, used[name]) for name, x in params.items()}
        return jnp.square(TABLES(params, {"user": ids})["user"] - 1).mean()

    def step(params: Any, state: Any, ids: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, ids)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, value

    params = TABLES.init(jax.random.key(0))
    state = tx.init(params)
    states = TABLES.in_sbp(GRID, None if cut else ("model",), like=state)
    program = sbp.compile(step, GRID, in_sbp=(rest, states, split))
    ids = np.random.default_rng(0).integers(0, 4000, 64).astype(np.int32)
    plan = program.plan(params, state, ids)
    for _ in range(3):
        params, state, _ = program(params, state, ids)
    return plan, jax.tree.map(np.asarray, (params, state))


def test_a_table_is_cut_over_its_copies_between_steps() -> None:
    """It takes half as much at rest, is gathered over the copies alone, and is trained by its rows."""
    whole, expected = trained(cut=False)
    plan, found = trained(cut=True)
    ((stack, _),) = TABLES.stacks.items()
    (at,) = (i for i, path in enumerate(plan.in_paths) if path.startswith("params"))
    assert [argument_bytes(p)[at] for p in (whole, plan)] == [64_000, 32_000]
    gathers = [c for c in plan.collectives if c.kind == "all_gather" and stack in c.tensor]
    assert gathers and all(c.axes == ("data",) for c in gathers)
    assert not [c for c in whole.collectives if c.kind == "all_gather" and stack in c.tensor]
    assert any("only the rows that were looked up" in note for note in plan.notes)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
