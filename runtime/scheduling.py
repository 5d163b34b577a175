"""What XLA:GPU's scheduler is told of a limit on memory, so that it keeps what was planned.

Its scheduler hides collectives at the cost of memory as long as there is some, and it only knows of the
device's. What the plan was given is less: then it has to know.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from sbp.hardware import Hardware
from sbp.passes.physical.evaluate import donations
from sbp.passes.physical.fusing import ShardSizes
from sbp.passes.physical.program import Physical
from sbp.passes.program.graph import Const

SCHEDULED_SHARE = 0.8
"""Of a device's memory, for a program (`GetSchedulerMemoryLimit`, gpu_hlo_schedule.cc); of what arguments and
results leave of that, `xla_gpu_memory_limit_slop_factor` hundredths are the scheduler's."""
MOST_HUNDREDTHS = 95
"""As XLA has it."""


def compiler_options(physical: Physical, hardware: Hardware, donated: Collection[int]) -> Mapping[str, int]:
    """The options for XLA under a limit on memory; none without one, and none but on GPUs."""
    limit = hardware.scheduled_bytes
    if hardware.platform != "gpu" or not math.isfinite(max(limit, hardware.memory_bytes)):
        return {}
    p, sizes = physical, ShardSizes(physical)
    results = ((x, nd) for x, nd in zip(p.graph.outputs, p.outputs, strict=True) if not isinstance(x, Const))
    taken = donations(p, donated)
    held = sum(map(sizes.bytes, zip(p.graph.inputs, p.inputs, strict=True)))
    held += sum(sizes.bytes(v) for v in dict.fromkeys(results) if v not in taken)
    left = max(limit - held, 0.0) / max(SCHEDULED_SHARE * hardware.memory_bytes - held, 1.0)
    return {"xla_gpu_memory_limit_slop_factor": min(max(round(100 * left), 1), MOST_HUNDREDTHS)}
