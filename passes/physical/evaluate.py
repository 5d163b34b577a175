"""The evaluator: what a physical program takes, in seconds and bytes. Nobody else adds them up.

Seconds are serial: ops and moves one after the other. A loop of unknown length counts `WHILE_TRIPS` times in
seconds, as in the search, so that a plan and the bound of the search speak of one cost; in bytes and numbers
of collectives it counts once, as what is known.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from sbp.communication.protocol import Communication
from sbp.passes.boxing.links import Network
from sbp.passes.physical.fusion import PRODUCTS, KernelOp, Seconds, ShardSizes, believed_product, op_of
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.memory import Live, Peak, Spaces, peak, swept
from sbp.passes.physical.order import BodyOrder, WholeProgram, has_loops, whole_program
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version
from sbp.passes.physical.sections import Sections, sections_of
from sbp.passes.physical.step_schedule import (
    MOVE,
    ScheduledStep,
    ScheduleTimes,
    SentId,
    loop_step,
    part_seconds,
    schedule_step,
    schedule_times,
)
from sbp.passes.physical.trips import trip_ops
from sbp.passes.plan.cost import communication_seconds, node_seconds
from sbp.passes.program.control import assumed_trips, trips
from sbp.passes.program.graph import Const, Node
from sbp.passes.program.views import communication_of
from sbp.signature import NdSbp

CALL_SECONDS = 10e-6
"""What XLA's scheduler takes a call of a library to be (a hundredth of `kMediumCost`)."""

OVERLAPPING = frozenset(["gpu"])
"""Platforms on which XLA runs collectives beside kernels; on CPUs an op waits for each."""

HOLES = 0.03
"""Of XLA's heap, beyond what is alive in it: none for plain transformers, 12 % for scans of recomputed
layers, 8 % for convolutional nets, as their buffer assignments show; this is the middle of them."""


class Execution(NamedTuple):
    """A step of a program, bodies included.

    Arguments:
      times: how often it runs, as far as that is known.
      assumed_count: how often it runs where loops of unknown length count `WHILE_TRIPS` times.
    """

    step: Step
    times: int
    assumed_count: int


