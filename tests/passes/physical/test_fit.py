"""Plans under a limit on memory: the search, its loads, and the evaluator's last word."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.hardware import hardware_for
from sbp.passes.physical.fit import fit, peak_bytes
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.candidates import rest_signatures
from sbp.passes.plan.model import Model
from sbp.passes.plan.room import loads_of
from sbp.passes.plan.solve import solve
from sbp.passes.program.trace import trace
from tests.passes.plan.test_optimal import problem, program

ON = sbp.placement("h100", shape=(8,))
OPTIMIZER = optax.adamw(1e-3)
LAYERS, WIDTH, ROWS = 4, 1024, 512


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(ws: Any, state: Any, x: Any) -> Any:
    updates, state = OPTIMIZER.update(jax.grad(loss)(ws, x), state, ws)
    return optax.apply_updates(ws, updates), state


WS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
ARGS = WS, jax.eval_shape(OPTIMIZER.init, WS), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def planned(limit: float | None = None, hardware: sbp.Hardware | None = None, rows: int = ROWS) -> sbp.Plan:
    options = sbp.Options(memory_limit=limit, hardware=hardware)
    # Links so slow that nothing travels unless it must: the fastest plan has copies of all state.
    signatures = [B], sbp.AUTO, [S(0)]
    return sbp.compile(step, ON, in_sbp=signatures, donate_argnums=(0, 1), options=options).plan(
        *ARGS[:2], jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    )


SLOW = replace(hardware_for("h100"), chip="", links=(sbp.Link(1 << 60, 1e9, 1e-3),))


def test_state_is_split_when_there_is_no_room_for_copies() -> None:
    fastest = planned(hardware=SLOW)
    limit = 0.7 * fastest.memory_bytes
    plan = planned(limit, SLOW)
    assert plan.memory_bytes <= limit < fastest.memory_bytes
    assert plan.seconds >= fastest.seconds and plan.bound <= plan.seconds
    moments = plan.in_sbp[LAYERS + 1 : 3 * LAYERS + 1]
    assert any(nd != (B,) for nd in moments)
    assert any(note.startswith("planned to fit into ") and "slower" in note for note in plan.notes)


def test_a_limit_that_is_kept_changes_nothing() -> None:
    fastest = planned(hardware=SLOW)
    assert planned(fastest.memory_bytes, SLOW) == fastest


def test_the_memory_of_the_device_is_a_limit_too() -> None:
    fastest = planned(hardware=SLOW)
    small = replace(SLOW, memory_bytes=0.7 * fastest.memory_bytes)
    assert planned(hardware=small).fits


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(sbp.SbpError, match="alive at the peak"):
        planned(1e6, SLOW)


@pytest.mark.parametrize("seed", range(12))
def test_loads_are_no_more_than_a_plan_needs(seed: int) -> None:
    """Else plans that fit would be left out."""
    place = sbp.placement("cpu", shape=(4,))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    given = problem(trace(program(seed, 2 + seed % 7), (x, x), {}).graph, place)
    model = Model(*given)
    model.build()
    network, loads = loads_of(model, 1.0)
    states = solve(network).states
    counted = Budget(loads, np.inf).peak_bytes(states)
    needed = peak_bytes(given[0], model.chosen(states, 0.0, 0.0), given[2], ())
    assert counted <= needed * (1 + 1e-9)
    found = fit(*given, needed, (), None)
    assert found.assignment is not None and found.least_bytes <= needed


def test_a_copy_counts_beside_what_it_is_made_of() -> None:
    """A weight at rest in parts, gathered once for two users."""
    place = sbp.placement("cpu", shape=(4,))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    given = problem(trace(lambda w, x: jnp.sin(x @ w) @ w, (w, w), {}).graph, place)
    model = Model(*given)
    model.build()
    network, loads = loads_of(model, 1.0)
    assert len(network.unary) > len(model.unary)
    whole = max(float(load.bytes.max()) for load in loads if load.node >= len(model.unary))
    assert whole == 4.0 * 64 * 64
    assert {len(nd) for nd in rest_signatures((64, 64), np.float32, place)} == {1}
