"""A program is made, merged and ordered once, whoever asks: the search, the plan's step, and its memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.passes import chain
from sbp.passes.boxing.links import Network
from sbp.passes.physical import evaluate, memory, order
from sbp.passes.physical.evaluate import HOLES, Evaluator, donations
from sbp.passes.physical.fusion import ShardSizes
from sbp.passes.physical.memory import peak
from sbp.passes.physical.owners import mark_owners

LINE = sbp.placement("h100", shape=(8,))
ARGS = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2048, 8192), (8192, 2048), (4096, 2048)))


def step(up: Any, down: Any, x: Any) -> Any:
    """Two layers, trained."""
    ups, downs = jax.grad(lambda up, down: ((jax.nn.relu(x @ up) @ down - x) ** 2).mean(), (0, 1))(up, down)
    return up - 0.1 * ups, down - 0.1 * downs


NO_LIMIT = sbp.Options(cache=False, memory_limit=math.inf)


def planned() -> sbp.Plan:
    return sbp.compile(step, LINE, donate_argnums=(0, 1), options=NO_LIMIT).plan(*ARGS)


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[Any]:
    """What a function is given first, each time that it is called."""
    given, real = list[Any](), getattr(where, name)

    def listening(first: Any, *args: Any, **more: Any) -> Any:
        given.append(first)
        return real(first, *args, **more)

    monkeypatch.setattr(where, name, listening)
    return given


def test_each_program_is_made_merged_and_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is not made again of what the search has found, and memory is asked of the same kernels."""
    merged, ran = (
        counted(monkeypatch, evaluate, "whole_program"),
        counted(monkeypatch, evaluate, "schedule_step"),
    )
    of_memory, again = counted(monkeypatch, memory, "kernels"), counted(monkeypatch, chain, "insert_boxing")
    plan = planned()
    assert plan.collectives
    assert len({id(p) for p in merged}) == len(merged) == len(ran)
    assert not of_memory and not again


def test_a_plan_that_was_found_before_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    given = counted(monkeypatch, chain, "insert_boxing")
    options = dataclasses.replace(NO_LIMIT, plan=plan)
    taken = sbp.compile(step, LINE, donate_argnums=(0, 1), options=options).plan(*ARGS)
    assert len(given) == 1 and taken == plan


@pytest.mark.parametrize("limit", [1.0, 0.5])
def test_what_is_alive_is_the_same_as_of_kernels_of_its_own(limit: float) -> None:
    """With collectives hidden, and in the orders that take less memory."""
    plan = planned()
    p = plan.physical
    assert p is not None
    found = Evaluator(p, Network(plan.placement, plan.hardware), plan.donated)
    inputs = list(zip(p.graph.inputs, p.inputs, strict=True))
    kept: Any = list(zip(p.graph.outputs, p.outputs, strict=True))
    bytes_ = limit * found.peak_bytes()

    def alive(known: order.WholeProgram | None) -> list[memory.Live]:
        over = donations(p, plan.donated)
        return peak(p.steps, ShardSizes(p), kept, inputs, over, found.scheduled_seconds, bytes_, HOLES, known)

    assert found.whole.sends and not order.has_loops(p.steps)
    assert alive(found.whole) == alive(None)


def looked_up(table: Any, ids: Any) -> Any:
    return jnp.tanh(table[ids])


@pytest.mark.parametrize("fn", [looked_up, lambda table, ids: table * ids.sum()])
def test_what_is_marked_stays_itself(fn: Callable[..., Any]) -> None:
    table, ids = jnp.ones((64, 8)), jnp.arange(16)
    plan = sbp.compile(fn, LINE, in_sbp=([sbp.S(0)], [sbp.B]), out_sbp=[sbp.B]).plan(table, ids)
    assert plan.physical is not None
    marked = mark_owners(plan.physical)
    assert mark_owners(marked) is marked
