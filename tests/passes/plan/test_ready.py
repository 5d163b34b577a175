"""Compiled loops are ready before the clock of a search runs."""

from typing import Any

from sbp.passes.plan import ready, sweeps
from sbp.passes.plan.ready import ready_seconds


def test_every_loop_is_compiled_and_once_is_enough() -> None:
    ready_seconds()
    kernels: tuple[Any, ...] = sweeps.total_cost, sweeps.descend
    assert all(kernel.dispatcher.nopython_signatures for kernel in kernels)
    ready_seconds()
    assert ready._run_all.cache_info().misses == 1
