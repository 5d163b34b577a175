"""The kernels of a whole program, and the order in which XLA's scheduler runs them.

How long a step takes (scheduled.py) and what it holds (memory.py) are asked of the same kernels in the same
order, unless first trips of loops run before these in memory. So they are merged and ordered once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sbp.passes.physical.fusing import KernelOp, Seconds, ShardSizes
from sbp.passes.physical.kernels import Kernels, program_kernels
from sbp.passes.physical.order import BodyOrder, hiding_order
from sbp.passes.physical.program import Border, Step, Version
from sbp.passes.physical.schedule_nodes import sent_together


@dataclass(frozen=True)
class WholeProgram:
    """A program as its kernels.

    Arguments:
      kept: versions that are needed after the last op.
      there: versions that are there before the first one.
      together: collectives that are sent as one.
      order: collectives hidden.
    """

    k: Kernels
    sizes: ShardSizes
    kept: Sequence[Version]
    there: Sequence[Version]
    together: Sequence[tuple[int, ...]]
    order: BodyOrder

    @property
    def sends(self) -> bool:
        """Whether there are collectives to hide."""
        return any(node.sends for node in self.order.nodes)


def has_loops(steps: Iterable[Step]) -> bool:
    """Whether a loop or a branch is among some steps."""
    return any(isinstance(step, Border) for step in steps)


def whole_program(sizes: ShardSizes, seconds: Seconds, known: dict[int, KernelOp]) -> WholeProgram:
    """The kernels of a program.

    Arguments:
      sizes: of its tensors.
      seconds: what the scheduler takes an op to be.
      known: what ops are to fusion, which is added to.
    """
    physical = sizes.physical
    there = list(dict.fromkeys(zip(physical.graph.inputs, physical.inputs, strict=True)))
    k = program_kernels(sizes, known)
    together = sent_together(k)
    return WholeProgram(k, sizes, list(k.ends), there, together, hiding_order(k, together, seconds))
