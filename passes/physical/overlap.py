"""A step with communication beside computation: when it ends, and how long kernels wait for each collective.

What XLA:GPU makes of a physical program, as far as time is concerned: small collectives are combined
(combining.py), the steps of a body are ordered so that kernels hide collectives (streams.py), a loop runs by
itself, trip after trip, but for what a trip sends only to stack it: that is sent in the next trip, beside
it (its collective pipeliner), and the last one after the loop. What steps take is asked, not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sbp.communication.protocol import Communication
from sbp.passes.physical.combining import combined, in_order
from sbp.passes.physical.fusing import Fusing, kind_of
from sbp.passes.physical.program import Border, Box, Compute, Step, Version, barrier_of, reads, writes
from sbp.passes.physical.streams import Stream, Task, task_times
from sbp.passes.program.control import assumed_trips, ports

SentId: TypeAlias = tuple[int, int]
"""A collective: the id of its step, and which of the collectives of an op it is; `MOVE` for a move."""
MOVE = -1


class Costs(Protocol):
    """What steps take. `Evaluator` is one."""

    def seconds_of(self, step: Step) -> float:
        """The time of a move or of an op, once, with what the op sends."""

    def communication_times(self, step: Compute) -> Sequence[tuple[Communication, float]]:
        """What an op sends itself, each with its time."""

    def box_bytes(self, box: Box) -> float:
        """What one device sends in a move, once."""

    def combines(self, box: Box) -> tuple[Hashable, float] | None:
        """With what a move may be sent as one, and the bytes that it gives; None if it is sent by itself."""

    def combined_seconds(self, boxes: Sequence[Box]) -> float:
        """The time of moves that are sent as one."""

    def believed_seconds(self, kind: str, axes: tuple[int, ...], wire_bytes: float) -> float:
        """What XLA's scheduler takes a collective to be in which one device sends so much."""


@dataclass(frozen=True)
class OverlappedStep:
    """A step as it overlaps.

    Arguments:
      seconds: of the step.
      exposed: per collective, the time in which kernels wait for it, all executions together.
    """

    seconds: float
    exposed: Mapping[SentId, float]

    def exposed_of(self, step: Step, communication: int = MOVE) -> float:
        """How long kernels wait for a collective."""
        return self.exposed.get((id(step), communication), 0.0)

    @property
    def exposed_seconds(self) -> float:
        """How long kernels wait for collectives."""
        return sum(self.exposed.values())


def overlapped(steps: Sequence[Step], costs: Costs) -> OverlappedStep:
    """The steps of a program, or of a part of it, as XLA:GPU runs them."""
    body = _Body(costs)
    body.add(steps)
    found = body.run()
    return OverlappedStep(found.seconds, found.exposed)


def asked_of(step: Compute, communication: Communication) -> Hashable | None:
    """The shares of an operand that an op asks for, which XLA sends once to all who ask; None for all else
    that an op sends."""
    if communication.sent is None:
        return None
    return (
        step.node.inputs[communication.operand],
        step.strategy.operands[communication.operand],
        communication.axes,
        communication.sent,
    )


