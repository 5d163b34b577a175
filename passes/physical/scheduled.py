"""A step as XLA:GPU compiles it: merged kernels in the order of its latency-hiding scheduler.

The list schedule (overlap.py) has every op by itself. Here ops are kernels as XLA merges them (kernels.py),
in the order that its scheduler gives them (latency_hiding.py), each with the time that it takes, and what a
collective turns over is copied (layouts.py). That takes about three times as long to find and is nearer to
compiled programs: it decides between the few plans that the search has left, and is what plans say.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sbp.passes.physical.fusing import KernelOp, ShardSizes
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.layouts import turned
from sbp.passes.physical.merged import kernels_that_compute
from sbp.passes.physical.order import BodyOrder, hiding_order
from sbp.passes.physical.overlap import (
    MOVE,
    Costs,
    OverlappedStep,
    SentId,
    asked_of,
    overlapped_loop,
)
from sbp.passes.physical.program import Border, Box, Compute, Version
from sbp.passes.physical.schedule_nodes import ScheduleNode
from sbp.passes.physical.sections import Sections
from sbp.passes.physical.whole import WholeProgram


class ScheduledCosts(Costs, Protocol):
    """What steps take, and what XLA's scheduler takes them to be. `Evaluator` is one."""

    @property
    def beside_share(self) -> float:
        """The share of its rate that a kernel keeps beside a collective."""

    def scheduled_seconds(self, op: KernelOp, *more: KernelOp) -> float:
        """How long the scheduler takes an op to be, or collectives that are sent as one."""

    def copy_seconds(self, size: float) -> float:
        """The time of a kernel that copies so many bytes."""

    def sections_if_large(self, most_bytes: float) -> Sections | None:
        """The sections in which the program runs, if it does so; none if there are so many bytes, which are
        all that it ever makes."""


@dataclass(frozen=True)
class ScheduledStep(OverlappedStep):
    """A step in XLA's own order.

    Arguments:
      copied_seconds: of copies at its end, which no op of the program stands for, and which are not among
        `seconds`.
    """

    copied_seconds: float = 0.0

    @property
    def whole_seconds(self) -> float:
        """With the copies at its end."""
        return self.seconds + self.copied_seconds


def scheduled(
    whole: WholeProgram, costs: ScheduledCosts, donated: Mapping[Version, Version]
) -> ScheduledStep:
    """The step of a program.

    Arguments:
      donated: results, and the argument whose memory each takes.
    """
    k = whole.k
    run = _Run(k, _order(whole, costs), costs)
    taken = {k.ends[v] for v in donated if v in k.ends}
    copied = sum(map(costs.copy_seconds, _copied_bytes(k, whole.sizes, taken)))
    return ScheduledStep(run.seconds(), run.exposed, copied)


def _order(whole: WholeProgram, costs: ScheduledCosts) -> BodyOrder:
    """The order in which a program runs, in sections where it does."""
    sections = costs.sections_if_large(sum(t.bytes for t in whole.k.tensors))
    if sections is None:
        return whole.order
    return hiding_order(whole.k, whole.together, costs.scheduled_seconds, sections.numbers)


def _copied_bytes(k: Kernels, sizes: ShardSizes, taken: Collection[Buffer]) -> Iterator[float]:
    """The bytes of each result that is copied to where it belongs, once all else is done: it is made of a
    tensor that a collective has turned over, and can write over none of its operands."""
    for x in turned(k, sizes, taken):
        yield from (t.bytes for t in x.results)
        if x.tensor in taken:
            yield x.tensor.bytes


@dataclass(frozen=True)
class Noted:
    """The times of a schedule.

    Arguments:
      times: of every event of the order, when it comes, seconds.
      spans: of every node, from when to when, and whether it is what it sends: an op that sends something
        itself has a span of its kernels too.
    """

    times: list[float] = field(default_factory=list)
    spans: list[tuple[int, float, float, bool]] = field(default_factory=list)


def noted(whole: WholeProgram, costs: ScheduledCosts) -> tuple[BodyOrder, Noted]:
    """When what runs in a step of a program; nodes are those of the order."""
    run = _Run(whole.k, _order(whole, costs), costs, noted=Noted())
    run.seconds()
    assert run.noted is not None
    return run.order, run.noted


@dataclass(frozen=True)
class _Run:
    """The nodes of a program in the order of the scheduler, as a device runs them.

    Arguments:
      exposed: per collective, how long kernels wait for it.
      asked: shares of operands, and who sends them for all who ask.
      noted: when what runs, if anybody wants to know.
    """

    k: Kernels
    order: BodyOrder
    costs: ScheduledCosts
    exposed: dict[SentId, float] = field(default_factory=dict)
    asked: dict[Hashable, SentId] = field(default_factory=dict)
    noted: Noted | None = None

    def seconds(self) -> float:
        """Until all have ended."""
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
            computed = self.computed(sum(own[i] for i in node.makes), wires_end - kernel_end)
            kernel_end += computed
            if computed:
                self.note(j, kernel_end - computed, kernel_end, sends=False)
            if node.sends:
                taken = sum(self.sent(node).values())
                ends[j] = wires_end = max(kernel_end, wires_end) + taken
                self.note(j, wires_end - taken, wires_end, sends=True)
        return max(kernel_end, wires_end)

    def computed(self, seconds: float, sending: float) -> float:
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
            inner = overlapped_loop(step, self.costs)
            self.exposed.update(inner.exposed)
            return inner.seconds
        if isinstance(step, Compute):
            sent = sum(seconds for _, seconds in self.costs.communication_times(step)) if op.sends else 0.0
            return max(0.0, self.costs.seconds_of(step) - sent)
        return 0.0 if step is None or op.sends else self.costs.seconds_of(step)

    def sent(self, node: ScheduleNode) -> dict[SentId, float]:
        """What a collective takes, or each of those that are sent as one."""
        members = node.makes or self.order.nodes[node.after[0]].reads  # what is packed is unpacked by others
        steps = [self.k.ops[i].step for i in members]
        boxes = [s for s in steps if isinstance(s, Box)]
        alone = {(id(b), MOVE): self.costs.seconds_of(b) for b in boxes}
        if len(boxes) > 1:
            own = sum(alone.values())
            share = min(1.0, self.costs.combined_seconds(boxes) / own) if own else 1.0
            alone = {who: share * seconds for who, seconds in alone.items()}
        talked = {who: seconds for s in steps if isinstance(s, Compute) for who, seconds in self.talked(s)}
        return alone | talked

    def talked(self, step: Compute) -> Iterator[tuple[SentId, float]]:
        """What an op sends itself, but for what another has sent for both of them."""
        for n, (communication, seconds) in enumerate(self.costs.communication_times(step)):
            asked = asked_of(step, communication)
            if asked is None or self.asked.setdefault(asked, (id(step), n)) == (id(step), n):
                yield (id(step), n), seconds

    def expose(self, node: ScheduleNode, waited: float) -> None:
        """Notes how long kernels wait for what is sent as one, each with its share."""
        sent = self.sent(node) if waited else {}
        total = sum(sent.values())
        for who, seconds in sent.items():
            self.exposed[who] = self.exposed.get(who, 0.0) + waited * seconds / total
