"""`sbp.search`: every hierarchy of so many devices is planned, ranked and described."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.__main__ import main
from sbp.errors import ArgumentError
from sbp.hardware.catalogue import hardware_for
from sbp.options import PipelineOptions
from sbp.runtime.search import search as module
from sbp.runtime.search.ranking import RankedPlan, Ranking
from tests.golden import two_layers
from tests.golden.hardware import HARDWARE

FILE = Path(two_layers.__file__)
H100 = hardware_for("h100")
# Arithmetic takes so long that plans split all of it.
SLOW = replace(HARDWARE, flops_per_second=((4, 1e12),), vector_flops_per_second=1e12)


def shapes(found: Ranking) -> list[str]:
    return [row.shape for row in found.rows]


def test_every_hierarchy_the_best_first() -> None:
    found = sbp.search(two_layers.step, 64)(*two_layers.step_args())
    assert sorted(shapes(found)) == ["2x32", "4x16", "4x2x8", "64", "8x4x2", "8x8"]
    assert all(
        row.usable and row.plan is not None and row.plan.placement == row.placement for row in found.rows
    )
    seconds = [row.seconds for row in found.rows]
    assert [float(f"{s:.3g}") for s in seconds] == sorted(float(f"{s:.3g}") for s in seconds)
    assert found.best is found.rows[0]


@pytest.mark.full
def test_each_plan_is_that_of_compile() -> None:
    """Sharing the trace changes nothing."""
    found = sbp.search(two_layers.step, 16, donate_argnums=0)(*two_layers.step_args())
    for row in found.rows:
        program = sbp.compile(two_layers.step, row.placement, donate_argnums=0)
        assert row.plan == program.plan(*two_layers.step_args())


def test_the_function_is_traced_once() -> None:
    traced = []

    def f(w: Any, x: Any) -> Any:
        traced.append(1)
        return jnp.tanh(x @ w)

    found = sbp.search(f, 64)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert len(found.rows) == 6 and len(traced) == 1


def test_signatures_may_depend_on_the_placement() -> None:
    options = sbp.Options(hardware=SLOW)
    asked = sbp.search(two_layers.step, 16, in_sbp=two_layers.step_sbp, axes=2, options=options)
    words = {row.shape: row.words for row in asked(*two_layers.step_args()).rows}
    assert words == {"16": "16 data + ZeRO-3", "2x8": "2 data, 8 tensor"}


def test_a_machine_of_ones_own() -> None:
    """Its innermost level says where axes are cut."""
    nvlink, nic = H100.links
    four = replace(H100, name="four", links=(replace(nvlink, devices=4), nic))
    found = sbp.search(two_layers.step, 16, options=sbp.Options(hardware=four), axes=2)(
        *two_layers.step_args()
    )
    assert sorted(shapes(found)) == ["16", "2x8", "4x4"]
    assert str(found).startswith("step on 16 x four of 80.0 GB: 3 hierarchies planned in ")


def test_devices_that_are_no_whole_domains() -> None:
    found = sbp.search(two_layers.step, 12, axes=2)(*two_layers.step_args())
    assert sorted(shapes(found)) == ["12", "3x4"]
    assert "note: 12 devices are no whole domains of 8, so axes are cut otherwise; 8 or 16 are" in str(found)


def test_what_does_not_fit_comes_last_and_says_why() -> None:
    """Two dims of four are all that may be split: one axis can split one of them, and three both."""
    x = jax.ShapeDtypeStruct((4, 4, 1 << 16), jnp.float32)
    every = sbp.search(jnp.sort, 16, options=sbp.Options(hardware=SLOW))(x).rows
    need = sorted(row.plan.memory_bytes for row in every if row.plan is not None)
    assert need[0] <= need[-1] / 8
    small = replace(SLOW, memory_bytes=need[-1] / 4)
    found = sbp.search(jnp.sort, 16, options=sbp.Options(hardware=small))(x)
    fits = [row.usable for row in found.rows]
    assert fits == sorted(fits, reverse=True) and not all(fits) and any(fits)
    assert "no plan\n  16: " in str(found) and " per device at the peak" in str(found)
    assert found.best is not None and found.best.plan is not None and found.best.plan.fits


def test_what_is_not_solved_stands_apart() -> None:
    """A gap too small to be seen is not shown; a plan that may be twice as long as it must ranks last."""
    found = sbp.search(two_layers.step, 16, axes=2)(*two_layers.step_args())
    first, second = found.rows
    assert all(row.is_solved and row.plan is not None for row in found.rows)

    def with_bound(row: RankedPlan, part: float) -> RankedPlan:
        assert row.plan is not None
        return replace(row, plan=replace(row.plan, bound=part * row.plan.seconds, cheapest_seconds=None))

    rows = sorted([with_bound(first, 0.5), with_bound(second, 0.9999)], key=lambda row: row.order)
    assert [row.shape for row in rows] == [second.shape, first.shape]
    ranking = replace(found, rows=tuple(rows))
    assert ranking.best == rows[-1], "what is fastest is best, solved or not"
    lines = str(ranking).split("\n")
    at = lines.index("not searched to the end")
    assert "50.0%" in lines[at + 1] and "%" not in "".join(lines[:at])


@pytest.mark.full
def test_what_cannot_be_planned_says_why() -> None:
    found = sbp.search(two_layers.step, 16, options=sbp.Options(memory_limit="1kB"))(*two_layers.step_args())
    assert found.best is None and all(row.plan is None for row in found.rows)
    text = str(found)
    assert "no plan\n  " in text and "per device only for arguments and results, and at most 1.00 kB" in text
    assert repr(found) == "<Ranking step on 16 x h100: 3 plans, none fits>"


def test_when_the_time_is_up_nothing_else_is_begun() -> None:
    found = sbp.search(two_layers.step, 64, seconds=0.0)(*two_layers.step_args())
    assert {row.trouble for row in found.rows} == {"0 s of the search were over"}


def test_stages_that_there_was_no_time_for() -> None:
    found = sbp.search(in_parts(4), 8, axes=2, stages=(2, 4), seconds=0.0)(*PARTS_ARGS)
    assert found.notes == ("more than 2 stages were not planned: the search's time was over",)


def test_progress_is_told() -> None:
    told: list[str] = []
    sbp.search(two_layers.step, 8, axes=1, said=told.append)(*two_layers.step_args())
    assert told == ["tracing", "planning 8, 1 of 1"]


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def in_parts(n: int) -> Any:
    gradients = sbp.microbatch(jax.value_and_grad(loss), n, batch_args=1)

    def step(weights: Any, x: Any) -> Any:
        value, grads = gradients(weights, x)
        return [w - g for w, g in zip(weights, grads, strict=True)], value

    return step


PARTS_ARGS = ([jax.ShapeDtypeStruct((512, 512), "float32")] * 4, jax.ShapeDtypeStruct((4096, 512), "float32"))


def test_a_function_with_micro_batches_is_cut_into_stages() -> None:
    found = sbp.search(in_parts(4), 4, axes=2, stages=(2,))(*PARTS_ARGS)
    rows = {(row.shape, row.stages): row for row in found.rows}
    assert rows.keys() == {("4", 0), ("2x2", 0), ("2x2", 2)}
    cut = rows["2x2", 2]
    assert cut.plan.stages and cut.plan.placement.axes == ("stage", "data")
    assert cut.words.startswith("2 pipeline, each 2 ")
    assert "stages" in str(found)


def test_numbers_of_micro_batches() -> None:
    found = sbp.search(in_parts, 2, axes=1, microbatches=(2, 4))(*PARTS_ARGS)
    assert sorted((row.microbatches, row.stages) for row in found.rows) == [(2, 0), (4, 0)]


def test_a_number_of_stages_among_the_options_is_the_only_one() -> None:
    options = sbp.Options(pipeline=PipelineOptions(stages=2, schedule="gpipe"))
    found = sbp.search(in_parts(4), 4, axes=2, options=options)(*PARTS_ARGS)
    assert [row.stages for row in found.rows if row.plan is not None] == [2]


def test_more_stages_only_while_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def slower(self: Any, traced_call: Any, row: Any) -> Any:
        planned.append(row.stages)
        plan = sbp.compile(lambda x: x, row.placement).plan(jnp.ones(4))
        seconds = 1.0 + {0: 5, 2: 3, 4: 4, 8: 1}[row.stages]
        return replace(row, plan=replace(plan, seconds=seconds, step_seconds=seconds))

    monkeypatch.setattr(module._Run, "plan_row", slower)
    found = sbp.search(in_parts(4), 16, axes=2, stages=(2, 4, 8))(*PARTS_ARGS)
    assert set(planned) == {0, 2, 4}
    assert found.notes == ("more than 4 stages were not planned: fewer are faster",)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"devices": 0}, "search(devices=...)"),
        ({"devices": 2.5}, "search(devices=...)"),
        ({"axes": 0}, "search(axes=...)"),
        ({"stages": (1,)}, "search(stages=...)"),
        ({"microbatches": (0,)}, "search(microbatches=...)"),
    ],
)
def test_numbers_that_mean_nothing(given: dict[str, Any], where: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        sbp.search(two_layers.step, **{"devices": 8, **given})
    (problem,) = caught.value.problems
    assert problem.where == where and problem.legal.startswith("a whole number of at least ")


def test_arguments_that_cannot_be_taken_are_no_rows() -> None:
    with pytest.raises(ArgumentError):
        sbp.search(two_layers.step, 8)("weights", "x")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    assert (
        main(["plan", f"{FILE}:step", "--search", "16", "--donate", "0", "--axes", "2", "--out", str(out)])
        == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("step on 16 x h100 of 80.0 GB: 2 hierarchies planned in ") and "hierarchy" in text
    assert sbp.load_plan(out).placement.size == 16


def test_the_command_with_signatures_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--search", "16", "--kind", "a100", "--axes", "2", "--in-sbp", f"{FILE}:step_sbp"
    assert main(["plan", f"{FILE}:step", *given]) == 0
    text = capsys.readouterr().out
    assert "planned for" not in text and "step on 16 x a100 of 80.0 GB: 2 hierarchies planned" in text


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--search", "8", "--placement", "h100:8"], "--placement beside --search 8"),
        (["--kind", "h100"], "beside --search N"),
        (["--axes", "2"], "beside --search N"),
        (["--microbatches", "8"], "beside --search N"),
        (["--search", "8", "--microbatches", "eight"], "whole numbers with ',' between them"),
        (["--search", "0"], "search(devices=...)"),
        (["--search", "8", "--kind", "h900"], "kind 'h900'"),
    ],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], given: list[str], complaint: str) -> None:
    assert main(["plan", f"{FILE}:step", *given]) == 1
    assert complaint in capsys.readouterr().err
