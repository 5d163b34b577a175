"""A step in the order of XLA's scheduler, and what is copied at its end."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.hardware.catalogue import Hardware
from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from tests.passes.physical.test_overlap import (
    IMAGES,
    ROWS,
    WEIGHTS,
    WIDTH,
    array,
    evaluator,
    kernel_seconds,
    planned,
    train,
)


def momentum(w: Any, m: Any, x: Any) -> Any:
    """A step whose gradient is a product as it is, which no transpose follows."""
    m = 0.9 * m + jnp.einsum("ri,rj->ij", x, jnp.tanh(x @ w))
    return w - 0.1 * m, m


def updated(lies: Any) -> Evaluator:
    """Of a step whose gradient is scattered along some dim to state that lies so."""
    args = array(WIDTH, WIDTH), array(WIDTH, WIDTH), array(ROWS, WIDTH)
    plan = planned(momentum, args, (lies, lies, [S(0)]), donate_argnums=(0, 1))
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(plan.placement, plan.hardware), plan.donated)


def test_a_step_is_what_is_computed_and_what_is_waited_for() -> None:
    plan = planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)]))
    takes = evaluator(plan)
    found = takes.scheduled()
    assert found.seconds == plan.step_seconds
    assert found.seconds == pytest.approx(kernel_seconds(plan) + found.exposed_seconds)
    assert found.seconds <= takes.seconds() * (1 + 1e-9)


def test_what_is_turned_over_is_copied_at_the_end() -> None:
    """The weight and its moment are written apart, and copied to where they belong."""
    along_rows, along_columns = (updated([S(d)]) for d in (0, 1))
    assert along_rows.scheduled().copied_seconds == 0.0
    shard = WIDTH * WIDTH * 4 / 8
    assert along_columns.scheduled().copied_seconds == pytest.approx(2 * along_columns.copy_seconds(shard))


def test_nothing_is_hidden_on_cpus() -> None:
    plan = planned(train, (WEIGHTS, array(WIDTH, 512)), ([B], [S(1)]), sbp.placement("cpu", shape=(8,)))
    takes = evaluator(plan)
    assert takes.scheduled().seconds == takes.overlapped().seconds == plan.seconds


def test_a_reader_of_a_gather_waits_for_it() -> None:
    """One product is all that there is: nothing runs beside what it needs."""
    plan = planned(lambda w, x: x @ w, (array(WIDTH, WIDTH), IMAGES), ([S(0)], [S(0)]), out_sbp=[S(0)])
    (gather,) = plan.collectives
    assert gather.kind == "all_gather" and gather.exposed_seconds == pytest.approx(gather.seconds)


class Crowded(Hardware):
    """A chip whose kernels have half of it while a collective runs."""

    @property
    def beside_share(self) -> float:
        return 0.5


def test_kernels_have_less_of_a_chip_beside_a_collective() -> None:
    """What runs beside it takes twice as long, and so does no more than half of the time that it hid."""
    plan = planned(train, (WEIGHTS, array(WIDTH, ROWS)), ([B], [S(1)]))
    alone = evaluator(plan)
    assert plan.physical is not None
    same = {f.name: getattr(plan.hardware, f.name) for f in fields(plan.hardware)}
    crowded = Evaluator(plan.physical, Network(plan.placement, Crowded(**same)))
    assert alone.whole.order.events == crowded.whole.order.events
    sent = sum(c.seconds for c in plan.collectives)
    found, before = crowded.scheduled(), alone.scheduled()
    hidden = sent - found.exposed_seconds
    lost = found.seconds - found.exposed_seconds - (before.seconds - before.exposed_seconds)
    assert lost == pytest.approx(hidden / 2) and hidden > 0
