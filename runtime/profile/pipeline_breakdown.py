"""Breaks a step of a pipeline under JAX's profiler down for each placement, whose pieces are programs.

Attributes kernels to the user's lines, where instructions do not carry the numbers of steps.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sbp.compat.untyped import Leaf, block_until_ready
from sbp.passes.explain.measurement import MeasuredCollective, MeasuredStep, kernel_estimate, steps_by_number
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.program.role import Phase
from sbp.passes.render.program_data import program_data
from sbp.runtime.hlo.groups import Groups
from sbp.runtime.hlo.meter import text_of
from sbp.runtime.hlo.origins import Origin, origins_of, rows_of
from sbp.runtime.hlo.parser import Instruction, parse
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.pipeline.stage_executor import StageExecutor
from sbp.runtime.pipeline.stage_programs import Runnable
from sbp.runtime.profile.step_breakdown import HOW, BreakdownError, local_devices, record_steps
from sbp.runtime.profile.trace import HasPlanes, TracedStep, traced_steps
from sbp.runtime.profile.trace_alignment import ProgramReader, share_of
from sbp.runtime.profile.trace_attribution import KERNEL, SENDING, WAITING, StepAttribution, account


@dataclass(frozen=True)
class LineReader:
    """The lines of the kernels of a compiled program.

    Arguments:
      reader: of its text.
      origins: where each instruction comes from.
      steps: of the plan's program, as JSON has them, in the order of their numbers.
      phases: those of this program; a line that also has ops of other phases counts for these.
    """

    reader: ProgramReader
    origins: Mapping[str, Origin]
    steps: Sequence[Mapping[str, Any]]
    phases: Collection[str]

    def shares(self, name: str) -> Mapping[int, float]:
        """The steps of an instruction, weighted by their estimated time; none if it has no line."""
        return self._shares.get(name, {})

    @cached_property
    def _at(self) -> Mapping[str, Sequence[int]]:
        """Per line, the steps that compute something there."""
        found: dict[str, list[int]] = {}
        for k, step in enumerate(self.steps):
            if "at" in step and kernel_estimate(step) > 0:
                found.setdefault(step["at"], []).append(k)
        return {
            at: [k for k in own if self.steps[k]["phase"] in self.phases] or own for at, own in found.items()
        }

    @cached_property
    def _shares(self) -> Mapping[str, Mapping[int, float]]:
        return {x.name: self._shared(x) for _, x in self.reader.module.instructions}

    def _shared(self, x: Instruction) -> Mapping[int, float]:
        own = {k for line in set(self._lines(x)) for k in self._at.get(line, ())}
        seconds = {k: kernel_estimate(self.steps[k]) for k in sorted(own)}
        total = math.fsum(seconds.values())
        return {k: s / total for k, s in seconds.items()} if total else {}

    def _lines(self, x: Instruction) -> Iterator[str]:
        """The line of an instruction, and the lines of the ops that it has fused."""
        inside = [
            inner
            for called in x.inner
            for inner in self.reader.module.computations[called].instructions.values()
        ]
        for one in (x, *inside):
            origin = self.origins.get(one.name)
            if origin is not None and origin.source:
                yield origin.source


NOT_NAMED = "no instruction of the compiled pieces names it: XLA has removed it, or sends an equal one"


@dataclass(frozen=True)
class _Piece:
    """One compiled piece: its module, its instructions, and their rows and lines."""

    module: str
    reader: ProgramReader
    rows: Mapping[str, tuple[str, ...]]
    lines: LineReader


def places_measured(built: CompiledPipeline, fresh: Callable[[], Sequence[Leaf]]) -> tuple[MeasuredStep, ...]:
    """The breakdown of a step per placement; kernels are told apart by their lines and their piece.

    Arguments:
      fresh: makes the arguments of a call, which the call may donate.

    Raises:
      BreakdownError: if the profiler records no ops.
    """
    executors = built.executor.executors
    pieces = list[list[_Piece]]()
    for s, plan in zip(executors, built.plan.stages, strict=True):
        program = program_data(plan)
        own = [] if program is None else [step for step, _ in steps_by_number(program["steps"])]
        pieces.append([_piece(r, part.phase, plan, own) for part, r in s.runnables.items()])
    profile = record_steps(fresh, lambda args: block_until_ready(built.run(args)))
    steps = _steps(profile, {p.module: p for own in pieces for p in own})
    if not steps or not any(step.events for step in steps):
        raise BreakdownError("JAX's profiler says nothing of the ops of a step")
    step = sorted(steps, key=lambda s: s.seconds)[len(steps) // 2]
    return tuple(
        _placement(step, s, own, plan.collectives)
        for s, own, plan in zip(executors, pieces, built.plan.stages, strict=True)
    )


PHASES_OF: Mapping[Phase, tuple[str, ...]] = {
    Phase.BEFORE: ("forward", "update"),
    Phase.FORWARD: ("forward",),
    Phase.INPUT: ("backward",),
    Phase.WEIGHT: ("backward",),
    Phase.AFTER: ("update", "backward"),
}
"""What the ops of a piece are, as plans call it."""


def _piece(run: Runnable, phase: Phase, plan: PlanData, steps: Sequence[Mapping[str, Any]]) -> _Piece:
    """A piece of a placement.

    Arguments:
      steps: of the placement's program, in the order of their numbers.
    """
    module = parse(text_of(run.run))
    rows = {name: tuple(c.name for c in meant) for name, meant in rows_of(run.run, plan).items()}
    reader = ProgramReader(module, ())
    lines = LineReader(reader, origins_of(run.run), steps, PHASES_OF[phase])
    return _Piece(module.header["name"], reader, rows, lines)


def _steps(profile: HasPlanes, modules: Mapping[str, _Piece]) -> list[TracedStep]:
    """The steps with the ops of all pieces, each also named by its module."""
    found: list[TracedStep] = []
    for name, piece in modules.items():
        own = traced_steps(profile, name, piece.reader.readers)
        named = [
            replace(s, events=tuple(replace(e, instruction=f"{name}/{e.instruction}") for e in s.events))
            for s in own
        ]
        pairs = zip(found, named, strict=True)
        found = [replace(a, events=a.events + b.events) for a, b in pairs] if found else named
    return found


def _placement(
    step: TracedStep, executor: StageExecutor, pieces: Sequence[_Piece], plan: Sequence[Collective]
) -> MeasuredStep:
    """The step of one placement's devices."""
    devices = local_devices(executor.slots.mesh)
    groups, rows = dict[str, Groups](), dict[str, tuple[str, ...]]()
    around = set[str]()
    for p in pieces:
        around |= {f"{p.module}/{name}" for name in p.reader.containers if step.surrounds}
        for name, own in p.reader.groups(list(p.rows), devices).items():
            key = f"{p.module}/{name}"
            groups[key] = own
            rows[key] = tuple(dict.fromkeys((*rows.get(key, ()), *p.rows[name])))
    events = tuple(e for e in step.events if e.device in devices)
    found = account(TracedStep(step.start, step.end, events), groups, around, devices)
    per_step, added = [0.0] * max((len(p.lines.steps) for p in pieces), default=0), 0.0
    of = {p.module: p.lines for p in pieces}
    for key, seconds in found.by_cause[KERNEL].items():
        module, _, name = key.partition("/")
        shares = of[module].shares(name)
        for k, share in shares.items():
            per_step[k] += share * seconds
        added += 0.0 if shares else seconds
    return MeasuredStep(
        "measured",
        HOW,
        found.seconds,
        found.devices,
        tuple(per_step),
        added,
        tuple(_collectives(plan, rows, found)),
        found.idle_before,
        found.idle_between,
        found.idle_after,
    )


