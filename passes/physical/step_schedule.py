"""A step as XLA:GPU compiles it: merged kernels in the order of its latency-hiding scheduler.

Ops are kernels as XLA merges them (kernels.py), in the order that its scheduler gives them
(latency_hiding.py), each with the time that it takes, and what a collective turns over is copied
(layouts.py). Trips of loops are ordered by themselves, and run one after the other; what a trip sends only
to stack it is sent in the next one (its collective pipeliner).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from sbp.communication.protocol import Communication
from sbp.passes.physical.fusion import KernelOp, ShardSizes, op_of
from sbp.passes.physical.kernel_merges import kernels_that_compute
from sbp.passes.physical.kernels import Buffer, Kernels, kernels
from sbp.passes.physical.layouts import turned_tensors
from sbp.passes.physical.order import BodyOrder, WholeProgram, body_order, hiding_order
from sbp.passes.physical.program import Border, Box, Compute, Step, Version
from sbp.passes.physical.schedule_nodes import ScheduleNode, sent_together
from sbp.passes.physical.sections import Sections
from sbp.passes.physical.trips import sent_later, sunk_into, trip_ops
from sbp.passes.program.control import assumed_trips

SentId: TypeAlias = tuple[int, int]
"""A collective: the id of its step, and which of the collectives of an op it is; `MOVE` for a move."""
MOVE = -1


class Costs(Protocol):
    """What steps take, and what XLA's scheduler takes them to be. `Evaluator` is one."""

    @property
    def beside_share(self) -> float:
        """The share of its rate that a kernel keeps beside a collective."""

    @property
    def sizes(self) -> ShardSizes:
        """How large tensors are."""

    def seconds_of(self, step: Step) -> float:
        """The time of a move or of an op, once, with what the op sends."""

    def communication_times(self, step: Compute) -> Sequence[tuple[Communication, float]]:
        """What an op sends itself, each with its time."""

    def combined_seconds(self, boxes: Sequence[Box]) -> float:
        """The time of moves that are sent as one."""

    def scheduled_seconds(self, op: KernelOp, *more: KernelOp) -> float:
        """How long the scheduler takes an op to be, or collectives that are sent as one."""

    def copy_seconds(self, size: float) -> float:
        """The time of a kernel that copies so many bytes."""

    def sections_if_large(self, most_bytes: float) -> Sections | None:
        """The sections in which the program runs, if it does so; none if there are so many bytes, which are
        all that it ever makes."""


@dataclass(frozen=True)
class ScheduledStep:
    """A step as it overlaps.

    Arguments:
      seconds: of the step, with the copies at its end, which no op of the program stands for.
      exposed_by_collective: per collective, the time in which kernels wait for it, all executions together.
    """

    seconds: float
    exposed_by_collective: Mapping[SentId, float]

    def exposed_of(self, step: Step, communication: int = MOVE) -> float:
        """How long kernels wait for a collective."""
        return self.exposed_by_collective.get((id(step), communication), 0.0)

    @property
    def exposed_seconds(self) -> float:
        """How long kernels wait for collectives."""
        return sum(self.exposed_by_collective.values())


def asked_of(step: Compute, communication: Communication) -> Hashable | None:
    """The shares of an operand that an op asks for, which XLA sends once to all who ask; None for all else
    that an op sends."""
    if communication.operand_part is None:
        return None
    return (
        step.node.inputs[communication.operand],
        step.strategy.operands[communication.operand],
        communication.axes,
        communication.operand_part,
    )


def schedule_step(whole: WholeProgram, costs: Costs, donated: Mapping[Version, Version]) -> ScheduledStep:
    """The step of a program. Sections only add what ops wait for: where the scheduler finds a shorter order
    in them, that is luck, and does not count.

    Arguments:
      donated: results, and the argument whose memory each takes.
    """
    k = whole.k
    runs = [_Run(k, order, costs) for order in _orders(whole, costs)]
    seconds, longest = max((run.seconds(), -i) for i, run in enumerate(runs))
    taken = {k.ends[v] for v in donated if v in k.ends}
    copied = sum(map(costs.copy_seconds, _copied_bytes(k, whole.sizes, taken)))
    return ScheduledStep(seconds + copied, runs[-longest].exposed)


def _orders(whole: WholeProgram, costs: Costs) -> list[BodyOrder]:
    """The order of a program as XLA finds it, and last that in which it runs, if it runs in sections."""
    sections = costs.sections_if_large(sum(t.bytes for t in whole.k.tensors))
    if sections is None:
        return [whole.order]
    return [whole.order, hiding_order(whole.k, whole.groups, costs.scheduled_seconds, sections.numbers)]


def _copied_bytes(k: Kernels, sizes: ShardSizes, taken: Collection[Buffer]) -> Iterator[float]:
    """The bytes of each result that is copied to where it belongs, once all else is done: it is made of a
    tensor that a collective has turned over, and can write over none of its operands."""
    for x in turned_tensors(k, sizes, taken):
        yield from (t.bytes for t in x.results)
        if x.tensor in taken:
            yield x.tensor.bytes


