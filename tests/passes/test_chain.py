"""The lists of passes: their order, what goes from one to the next, and the contract between them."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import InternalError
from sbp.passes import chain
from sbp.passes.chain import PLACEMENT, STAGES, Chain, Placed, chain_of
from sbp.passes.explain.plan import PlanData
from sbp.passes.face import Plan, with_forms
from sbp.passes.spec import SpecError
from tests.golden import two_stages

LINE = sbp.placement("cpu", shape=(4,))
X = np.ones((8, 8), np.float32)


def model(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w))


def test_the_lists_read_as_the_work_goes() -> None:
    assert [
        p.name for p in PLACEMENT.passes
    ] == "rows pins equals hoist candidates choice boxing owners buckets report".split()
    assert [p.name for p in STAGES.passes] == "divide hoist sums placements schedule report".split()


def test_each_pass_takes_what_the_one_before_it_gives() -> None:
    steps: Chain[int, str] = chain_of("add", lambda x: x + 1, lambda _: None).then(
        "text", str, lambda _: None
    )
    assert steps.run(41) == "42"


def test_a_pass_that_breaks_its_contract_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, since checks take next to nothing; and not where they are turned off."""

    def forgets(s: Placed) -> Placed:
        return replace(s, physical=replace(s.physical, steps=s.physical.steps[:-1]))

    broken = tuple(replace(p, run=forgets) if p.name == "buckets" else p for p in PLACEMENT.passes)
    monkeypatch.setattr(chain, "PLACEMENT", Chain(broken))
    with pytest.raises(InternalError, match="pass 'buckets'") as refused:
        sbp.compile(model, LINE).plan(X, X)
    assert isinstance(refused.value.__cause__, SpecError)
    assert "the physical program" in str(refused.value)
    sbp.compile(model, LINE, options=sbp.Options(check=False)).plan(X, X)


def test_a_plan_is_data_and_the_face_shows_it() -> None:
    plan = sbp.compile(model, LINE, in_sbp=([S(0)], [B])).plan(X, X)
    data = PlanData(**{name: getattr(plan, name) for name in PlanData.__dataclass_fields__})
    assert type(plan) is Plan and type(data) is PlanData
    assert with_forms(data) == plan and with_forms(plan) is plan
    assert str(with_forms(data)) == str(plan) and "all-reduce" in str(plan) and "all-reduce" not in str(data)


def test_a_plan_of_stages_has_faces_all_the_way_down() -> None:
    program = sbp.compile(two_stages.step, two_stages.step_placement)
    plan = program.plan(*two_stages.step_args())
    assert plan.stages and all(type(p) is Plan for p in plan.stages)
    data = PlanData(**{name: getattr(plan, name) for name in PlanData.__dataclass_fields__})
    assert str(with_forms(data)) == str(plan) and plan.wire_bytes == data.wire_bytes
