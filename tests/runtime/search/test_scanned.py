"""`sbp.search` of a model whose layers lie in a scan: stages of it, and how much of its layers is kept."""

from typing import Any

import jax
import numpy as np
import pytest

import sbp
from sbp.errors import ArgumentError
from sbp.options import PipelineOptions
from sbp.runtime.search.ranking import Ranking
from tests.passes.pipeline.scanned import arguments, step_of


def searched(**given: Any) -> Ranking:
    asked = {"stages": (2,), "axes": 2, "kind": "cpu", "donate_argnums": (0, 1), **given}
    return sbp.search(step_of(checkpoint=given.pop("checkpoint", True)), 4, **asked)(*arguments())


def test_a_scan_is_cut_into_stages_and_keeps_more_or_less() -> None:
    found = searched(kept=(0.0, 1.0))
    rows = {(row.stages, row.scan_kept) for row in found.rows if row.plan is not None}
    assert {(0, 0.0), (0, 1.0), (2, 0.0), (2, 1.0)} <= rows
    staged = next(row for row in found.rows if row.stages == 2 and row.scan_kept == 1.0)
    assert staged.plan is not None and "2 pipeline" in staged.words
    assert str(staged) == f"{staged.shape} (2 stages, 100% kept)"
    assert " kept " in str(found)


def test_more_is_kept_only_while_that_helps() -> None:
    """Once a share does not fit, or is not faster, no larger one is planned."""
    rows: dict[tuple[str, int], list[sbp.RankedPlan]] = {}
    for row in sorted(searched().rows, key=lambda row: row.scan_kept):
        rows.setdefault((row.shape, row.stages), []).append(row)
    for some in rows.values():
        before = some[:-1]
        assert all(row.usable for row in before)
        assert [row.seconds for row in before] == sorted((row.seconds for row in before), reverse=True)


def test_without_checkpoints_there_is_nothing_to_keep() -> None:
    step = step_of(checkpoint=False)
    found = sbp.search(step, 4, kind="cpu", stages=(2,), axes=2)(*arguments())
    assert {row.scan_kept for row in found.rows} == {0.0}


def test_a_share_among_the_options_is_the_only_one() -> None:
    assert {row.scan_kept for row in searched(options=sbp.Options(scan_kept=0.5)).rows} == {0.5}


@pytest.mark.parametrize("kept", [(), (2.0,), (True,)])
def test_shares_that_mean_nothing(kept: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        searched(kept=kept)
    (problem,) = caught.value.problems
    assert problem.where == "search(kept=...)" and problem.legal == "numbers from 0 to 1"


@pytest.mark.full
def test_the_row_with_stages_can_be_compiled() -> None:
    """What a row says is what `compile` is told."""
    found = searched(kept=(1.0,))
    row = next(row for row in found.rows if row.stages == 2)
    options = sbp.Options(scan_kept=row.scan_kept, pipeline=PipelineOptions(stages=row.stages))
    step = sbp.compile(step_of(), row.placement, donate_argnums=(0, 1), options=options)
    for one, other in zip(
        jax.tree.leaves(step(*arguments())), jax.tree.leaves(jax.jit(step_of())(*arguments())), strict=True
    ):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-6)
