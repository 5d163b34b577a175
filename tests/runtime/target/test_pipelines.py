"""Pipelines compiled for H100s that are not here: plan against what XLA:GPU makes of stages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from models import gpt, train
from models.pipeline import Pipeline
from sbp.runtime.report.report import PipelineReport
from tests.runtime.report.test_pipeline import MICRO, trained
from tests.runtime.target.plugin import needs_plugin

pytestmark = needs_plugin

WITHIN = 0.17


@pytest.fixture(scope="module", params=["products", pytest.param("a GPT", marks=pytest.mark.full)])
def report(request: pytest.FixtureRequest) -> PipelineReport:
    """Plan against compiled pieces."""
    if request.param == "products":
        program, args = trained("h100", width=2048, rows=16_384)
        found = program.report(*args)
    else:
        config = gpt.Config(2, 512, 8, vocabulary=8192, sequence=512, dropout=0.0, compute_dtype=jnp.bfloat16)
        optimizer = optax.adamw(1e-3)
        hosts = sbp.placement("h100", shape=(2, 2, 4), axes=("stage", "data", "model"))
        stages = Pipeline(tuple(hosts.split("stage")), MICRO)
        tokens = jax.ShapeDtypeStruct((256, 513), jnp.int32)
        args = train.example(partial(gpt.init, config=config), optimizer, tokens)
        signatures = gpt.signatures("2d", stages.stage_shape(hosts), config, optimizer)
        step = gpt.make_train_step(config, optimizer, stages)
        found = sbp.compile(step, hosts, in_sbp=signatures, donate_argnums=(0, 1)).report(*args)
    assert isinstance(found, PipelineReport)
    return found


def test_bytes_inside_stages_are_those_of_the_plan(report: PipelineReport) -> None:
    for place in report.places:
        assert place.wire_bytes == pytest.approx(place.plan.wire_bytes, rel=0.01) and place.wire_bytes > 0


def test_memory_of_stages_is_that_of_the_plan(report: PipelineReport) -> None:
    for place in report.places:
        assert place.peak is not None and place.peak.bytes == pytest.approx(
            place.plan.memory_bytes, rel=WITHIN
        )
    assert report.fits


def test_the_step_is_simulated_by_the_schedule(report: PipelineReport, tmp_path: Path) -> None:
    assert report.timeline is not None and report.simulated_seconds is not None
    busiest = max(
        sum(c.times * c.simulation.seconds for c in p.pieces if c.simulation is not None)
        for p in report.places
    )
    assert busiest < report.simulated_seconds < 3 * busiest
    assert "simulated, bubble" in str(report)
    report.save(tmp_path / "step.trace.json")
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    assert {"F0:0", "B1:0"} <= {e["name"] for e in events}


def test_programs_have_a_size_and_took_time(report: PipelineReport) -> None:
    for place in report.places:
        assert all(c.size_bytes and c.cpu_seconds > 0 for c in place.pieces)
        assert len(place.programs) == len(place.pieces)
    assert all(w.size_bytes and w.shard_bytes for w in report.ways)
    assert not any(w.relaid for w in report.ways)
