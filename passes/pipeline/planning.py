"""Planning the placements of a program with stages, one after the other.

The first of two that plans decides how a value lies that goes from one to the other, and counts what it takes
to send it; where their hierarchies differ, each decides for itself.

The memory budget of each placement of a pipeline, so that its plan can be made to fit.

The plan of a placement holds the transfers of all micro-batches at once, and the residuals of one. A schedule
holds the transfers of a few, and the residuals of several. So the needs of a plan are counted from its pieces
and the schedule; if they are too much, the plan is made again with a limit that is lower by the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

from sbp.errors import MemoryLimitError, SbpError
from sbp.passes.explain.plan import PlanData
from sbp.passes.pipeline.cut import cut, transfers_inside
from sbp.passes.pipeline.op_placement import OpPlacements, loop_of
from sbp.passes.pipeline.order import Order
from sbp.passes.pipeline.plan import Sizes
from sbp.passes.pipeline.split import Splitter, Subgraph
from sbp.passes.pipeline.stages import Labels, Stages, physical_of
from sbp.passes.plan.model import BoundaryCost
from sbp.passes.program.graph import Graph
from sbp.passes.program.names import Names
from sbp.passes.program.trace import TracedProgram
from sbp.passes.request import Request, StagesRequest, Terms
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.memory import Footprint, peaks
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.placement import with_types_of
from sbp.signature import NdSbp, Split

PlanOne: TypeAlias = Callable[[TracedProgram, Request], PlanData]
"""How a program of one placement is planned."""


def plan_shares(
    request: StagesRequest,
    traced: TracedProgram,
    graph: Graph,
    where: OpPlacements,
    order: Order,
    plan_one: PlanOne,
) -> Stages:
    """Splits a program by its placements, and plans what each of them computes.

    Arguments:
      traced: as it was read.
      graph: what earlier passes have made of it.

    Raises:
      SbpError: for scopes and annotations that cannot be honoured.
    """
    splitter = Splitter(graph, where, order, len(traced.in_paths))
    planning = _Planning(traced, graph, where, splitter, request, plan_one)
    loop = loop_of(graph)
    count = 0 if loop is None else int(loop.params["length"])
    subgraphs, plans = planning.run()
    asked = tuple(planning.requests)
    return Stages(request.name, traced, where, order.stages, count, subgraphs, plans, planning.labels, asked)


@dataclass
class _Planning:
    traced: TracedProgram
    graph: Graph
    where: OpPlacements
    splitter: Splitter
    asked: StagesRequest
    plan_one: PlanOne
    pins: dict[tuple[int, int], NdSbp] = field(default_factory=dict)
    outer: dict[tuple[int, int], NdSbp] = field(default_factory=dict)
    requests: list[tuple[TracedProgram, Request]] = field(default_factory=list)

    @cached_property
    def subgraphs(self) -> tuple[Subgraph, ...]:
        """What every placement computes."""
        return tuple(self.splitter.subgraphs())

    def run(self) -> tuple[tuple[Subgraph, ...], tuple[PlanData, ...]]:
        plans = list[PlanData]()
        for subgraph in self.subgraphs:
            plans.append(self.plan_subgraph(subgraph))
            self.agree(subgraph, plans[-1])
        return self.subgraphs, tuple(plans)

    @cached_property
    def labels(self) -> Labels:
        """The words for what goes from one placement to another."""
        names = Names(self.graph, self.traced.in_paths, self.traced.out_paths)
        return Labels(self.graph, self.where, self.splitter.order, names)

    def plan_subgraph(self, subgraph: Subgraph) -> PlanData:
        """One placement, with what has been agreed on so far."""
        place, whole = subgraph.place, self.asked
        placement = self.where.placements[place]
        ins, outs = whole.signatures(placement, subgraph.arguments, subgraph.results)
        request = Request(
            name=f"{whole.name}, placement {place} of {len(self.where.placements)}",
            placement=with_types_of(placement, whole.placement.axes, whole.placement.axis_types),
            hardware=whole.hardware(placement),
            in_sbp=(*ins, *self.known_sbp(place, subgraph.receives, subgraph.micro_receives)),
            out_sbp=(*outs, *self.known_sbp(place, subgraph.sends, subgraph.micro_sends)),
            ties=self.ties(subgraph),
            in_costs=(*(None for _ in subgraph.arguments), *self.ways_in(subgraph)),
            out_costs=(*(None for _ in subgraph.results), *self.ways_out(subgraph)),
            terms=self.terms,
            donated=tuple(k for k, i in enumerate(subgraph.arguments) if i in whole.donated),
            # Of a program with a loop the schedule is checked instead.
            whole_step=self.splitter.loop is None,
        )
        traced = self.sub_traced(subgraph)
        self.requests.append((traced, request))
        capacity = request.hardware.memory_bytes
        limit = whole.terms.memory_limit_bytes
        budget = self.budget(capacity if limit is None else limit)
        if budget is None:
            return self.plan_one(traced, request)
        return budget.fit_plan(subgraph, request, partial(self.plan_one, traced))

    def budget(self, limit_bytes: float) -> MemoryBudget | None:
        """What the placements may need; None without micro-batches, or a backward pass."""
        loop = self.splitter.loop
        count = 0 if loop is None else int(loop.params["length"])
        return budget_of(self.splitter.order.stages, count, self.asked.schedule, limit_bytes)

    @cached_property
    def terms(self) -> Terms:
        """Those of one placement: they share the time."""
        limit = self.asked.terms.time_limit_seconds
        share = None if limit is None else limit / len(self.subgraphs)
        return replace(self.asked.terms, time_limit_seconds=share)

    def known_sbp(self, place: int, once: Sequence[int], inside: Sequence[int]) -> Iterator[NdSbp | None]:
        """How values lie that are sent once, and stacks of those that are sent in the loop; None if free."""
        yield from (self.outer.get((v, place)) for v in once)
        for v in inside:
            nd = self.pins.get((v, place))
            yield nd and tuple(Split(s.dim + 1) if isinstance(s, Split) else s for s in nd)

    def ways_in(self, subgraph: Subgraph) -> Iterator[BoundaryCost]:
        """Where what is received comes from."""
        for v in (*subgraph.receives, *subgraph.micro_receives):
            yield self.way([subgraph.place, self.where.home(v)], v in subgraph.micro_receives)

    def ways_out(self, subgraph: Subgraph) -> Iterator[BoundaryCost]:
        """Where what is sent goes to."""
        for v in (*subgraph.sends, *subgraph.micro_sends):
            readers = [s.place for s in self.subgraphs if v in (*s.receives, *s.micro_receives)]
            yield self.way([subgraph.place, *readers], v in subgraph.micro_sends)

    def way(self, places: Sequence[int], stacked: bool) -> BoundaryCost:
        """From the first of some placements to each of the others, or the other way."""
        here, *others = (self.where.placements[p] for p in places)
        links = [self.asked.hardware(here).link_between(here.ranks, other.ranks) for other in others]
        seconds_per_byte = sum(1 / link.bytes_per_second for link in links)
        # A stack goes micro-batch by micro-batch, each as it lies in the loop.
        return BoundaryCost(seconds_per_byte, (0,), True) if stacked else BoundaryCost(seconds_per_byte)

    def sub_traced(self, subgraph: Subgraph) -> TracedProgram:
        """A subgraph as a traced function, with names."""
        ins = [
            *(self.traced.in_paths[i] for i in subgraph.arguments),
            *self.labels.receive_labels([*subgraph.receives, *subgraph.micro_receives]),
        ]
        outs = [
            *(self.traced.out_paths[i] for i in subgraph.results),
            *self.labels.send_labels([*subgraph.sends, *subgraph.micro_sends]),
        ]
        return TracedProgram(subgraph.graph, tuple(ins), None, tuple(outs))

    def ties(self, subgraph: Subgraph) -> tuple[int | None, ...]:
        """Per result of a subgraph, its argument that it comes back as."""
        position = {i: k for k, i in enumerate(subgraph.arguments)}
        tied = (self.asked.ties[i] for i in subgraph.results)
        ends = [None if i is None else position.get(i) for i in tied]
        return (*ends, *[None] * (len(subgraph.sends) + len(subgraph.micro_sends)))

    def agree(self, subgraph: Subgraph, plan: PlanData) -> None:
        """Has the other placements of equal hierarchy send and receive what this one does, as it does."""
        physical = physical_of(plan)
        inside = transfers_inside(subgraph, physical)
        # By position: a pass may have put another value in the place of one that is sent.
        ins = dict(zip(subgraph.receives, physical.inputs[len(subgraph.arguments) :], strict=False))
        outs = dict(zip(subgraph.sends, physical.outputs[len(subgraph.results) :], strict=False))
        for q, other in enumerate(self.where.placements):
            if other.shape == plan.placement.shape and q != subgraph.place:
                for v, nd in inside.items():
                    self.pins.setdefault((v, q), nd)
                for v, nd in (*ins.items(), *outs.items()):
                    self.outer.setdefault((v, q), nd)


TRIES = 3
"""How often a placement is planned again because its plan needs too much."""
FEWEST = "1f1b"
"""The schedule that is reckoned with where another one is to be found."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that the placements of a program with micro-batches may need.

    Arguments:
      schedule: the order in which stages run, or one that holds about as much.
      stages: per stage, the position of its placement.
      limit_bytes: per device.
    """

    schedule: Schedule
    stages: tuple[int, ...]
    limit_bytes: float

    def peak_bytes(self, subgraph: Subgraph, plan: PlanData) -> float:
        """The peak of a device of a placement with such a plan, bytes."""
        sizes = Sizes(cut(subgraph, physical_of(plan), False))
        own = [s == subgraph.place for s in self.stages]
        kept = [sizes.residuals(s) if mine else (0.0, 0.0) for s, mine in enumerate(own)]
        footprint = Footprint(tuple(k for k, _ in kept), tuple(late for _, late in kept))
        held = peaks(self.schedule, footprint)[subgraph.place]
        place = sizes.place(plan.memory_bytes, self.schedule.microbatches)
        return max(place.outside_bytes, place.steady_bytes + held)

    def fit_plan(
        self, subgraph: Subgraph, request: Request, plan_one: Callable[[Request], PlanData]
    ) -> PlanData:
        """A plan of a placement that fits, if one is found; else the nearest."""
        plan = plan_one(request)
        need, limit = self.peak_bytes(subgraph, plan), plan.memory_bytes
        for _ in range(TRIES):
            limit -= need - self.limit_bytes
            if need <= self.limit_bytes or limit <= 0:
                break
            try:
                other = plan_one(replace(request, most_bytes=limit))
            except MemoryLimitError:
                break  # that it does not fit is said of the program as a whole
            if (less := self.peak_bytes(subgraph, other)) >= need:
                break
            plan, need = other, less
        return plan


def budget_of(
    stages: Sequence[int], microbatches: int, schedule: str | Schedule | None, limit_bytes: float
) -> MemoryBudget | None:
    """The budget of a program; None without micro-batches, or with a schedule that does not suit its stages.

    Arguments:
      stages: per stage, the position of its placement.
    """
    if not microbatches:
        return None
    name = schedule if isinstance(schedule, str) and schedule in GENERATORS else FEWEST
    try:
        found = schedule if isinstance(schedule, Schedule) else make(name, stages, microbatches)
    except SbpError:
        return None
    return MemoryBudget(found, tuple(stages), limit_bytes)
