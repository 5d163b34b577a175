"""`Options(plan=...)`: a plan of an earlier compilation in place of a search."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import ArgumentError
from sbp.passes import recall
from sbp.passes.search import search

GRID = sbp.placement("cpu", shape=(2, 4))
W, X = np.ones((64, 32), np.float32), np.ones((16, 64), np.float32)


def step(w: Any, x: Any) -> Any:
    value, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    return w - 0.1 * slope, value


def compiled(fn: Any = step, plan: Any = None, on: Any = GRID, in_sbp: Any = sbp.AUTO, **options: Any) -> Any:
    return sbp.compile(fn, on, in_sbp=in_sbp, options=sbp.Options(plan=plan, **options))


ROWS = ([B, B], [S(0), B])
UNEVEN = ([S(0), B], None)
ASKED: dict[str, Any] = {
    "nothing asked": (sbp.AUTO, (W, X)),
    "signatures": (ROWS, (W, X)),
    "one that does not divide": (UNEVEN, (W[:63], X[:, :63])),
}


@pytest.mark.parametrize(("in_sbp", "args"), ASKED.values(), ids=ASKED.keys())
def test_a_plan_is_taken_whole(
    in_sbp: Any, args: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory or a file; with what was asked then asked again, or not."""
    plan, file = compiled(in_sbp=in_sbp).plan(*args), tmp_path / "plan.json"
    plan.save(file)
    monkeypatch.setattr(search, "solve_indexed", lambda *_, **__: 1 / 0)
    for given in (plan, file, str(file), sbp.load_plan(file)):
        for again in (sbp.AUTO, in_sbp):
            program = compiled(plan=given, in_sbp=again)
            assert program.plan(*args).collectives == plan.collectives
            assert program.plan(*args).choice == plan.choice
    np.testing.assert_allclose(program(*args)[0], step(*args)[0], rtol=1e-5)


def test_it_is_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compiled().plan(W, X)
    monkeypatch.setattr(search, "solve_indexed", lambda *_, **__: 1 / 0)
    assert compiled(plan=plan).plan(W, X) == plan


def test_another_kind_of_the_same_shape_is_planned_so_too() -> None:
    """A plan for chips that are not here is tried out on CPU devices."""
    plan = compiled(on=sbp.placement("h100", shape=(2, 4))).plan(W, X)
    found = compiled(plan=plan).plan(W, X)
    assert found.in_sbp == plan.in_sbp and recall.OTHER_COSTS in found.notes and found.bound == 0


def test_where_something_else_is_asked_the_rest_is_searched_for() -> None:
    plan = compiled(in_sbp=ROWS).plan(W, X)
    other = compiled(plan=plan, in_sbp=([S(1), B], None)).plan(W, X)
    assert other.in_sbp == ((S(1), B), (S(0), B))
    pinned = compiled(plan=plan, in_sbp=(None, [S(0), B])).plan(W, X)
    assert pinned == plan


def test_a_plan_without_its_choice_gives_the_boundary() -> None:
    plan = compiled(in_sbp=ROWS).plan(W, X)
    assert compiled(plan=replace(plan, choice=None)).plan(W, X).in_sbp == plan.in_sbp


def test_batches_do_not_matter() -> None:
    """What is planned from shapes is taken by a call with ids at hand."""

    def looked_up(table: Any, ids: Any) -> Any:
        return jnp.sum(table[ids], axis=0)

    table, ids = np.ones((64, 8), np.float32), np.arange(16, dtype=np.int32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (table, ids)]
    asked = ([S(0), B], [S(0), B])
    plan = compiled(looked_up, in_sbp=asked).plan(*shapes)
    program = compiled(looked_up, plan=plan)
    np.testing.assert_allclose(program(table, ids), table[ids].sum(axis=0))


def test_the_message_says_who_made_another_plan() -> None:
    plan = compiled().plan(W, X)
    assert plan.choice is not None
    old = replace(plan, choice=replace(plan.choice, program="another", made_by="sbp 0.0.1, jax 0.9.0"))
    with pytest.raises(ArgumentError, match=r"that one was made by sbp 0\.0\.1, jax 0\.9\.0"):
        compiled(plan=old).plan(W, X)


def test_a_strict_plan_is_compared_with_a_search() -> None:
    plan = compiled(strict_nonfinite=True).plan(W, X)
    again = compiled(plan=plan, strict_nonfinite=True).plan(W, X)
    assert again.choice == plan.choice and again.notes == plan.notes
