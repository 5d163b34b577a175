"""The evaluator: what a physical program takes, in seconds and bytes. Nobody else adds them up.

Seconds are serial: ops and moves one after the other. A loop of unknown length counts `WHILE_TRIPS` times in
seconds, as in the search, so that a plan and the bound of the search speak of one cost; in bytes and numbers
of collectives it counts once, as what is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sbp import compat
from sbp.passes.boxing.links import Network
from sbp.passes.physical.fusing import KernelOp, ShardSizes
from sbp.passes.physical.memory import Live, peak
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version
from sbp.passes.plan.cost import node_seconds
from sbp.passes.program.control import assumed_trips, trips
from sbp.passes.program.graph import Const
from sbp.signature import NdSbp

SHORTEST_COLLECTIVE_SECONDS = 36e-6
"""Of 8 H100s, in the table of XLA's scheduler (default_collective_perf_table.txtpb)."""


HOLES = 0.03
"""Of XLA's heap, beyond what is alive in it: none for plain transformers, 12 % for scans of recomputed
layers, 8 % for convolutional nets, as their buffer assignments show; this is the middle of them."""


@dataclass(frozen=True, slots=True)
class Executed:
    """A step of a program, bodies included.

    Arguments:
      times: how often it runs, as far as that is known.
      assumed: how often it runs where loops of unknown length count `WHILE_TRIPS` times.
    """

    step: Step
    times: int
    assumed: int


@dataclass(frozen=True)
class Evaluator:
    """What a program takes on a network.

    Arguments:
      donated: positions of the inputs whose memory the results may take.
    """

    physical: Physical
    network: Network
    donated: Sequence[int] = ()

    def box_seconds(self, box: Box) -> float:
        """The time of a move, once."""
        value = self.physical.graph.values[box.value]
        return self.network.seconds(box.move, value.shape, value.dtype)

    def box_bytes(self, box: Box) -> float:
        """What one device sends in a move, once."""
        value = self.physical.graph.values[box.value]
        return self.network.wire_bytes(box.move, value.shape, value.dtype)

    def seconds_of(self, step: Step) -> float:
        """The time of a step, once; that of a loop or a branch is its steps'."""
        if isinstance(step, Box):
            return self.box_seconds(step)
        if isinstance(step, Compute):
            traffic = self.physical.traffic.get(step.node.id)
            return node_seconds(self.physical.graph, step.node, step.strategy, self.network, traffic)
        return 0.0

    def seconds(self, steps: Iterable[Step] | None = None) -> float:
        """The time of all steps, or of some of them."""
        every = self.physical.steps if steps is None else steps
        return sum(e.assumed * self.seconds_of(e.step) for e in executed(every))

    def at_peak(self) -> list[Live]:
        """What one device holds when it holds most, the largest first: that of XLA:GPU (memory.py)."""
        p = self.physical
        inputs = list(zip(p.graph.inputs, p.inputs, strict=True))
        results = zip(p.graph.outputs, p.outputs, strict=True)
        kept = [(x, nd) for x, nd in results if not isinstance(x, Const)]
        over, limit = donations(p, self.donated), self.network.hardware.memory_bytes
        found = peak(p.steps, ShardSizes(p), kept, inputs, over, self.scheduled_seconds, limit)
        return sorted(found, key=lambda x: -x.bytes)

    def scheduled_seconds(self, op: KernelOp) -> float:
        """How long XLA's scheduler takes an op to be: it computes products of float32 in TF32, at half the
        rate of 2 bytes, has no figures for convolutions, and knows no short collective."""
        if op.step is None or op.name == "conv_general_dilated":
            return 0.0
        taken, hardware = self.seconds([op.step]), self.network.hardware
        if op.sends:
            return max(taken, SHORTEST_COLLECTIVE_SECONDS)
        if not op.product or max(self._itemsizes(op)) != 4:
            return taken
        return taken * min(1.0, 2 * hardware.flops(4) / hardware.flops(2))

    def _itemsizes(self, op: KernelOp) -> list[float]:
        return [compat.itemsize(self.physical.graph.values[v].dtype) for v, _ in op.reads]

    def peak_bytes(self) -> float:
        """What one device needs: what it holds when it holds most, and the holes between temporaries."""
        p, live = self.physical, self.at_peak()
        ends = {*zip(p.graph.inputs, p.inputs, strict=True), *zip(p.graph.outputs, p.outputs, strict=True)}
        shared = sum(x.bytes for x in live if x.version not in ends)
        return sum(x.bytes for x in live) + HOLES * shared


def donations(physical: Physical, donated: Iterable[int]) -> dict[Version, Version]:
    """Results, and the donated argument whose memory each takes: the first one of its shape, dtype and
    signature, as JAX pairs them."""
    p = physical

    def kind(x: int, nd: NdSbp) -> Hashable:
        return p.graph.values[x].shape, str(p.graph.values[x].dtype), nd

    free: dict[Hashable, deque[Version]] = {}
    for i in donated:
        version = p.graph.inputs[i], p.inputs[i]
        free.setdefault(kind(*version), deque()).append(version)
    pairs: dict[Version, Version] = {}
    for x, nd in zip(p.graph.outputs, p.outputs, strict=True):
        if not isinstance(x, Const) and (x, nd) not in pairs and free.get(kind(x, nd)):
            pairs[x, nd] = free[kind(x, nd)].popleft()
    return pairs


def executed(steps: Iterable[Step], times: int = 1, assumed: int = 1) -> Iterator[Executed]:
    """Every step, bodies included, with how often it runs."""
    for step in steps:
        yield Executed(step, times, assumed)
        if isinstance(step, Border):
            inner = times * trips(step.node), assumed * assumed_trips(step.node)
            for body in step.bodies:
                yield from executed(body, *inner)
