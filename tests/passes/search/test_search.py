"""Plans under a limit on memory: the search, its loads, and the evaluator's last word."""

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.hardware.catalogue import Hardware, Link, hardware_for
from sbp.passes.physical.evaluate import HOLES
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.program import Box
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.solve import solve
from sbp.passes.program.trace import trace
from sbp.passes.request import Request, Terms
from sbp.passes.search.limited_space import LimitedProblem
from sbp.passes.search.search import FoundSignatures, Search
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


CPU = replace(hardware_for("cpu"), links=(Link(1 << 60, 1e10, 1e-6),))
WS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
ARGS = WS, jax.eval_shape(OPTIMIZER.init, WS), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def planned(limit: float | None = None, hardware: Hardware | None = None, rows: int = ROWS) -> sbp.Plan:
    options = sbp.Options(memory_limit=limit, hardware=hardware)
    # Links so slow that nothing travels unless it must: the fastest plan has copies of all state.
    signatures = [B], sbp.AUTO, [S(0)]
    return sbp.compile(step, ON, in_sbp=signatures, donate_argnums=(0, 1), options=options).plan(
        *ARGS[:2], jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    )


SLOW = replace(hardware_for("h100"), chip="", links=(Link(1 << 60, 1e9, 1e-3),))


@pytest.mark.full
def test_state_is_split_when_there_is_no_room_for_copies() -> None:
    fastest = planned(hardware=SLOW)
    limit = 0.7 * fastest.memory_bytes
    plan = planned(limit, SLOW)
    assert plan.memory_bytes <= limit < fastest.memory_bytes
    assert plan.seconds >= fastest.seconds and plan.bound <= plan.seconds
    moments = plan.in_sbp[LAYERS + 1 : 3 * LAYERS + 1]
    assert any(nd != (B,) for nd in moments)
    assert any(note.startswith("planned to fit into ") and "longer" in note for note in plan.notes)


def test_a_limit_that_is_kept_changes_nothing() -> None:
    fastest = planned(hardware=SLOW)
    plan = planned(fastest.memory_bytes, SLOW)
    # But that XLA's scheduler is told.
    assert plan.hardware.scheduled_bytes == fastest.memory_bytes
    assert replace(plan, hardware=fastest.hardware) == fastest


@pytest.mark.full
def test_the_memory_of_the_device_is_a_limit_too() -> None:
    fastest = planned(hardware=SLOW)
    small = replace(SLOW, memory_bytes=0.7 * fastest.memory_bytes)
    assert planned(hardware=small).fits


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(sbp.SbpError, match="alive there"):
        planned(2.2e7, SLOW)


def limited(fn: Any, *shapes: tuple[int, ...]) -> LimitedProblem:
    place = sbp.placement("cpu", shape=(4,))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return LimitedProblem(*problem(trace(fn, args, {}).graph, place), (), 1.0)


def searched(given: LimitedProblem, limit: float) -> FoundSignatures:
    """What the search finds for a problem of four devices under a limit."""
    graph, place = given.candidates.graph, given.candidates.placement
    free = (None,) * len(graph.inputs), (None,) * len(graph.outputs)
    hardware = given.boxings.network.hardware
    request = Request("f", place, hardware, *free, free[1], terms=Terms(memory_limit_bytes=limit))
    return Search(given.candidates, given.boundary, given.boxings, request).run()


@pytest.mark.parametrize("seed", range(12))
def test_loads_are_no_more_than_a_plan_needs(seed: int) -> None:
    """Else plans that fit would be left out."""
    given = limited(program(seed, 2 + seed % 7), (64, 64), (64, 64))
    model = given.model()
    network = model.build()
    # Of states that cost the same those without idle copies.
    unary = list(network.unary)
    for load in model.loads:
        unary[load.node] = unary[load.node] + 1e-15 * load.bytes
    states = solve(replace(network, unary=tuple(unary))).states
    counted = Budget(tuple(model.loads), np.inf).peak_bytes(states)
    clock = Clock(given.candidates, given.boxings)
    needed = clock.program(model.chosen_signatures(states, 0.0, 0.0)).peak_bytes()
    assert counted <= needed * (1 + HOLES)
    found = searched(given, needed)
    assert found.smallest is None and found.takes is not None
    assert found.takes.peak_bytes() <= needed


