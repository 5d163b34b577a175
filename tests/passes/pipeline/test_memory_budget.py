"""Placements of a pipeline are planned to fit, as the schedule holds their micro-batches."""

from dataclasses import replace
from typing import Any

import pytest

import sbp
from sbp import B, S
from sbp.hardware.catalogue import hardware_for
from sbp.options import PipelineOptions
from sbp.passes.pipeline.planning import budget_of
from tests.passes.pipeline.scanned import arguments, step_of

GRID = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))


def plan(memory_bytes: float | None = None, **given: Any) -> Any:
    """The plan on devices with so much memory."""
    hardware = hardware_for("cpu")
    if memory_bytes is not None:
        hardware = replace(hardware, memory_bytes=memory_bytes)
    options = sbp.Options(hardware=hardware, cache=False, pipeline=PipelineOptions(stages=2))
    return sbp.compile(step_of(), GRID, donate_argnums=(0, 1), options=options, **given).plan(*arguments())


def test_where_the_fastest_does_not_fit_another_one_is_found() -> None:
    fastest = plan()
    small = plan(0.8 * max(fastest.memory))
    assert max(small.memory) <= 0.8 * max(fastest.memory)
    assert small.seconds >= fastest.seconds and small.fits


@pytest.mark.full
def test_what_cannot_fit_is_said_of_the_whole() -> None:
    tight = plan(5500.0, in_sbp=([B], [B], [S(0)]))
    assert not tight.fits and "it does not fit" in tight.notes[0]


def test_room_needs_micro_batches_and_a_schedule_that_suits() -> None:
    assert budget_of((0, 1), 0, None, 1.0) is None
    assert budget_of((0, 1), 4, "interleaved", 1.0) is None
    found = budget_of((0, 1), 4, "auto", 1.0)
    assert found is not None and found.schedule.name == "1f1b"
