"""Tells XLA:GPU's scheduler the limit on memory that the plan was made for.

The scheduler hides collectives at the cost of memory while there is some, and it knows only the memory of the
device. The plan's limit may be smaller: then the scheduler must know it. It may be larger too, since XLA
leaves a fifth of the device alone: beyond that it hides nothing, and computes and sends things again to save
memory (rematerialization), though the plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from sbp.hardware.catalogue import Hardware
from sbp.passes.physical.evaluate import donations
from sbp.passes.physical.fusing import ShardSizes
from sbp.passes.physical.program import Physical
from sbp.passes.program.graph import Const
from sbp.rates.chips import CHIPS

SCHEDULED_SHARE = 0.8
"""Of a device's memory, for a program (`GetSchedulerMemoryLimit`, gpu_hlo_schedule.cc); of what arguments and
results leave of that, `xla_gpu_memory_limit_slop_factor` hundredths are the scheduler's."""
USUAL_HUNDREDTHS = 95
"""As XLA has it."""
SPARE = 1.05
"""Of what a plan needs, XLA has so much, if there is as much. Given all that there is it takes that, and a
little more for holes: a step of Llama 3 70B that is planned with 73 GB then needs 81."""


def compiler_options(
    physical: Physical, hardware: Hardware, donated: Collection[int], needed_bytes: float
) -> Mapping[str, int]:
    """The options for XLA if the memory limit differs from XLA's own; none except on GPUs.

    Arguments:
      donated: positions of the inputs whose memory the results may take.
      needed_bytes: per device, by the plan.
    """
    limit = min(hardware.scheduled_bytes, hardware.memory_bytes)
    if hardware.platform != "gpu" or not math.isfinite(limit):
        return {}
    held = _held_bytes(physical, donated)
    device = CHIPS[hardware.chip].memory_bytes if hardware.chip in CHIPS else hardware.memory_bytes
    own = max(SCHEDULED_SHARE * device - held, 1.0)
    wanted = max(held + USUAL_HUNDREDTHS / 100 * own, SPARE * needed_bytes)
    hundredths = max(round(100 * (min(limit, wanted) - held) / own), 1)
    return {} if hundredths == USUAL_HUNDREDTHS else {"xla_gpu_memory_limit_slop_factor": hundredths}


def _held_bytes(p: Physical, donated: Collection[int]) -> float:
    """Bytes of arguments and results, which live through the whole step."""
    sizes, taken = ShardSizes(p), donations(p, donated)
    results = ((x, nd) for x, nd in zip(p.graph.outputs, p.outputs, strict=True) if not isinstance(x, Const))
    held = sum(map(sizes.bytes, zip(p.graph.inputs, p.inputs, strict=True)))
    return held + sum(sizes.bytes(v) for v in dict.fromkeys(results) if v not in taken)
