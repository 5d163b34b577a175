"""The simulated step of a program compiled for GPUs, laid over its plan as a measured one is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from sbp.passes.explain.measurement import MeasuredSpan, MeasuredStep
from sbp.runtime.profile.trace_alignment import collective_times
from sbp.runtime.profile.trace_attribution import SENDING, StepAttribution
from sbp.runtime.target.comparison import ComparedProgram
from sbp.runtime.target.events import KERNELS, LOOPS, Simulation


def simulated_step(report: ComparedProgram) -> MeasuredStep | None:
    """The simulated step; None where nothing was simulated.

    Its kernels are not told apart by steps of the program: their names in the compiled program are those of
    the user's scopes. What waits for copies to and from the host is nobody's.
    """
    simulation = report.simulation
    if simulation is None:
        return None
    found = StepAttribution(simulation.seconds, 1)
    found.sent = defaultdict(float, {c.instruction: c.seconds or 0.0 for c in report.collectives})
    exposed = {c.instruction: c.exposed_seconds or 0.0 for c in report.collectives}
    found.claimed[SENDING].update(exposed)
    found.times = Counter({c.instruction: c.count for c in report.collectives if not c.conditional})
    rest = simulation.seconds - simulation.kernel_seconds - math.fsum(exposed.values())
    return MeasuredStep(
        "simulated",
        f"for {report.target}",
        simulation.seconds,
        1,
        (),
        simulation.kernel_seconds,
        tuple(collective_times(report, found)),
        0.0,
        max(0.0, rest),
        0.0,
        tuple(_spans(report, simulation)),
    )


def _spans(report: ComparedProgram, simulation: Simulation) -> Iterator[MeasuredSpan]:
    """What runs when, the first trip of a loop."""
    rows = {c.instruction: c.rows for c in report.collectives}
    for e in simulation.events:
        if e.resource == LOOPS:
            continue
        origin = report.origins.get(e.instruction)
        label = origin.source if origin is not None and origin.source else e.instruction
        sends = e.resource != KERNELS
        own = rows.get(e.instruction, ())
        yield MeasuredSpan(e.start_seconds, e.end_seconds, -1, own, sends, label=label)