@dataclass(slots=True)
class _Node:
    """A step, or a part of one.

    Arguments:
      makers: the nodes that it waits for.
      sent: who sends in it, and how long that takes by itself.
      kind, axes, wire_bytes: what it sends, over which axes, and how much.
      box: the move that it is, if it sends.
      step: what computes in it, or only changes how a tensor lies; None for all else.
      inner: of a loop, what is exposed in it.
      of: what it is of, where neither `step` nor `box` says it: a loop, an op that sends.
    """

    seconds: float
    makers: list[int]
    stream: Stream = Stream.KERNELS
    sent: tuple[SentId, float] | None = None
    kind: str = ""
    axes: tuple[int, ...] = ()
    wire_bytes: float = 0.0
    box: Box | None = None
    step: Box | Compute | None = None
    inner: Mapping[SentId, float] | None = None
    of: Step | None = None

    @property
    def shown(self) -> Step | None:
        """What a timeline calls it by."""
        return self.step or self.box or self.of

    @property
    def formats(self) -> bool:
        """Whether it is element-wise work, or less."""
        step = self.step
        return isinstance(step, Box) or (
            step is not None and kind_of(step.node) in (Fusing.VIEW, Fusing.LOOP)
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """Some steps, executed."""

    seconds: float
    exposed: dict[SentId, float]
    sends: bool

    def times(self, n: int) -> _Run:
        """One after another."""
        return _Run(n * self.seconds, {x: n * s for x, s in self.exposed.items()}, self.sends)

    def __add__(self, other: _Run) -> _Run:
        exposed = dict(self.exposed)
        for x, s in other.exposed.items():
            exposed[x] = exposed.get(x, 0.0) + s
        return _Run(self.seconds + other.seconds, exposed, self.sends or other.sends)


_NOTHING = _Run(0.0, {}, False)


class _Body:
    """The steps of one body as nodes, in an order in which they can run."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.nodes: list[_Node] = []
        self.made: dict[Version, int] = {}
        self.asked: dict[Hashable, int] = {}

    def add(self, steps: Sequence[Step]) -> None:
        """Takes the steps in; the ops of one barrier wait for all that any of them reads."""
        for barrier, group in itertools.groupby(steps, barrier_of):
            together = list(group)
            gate: list[int] = []
            if barrier >= 0:
                gate = [self._node(_Node(0.0, [m for step in together for m in self._makers(step)]))]
            for step in together:
                last = self._step(step, self._makers(step) + gate)
                self.made.update(dict.fromkeys(writes(step), last))

    def _makers(self, step: Step) -> list[int]:
        return [self.made[v] for v in reads(step) if v in self.made]

    def _node(self, node: _Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _step(self, step: Step, makers: list[int]) -> int:
        """The node that ends a step."""
        if isinstance(step, Border):
            inner = _loop(step, self.costs)
            stream = Stream.BOTH if inner.sends else Stream.KERNELS
            return self._node(_Node(inner.seconds, makers, stream, inner=inner.exposed, of=step))
        seconds = self.costs.seconds_of(step)
        if isinstance(step, Compute):
            return self._op(step, seconds, makers)
        wire_bytes, move = self.costs.box_bytes(step), step.move
        if wire_bytes > 0:
            what = (move.kind, move.axes, wire_bytes)
            sent = (id(step), MOVE), seconds
            return self._node(_Node(seconds, makers, Stream.WIRES, sent, *what, step))
        return self._node(_Node(seconds, makers, step=step))

    def _op(self, step: Compute, seconds: float, makers: list[int]) -> int:
        """Sends shares of the operands before the arithmetic, and all else after it."""
        times = list(enumerate(self.costs.communication_times(step)))
        if not times:
            return self._node(_Node(seconds, makers, step=step))
        for k, (sent, each) in times:
            asked = asked_of(step, sent)
            if asked is not None:
                if asked not in self.asked:
                    self.asked[asked] = self._sent_inside(step, k, sent, each, makers)
                makers = [*makers, self.asked[asked]]
        rest = max(0.0, seconds - sum(each for _, (_, each) in times))
        at = self._node(_Node(rest, makers, step=step))
        for k, (sent, each) in times:
            if sent.sent is None:
                at = self._sent_inside(step, k, sent, each, [at])
        return at

    def _sent_inside(
        self, step: Compute, k: int, sent: Communication, seconds: float, makers: list[int]
    ) -> int:
        what = (sent.kind, sent.axes, sent.wire_bytes)
        return self._node(_Node(seconds, makers, Stream.WIRES, ((id(step), k), seconds), *what, of=step))

    def only_stacked(self, stacked: Collection[Version], whole: Collection[Version]) -> set[int]:
        """The moves that a trip sends only to stack them, at most put into another form on the way."""
        kept, stack = ({self.made[v] for v in vs if v in self.made} for vs in (whole, stacked))
        used, needed = set[int](stack), set[int](kept)
        for i in reversed(range(len(self.nodes))):
            node = self.nodes[i]
            passes_on = i not in needed and i in used and node.formats
            (used if passes_on else needed).update(node.makers)
        return {i for i, x in enumerate(self.nodes) if x.box is not None and i in used and i not in needed}

    def run(self, later: Collection[int] = (), without: bool = False) -> _Run:
        """The nodes, once.

        Arguments:
          later: nodes of which a trip sends what the trip before it has made.
          without: whether nothing is sent of these, as in the first trip.
        """
        together, tasks = self._tasks(later, without)
        found, exposed = task_times(tasks), dict[SentId, float]()
        for unit, waited in zip(together, found.exposed, strict=True):
            first = self.nodes[unit[0]]
            if first.sent is not None:
                exposed.update(self._shares(unit, waited))
            elif first.inner:
                exposed.update(first.inner)
        return _Run(found.seconds, exposed, any(t.stream is not Stream.KERNELS for t in tasks))

    def spans(self, later: Collection[int] = ()) -> Iterator[TripSpan]:
        """When what runs in a trip."""
        together, tasks = self._tasks(later, without=False)
        found = task_times(tasks)
        for unit, task, start, end in zip(together, tasks, found.starts, found.ends, strict=True):
            steps = [step for i in unit if (step := self.nodes[i].shown) is not None]
            if steps and end > start:
                yield TripSpan(steps, task.stream is Stream.WIRES, start, end)

    def _tasks(self, later: Collection[int], without: bool) -> tuple[list[tuple[int, ...]], list[Task]]:
        """The nodes in an order, those as one that are sent as one, with what each takes."""
        together, place = self._together(later), dict[int, int]()
        tasks: list[Task] = []
        for at, unit in enumerate(together):
            place.update(dict.fromkeys(unit, at))
            if len(unit) == 1 and not later:
                waits = {place[m] for m in self.nodes[unit[0]].makers}
            else:
                waits = {place[m] for i in unit if i not in later for m in self.nodes[i].makers}
            seconds = 0.0 if without and unit[0] in later else self._seconds(unit)
            stream, believed = self.nodes[unit[0]].stream, self._believed(unit) if seconds else None
            tasks.append(Task(seconds, stream, tuple(waits), believed))
        return together, tasks

    def alone(self, later: Collection[int]) -> _Run:
        """Some collectives after the last trip, one after another."""
        units = [unit for unit in self._together(later) if unit[0] in later]
        taken = [self._seconds(unit) for unit in units]
        exposed = [self._shares(unit, seconds) for unit, seconds in zip(units, taken, strict=True)]
        return _Run(sum(taken), {x: s for each in exposed for x, s in each}, True)

    def _together(self, later: Collection[int]) -> list[tuple[int, ...]]:
        """The nodes in an order, those as one that are sent as one."""
        makers = [[] if i in later else x.makers for i, x in enumerate(self.nodes)]
        sent: dict[int, tuple[Hashable, float]] = {}
        for i, node in enumerate(self.nodes):
            if node.box is None:
                continue
            with_what = self.costs.combines(node.box)
            if with_what is not None:
                # What is sent a trip later is combined whatever its size, as compiled programs show.
                sent[i] = (i in later, with_what[0]), 0.0 if i in later else with_what[1]
        return in_order(makers, combined(makers, sent))

    def _seconds(self, unit: tuple[int, ...]) -> float:
        if len(unit) == 1:
            return self.nodes[unit[0]].seconds
        own = sum(self.nodes[i].seconds for i in unit)
        boxes = [x.box for x in (self.nodes[i] for i in unit) if x.box is not None]
        return min(own, self.costs.combined_seconds(boxes))

    def _believed(self, unit: tuple[int, ...]) -> float | None:
        """What the scheduler takes collectives to be that are sent as one; None for what it knows."""
        nodes = [self.nodes[i] for i in unit]
        wire_bytes = sum(x.wire_bytes for x in nodes)
        return self.costs.believed_seconds(nodes[0].kind, nodes[0].axes, wire_bytes) if wire_bytes else None

    def _shares(self, unit: tuple[int, ...], waited: float) -> Iterator[tuple[SentId, float]]:
        """What is exposed of each collective that is sent as one with others."""
        sent = [x for i in unit if (x := self.nodes[i].sent) is not None]
        own = sum(seconds for _, seconds in sent)
        for who, seconds in sent:
            yield who, waited * seconds / own if own else 0.0


@dataclass(frozen=True, slots=True)
class TripSpan:
    """Something that runs in a trip.

    Arguments:
      steps: one, or several that are sent as one.
      sends: whether it is sent.
      start_seconds, end_seconds: from the beginning of the trip.
    """

    steps: Sequence[Step]
    sends: bool
    start_seconds: float
    end_seconds: float


def trip_spans(step: Border, k: int, costs: Costs) -> list[TripSpan]:
    """When what runs in one trip of a loop through body `k`, neither the first nor the last."""
    return list(_Trip.of(step, k, costs).spans())


def overlapped_loop(step: Border, costs: Costs) -> OverlappedStep:
    """All trips of a loop, or all branches."""
    found = _loop(step, costs)
    return OverlappedStep(found.seconds, found.exposed)


def _loop(step: Border, costs: Costs) -> _Run:
    """All trips of a loop, or all branches, as the evaluator counts them."""
    times, total = assumed_trips(step.node), _NOTHING
    for k in range(len(step.bodies)):
        trip = _Trip.of(step, k, costs)
        body, later = trip.body, trip.later
        if later:
            total += body.run(later, without=True) + body.run(later).times(times - 1) + body.alone(later)
        else:
            total += body.run().times(times)
    return total


@dataclass(frozen=True, slots=True)
class _Trip:
    """One trip of a loop.

    Arguments:
      later: what is sent one trip later.
    """

    body: _Body
    later: Collection[int]

    @classmethod
    def of(cls, step: Border, k: int, costs: Costs) -> _Trip:
        """That through body `k`."""
        body = _Body(costs)
        body.add(step.bodies[k])
        wired = zip(ports(step.node), step.inside, strict=True)
        leaving = [(p.stacked, (x, nd)) for p, nd in wired for x in p.left_by(k) if isinstance(x, int)]
        stacked, whole = ([v for s, v in leaving if s is wanted] for wanted in (True, False))
        once = assumed_trips(step.node) <= 1
        return cls(body, set[int]() if once else body.only_stacked(stacked, whole))

    def spans(self) -> Iterator[TripSpan]:
        """When what runs in it."""
        return self.body.spans(self.later)
