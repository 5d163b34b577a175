"""A compiled pipeline as `Program` has it: planned, built on its first call, run on every later one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from sbp.errors import ArgumentError, Problem
from sbp.passes.pipeline.chain import Stages
from sbp.passes.pipeline.edges import edges_of, trains
from sbp.passes.pipeline.plan import PipelinePlan
from sbp.passes.pipeline.slots import Cut, Slot
from sbp.passes.schedule.actions import Kind, Schedule
from sbp.passes.schedule.orders import make
from sbp.passes.trace import Traced
from sbp.runtime.pipeline.machine import Machine, make_machine

DEFAULT = "1f1b"


@dataclass
class BuiltPipeline:
    """One abstract signature of a program with stages.

    Arguments:
      stages, schedule: what was planned.
      donate: positions of the leaves that are gone after a call.
      threads: whether each rank has a thread of its own.
    """

    stages: Stages
    schedule: Schedule | None
    plan: PipelinePlan
    donate: tuple[int, ...]
    threads: bool
    moved: dict[str, str] = field(default_factory=dict)
    lacks_samples: bool = False
    counting: None = None

    @property
    def traced(self) -> Traced:
        """The whole function."""
        return self.stages.traced

    @functools.cached_property
    def machine(self) -> Machine:
        """The pipeline on its devices."""
        merged = self.schedule is None or merges(self.schedule)
        return make_machine(self.stages, self.schedule, edges_of(self.stages.cuts(merged)), merged)

    @functools.cached_property
    def closed(self) -> list[dict[Slot, Any]]:
        """The closed-over arrays, per placement."""
        consts = self.stages.traced.graph.consts
        n = len(self.stages.traced.in_paths)
        return [
            {
                slot: jax.device_put(consts[i - n], s.slots.sharding(slot))
                for i, slot in zip(s.cut.share.closed, s.cut.closed, strict=True)
            }
            for s in self.machine.stations
        ]

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs one step on the leaves of a call."""
        out = self.machine.run(self.arguments(leaves), self.threads)
        for i in self.donate:
            if isinstance(leaves[i], jax.Array) and not leaves[i].is_deleted():
                leaves[i].delete()
        return jax.tree.unflatten(self.stages.traced.out_tree, out)

    def arguments(self, leaves: Sequence[Any]) -> list[Mapping[Slot, Any]]:
        """The leaves where each placement wants them."""
        placed: list[Mapping[Slot, Any]] = []
        for s, closed in zip(self.machine.stations, self.closed, strict=True):
            wanted = list(zip(s.cut.share.arguments, s.cut.arguments, strict=True))
            given = [leaves[i] for i, _ in wanted]
            arrays = jax.device_put(given, [s.slots.sharding(slot) for _, slot in wanted])
            placed.append({**dict(zip((slot for _, slot in wanted), arrays, strict=True)), **closed})
        return placed

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves where their first placement wants them."""
        out = list(leaves)
        for s in reversed(self.machine.stations):
            for i, slot in zip(s.cut.share.arguments, s.cut.arguments, strict=True):
                out[i] = jax.device_put(leaves[i], s.slots.sharding(slot))
        return out


def merges(schedule: Schedule) -> bool:
    """Whether a backward pass is one action."""
    return not any(a.kind in (Kind.I, Kind.W) for order in schedule.orders for a in order)


def schedule_for(stages: Stages, asked: str | Schedule | None) -> Schedule | None:
    """The schedule of a program.

    Raises:
      ArgumentError: for one that does not suit its stages.
    """
    if not stages.microbatches:
        if asked is not None:
            raise ArgumentError(_no_loop(asked))
        return None
    if isinstance(asked, Schedule):
        _check_suits(asked, stages)
        return asked
    # Whether there is a backward pass does not depend on how it is cut.
    name = asked or (DEFAULT if trains(stages.cuts(True)) else "forward")
    return make(name, stages.stages, stages.microbatches)


def _no_loop(asked: object) -> Problem:
    return Problem(
        "argument",
        "Options(schedule=...)",
        repr(asked if isinstance(asked, str) else "a schedule"),
        "a program with sbp.microbatch",
        "a schedule orders micro-batches",
        "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1)",
    )


def _check_suits(schedule: Schedule, stages: Stages) -> None:
    if schedule.rank_of != stages.stages or schedule.microbatches != stages.microbatches:
        raise ArgumentError(
            Problem(
                "argument",
                f"Options(schedule={schedule.name!r})",
                f"stages on ranks {schedule.rank_of}, {schedule.microbatches} micro-batches",
                f"stages on {stages.stages}, {stages.microbatches} micro-batches",
                "the schedule is of another program",
                "the schedule's name, or one made for these stages",
            )
        )


def cuts_of(stages: Stages, schedule: Schedule | None) -> tuple[Cut, ...]:
    """The pieces that a schedule runs."""
    return stages.cuts(schedule is None or merges(schedule))
