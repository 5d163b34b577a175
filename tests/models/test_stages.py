"""Models in stages: their options, and training that equals one device whatever the schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from models import gpt, resnet
from models.pipeline import SCHEDULES, Pipeline, add_options, pipeline_of
from sbp.annotation import placement_in
from sbp.options import PipelineOptions
from sbp.passes.program.trace import trace
from sbp.passes.schedule.orders import GENERATORS
from sbp.placement import parse_placement

STEPS = 20
CUBE = sbp.placement("cpu", shape=(2, 2, 2), axes=("stage", "data", "model"))
LINE = sbp.placement("cpu", shape=(4,), axes=("stage",))
ONE_EACH = ("gpipe", "1f1b", "zb-h1")
TWO_EACH = ("interleaved", "zb-v", "dualpipe-v")
# Dropout: a micro-batch has random numbers of its own. Heads and a vocabulary that two devices divide.
TINY = gpt.Config(layers=2, width=8, heads=2, vocabulary=12, sequence=6, dropout=0.1)
RESNET_18 = resnet.Config(resnet.DEPTHS[18].blocks, width=2)


def options_of(*given: str) -> tuple[Pipeline, sbp.Placement, sbp.Options]:
    """What a command line asks for, with `--placement` first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--placement")
    add_options(parser)
    args = parser.parse_args(["--placement", *given])
    return pipeline_of(args, parse_placement(args.placement))


def test_the_first_axis_has_the_stages() -> None:
    given = "cpu:2x2x2 --stages 2 --microbatches 8 --schedule zb-h1 --threads".split()
    pipeline, placement, options = options_of(*given)
    assert placement.axes == ("stage", "data", "model")
    assert [p.ranks for p in pipeline.placements] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert (pipeline.microbatches, pipeline.stage_shape(placement)) == (8, (2, 2))
    assert options.pipeline == PipelineOptions("zb-h1", None, True)


def test_without_stages_there_is_no_pipeline() -> None:
    pipeline, placement, options = options_of("cpu:2x4")
    assert (pipeline, placement) == (Pipeline(), parse_placement("cpu:2x4"))
    assert (pipeline.stage_shape(placement), options) == ((2, 4), sbp.Options())
    assert options_of("cpu:2x4", "--microbatches", "4")[0] == Pipeline(microbatches=4)