@dataclass(frozen=True)
class ScheduleTimes:
    """The times of a schedule.

    Arguments:
      times: of every event of the order, when it comes, seconds.
      spans: of every node, from when to when, and whether it is what it sends: an op that sends something
        itself has a span of its kernels too.
    """

    times: list[float] = field(default_factory=list)
    spans: list[tuple[int, float, float, bool]] = field(default_factory=list)


def schedule_times(whole: WholeProgram, costs: Costs) -> tuple[BodyOrder, ScheduleTimes]:
    """When what runs in a step of a program; nodes are those of the order."""
    run = _Run(whole.k, _orders(whole, costs)[-1], costs, noted=ScheduleTimes())
    run.seconds()
    assert run.noted is not None
    return run.order, run.noted


@dataclass(frozen=True)
class Trip:
    """One trip through a body of a loop, or a branch, in the order of the scheduler.

    Arguments:
      times: how often it runs, as the evaluator counts.
      k, groups, order: its kernels, those that are sent as one, and when what runs.
      sends_of_before: positions of the collectives that send what the trip before has made.
    """

    times: int
    k: Kernels
    groups: Sequence[tuple[int, ...]]
    order: BodyOrder
    sends_of_before: frozenset[int]

    @classmethod
    def of(cls, op: KernelOp, b: int, costs: Costs) -> Trip:
        """That of a loop through body `b`."""
        assert isinstance(op.step, Border)
        times, trip = assumed_trips(op.step.node), trip_ops(op.step, b, costs.sizes, sunk_into(op))
        k = kernels(trip.ops, costs.sizes, trip.whole, trip.whole_inputs)
        later, together = sent_later(k) if times > 1 else [], sent_together(k)
        elsewhere = {t for t in k.tensors if t.maker < 0} | {k.ends[v] for v in trip.donors if v in k.ends}
        order = body_order(k, elsewhere, together, costs.scheduled_seconds, later, in_loop=True)
        ids = {id(x) for x in later}
        return cls(times, k, together, order, frozenset(i for i, x in enumerate(k.ops) if id(x) in ids))

    def steps_of(self, node: int) -> list[Step]:
        """What runs in a node of its order: of a stack that is written, what is merged into that."""
        own = self.order.nodes[node]
        members = own.makes or self.order.nodes[own.after[0]].reads  # what is packed is unpacked by others
        found = [step for i in members if (step := self.k.ops[i].step) is not None]
        inside = () if found else zip(self.k.ops, kernels_that_compute(self.k), strict=True)
        return found or [op.step for op, at in inside if op.step is not None and not at.isdisjoint(members)]

    def schedule_times(self, costs: Costs) -> ScheduleTimes:
        """When what runs in it, where it is neither the first nor the last."""
        run = _Run(self.k, self.order, costs, noted=ScheduleTimes())
        run.seconds()
        assert run.noted is not None
        return run.noted


def trips_of(loop: Border, costs: Costs) -> list[Trip]:
    """A trip through each body of a loop or a branch."""
    op = op_of(loop, costs.sizes.physical)
    return [Trip.of(op, b, costs) for b in range(len(loop.bodies))]


def loop_step(op: KernelOp, costs: Costs) -> ScheduledStep:
    """All trips of a loop, or all branches."""
    assert isinstance(op.step, Border)
    total, exposed = 0.0, dict[SentId, float]()

    def ran(times: int, run: _Run, seconds: float) -> float:
        for who, waited in run.exposed.items():
            exposed[who] = exposed.get(who, 0.0) + times * waited
        return times * seconds

    for b in range(len(op.step.bodies)):
        trip = Trip.of(op, b, costs)
        usual, first, last = (_Run(trip.k, trip.order, costs, later=trip.sends_of_before) for _ in range(3))
        if trip.sends_of_before:
            total += ran(1, first, first.seconds(is_first=True)) + ran(1, last, last.send_later())
        total += ran(trip.times - bool(trip.sends_of_before), usual, usual.seconds())
    return ScheduledStep(total, exposed)


def part_seconds(steps: Sequence[Step], kept: Collection[Version], costs: Costs) -> float:
    """The time of some steps of a program as one of their own.

    Arguments:
      kept: versions that are needed after the last step; one that no step makes or reads only passes by.
    """
    sizes = costs.sizes
    ops = [op_of(step, sizes.physical) for step in steps]
    known = {v for op in ops for v in (*op.reads, *op.writes)}
    k = kernels(ops, sizes, [v for v in kept if v in known])
    return _Run(k, hiding_order(k, sent_together(k), costs.scheduled_seconds), costs).seconds()


