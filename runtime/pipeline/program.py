"""A compiled pipeline as `Program` has it: planned, built on its first call, run on every later one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp

from sbp.errors import ArgumentError, Problem, raise_all
from sbp.passes.pipeline.chain import Stages
from sbp.passes.pipeline.choose import AUTO, candidates_note, found_schedule, task_of
from sbp.passes.pipeline.edges import edges_of, trains
from sbp.passes.pipeline.plan import PipelinePlan
from sbp.passes.pipeline.slots import Slot
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.orders import GENERATORS, make
from sbp.passes.trace import Traced
from sbp.runtime.arguments import weaken
from sbp.runtime.builds import locked_property
from sbp.runtime.donation import Owners, layouts_of, own_copy
from sbp.runtime.pipeline.drivers import Drivers
from sbp.runtime.pipeline.machine import Machine, make_machine

DEFAULT = "1f1b"


@dataclass
class BuiltPipeline:
    """One abstract signature of a program with stages.

    Arguments:
      stages, schedule: what was planned.
      donate: positions of the leaves that are gone after a call.
      weak: per result, whether it is weakly typed.
      drivers: whether each placement has a thread of its own.
    """

    stages: Stages
    schedule: Schedule | None
    plan: PipelinePlan
    donate: tuple[int, ...]
    weak: tuple[bool, ...]
    drivers: Drivers
    moved: dict[str, str] = field(default_factory=dict)
    lacks_samples: bool = False
    counting: None = None
    lock: Any = field(default_factory=threading.RLock, repr=False)

    @functools.cached_property
    def owners(self) -> Owners:
        """Who has the memory of what is donated."""
        return Owners(self.donate)

    @property
    def traced(self) -> Traced:
        """The whole function."""
        return self.stages.traced

    @locked_property
    def machine(self) -> Machine:
        """The pipeline on its devices."""
        merged = self.schedule is None or not self.schedule.splits
        return make_machine(
            self.stages, self.schedule, edges_of(self.stages.cuts(merged)), merged, self.donate
        )

    @locked_property
    def closed(self) -> list[dict[Slot, Any]]:
        """The closed-over arrays, per placement."""
        graph = self.stages.traced.graph
        n = len(self.stages.traced.in_paths)
        return [
            {
                slot: own_copy(
                    graph.consts[i - n], s.slots.sharding(slot), graph.values[graph.inputs[i]].name
                )
                for i, slot in zip(s.cut.share.closed, s.cut.closed, strict=True)
            }
            for s in self.machine.stations
        ]

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs one step on the leaves of a call.

        Raises:
          DonationError: if the memory of a donated one is also that of another one.
        """
        raise_all(self.owners.check(leaves, layouts_of(leaves), lambda: self.traced.in_paths))
        placed = self.arguments(leaves)
        given = [x for arrays in placed for x in arrays.values()]
        out = self.drivers.run(lambda threads: self.machine.run(placed, threads), given)
        gone = [x for i in self.donate if isinstance(x := leaves[i], jax.Array)]
        # An argument that is a result too lives on as that.
        out = [jnp.copy(x) if any(x is y for y in gone) else x for x in out]
        out = [weaken(x) if weak else x for x, weak in zip(out, self.weak, strict=True)]
        for x in gone:
            if not x.is_deleted():
                x.delete()
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


def schedule_for(
    stages: Stages, asked: str | Schedule | None, memory_limit_bytes: float | None = None
) -> tuple[Schedule | None, list[str]]:
    """The schedule of a program, and remarks on it.

    Raises:
      ArgumentError: for one that does not suit its stages.
      MemoryLimitError: for one that holds more than it may, and if none that was looked at does not.
    """
    known = isinstance(asked, str) and asked in (*GENERATORS, AUTO)
    if asked is not None and not known and not isinstance(asked, Schedule):
        raise ArgumentError(_no_schedule(asked))
    if not stages.microbatches:
        if asked is not None:
            fix = "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1)"
            raise ArgumentError(
                _idle(asked, "a program with sbp.microbatch", "a schedule orders micro-batches", fix)
            )
        return None, []
    # Whether there is a backward pass does not depend on how it is cut.
    training = trains(stages.cuts(True))
    if asked == AUTO and training:
        choice = task_of(stages).search(memory_limit_bytes)
        return found_schedule(choice), [candidates_note(choice, memory_limit_bytes)]
    if isinstance(asked, Schedule):
        _check_suits(asked, stages)
        schedule = asked
    else:
        name = (asked or DEFAULT) if training or asked not in (None, AUTO) else "forward"
        schedule = make(name, stages.stages, stages.microbatches)
    if training and not schedule.trains:
        raise ArgumentError(_no_backward(schedule))
    if memory_limit_bytes is not None:
        task_of(stages).check(schedule, memory_limit_bytes)
    return schedule, []


def unstaged(schedule: object) -> Problem:
    """What is wrong with a schedule for a program without stages."""
    fix = "with sbp.on(placement.split(0)[0]): ... in the model, or Options(stages=...)"
    return _idle(schedule, "a program with stages", "a schedule says in which order stages run", fix)


def _idle(asked: object, legal: str, why: str, fix: str) -> Problem:
    """What is wrong with a schedule where there is nothing to order."""
    got = repr(asked if isinstance(asked, str) else "a schedule")
    return Problem("argument", "Options(schedule=...)", got, legal, why, fix)


def _no_schedule(asked: object) -> Problem:
    return Problem(
        "argument",
        "Options(schedule=...)",
        repr(asked),
        ", ".join(map(repr, (*GENERATORS, AUTO))) + ", a Schedule, or None",
        "it says in which order the stages run",
        repr(get_close_matches(asked, (*GENERATORS, AUTO), 1, 0.0)[0] if isinstance(asked, str) else DEFAULT),
    )


def _no_backward(schedule: Schedule) -> Problem:
    return Problem(
        "argument",
        f"Options(schedule={schedule.name!r})",
        "a schedule without backward",
        "one of a training",
        "the program has gradients, which it would leave out",
        f"{DEFAULT!r}, or sbp.microbatch of the loss alone",
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


def many_programs(program: object) -> Problem:
    """What is wrong with lowering a program that is several."""
    return Problem(
        "argument",
        f"{program}.lower(...)",
        "a program with stages",
        "a program of one placement",
        "each piece of a stage is a program of its own",
        "Program.plan(...) says what they do",
    )
