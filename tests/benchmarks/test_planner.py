"""The table of what planning must keep: its rows, their targets, its words."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from benchmarks import musts, nets
from benchmarks.musts import MUSTS, Must, PlanningCost, Verdict
from benchmarks.nets import NETS
from benchmarks.planner import main, must_line


def test_what_planning_takes_is_within_its_must_or_not() -> None:
    most = PlanningCost(60.0, 3.0, 0.01)
    assert PlanningCost(50.0, 2.0, 0.0).within(most) and str(most) == "60 CPU s, 3 GB, gap 1.00%"
    for more in (PlanningCost(61.0, 2.0), PlanningCost(50.0, 3.1), PlanningCost(50.0, 2.0, 0.02)):
        assert not more.within(most)
    assert str(PlanningCost(gap=0.001)) == "gap 0.10%" and math.isinf(PlanningCost().seconds)


def test_a_line_says_met_or_short() -> None:
    must = Must("name", "at most 1 s", lambda rounds: Verdict("", True))
    assert must_line(must, Verdict("0.5 s", True)) == "| name | at most 1 s | 0.5 s | met |"
    assert must_line(must, Verdict("2 s", False)).endswith("| 2 s | SHORT |")


def test_every_must_has_a_model_and_a_placement() -> None:
    for name in musts.PLANNING:
        model, placement, layers = name.split("/")
        case = musts.MODELS[model]("auto", tuple(map(int, placement.split("x"))), min(2, int(layers)))
        assert len(case.shapes()) == 4
    assert {name.partition("/")[0] for name in MUSTS} >= {"brute", "limit", "hand", "layouts", "compiled"}
    assert all(must.name == name and must.target for name, must in MUSTS.items())


@pytest.mark.full
def test_a_step_is_planned() -> None:
    cost = musts.planning_cost("gpt/2x2/1")
    assert cost.seconds > 0 and cost.gigabytes > 0 and cost.gap == 0.0


@pytest.mark.parametrize("model", NETS)
def test_nets_of_other_kinds_are_train_steps(model: str) -> None:
    case = NETS[model]("auto", (2,), 2)
    args = case.shapes()
    params, state, loss = jax.eval_shape(case.step, *args)
    assert (params, state) == args[:2] and loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("model", NETS)
def test_nets_of_other_kinds_are_planned(model: str) -> None:
    assert musts.planning_cost(f"{model}/2/1").gap == 0.0


def test_a_token_goes_to_the_two_best_experts() -> None:
    """With experts that all compute the same, and gates that are equal, the first two get what has room."""
    keys = jax.random.split(jax.random.key(0), 4)
    up, down = jax.random.normal(keys[0], (16, 8)), jax.random.normal(keys[1], (8, 16))
    same = {"up": jnp.stack([up] * nets.EXPERTS), "down": jnp.stack([down] * nets.EXPERTS)}
    x = jax.random.normal(keys[2], (2, 4, 16))
    found = jax.jit(nets.experts)({**same, "gate": jnp.zeros((16, nets.EXPERTS))}, x)
    expected = jax.jit(lambda x: jax.nn.gelu(x @ up) @ down)(x) * nets.CHOSEN / nets.EXPERTS
    room = int(nets.CAPACITY * nets.CHOSEN * 4 / nets.EXPERTS)
    np.testing.assert_allclose(found[:, :room], expected[:, :room], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[:, room:], 0.0)


@pytest.mark.full
def test_a_step_that_cannot_be_planned_is_short() -> None:
    verdict = musts._planning("nothing/2/1", PlanningCost(), 1)
    assert not verdict.met and verdict.measured == "failed: KeyError: 'nothing'"


@pytest.mark.full
def test_brute_force_and_compiled_rows_are_counted() -> None:
    assert musts._brute(1, 1).measured.endswith("of 1")
    assert "rows; " in MUSTS["compiled/auto"].run(1).measured


def test_under_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sbp.compile(jnp.tanh, sbp.placement("h100", shape=(2,))).plan(jnp.ones((64, 64)))
    needed, asked = replace(plan, memory_bytes=100e6), list[float]()

    def planned(case: object, shape: object, limit: float) -> sbp.Plan | str:
        asked.append(limit)
        return "the smallest peak that was found is 60.0 MB" if limit < 60e6 else needed

    monkeypatch.setattr(musts.limits, "planned", planned)
    verdict = musts._limited("gpt", (2,), 1, 1)
    assert asked == [math.inf, 1e6, pytest.approx(72e6)]
    assert verdict == Verdict("gap 0.00% under 72.0 MB of 100 MB", True)
    needed = replace(needed, seconds=needed.bound * 1.1)
    assert not musts._limited("gpt", (2,), 1, 1).met


def test_musts_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "compiled/auto"])
    said = capsys.readouterr().out
    assert said.startswith("| must | target | measured | |") and "| compiled/auto | " in said
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "no must is called nothing; there are brute/50, " in capsys.readouterr().err


def test_passes_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--passes", "--models", "mlp", "--placement", "2x2", "--rounds", "1"])
    said = capsys.readouterr().out
    assert "| mlp | choice |" in said and "| mlp | **all** |" in said