def test_a_copy_counts_beside_what_it_is_made_of() -> None:
    """A weight at rest in parts, gathered once for two users."""
    model = limited(lambda w, x: jnp.sin(x @ w) @ w, (64, 64), (64, 64)).model()
    model.build()
    (weight,) = (v for v in model.graph.inputs if v in model.shares)
    whole, largest = 4.0 * 64 * 64, dict[int, float]()
    for load in model.loads:
        largest[load.node] = max(largest.get(load.node, 0.0), float(load.bytes.max()))
    assert largest[model.supply[weight].variable] == whole / 4
    # Two users, and the share: each may have it whole beside what lies at rest.
    copies = [size for node, size in largest.items() if node > max(model.shares.values())]
    assert copies.count(pytest.approx(whole * (1 + HOLES))) >= 3


def again(plan: sbp.Plan) -> list[Box]:
    assert plan.physical is not None
    return [s for s in plan.physical.steps if isinstance(s, Box) and s.after is not None]


def short(limit: float) -> tuple[sbp.Program, tuple[Any, ...]]:
    """Six layers, whose weights are rather sent than the rows that they are multiplied with."""
    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    args = ws, jax.eval_shape(OPTIMIZER.init, ws), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    options = sbp.Options(memory_limit=limit, hardware=CPU)
    on = sbp.placement("cpu", shape=(4,))
    signatures = sbp.AUTO, sbp.AUTO, [S(0)]
    return sbp.compile(step, on, in_sbp=signatures, donate_argnums=(0, 1), options=options), args


def plan_of(limit: float) -> sbp.Plan:
    program, args = short(limit)
    return program.plan(*args)


LIMIT = 268_000.0
"""Below the fastest plan's peak, and above the smallest."""


def test_what_is_short_of_memory_is_gathered_again_for_the_backward() -> None:
    fastest, plan = plan_of(math.inf), plan_of(LIMIT)
    assert plan.memory_bytes <= LIMIT < fastest.memory_bytes and 0.0 <= plan.gap <= 0.03
    assert not again(fastest) and again(plan)
    assert {box.move.kind for box in again(plan)} == {"all_gather"}
    assert any("boxed again for later uses" in note for note in plan.notes)
    assert not any("boxed again" in note for note in fastest.notes)


def test_what_is_gathered_again_computes_the_same() -> None:
    keys = jax.random.split(jax.random.key(0), 7)
    ws = [jax.random.normal(key, (64, 64)) / 8 for key in keys[:6]]
    args = ws, OPTIMIZER.init(ws), jax.random.normal(keys[6], (256, 64))
    want = jax.jit(step)(*args)
    program, _ = short(LIMIT)
    got = program(*jax.tree.map(jnp.copy, args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), want, got)


def test_what_is_gathered_again_waits_for_what_it_is_wanted_with() -> None:
    """Else XLA gathers it once, and keeps it. What runs again for that, such as a transpose, waits too."""
    program, args = short(LIMIT)
    text, plan = program.lower(*args).as_text(), program.plan(*args)
    assert plan.physical is not None
    others = {node.barrier for node in plan.physical.graph.walk() if node.barrier >= 0}
    assert text.count("optimization_barrier") == len(again(plan)) + len(others)


@pytest.mark.full
def test_the_smallest_peak_is_said_where_nothing_fits() -> None:
    with pytest.raises(sbp.SbpError) as caught:
        planned(22e6, SLOW)
    (wrong,) = caught.value.problems
    found = re.search(r"the smallest peak that was found is (\S+ \wB), and none below (\S+ \wB)", wrong.why)
    assert found is not None
    smallest, bound = (sbp.options.bytes_of(text, "") for text in found.groups())
    assert smallest is not None and bound is not None and 0.5 * smallest < bound <= smallest
    assert planned(1.02 * smallest, SLOW).memory_bytes <= 1.02 * smallest
    with pytest.raises(sbp.SbpError, match="alive there"):
        planned(0.98 * bound, SLOW)