@dataclass(frozen=True)
class StepFacts:
    """What was asked of steps already. Equal layers have the same strategies and moves, as objects, and
    plans of one program most of their ops.

    Arguments:
      seconds, wire_bytes: of kinds of ops and of moves.
      step_seconds: of ops.
      scheduled_seconds: what XLA's scheduler takes them to be.
      communication: of each op what it sends, with its time.
      kernel_ops: of each op what it is to fusion.
      shard_bytes: of values of one graph.
    """

    seconds: dict[Hashable, float] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)
    wire_bytes: dict[Hashable, float] = field(default_factory=dict)
    scheduled_seconds: dict[Hashable, float] = field(default_factory=dict)
    communication: dict[int, list[tuple[Communication, float]]] = field(default_factory=dict)
    kernel_ops: dict[int, KernelOp] = field(default_factory=dict)
    shard_bytes: dict[Version, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator:
    """What a program takes on a network.

    Arguments:
      donated: positions of the inputs whose memory the results may take.
      facts: of its steps. What they are of is held by this program, or by who made them.
    """

    physical: Physical
    network: Network
    donated: Sequence[int] = ()
    facts: StepFacts = field(default_factory=StepFacts, compare=False, repr=False)

    def box_seconds(self, box: Box) -> float:
        """The time of a move, once."""
        shape, dtype = self.physical.sent_type(box)
        key, known = (id(box.move), shape, dtype), self.facts.seconds
        if key not in known:
            known[key] = self.network.seconds(box.move, shape, dtype)
        return known[key]

    def box_bytes(self, box: Box) -> float:
        """What one device sends in a move, once."""
        shape, dtype = self.physical.sent_type(box)
        key, known = (id(box.move), shape, dtype), self.facts.wire_bytes
        if key not in known:
            known[key] = self.network.wire_bytes(box.move, shape, dtype)
        return known[key]

    def seconds_of(self, step: Step) -> float:
        """The time of a step, once; that of a loop or a branch is its steps'."""
        if isinstance(step, Box):
            return self.box_seconds(step)
        if not isinstance(step, Compute):
            return 0.0
        own = self.facts.step_seconds
        if id(step) not in own:
            key, known = self._kind_of(step), self.facts.seconds
            if key not in known:
                traffic = self.physical.traffic.get(step.node.id)
                known[key] = node_seconds(
                    self.physical.graph, step.node, step.strategy, self.network, traffic
                )
            own[id(step)] = known[key]
        return own[id(step)]

    def _kind_of(self, step: Compute) -> Hashable:
        """What the times of an op depend on."""
        # What it sends depends on who uses its results; all else is that of its strategy.
        node = step.node
        return id(step.strategy), self.physical.traffic.get(node.id), node.id if _communication(node) else -1

    def seconds(self, steps: Iterable[Step] | None = None) -> float:
        """The time of all steps, or of some of them."""
        every = self.physical.steps if steps is None else steps
        return sum(e.assumed_count * self.seconds_of(e.step) for e in executions(every))

    def communication_times(self, step: Compute) -> list[tuple[Communication, float]]:
        """What an op sends itself, each with its time."""
        if not _communication(step.node):
            return []
        p, known = self.physical, self.facts.communication
        if id(step) not in known:
            communication = communication_of(p.graph, step.node, step.strategy.signatures, p.placement.shape)
            known[id(step)] = [(t, communication_seconds(t, self.network)) for t in communication]
        return known[id(step)]

    def combined_seconds(self, boxes: Sequence[Box]) -> float:
        """The time of moves that are sent as one: that of the largest, with the bytes of all."""
        sizes = [self.box_bytes(b) for b in boxes]
        largest = max(range(len(boxes)), key=sizes.__getitem__)
        if sizes[largest] == 0:  # over an axis of one device
            return 0.0
        (sent, dtype), times = self.physical.sent_type(boxes[largest]), sum(sizes) / sizes[largest]
        shape = (math.ceil(sent[0] * times), *sent[1:]) if sent else (math.ceil(times),)
        return self.network.seconds(boxes[largest].move, shape, dtype)

    @property
    def beside_share(self) -> float:
        """The share of its rate that a kernel keeps beside a collective."""
        return self.network.hardware.beside_share

    @property
    def hides(self) -> bool:
        """Whether collectives run beside kernels."""
        return self.network.hardware.platform in OVERLAPPING

    def part_seconds(self, steps: Sequence[Step], kept: Collection[Version]) -> float:
        """The time of some steps, as a program of their own.

        Arguments:
          kept: versions that are needed after the last one.
        """
        return part_seconds(steps, kept, self) if self.hides else self.seconds(steps)

    @cached_property
    def schedule(self) -> ScheduledStep:
        """The same of the whole program, nearer to what XLA makes of it, and found more slowly."""
        if not self.hides:
            return ScheduledStep(self.seconds(), self._alone())
        return schedule_step(self.whole, self, donations(self.physical, self.donated))

    def _alone(self) -> dict[SentId, float]:
        """What each collective takes, all executions together."""
        found = dict[SentId, float]()
        for e in executions(self.physical.steps):
            if isinstance(e.step, Compute):
                for k, (_, seconds) in enumerate(self.communication_times(e.step)):
                    found[id(e.step), k] = e.assumed_count * seconds
            elif isinstance(e.step, Box) and self.box_bytes(e.step) > 0:
                found[id(e.step), MOVE] = e.assumed_count * self.box_seconds(e.step)
        return found

    @cached_property
    def whole(self) -> WholeProgram:
        """The program as the kernels that XLA:GPU makes of it, in the order of its scheduler."""
        return whole_program(self.sizes, self.scheduled_seconds, self.facts.kernel_ops)

    @cached_property
    def sizes(self) -> ShardSizes:
        """How large its tensors are."""
        return ShardSizes(self.physical, self.facts.shard_bytes)

    def copy_seconds(self, size: float) -> float:
        """The time of a kernel that copies so many bytes."""
        hardware = self.network.hardware
        return 2 * size / hardware.memory_bytes_per_second + hardware.launch_seconds

    @property
    def at_peak(self) -> list[Live]:
        """What one device holds when it holds most, the largest first: that of XLA:GPU (memory.py)."""
        return sorted(self._peak.live, key=lambda x: -x.bytes)

    @property
    def course(self) -> Sequence[float]:
        """The bytes that one device holds, from the first kernel to the end."""
        return self._peak.course

    @cached_property
    def timeline(self) -> tuple[BodyOrder, ScheduleTimes] | None:
        """When what runs in a step, a loop as one kernel; None where nothing runs beside anything."""
        return schedule_times(self.whole, self) if self.hides else None

    @property
    def course_seconds(self) -> Sequence[float]:
        """When the course has each of its bytes: known of a program without loops whose kernels hide
        collectives. In others as if what runs ran one thing after the other, as long as a step is."""
        course, timeline = self.course, self.timeline
        if timeline is not None and self._peak.hastens is None and not has_loops(self.physical.steps):
            times = timeline[1].times
            return [*times, *(times[-1:] * (len(course) - len(times)))][: len(course)]
        taken = [0.0] * (len(course) + 1)
        for turn, step in self._peak.ops:
            taken[turn + 1] += self.together_seconds(step)
        *ends, total = itertools.accumulate(taken)
        scale = self.schedule.seconds / total if total else 0.0
        return [scale * seconds for seconds in ends]

    def trip_course(self, loop: Border, k: int) -> TripCourse:
        """What a device holds over one trip through body `k` of a loop, beyond what is counted outside."""
        seconds = self.scheduled_seconds if self.hides else None
        return trip_course(loop, k, self.sizes, seconds, self.together_seconds)

    def together_seconds(self, step: Step) -> float:
        """The time of a step by itself, all trips of a loop with what they hide."""
        if not isinstance(step, Border):
            return self.seconds_of(step)
        return loop_step(op_of(step, self.physical), self).seconds if self.hides else self.seconds([step])

    @cached_property
    def sections(self) -> Sections | None:
        """The program in sections, where only an order that takes little memory keeps the limit, and the
        device has as much."""
        device_bytes = self.network.hardware.memory_bytes
        hastens = self._peak.hastens if self.hides and self.peak_bytes() <= device_bytes else None
        return None if hastens is None else sections_of(self.physical, hastens, self.whole.k)

    def sections_if_large(self, most_bytes: float) -> Sections | None:
        """The same; none if the program never needs more than some bytes, and these are there."""
        return self.sections if most_bytes > self._limit_bytes else None

    @property
    def _limit_bytes(self) -> float:
        hardware = self.network.hardware
        return min(hardware.memory_bytes, hardware.scheduled_bytes)

    @cached_property
    def _peak(self) -> Peak:
        p = self.physical
        inputs = list(zip(p.graph.inputs, p.inputs, strict=True))
        results = zip(p.graph.outputs, p.outputs, strict=True)
        kept = [(x, nd) for x, nd in results if not isinstance(x, Const)]
        over, seconds = donations(p, self.donated), self.scheduled_seconds if self.hides else None
        # Without collectives to hide, kernels run in another order.
        whole = self.whole if self.hides and not has_loops(p.steps) and self.whole.sends else None
        return peak(p.steps, self.sizes, kept, inputs, over, seconds, self._limit_bytes, HOLES, whole)

    def scheduled_seconds(self, op: KernelOp, *more: KernelOp) -> float:
        """How long XLA's scheduler takes an op to be (`NodeCost`, sol_latency_estimator.cc): collectives and
        products by its tables, other kernels by peak rates, and loops next to nothing (`kLowCost`).
        Collectives that are sent as one are one to it.
        """
        graph, step = self.physical.graph, op.step
        if op.name == "conv_general_dilated":
            return CALL_SECONDS
        if isinstance(step, Box) and op.sends:
            wire_bytes = sum(map(self.box_bytes, [x.step for x in (op, *more) if isinstance(x.step, Box)]))
            believed = self.network.believed_seconds
            return believed(step.move.kind, step.move.axes, wire_bytes) if wire_bytes else 0.0
        if isinstance(step, Compute):
            key, known = self._kind_of(step), self.facts.scheduled_seconds
            if key not in known:
                product = op.name in PRODUCTS
                given = graph, step.node, step.strategy, self.network
                known[key] = believed_product(*given) if product else self._by_peaks.seconds_of(step)
            return known[key]
        return self._by_peaks.box_seconds(step) if isinstance(step, Box) else 0.0

    @cached_property
    def _by_peaks(self) -> Evaluator:
        hardware = replace(self.network.hardware, chip="", launch_seconds=0.0)
        return Evaluator(self.physical, Network(self.network.placement, hardware))

    def peak_bytes(self) -> float:
        """What one device needs: what it holds when it holds most, and the holes between temporaries."""
        p, live = self.physical, self.at_peak
        ends = {*zip(p.graph.inputs, p.inputs, strict=True), *zip(p.graph.outputs, p.outputs, strict=True)}
        shared = sum(x.bytes for x in live if x.version not in ends)
        return sum(x.bytes for x in live) + HOLES * shared


def _communication(node: Node) -> bool:
    """Whether an op may send something itself."""
    return node.rule is not None and node.rule.communication is not None


def donations(physical: Physical, donated: Iterable[int]) -> dict[Version, Version]:
    """Results, and the donated argument whose memory each takes: the first one of its shape, dtype and
    signature, as JAX pairs them."""
    p = physical

    def kind(x: int, nd: NdSbp) -> Hashable:
        return p.graph.values[x].shape, p.graph.values[x].dtype, nd

    free: dict[Hashable, deque[Version]] = {}
    for i in donated:
        version = p.graph.inputs[i], p.inputs[i]
        free.setdefault(kind(*version), deque()).append(version)
    pairs: dict[Version, Version] = {}
    for x, nd in zip(p.graph.outputs, p.outputs, strict=True):
        if not isinstance(x, Const) and (x, nd) not in pairs and free.get(kind(x, nd)):
            pairs[x, nd] = free[kind(x, nd)].popleft()
    return pairs


def executions(steps: Iterable[Step], times: int = 1, assumed: int = 1) -> Iterator[Execution]:
    """Every step, bodies included, with how often it runs."""
    for step in steps:
        yield Execution(step, times, assumed)
        if isinstance(step, Border):
            inner = times * trips(step.node), assumed * assumed_trips(step.node)
            for body in step.bodies:
                yield from executions(body, *inner)


@dataclass(frozen=True, slots=True)
class TripCourse:
    """One trip.

    Arguments:
      bytes: turn by turn.
      seconds: when each of them begins.
    """

    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


def trip_course(
    loop: Border, k: int, sizes: ShardSizes, seconds: Seconds | None, takes: Callable[[Step], float]
) -> TripCourse:
    """What one trip through body `k` holds, op after op.

    Arguments:
      seconds: of an op, as memory is counted; None where collectives are not hidden at its cost.
      takes: the time of a step by itself.
    """
    trip = trip_ops(loop, k, sizes)
    body = kernels(trip.ops, sizes, trip.whole, trip.whole_inputs)
    sweep = swept(body, sizes, Spaces(trip.donors, frozenset(trip.donors), seconds, in_loop=True), None)
    held = [max(0.0, n) for n in itertools.accumulate(sweep.change)]
    taken = [0.0] * (len(held) + 1)
    for i, op in enumerate(body.ops):
        if body.runs(i) and op.step is not None:
            taken[min(sweep.turn.born[i] + 1, len(held))] += takes(op.step)
    return TripCourse(tuple(held), tuple(list(itertools.accumulate(taken))[: len(held)]))