def _collectives(
    plan: Sequence[Collective], rows: Mapping[str, tuple[str, ...]], found: StepAttribution
) -> Iterator[MeasuredCollective]:
    """The time of each row of a placement, and of collectives without a row."""
    known = {c.name: c for c in plan}
    for c in plan:
        own = [key for key, names in rows.items() if c.name in names]
        seen = [(key, share_of(known, c.name, rows[key])) for key in own if found.times[key]]
        if not seen:
            why = f"the profile has no event of {', '.join(own)}" if own else NOT_NAMED
            yield MeasuredCollective(c.name, None, remark=why)
            continue
        shared = any(len(rows[key]) > 1 for key, _ in seen)
        yield MeasuredCollective(
            c.name,
            math.fsum(found.collectives[key] * share for key, share in seen),
            math.fsum(found.by_cause[SENDING][key] * share for key, share in seen),
            math.fsum(found.by_cause[WAITING][key] * share for key, share in seen),
            sum(found.times[key] for key, _ in seen),
            "not told apart from other rows: time by their estimates" if shared else "",
        )
    for key, names in rows.items():
        if not names and found.times[key]:
            own_seconds = (found.collectives[key], found.by_cause[SENDING][key], found.by_cause[WAITING][key])
            yield MeasuredCollective("", *own_seconds, found.times[key], f"{key} is for no row of the plan")
