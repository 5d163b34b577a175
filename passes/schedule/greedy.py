"""Schedules by list scheduling: a free rank starts what is most urgent of what is ready and fits."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sbp.passes.schedule.actions import Action, Kind, Schedule
from sbp.passes.schedule.dataflow import Edge, dataflow, makes
from sbp.passes.schedule.memory import Footprint
from sbp.passes.schedule.spans import Timeline
from sbp.passes.schedule.times import Times


@dataclass(frozen=True, slots=True)
class GreedyPolicy:
    """What is urgent.

    Backwards come first, the oldest before others, then forwards that fit into memory, then weight gradients.

    Arguments:
      split: whether backwards are split into `I` and `W`.
      deep: whether of several stages on a rank the last one's forward goes first; else micro-batches go in
        rounds of as many as there are ranks through the first stage, then through the next.
      reserve: whether a micro-batch enters a rank only if all its stages there fit.
      patience: a weight gradient waits for what comes within this part of its time.
    """

    split: bool
    deep: bool
    reserve: bool
    patience: float

    def __str__(self) -> str:
        words = ["split" if self.split else "whole", "deep" if self.deep else "rounds"]
        return "list: " + ", ".join([*words, *(["reserved"] * self.reserve), f"patience {self.patience:g}"])


@dataclass(frozen=True, slots=True)
class OrderTask:
    """What is to be scheduled: see `search.search`; `limits` is what each rank may hold."""

    rank_of: tuple[int, ...]
    microbatches: int
    times: Times
    footprint: Footprint
    limits: tuple[float, ...]
    edges: Sequence[Edge] | None
    barrier: bool

    def seconds(self, timeline: Timeline) -> float:
        """The time of a step."""
        return timeline.makespan if self.barrier else timeline.period

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.limits)

    def size(self, stage: int) -> float:
        """The peak memory of one micro-batch on a stage."""
        weights = self.footprint.for_weights
        return max(self.footprint.residuals[stage], weights[stage] if weights else 0)

    def reserve_bytes(self, rank: int) -> float:
        """What must stay free for the backward of any stage of a rank."""
        return max(
            (w for w, r in zip(self.footprint.working_bytes, self.rank_of, strict=False) if r == rank),
            default=0,
        )

    @property
    def least(self) -> OrderTask:
        """The same with room for one micro-batch at a time on each rank."""
        own = [[self.size(s) for s, r in enumerate(self.rank_of) if r == rank] for rank in range(self.ranks)]
        return replace(self, limits=tuple(sum(sizes) + self.reserve_bytes(r) for r, sizes in enumerate(own)))


def list_schedule(task: OrderTask, policy: GreedyPolicy) -> Schedule | None:
    """A schedule by that policy; None if it ends where nothing fits any more.

    Source: after the heuristic of Qi et al., 2024, arXiv:2401.10241, for any placement of stages and with
    several policies.
    """
    if not policy.split:
        task = replace(task, footprint=replace(task.footprint, for_weights=()))
    run = _Run(task, policy)
    run.go()
    if sum(map(len, run.orders)) < run.actions:
        return None
    return Schedule(str(policy), task.microbatches, task.rank_of, tuple(tuple(order) for order in run.orders))


class _Run:
    """One pass over time; an action's end is known once it starts, and so is when what needs it is ready."""

    def __init__(self, task: OrderTask, policy: GreedyPolicy) -> None:
        self.task, self.policy = task, policy
        stages, ranks = range(len(task.rank_of)), range(task.ranks)
        self.flow = dataflow(task.rank_of, task.edges)
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.room = [task.limits[r] - task.reserve_bytes(r) for r in ranks]
        self.pool: list[dict[Action, float]] = [{} for _ in ranks]
        self.next_forward = [0 for _ in stages]
        self.entered: set[tuple[int, int]] = set()
        self.ends: dict[Action, float] = {}
        self.events: list[tuple[float, int]] = []
        kinds = (Kind.F, Kind.I, Kind.W) if policy.split else (Kind.F, Kind.B)
        every = [Action(k, s, mb) for k in kinds for s in stages for mb in range(task.microbatches)]
        self.actions = len(every)
        self.needed: dict[Action, list[Action]] = {}
        for a in every:
            for need in self.flow.needs(a):
                self.needed.setdefault(need, []).append(a)
        for a in every:
            if not self.flow.needs(a):
                self._ready(a)

    def go(self) -> None:
        """Starts what is chosen, by time, until nothing is left that fits."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now and (a := self._choice(rank, now)) is not None:
                self._start(a, rank, now)

    def _choice(self, rank: int, now: float) -> Action | None:
        """The most urgent of what a rank can start."""
        ready = [a for a, at in self.pool[rank].items() if at <= now]
        if backwards := [a for a in ready if a.kind in (Kind.I, Kind.B)]:
            return min(backwards, key=lambda a: (a.microbatch, -a.stage))
        forwards = [a for a in ready if a.kind is Kind.F and self._fits(a, rank)]
        if forwards:
            return min(forwards, key=self._urgency)
        weights = [a for a in ready if a.kind is Kind.W]
        if not weights:
            return None
        oldest = min(weights, key=lambda a: (a.microbatch, -a.stage))
        until = now + self.policy.patience * self.task.times.of(oldest)
        soon = any(now < at <= until and a.kind is Kind.I for a, at in self.pool[rank].items())
        return None if soon else oldest

    def _urgency(self, a: Action) -> tuple[int, ...]:
        if self.policy.deep:
            return (-a.stage, a.microbatch)
        return (a.microbatch // self.task.ranks, a.stage, a.microbatch)

    def _fits(self, a: Action, rank: int) -> bool:
        in_order = a.microbatch == self.next_forward[a.stage]
        return in_order and self.held[rank] + self._claim(a, rank) <= self.room[rank]

    def _claim(self, a: Action, rank: int) -> float:
        """What a forward takes: its own share, or that of all its rank's stages for the first of them."""
        if not self.policy.reserve:
            return self.task.size(a.stage)
        if (a.microbatch, rank) in self.entered:
            return 0
        return sum(self.task.size(s) for s, r in enumerate(self.task.rank_of) if r == rank)

    def _start(self, a: Action, rank: int, now: float) -> None:
        self.held[rank] += self._change(a, rank)
        if a.kind is Kind.F:
            self.next_forward[a.stage] += 1
            self.entered.add((a.microbatch, rank))
        del self.pool[rank][a]
        self.orders[rank].append(a)
        self.free[rank] = now + self.task.times.of(a)
        heapq.heappush(self.events, (self.free[rank], rank))
        for made in makes(a):
            self.ends[made] = self.free[rank]
        for made in makes(a):
            for b in self.needed.get(made, ()):
                if all(need in self.ends for need in self.flow.needs(b)):
                    self._ready(b)

    def _change(self, a: Action, rank: int) -> float:
        left = (self.task.footprint.for_weights or self.task.footprint.residuals)[a.stage]
        match a.kind:
            case Kind.F:
                return self._claim(a, rank)
            case Kind.I:
                return left - self.task.size(a.stage)
            case Kind.W:
                return -left
            case _:
                return -self.task.size(a.stage)

    def _ready(self, a: Action) -> None:
        """Everything that an action needs has been started: it is ready once all of it has come."""
        at: float = 0
        for need in self.flow.needs(a):
            crosses = self.flow.crosses(need, a)
            way = self.task.times.on_the_way(need.stage, a.stage) if crosses else 0
            at = max(at, self.ends[need] + way)
        rank = self.task.rank_of[a.stage]
        self.pool[rank][a] = at
        heapq.heappush(self.events, (at, rank))
