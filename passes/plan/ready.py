"""Has the compiled loops of the solver ready before a clock runs: the first time they are compiled.

That takes seconds. The code is kept on disk; from then on it is a moment, once in each process.
"""

import time
from functools import cache

import numpy as np

from sbp.passes.plan import sweeps
from sbp.passes.plan.dual import Dual
from sbp.passes.plan.flat import flat_network
from sbp.passes.plan.network import CostNetwork


def ready_seconds() -> float:
    """What it took to have them ready; next to nothing from the second time on."""
    begun = time.monotonic()
    _run_all()
    return time.monotonic() - begun


@cache
def _run_all() -> None:
    """Runs every loop once, on three variables in a ring."""
    table = np.array([[0.0, 1.0], [2.0, 0.0]])
    ring = CostNetwork((np.array([0.0, 1.0]),) * 3, ((0, 1, table), (1, 2, table), (0, 2, table)))
    flat = flat_network(ring)
    dual = Dual(flat, 10.0)
    dual.bound()
    for forward in (True, False):
        dual.sweep(forward=forward)
        dual.sweep(forward, np.zeros(flat.theta.size))
        states = dual.decode(forward=forward)
    found = np.array(states, dtype=np.int64)
    sweeps.descend(flat, found, 0.0)
    sweeps.total_cost(flat, found)
