"""Compiled loops are ready before the clock of a search runs."""

from sbp.passes.plan import ready, sweeps
from sbp.passes.plan.ready import ready_seconds


def test_every_loop_is_compiled_and_once_is_enough() -> None:
    ready_seconds()
    loops = [f for f in vars(sweeps).values() if hasattr(f, "nopython_signatures")]
    assert loops and all(f.nopython_signatures for f in (sweeps.total_cost, sweeps.descend))  # type: ignore[attr-defined]
    ready_seconds()
    assert ready._run_all.cache_info().misses == 1
