"""What the page draws of memory: of stages over a schedule, of one trip of a loop; and kernels that talk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.passes.render.page_data import page_data
from sbp.passes.render.web_page import data_of
from tests.passes.render.nets import piped, scanned


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return piped()


def test_every_stage_has_its_memory_over_the_schedule(pipeline: Any) -> None:
    """From what lies at rest up to the plan's own peak, of parts that add up to it."""
    found = data_of(pipeline)["memories"]
    assert [m["peak"] for m in found] == list(pipeline.memory)
    for place, m in zip(pipeline.places, found, strict=True):
        assert m["course"][0] == place.rest_bytes and len(m["course"]) == len(m["seconds"]) > 4
        # Here the piece that needs most runs when most micro-batches are held.
        assert max(m["course"]) == pytest.approx(m["peak"])
        assert m["seconds"] == sorted(m["seconds"])
        assert m["seconds"][-1] == pytest.approx(float(pipeline.timeline.makespan))
        rows = m["rows"]
        parts = [b for b, inner in zip(rows["bytes"], rows["inner"], strict=True) if not inner]
        assert sum(parts[:3]) == pytest.approx(m["peak"])
        named = [w for w, inner in zip(rows["what"], rows["inner"], strict=True) if inner]
        assert named and all("from " not in name for name in named)
    assert "micro-batches, at most 2 at once" in found[0]["rows"]["what"]


def test_a_pipeline_from_a_file_has_it_too(pipeline: Any, tmp_path: Path) -> None:
    pipeline.save(tmp_path / "plan.json")
    loaded = sbp.load_plan(tmp_path / "plan.json")
    assert loaded.stages and loaded.places == pipeline.places
    assert data_of(loaded)["memories"] == data_of(pipeline)["memories"]


def test_one_trip_of_a_loop_has_its_memory() -> None:
    """What it makes and frees, not one level for all of it."""
    _, trip = page_data(scanned())["timelines"]
    (points,) = trip["held"]
    held = [b for _, b in points]
    assert max(held) > min(held) >= 0 and len(set(held)) > 2
    assert 0 <= points[0][0] <= points[-1][0] <= trip["seconds"] * (1 + 1e-9)
    # The gathered weight of a trip, 16 x 16 numbers, is in it.
    assert max(held) >= 16 * 16 * 4
    assert trip["holder"].startswith("a trip")


def test_kernels_of_an_op_that_sends_something_are_drawn() -> None:
    """An exchange finds distinct ids before it sends them: its kernels have spans, besides what is sent."""

    def f(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.tanh(table[ids]).sum()

    program = sbp.compile(f, sbp.placement("h100", shape=(8,)), in_sbp=([S(0)], [S(0)]))
    plan = program.plan(
        jax.ShapeDtypeStruct((1 << 20, 128), "float32"), jax.ShapeDtypeStruct((1 << 16,), "int32")
    )
    assert plan.collectives and plan.in_sbp[0] != (B,)
    (timeline,) = page_data(plan)["timelines"]
    spans = timeline["spans"]
    sent = [k for k, rows in enumerate(spans["rows"]) if rows]
    first = min(spans["from"][k] for k in sent)
    before = [k for k, end in enumerate(spans["to"]) if spans["lane"][k] == 0 and end <= first * (1 + 1e-9)]
    # Nothing stands before the first exchange but its own kernels.
    assert before and sum(spans["to"][k] - spans["from"][k] for k in before) == pytest.approx(first)
