"""From a traced function with several placements to the pieces of each: the list of passes of a pipeline.

    hoist -> where, order -> sums -> where, order -> split -> (`passes/chain.py`, per placement) -> cut

Placements are planned one after the other. The first of two that plans decides how a value lies that goes
from one to the other, and counts what it takes to send it; where their hierarchies differ, each decides for
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from sbp.hardware import Hardware
from sbp.layout import at_rest
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
from sbp.passes.plan.model import Way
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
      time_limit_seconds, memory_limit_bytes, transfer, check: as of `Request` and `compile_plan`.
    """

    name: str
    hardware: Callable[[Placement], Hardware]
    asked: Asked
    ties: Sequence[int | None]
    rank_of: Sequence[int] | None = None
    time_limit_seconds: float | None = None
    memory_limit_bytes: float | None = None
    transfer: Transfer = field(default_factory=Transfer)
    check: bool = False


@dataclass(frozen=True)
class Stages:
    """A program taken apart.

    Arguments:
      traced: the whole.
      where: its placements.
      stages: per stage, the position of its placement.
      microbatches: how many there are; 0 for a program without a loop over them.
      shares, plans: per placement.
      labels: the words for what goes from one placement to another.
    """

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
    stages = Stages(traced, where, order.stages, count, shares, plans, planning.labels)
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

    def run(self) -> tuple[tuple[Share, ...], tuple[Plan, ...]]:
        shares, plans = list[Share](), list[Plan]()
        for place in range(len(self.where.placements)):
            share, plan = self.planned(place)
            if self.repinned(share, plan):
                share, plan = self.planned(place)
                assert not self.repinned(share, plan), f"what {share.place} sends does not lie as it should"
            self.agree(share, plan)
            shares.append(share)
            plans.append(plan)
        return tuple(shares), tuple(plans)

    @cached_property
    def labels(self) -> Labels:
        """The words for what goes from one placement to another."""
        names = Names(self.graph, self.traced.in_paths, self.traced.out_paths)
        return Labels(self.graph, self.where, self.splitter.order, names)

    def planned(self, place: int) -> tuple[Share, Plan]:
        """One placement, with what has been agreed on so far."""
        placement, job = self.where.placements[place], self.job
        shares = self.splitter.shares(self.pins)
        share = shares[place]
        readers = {
            v: [s.place for s in shares if v in (*s.received, *s.fed)] for v in (*share.sent, *share.passed)
        }
        ins, outs = job.asked(placement, share.arguments, share.results)
        request = Request(
            name=f"{job.name}, placement {place} of {len(self.where.placements)}",
            placement=placement,
            hardware=job.hardware(placement),
            in_sbp=(
                *ins,
                *(self.outer.get((v, place)) for v in share.received),
                *(self.stacked(v, place) for v in share.fed),
            ),
            out_sbp=(
                *outs,
                *(self.outer.get((v, place)) for v in share.sent),
                *(self.stacked(v, place) for v in share.passed),
            ),
            ties=self.ties(share),
            ways_in=(
                *(None for _ in share.arguments),
                *(
                    self.way([place, self.where.home(v)], v in share.fed)
                    for v in (*share.received, *share.fed)
                ),
            ),
            ways_out=(
                *(None for _ in share.results),
                *(self.way([place, *readers[v]], v in share.passed) for v in (*share.sent, *share.passed)),
            ),
            time_limit_seconds=job.time_limit_seconds,
            # Here all micro-batches would count; of a program with a loop the schedule is checked instead.
            memory_limit_bytes=job.memory_limit_bytes if self.splitter.loop is None else None,
            transfer=job.transfer,
        )
        return share, compile_plan(self.sub_traced(share), request, check=job.check)

    def stacked(self, v: int, place: int) -> NdSbp | None:
        """How the stack lies of a value that is sent in the loop, as far as that has been agreed on."""
        nd = self.pins.get((v, place))
        return None if nd is None else tuple(Split(s.dim + 1) if isinstance(s, Split) else s for s in nd)

    def way(self, places: Sequence[int], stacked: bool) -> Way:
        """From the first of some placements to each of the others, or the other way."""
        ranks = [self.where.placements[p].ranks for p in places]
        hardware = self.job.hardware(self.where.placements[places[0]])
        links = [hardware.link([*ranks[0], *other]) for other in ranks[1:]]
        return Way(sum(1 / link.bytes_per_second for link in links), stacked)

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

    def repinned(self, share: Share, plan: Plan) -> bool:
        """Whether something is sent in the loop that does not lie as an array can: it is to, from now on."""
        found = False
        for v, nd in transfers_inside(share, _physical(plan)).items():
            shape, hierarchy = self.graph.values[v].shape, plan.placement.shape
            rest = at_rest(shape, nd, hierarchy)
            if rest != nd:
                self.pins[v, share.place] = rest
                found = True
        return found

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
