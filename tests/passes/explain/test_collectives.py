"""Collectives inside ops: in the plan, in its cost, in the picture, and in the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import S
from sbp.hardware.catalogue import BYTES_ONLY, Hardware, Link
from sbp.passes.explain.why import select, why_text
from sbp.passes.render.dot import dot_text
from sbp.runtime.hlo.meter import read_compiled

LINE = sbp.placement("cpu", shape=(8,), axes=("seq",))
GRID = sbp.placement("cpu", shape=(2, 4))


def along(x: Any) -> Any:
    """Everything that goes along dim 1, which stays split."""
    total = jnp.cumsum(x, axis=1)
    return total, jnp.argmax(total, axis=1), jax.lax.top_k(x, 2)


FEWEST = sbp.Options(hardware=BYTES_ONLY)
X = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)


@pytest.mark.parametrize(
    ("place", "x_sbp"),
    [(LINE, [S(1)]), (GRID, [S(1), S(1)]), (GRID, [S(0), S(1)])],
    ids=("line", "twice", "grid"),
)
def test_the_plan_says_what_is_sent(place: sbp.Placement, x_sbp: Any) -> None:
    program = sbp.compile(along, place, in_sbp=(x_sbp,), options=FEWEST)
    for got, want in zip(jax.tree.leaves(program(X)), jax.tree.leaves(jax.jit(along)(X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    plan = program.plan(X)
    inside = [c for c in plan.collectives if c.before == c.after]
    assert inside and all(c.kind == "all_gather" and c.wire_bytes < X.nbytes / 8 for c in inside)
    assert "carried on" in " ".join(c.reason for c in inside)
    meter = read_compiled(program.lower(X).compile())
    assert abs(meter.wire_bytes - plan.wire_bytes) <= 0.01 * meter.wire_bytes


@pytest.mark.parametrize(("taken", "rows"), [(0, 1), (1, 2)], ids=("values", "positions"))
def test_what_nobody_uses_is_neither_sent_nor_planned(taken: int, rows: int) -> None:
    """Positions are sent for the positions alone; values are also what these are chosen by."""
    program = sbp.compile(lambda x: jax.lax.top_k(x, 2)[taken], LINE, in_sbp=([S(1)],), options=FEWEST)
    np.testing.assert_allclose(program(X), jax.lax.top_k(X, 2)[taken])
    plan = program.plan(X)
    assert len(plan.collectives) == rows
    meter = read_compiled(program.lower(X).compile())
    assert meter.wire_bytes == pytest.approx(plan.wire_bytes, rel=0.01)


def test_a_carry_is_drawn_and_explained() -> None:
    plan = sbp.compile(along, LINE, in_sbp=([S(1)],), options=FEWEST).plan(X)
    at = select(plan, "all-gather")
    assert at and "needs it as" in why_text(plan, at)
    # Those of a line are one box: of cumsum and argmax, and the two of top_k.
    assert dot_text(plan).count("all-gather") == 2 and len(at) == 4


def test_what_is_said_costs_time() -> None:
    def seconds(latency: float) -> float:
        slow = Hardware("slow", ((8, 1e12),), 1e12, 1e12, 1e12, (Link(1 << 60, 1e9, latency),))
        options = sbp.Options(hardware=slow)
        program = sbp.compile(
            lambda x: jnp.cumsum(x, axis=1), LINE, in_sbp=([S(1)],), out_sbp=[S(1)], options=options
        )
        (carry,) = program.plan(X).collectives
        assert carry.seconds == pytest.approx(latency + carry.wire_bytes / 1e9)
        return program.plan(X).seconds

    assert seconds(2e-3) - seconds(1e-3) == pytest.approx(1e-3)