@pytest.mark.parametrize(
    ("schedule", "path"),
    [
        ("interleaved", [0, 1, 0, 1]),
        ("zb-v", [0, 1, 1, 0]),
        ("dualpipe-v", [0, 1, 1, 0]),
        ("gpipe", [0, 1, 0, 1]),
    ],
)
def test_stages_come_by_a_group_several_times(schedule: str, path: list[int]) -> None:
    pipeline, placement, _ = options_of("cpu:2x2", "--stages", "4", "--schedule", schedule)
    groups = placement.split("stage")
    assert [groups.index(p) for p in pipeline.placements] == path
    assert pipeline.microbatches == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cpu:4x2 --stages 6", r"4 groups.*--stages 4 or a multiple, or --placement cpu:6x2"),
        ("cpu:8 --stages 0", "at least 1"),
        ("cpu:8 --schedule gpipe", "give --stages 2 or more"),
        ("cpu:8 --microbatches 2 --threads", "give --stages 2 or more"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options_of(*given.split())


def test_blocks_are_dealt_out_in_order() -> None:
    pipeline = Pipeline(tuple(LINE.split("stage")))

    def all_of(x: jax.Array) -> jax.Array:
        for block in range(6):
            with pipeline.block(block, 6):
                x = x * 2
        return x

    assert [p.ranks for p in places_of("mul", all_of, jnp.ones(()))] == [(0,), (0,), (1,), (2,), (2,), (3,)]
    with pytest.raises(ValueError, match="4 stages of a model with 3 blocks"):
        pipeline.block(0, 3)


def places_of(op: str, fn: Any, *args: Any) -> list[sbp.Placement]:
    """The placements that the ops of a name belong to, in the order of a function."""
    found = [placement_in(n.source.scope) for n in trace(fn, args, {}).graph.walk() if n.op == op]
    return [p for p in found if p is not None]


def test_convolutions_of_each_stage() -> None:
    """ResNet-18 in four stages: five convolutions, then four each, beside the three on skips."""
    stages = LINE.split("stage")
    params = jax.eval_shape(partial(resnet.init, config=RESNET_18), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    loss = partial(resnet.loss, pipeline=Pipeline(tuple(stages)))
    found = places_of("conv_general_dilated", loss, params, batch)
    assert [stages.index(p) for p in found] == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert places_of("dot_general", loss, params, batch) == [stages[3]]


@dataclass(frozen=True)
class Case:
    """A model in stages, with what it is trained on."""

    placement: sbp.Placement
    step: Any
    init: Any
    optimizer: optax.GradientTransformation
    in_sbp: Any
    batch: Any

    def start(self, dtype: Any) -> tuple[Any, Any]:
        rng = np.random.default_rng(0)

        def drawn(x: Any) -> Any:
            scale = np.prod(x.shape[:-1]) ** -0.5
            return (scale * rng.normal(size=x.shape) if x.ndim > 1 else np.ones(x.shape)).astype(dtype)

        params = jax.tree.map(drawn, jax.eval_shape(self.init, jax.random.key(0)))
        return params, jax.device_get(jax.jit(self.optimizer.init)(params))

    def train(self, step: Any, dtype: Any) -> tuple[Any, list[float]]:
        state, losses = self.start(dtype), list[float]()
        for i in range(STEPS):
            *state, loss = step(*state, self.batch(i), jax.random.key(i))
            losses.append(float(loss))
        return state, losses


@cache
def one_device(case: Callable[[str], Case], like: str, dtype: Any) -> tuple[Any, list[float]]:
    """What all schedules that cut a case alike are compared with."""
    made = case(like)
    state, losses = made.train(jax.jit(made.step), dtype)
    return jax.device_get(state), losses


def check(case: Callable[[str], Case], schedule: str, dtype: Any) -> None:
    """Losses within 1e-5 of one device's; in float64 parameters and optimizer state within 1e-9."""
    like = ONE_EACH[0] if schedule in ONE_EACH else schedule
    made, (state, losses) = case(schedule), one_device(case, like, dtype)
    options = sbp.Options(check=True, pipeline=PipelineOptions(schedule=schedule))
    got, found = made.train(
        sbp.compile(made.step, made.placement, in_sbp=made.in_sbp, options=options), dtype
    )
    exact = dtype == jnp.float64
    assert found == pytest.approx(losses, rel=1e-10 if exact else 1e-5)
    assert min(losses[-2:]) < losses[0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert len(a.sharding.device_set) < made.placement.size  # of one stage
        if exact:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def groups_of(whole: sbp.Placement, schedule: str) -> tuple[sbp.Placement, ...]:
    """Where the stages live, as a schedule wants it: of some, every group of devices has two."""
    groups, each = whole.split("stage"), 2 if schedule in TWO_EACH else 1
    order = GENERATORS[schedule].asks.map.example(len(groups), each)
    return tuple(groups[i] for i in order)


def gpt_case(schedule: str) -> Case:
    pipeline, optimizer = Pipeline(groups_of(CUBE, schedule), 4), optax.adamw(1e-2)
    config = replace(TINY, layers=len(pipeline.placements))

    def batch(step: int) -> Any:
        rows = np.random.default_rng(step % 2).integers(0, config.vocabulary, (8, config.sequence + 1))
        return rows.astype(np.int32)

    step = gpt.make_train_step(config, optimizer, pipeline)
    in_sbp = gpt.signatures("2d", (2, 2), config, optimizer)
    return Case(CUBE, step, partial(gpt.init, config=config), optimizer, in_sbp, batch)


def resnet_of(config: resnet.Config, size: int, schedule: str) -> Case:
    """In four stages. In float32 two devices agree if many numbers are under each mean and variance."""
    line = LINE if schedule not in TWO_EACH else sbp.placement("cpu", shape=(2,), axes=("stage",))
    microbatches = 4 if schedule == "dualpipe-v" else 2
    pipeline, optimizer = Pipeline(groups_of(line, schedule), microbatches), optax.sgd(2e-3, momentum=0.9)
    assert len(pipeline.placements) == 4
    rows = 8 * microbatches

    def batch(step: int) -> Any:
        rng = np.random.default_rng(step % 2)
        images = rng.normal(size=(rows, size, size, 3)).astype(jnp.result_type(float))
        return images, rng.integers(0, 10, rows).astype(np.int32)

    step = resnet.make_train_step(optimizer, pipeline)
    in_sbp = resnet.signatures("data", (1,), config, optimizer)
    return Case(line, step, partial(resnet.init, config=config), optimizer, in_sbp, batch)


def resnet_18(schedule: str) -> Case:
    return resnet_of(RESNET_18, 64, schedule)


def resnet_10(schedule: str) -> Case:
    return resnet_of(resnet.Config((1, 1, 1, 1), width=2), 32, schedule)


@pytest.mark.full
def test_gpt_on_stages_of_two_axes() -> None:
    check(gpt_case, "1f1b", jnp.float32)


@pytest.mark.full
def test_resnet_in_four_stages(x64: None) -> None:
    check(resnet_10, "zb-h1", jnp.float64)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", (*ONE_EACH, *TWO_EACH))
@pytest.mark.parametrize("case", (gpt_case, resnet_18))
def test_float32(case: Any, schedule: str) -> None:
    check(case, schedule, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", (*ONE_EACH, *TWO_EACH))
@pytest.mark.parametrize("case", (gpt_case, resnet_18))
def test_float64(case: Any, schedule: str, x64: None) -> None:
    check(case, schedule, jnp.float64)


GPT_IN_STAGES = "--stages 2 --schedule zb-h1 --placement cpu:2x2x2 --width 16 --heads 2 --seq 8 --sample 0"
RESNETS = {
    "stages": "--stages 4 --microbatches 4 --placement cpu:4x2 --width 2 --batch 16 --x64",
    "accumulation": "--microbatches 2 --placement cpu:2 --width 2 --batch 16 --x64",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "given"), [(gpt, GPT_IN_STAGES), *((resnet, given) for given in RESNETS.values())]
)
def test_commands_run(model: Any, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = model.main([*given.split(), "--steps", "3", "--out", str(tmp_path)])
    assert result.difference is not None
    assert result.difference.losses < 1e-5
    assert len(result.losses) == 3
    assert (tmp_path / "plan.html").exists()
    assert str(result.plan) in capsys.readouterr().out


@pytest.mark.parametrize("model", (gpt, resnet))
def test_help_says_what_each_option_does(model: Any) -> None:
    said = model.parser().format_help()
    assert all(f"--{name}" in said for name in ("stages", "microbatches", "schedule", "threads"))
    assert all(name in said for name in SCHEDULES)
