"""From a traced function with several placements to the pieces of each: the list of passes of a pipeline.

    hoist -> where, order -> sums -> where, order -> split -> (`passes/chain.py`, per placement) -> cut

Placements are planned one after the other. The first of two that plans decides how a value lies that goes
from one to the other, and counts what it takes to send it; where their hierarchies differ, each decides for
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from sbp.hardware import Hardware
from sbp.passes.chain import Request, compile_plan
from sbp.passes.explain import Plan
from sbp.passes.graph import Const, Graph, Operand
from sbp.passes.lookups import Transfer
from sbp.passes.names import Names
from sbp.passes.physical import Physical
from sbp.passes.pipeline.check import check_cuts
from sbp.passes.pipeline.cut import cut, transfers_inside
from sbp.passes.pipeline.hoist import hoist_casts
from sbp.passes.pipeline.labels import Labels
from sbp.passes.pipeline.order import find_order
from sbp.passes.pipeline.slots import Cut
from sbp.passes.pipeline.split import Share, Splitter
from sbp.passes.pipeline.sums import split_sums
from sbp.passes.pipeline.where import Where, find_places, loop_of, placements_of
from sbp.passes.plan.model import Crossing
from sbp.passes.trace import Traced
from sbp.placement import Placement
from sbp.signature import NdSbp, Split

Signed: TypeAlias = Sequence[NdSbp | None]
Asked: TypeAlias = Callable[[Placement, Sequence[int], Sequence[int]], tuple[Signed, Signed]]
"""What the user asked of some arguments and results (by position), read for a placement."""


@dataclass(frozen=True)
class Job:
    """What is asked.

    Arguments:
      name: the function's name.
      hardware: what a placement is planned for.
      asked: signatures of arguments and results.
      ties: per result, the argument that it comes back as, or None.
      rank_of: stage -> placement, as the schedule wants it; None for any.
      time_limit_seconds, memory_limit_bytes, transfer, strict_nonfinite, donated, check: as of `Request` and
        `compile_plan`.
    """

    name: str
    hardware: Callable[[Placement], Hardware]
    asked: Asked
    ties: Sequence[int | None]
    rank_of: Sequence[int] | None = None
    time_limit_seconds: float | None = None
    memory_limit_bytes: float | None = None
    transfer: Transfer = field(default_factory=Transfer)
    strict_nonfinite: bool = False
    donated: Sequence[int] = ()
    check: bool = False


@dataclass(frozen=True)
class Stages:
    """A program taken apart.

    Arguments:
      name: the function's name.
      traced: the whole.
      where: its placements.
      stages: per stage, the position of its placement.
      microbatches: how many there are; 0 for a program without a loop over them.
      shares, plans: per placement.
      labels: the words for what goes from one placement to another.
    """

    name: str
    traced: Traced
    where: Where
    stages: tuple[int, ...]
    microbatches: int
    shares: tuple[Share, ...]
    plans: tuple[Plan, ...]
    labels: Labels

    def cuts(self, merged: bool) -> tuple[Cut, ...]:
        """The pieces of every placement; `merged` as of `cut`."""
        return tuple(cut(s, _physical(p), merged) for s, p in zip(self.shares, self.plans, strict=True))


def _physical(plan: Plan) -> Physical:
    assert plan.physical is not None
    return plan.physical


def plan_stages(traced: Traced, job: Job) -> Stages:
    """Takes a program apart, and plans every placement.

    Raises:
      SbpError: for scopes and annotations that cannot be honoured.
    """
    graph = traced.graph
    placements = placements_of(graph)
    graph = hoist_casts(graph)
    where = find_places(graph, placements)
    graph = split_sums(graph, where, find_order(graph, where, job.rank_of))
    where = find_places(graph, placements)
    order = find_order(graph, where, job.rank_of)
    planning = _Planning(traced, graph, where, Splitter(graph, where, order, len(traced.in_paths)), job)
    loop = loop_of(graph)
    count = 0 if loop is None else int(loop.params["length"])
    shares, plans = planning.run()
    stages = Stages(job.name, traced, where, order.stages, count, shares, plans, planning.labels)
    for merged in (True, False) if job.check else ():
        check_cuts(stages.cuts(merged))
    return stages


@dataclass
class _Planning:
    traced: Traced
    graph: Graph
    where: Where
    splitter: Splitter
    job: Job
    pins: dict[tuple[int, int], NdSbp] = field(default_factory=dict)
    outer: dict[tuple[int, int], NdSbp] = field(default_factory=dict)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """What every placement computes."""
        return tuple(self.splitter.shares())

    def run(self) -> tuple[tuple[Share, ...], tuple[Plan, ...]]:
        plans = list[Plan]()
        for share in self.shares:
            plans.append(self.planned(share))
            self.agree(share, plans[-1])
        return self.shares, tuple(plans)

    @cached_property
    def labels(self) -> Labels:
        """The words for what goes from one placement to another."""
        names = Names(self.graph, self.traced.in_paths, self.traced.out_paths)
        return Labels(self.graph, self.where, self.splitter.order, names)

    def planned(self, share: Share) -> Plan:
        """One placement, with what has been agreed on so far."""
        place, job = share.place, self.job
        placement = self.where.placements[place]
        ins, outs = job.asked(placement, share.arguments, share.results)
        request = Request(
            name=f"{job.name}, placement {place} of {len(self.where.placements)}",
            placement=placement,
            hardware=job.hardware(placement),
            in_sbp=(*ins, *self.agreed(place, share.received, share.fed)),
            out_sbp=(*outs, *self.agreed(place, share.sent, share.passed)),
            ties=self.ties(share),
            ways_in=(*(None for _ in share.arguments), *self.ways_in(share)),
            ways_out=(*(None for _ in share.results), *self.ways_out(share)),
            time_limit_seconds=job.time_limit_seconds,
            memory_limit_bytes=job.memory_limit_bytes,
            transfer=job.transfer,
            strict_nonfinite=job.strict_nonfinite,
            donated=tuple(k for k, i in enumerate(share.arguments) if i in job.donated),
            # Of a program with a loop the schedule is checked instead.
            whole_step=self.splitter.loop is None,
        )
        return compile_plan(self.sub_traced(share), request, check=job.check)

    def agreed(self, place: int, once: Sequence[int], inside: Sequence[int]) -> Iterator[NdSbp | None]:
        """How values lie that are sent once, and stacks of those that are sent in the loop; None if free."""
        yield from (self.outer.get((v, place)) for v in once)
        for v in inside:
            nd = self.pins.get((v, place))
            yield nd and tuple(Split(s.dim + 1) if isinstance(s, Split) else s for s in nd)

    def ways_in(self, share: Share) -> Iterator[Crossing]:
        """Where what is received comes from."""
        for v in (*share.received, *share.fed):
            yield self.way([share.place, self.where.home(v)], v in share.fed)

    def ways_out(self, share: Share) -> Iterator[Crossing]:
        """Where what is sent goes to."""
        for v in (*share.sent, *share.passed):
            readers = [s.place for s in self.shares if v in (*s.received, *s.fed)]
            yield self.way([share.place, *readers], v in share.passed)

    def way(self, places: Sequence[int], stacked: bool) -> Crossing:
        """From the first of some placements to each of the others, or the other way."""
        here, *others = (self.where.placements[p] for p in places)
        links = [self.job.hardware(here).between(here.ranks, other.ranks) for other in others]
        return Crossing(sum(1 / link.bytes_per_second for link in links), stacked)

    def sub_traced(self, share: Share) -> Traced:
        """A share as a traced function, with names."""
        ins = [self.traced.in_paths[i] for i in share.arguments]
        ins += self.labels.received([*share.received, *share.fed])
        outs = [self.traced.out_paths[i] for i in share.results]
        outs += self.labels.sent([*share.sent, *share.passed])
        return Traced(share.graph, tuple(ins), None, tuple(outs))

    def ties(self, share: Share) -> tuple[int | None, ...]:
        """Per result of a share, its argument that it comes back as."""
        position = {i: k for k, i in enumerate(share.arguments)}
        tied = (self.job.ties[i] for i in share.results)
        ends = [None if i is None else position.get(i) for i in tied]
        return (*ends, *[None] * (len(share.sent) + len(share.passed)))

    def agree(self, share: Share, plan: Plan) -> None:
        """Has the other placements of equal hierarchy send and receive what this one does, as it does."""
        physical = _physical(plan)
        inside = transfers_inside(share, physical)
        ins = dict(zip(physical.graph.inputs, physical.inputs, strict=True))
        outs: dict[Operand, NdSbp] = {
            x: nd
            for x, nd in zip(physical.graph.outputs, physical.outputs, strict=True)
            if not isinstance(x, Const)
        }
        for q, other in enumerate(self.where.placements):
            if other.shape == plan.placement.shape and q != share.place:
                for v, nd in inside.items():
                    self.pins.setdefault((v, q), nd)
                for v in (*share.received, *share.sent):
                    self.outer.setdefault((v, q), ins[v] if v in share.received else outs[v])