@dataclass(frozen=True)
class _Run:
    """The nodes of a program in the order of the scheduler, as a device runs them.

    Arguments:
      exposed: per collective, how long kernels wait for it.
      asked: shares of operands, and who sends them for all who ask.
      later: of a trip, positions of what it sends of the trip before.
      noted: when what runs, if anybody wants to know.
    """

    k: Kernels
    order: BodyOrder
    costs: Costs
    later: frozenset[int] = frozenset()
    exposed: dict[SentId, float] = field(default_factory=dict)
    asked: dict[Hashable, SentId] = field(default_factory=dict)
    noted: ScheduleTimes | None = None

    def seconds(self, is_first: bool = False) -> float:
        """Until all have ended.

        Arguments:
          is_first: whether no trip before has left anything to send.
        """
        unsent = self.later if is_first else frozenset()
        own, kernel_end = self.op_seconds()
        wires_end = 0.0
        ends: dict[int, float] = {}
        for j, begins in self.order.events:
            node = self.order.nodes[j]
            if self.noted is not None:
                self.noted.times.append(kernel_end)
            if not begins:
                self.expose(node, max(0.0, ends[j] - kernel_end))
                kernel_end = max(kernel_end, ends[j])
                continue
            computed = self.compute_seconds(sum(own[i] for i in node.makes), wires_end - kernel_end)
            kernel_end += computed
            if computed:
                self.note(j, kernel_end - computed, kernel_end, sends=False)
            if node.sends:
                taken = 0.0 if unsent.intersection(node.makes) else sum(self.send_seconds(node).values())
                ends[j] = wires_end = max(kernel_end, wires_end) + taken
                self.note(j, wires_end - taken, wires_end, sends=True)
        return max(kernel_end, wires_end)

    def send_later(self) -> float:
        """Sends what the last trip has left to send, one after the other; how long that takes."""
        for node in self.order.nodes:
            if node.sends and self.later.intersection(node.makes):
                self.expose(node, sum(self.send_seconds(node).values()))
        return sum(self.exposed.values())

    def compute_seconds(self, seconds: float, sending: float) -> float:
        """What kernels take that need so long alone, while something is sent for some time."""
        share = self.costs.beside_share
        beside = min(seconds, share * max(0.0, sending))
        return seconds + beside * (1 / share - 1)

    def note(self, node: int, start: float, end: float, *, sends: bool) -> None:
        """Notes from when to when a node runs, if anybody wants to know."""
        if self.noted is not None:
            self.noted.spans.append((node, start, end, sends))

    def op_seconds(self) -> tuple[list[float], float]:
        """Per op what kernels do for it, those that are merged into it counted; nothing is sent in it. And
        what no kernel has: ops that nobody needs, which are counted all the same."""
        own, rest = [0.0] * len(self.k.ops), 0.0
        for op, inside in zip(self.k.ops, kernels_that_compute(self.k), strict=True):
            seconds = self.alone_seconds(op)
            for at in inside:
                own[at] += seconds / len(inside)
            rest += 0.0 if inside else seconds
        return own, rest

    def alone_seconds(self, op: KernelOp) -> float:
        """What the kernels of an op take by themselves; of a loop all of it."""
        step = op.step
        if isinstance(step, Border):
            inner = loop_step(op, self.costs)
            self.exposed.update(inner.exposed_by_collective)
            return inner.seconds
        if isinstance(step, Compute):
            sent = sum(seconds for _, seconds in self.costs.communication_times(step)) if op.sends else 0.0
            return max(0.0, self.costs.seconds_of(step) - sent)
        return 0.0 if step is None or op.sends else self.costs.seconds_of(step)

    def send_seconds(self, node: ScheduleNode) -> dict[SentId, float]:
        """What a collective takes, or each of those that are sent as one."""
        members = node.makes or self.order.nodes[node.after[0]].reads  # what is packed is unpacked by others
        steps = [self.k.ops[i].step for i in members]
        boxes = [s for s in steps if isinstance(s, Box)]
        alone = {(id(b), MOVE): self.costs.seconds_of(b) for b in boxes}
        if len(boxes) > 1:
            own = sum(alone.values())
            share = min(1.0, self.costs.combined_seconds(boxes) / own) if own else 1.0
            alone = {who: share * seconds for who, seconds in alone.items()}
        talked = {
            who: seconds
            for s in steps
            if isinstance(s, Compute)
            for who, seconds in self.communication_seconds(s)
        }
        return alone | talked

    def communication_seconds(self, step: Compute) -> Iterator[tuple[SentId, float]]:
        """What an op sends itself, but for what another has sent for both of them."""
        for n, (communication, seconds) in enumerate(self.costs.communication_times(step)):
            asked = asked_of(step, communication)
            if asked is None or self.asked.setdefault(asked, (id(step), n)) == (id(step), n):
                yield (id(step), n), seconds

    def expose(self, node: ScheduleNode, waited: float) -> None:
        """Notes how long kernels wait for what is sent as one, each with its share."""
        sent = self.send_seconds(node) if waited else {}
        total = sum(sent.values())
        for who, seconds in sent.items():
            self.exposed[who] = self.exposed.get(who, 0.0) + waited * seconds / total
