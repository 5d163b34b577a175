"""A search for what fits whose time is over before it has found any plan."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import sbp
from sbp.errors import MemoryLimitError
from sbp.passes.plan.budget import Fitted
from sbp.passes.plan.room import RoomModel
from sbp.passes.plan.within import LimitedSearch

LINE = sbp.placement("cpu", shape=(4,))


def step(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w)


@pytest.mark.full
def test_states_that_cannot_be_are_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing that fits was found, and the error says so."""
    answer = LimitedSearch._answer

    def late(self: LimitedSearch, least: float = 0.0) -> Fitted:
        return replace(answer(self, least), cost=math.inf)

    made = RoomModel.chosen

    def only_plans(self: RoomModel, states: Any, cost: float, bound: float) -> Any:
        assert math.isfinite(cost), "boxings that do not exist would be put into a program"
        return made(self, states, cost, bound)

    monkeypatch.setattr(RoomModel, "chosen", only_plans)
    for name in ("run", "smallest"):
        monkeypatch.setattr(LimitedSearch, name, lambda self, *_: late(self))
    program = sbp.compile(step, LINE, options=sbp.Options(memory_limit=150_000.0, cache=False))
    with pytest.raises(MemoryLimitError) as caught:
        program.plan(jnp.ones((128, 128)), jnp.ones((256, 128)))
    assert "per device at the peak" in str(caught.value)
