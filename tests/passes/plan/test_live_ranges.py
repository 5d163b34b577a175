"""When values are used: soon after they are made, and again much later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.program import Compute
from sbp.passes.plan.live_ranges import NOWHERE, LaterUse, LaterUses, is_plain
from sbp.passes.plan.memory_problem import RoomModel
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.solve import solve
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
    early, late, reads = uses.divide_uses(first)
    assert {uses.by_id[u.user].op for u in early} == {"dot_general"}
    assert {uses.by_id[u.user].op for u in late} == {"mul"}
    assert reads == [model.when(u) for u in late]
    span = uses.wanted_later()[first]
    assert (span.start, span.until) == reads[0] and max(model.when(u)[1] for u in early) < span.start


DEVICES = sbp.placement("cpu", shape=(4,))


def loss(ws: Any, x: Any) -> Any:
    for w, u in ws:
        x = x + (jnp.tanh(x @ w) * 0.5 + 1.0) @ u
    return (x**2).mean()


INPUT, W, U = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(512, 64), (64, 256), (256, 64)])
GIVEN = problem(trace(jax.grad(loss), ([(W, U)] * 3, INPUT), {}).graph, DEVICES)
MODEL = RecomputingModel(*GIVEN, 1e6)
NETWORK = MODEL.build()
UNWRITTEN = [x for v, x in MODEL.later.items() if v not in MODEL.lives]


def tables(a: int, b: int) -> list[np.ndarray]:
    """What choices of two variables cost together, rows of the first."""
    found = [t.dense() for i, j, t in MODEL.edges if (i, j) == (a, b)]
    return found + [t.dense().T for i, j, t in MODEL.edges if (i, j) == (b, a)]


def operands(x: LaterUse) -> list[LaterUse]:
    return [MODEL.later[v] for v in x.maker.inputs if isinstance(v, int) and v in MODEL.later]


def test_there_are_two_or_three_ways_to_keep_what_is_not_written() -> None:
    assert {x.kept_count // x.each for x in UNWRITTEN} == {2, 3}
    for x in UNWRITTEN:
        lies = MODEL.states[x.variable]
        assert lies[: x.kept_count] == lies[: x.each] * (x.kept_count // x.each)


def test_what_is_computed_for_what_runs_again_takes_what_its_op_does() -> None:
    """Only there: boxed it is read, and for other uses the op has counted it."""
    spots = [x for x in UNWRITTEN if x.has_spots]
    assert spots
    for x in spots:
        maker = MODEL.nodes[x.maker.id]
        (table,) = tables(maker, x.variable)
        lies, seconds = MODEL.states[x.variable], MODEL.unary[maker]
        for s, strategy in enumerate(MODEL.states[maker]):
            same = np.array([nd == strategy.results[0] for nd in lies[: x.each]])
            assert not table[s, : x.each].any() and not table[s, x.kept_count :].any()
            assert (table[s, x.each : 2 * x.each] == np.where(same, 0.0, np.inf)).all()
            assert (table[s, 2 * x.each : x.kept_count] == np.where(same, seconds[s], np.inf)).all()


def test_what_runs_again_reads_nothing_that_is_only_computed_for_other_uses() -> None:
    """Nor does what is computed for it, which is made by a strategy with that result."""
    read = 0
    for y in MODEL.later.values():
        for x in (x for x in operands(y) if x.value not in MODEL.lives and x.has_spots):
            table, k = np.sum(tables(x.variable, y.variable), axis=0), y.maker.inputs.index(x.value)
            columns = [
                (s.operands[k], table[:, y.kept_count + i]) for i, s in enumerate(MODEL.silent(y.maker))
            ]
            if y.value not in MODEL.lives and y.has_spots:
                columns += [
                    (s.operands[k], table[:, 2 * y.each + i])
                    for i, nd in enumerate(MODEL.states[y.variable][: y.each])
                    for s in MODEL.silent(y.maker)
                    if s.results[0] == nd
                ]
            for wanted, column in columns:
                same = [nd == wanted for nd in MODEL.states[x.variable][: x.each]]
                assert np.isinf(column[x.each : 2 * x.each][same]).all()
                assert np.isfinite(column[2 * x.each : x.kept_count][same]).all()
                read += sum(same)
    assert read


def test_the_search_and_the_evaluator_agree_on_what_is_computed_for_what_runs_again() -> None:
    """Products that run again read a chain whose first op reads memory, once more than in the program."""
    unary = list(NETWORK.unary)
    forced = [x for x in MODEL.later.values() if x.value in MODEL.lives and operands(x)]
    for x in forced:
        unary[x.variable] = unary[x.variable].copy()
        unary[x.variable][: x.kept_count] = np.inf
    found = solve(replace(NETWORK, unary=tuple(unary)))
    spots = [x for x in UNWRITTEN if 2 * x.each <= found.states[x.variable] < x.kept_count]
    assert any(any(MODEL.c.traffic[x.maker.id].reads) for x in spots)
    chosen = MODEL.chosen_signatures(found.states, found.cost, found.bound)
    takes = Evaluator(insert_boxing(GIVEN[0], chosen, GIVEN[2]), GIVEN[2].network)
    barriers = sum(
        takes.seconds_of(s) for s in takes.physical.steps if isinstance(s, Compute) and s.node.barrier >= 0
    )
    assert takes.seconds() - barriers == pytest.approx(found.cost, rel=1e-12)


def test_what_is_computed_later_wants_what_it_is_made_of_kept() -> None:
    chained = [(x, y) for x in UNWRITTEN for y in operands(x)]
    assert chained
    for x, y in chained:
        table = np.sum(tables(y.variable, x.variable), axis=0)
        computed = slice(x.each, x.kept_count)
        assert np.isinf(table[y.kept_count :, computed]).all()
        assert np.isfinite(table[: y.kept_count, computed]).any()
        # Boxed it lies there itself, and what runs again reads it late.
        assert np.isfinite(np.delete(table, np.arange(x.kept_count), axis=1)).any()


def test_what_is_boxed_and_kept_has_bytes_until_its_later_uses() -> None:
    boxed = [x for x in UNWRITTEN if x.value in MODEL.boxed]
    assert boxed
    for x in boxed:
        (load,) = [y for y in MODEL.loads if y.node == x.variable and (y.start, y.end) == (x.since, x.start)]
        half = x.each
        assert (load.bytes[:half] > 0.0).all() and not load.bytes[half:].any()
        (table,) = tables(x.variable, MODEL.boxed[x.value])
        # One way where the share is boxed, the other where it is not.
        assert np.isinf(table[:half, half:]).all() and np.isinf(table[half : x.kept_count, :half]).all()
        assert np.isfinite(table[x.kept_count :]).all()


def test_what_is_never_boxed_is_not_kept_so() -> None:
    for x in UNWRITTEN:
        if x.value not in MODEL.boxed:
            assert np.isinf(MODEL.unary[x.variable][: x.each]).all()
    assert NOWHERE is None
