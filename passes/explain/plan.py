"""A plan as data: every collective of a program, what it costs, and why it is there.

The estimated costs of a stage and of a placement of a pipeline, as a plan holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from sbp.hardware.catalogue import Hardware
from sbp.passes.explain.choices import RowChoices, TensorChoices
from sbp.passes.physical.program import Physical
from sbp.passes.plan.constants import PROVEN
from sbp.passes.plan.record import ChoiceRecord
from sbp.passes.program.names import common, without_indices
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.memory import peaks, units
from sbp.passes.schedule.spans import Timeline
from sbp.placement import Placement
from sbp.signature import NdSbp


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage; bytes are those of one device.

    Arguments:
      place: the position of its placement.
      forward_seconds, input_seconds, weight_seconds: of a micro-batch's forward, of the gradients that other
        stages wait for, and of the rest of the backward pass.
      residual_bytes: what a micro-batch leaves from its forward to the end of its backward.
      for_weights_bytes: what of that, and of what the gradients for others made, the rest of the backward
        pass still needs.
      weight_bytes: what the forward reads whole for every micro-batch.
      forward_working_bytes, input_working_bytes, weight_working_bytes: the most that each of these takes
        besides while it runs.
    """

    place: int
    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    residual_bytes: float
    for_weights_bytes: float
    weight_bytes: float
    forward_working_bytes: float = 0.0
    input_working_bytes: float = 0.0
    weight_working_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """One placement; bytes are those of one device.

    Arguments:
      rest_bytes: arguments, sums over micro-batches, and what was received for all of these.
      working_bytes: what one piece needs besides while it runs, the one that needs most.
      outside_bytes: the peak before and after the loop over micro-batches.
    """

    rest_bytes: float
    working_bytes: float
    outside_bytes: float

    @property
    def steady_bytes(self) -> float:
        """All but what micro-batches hold."""
        return self.rest_bytes + self.working_bytes


ROUNDING = 1e-9
"""Times that differ by less, relatively, are the same sum in another order."""


Writes: TypeAlias = Callable[["PlanData"], Any]
"""Writes a plan as Python: what it gives is a `ProgramSource` (passes/render/program_source.py)."""


class Replans(Protocol):
    """Who can make a plan again with some of it held (passes/replan)."""

    def choices(self, plan: PlanData, name: str, most: int, time_limit_seconds: float) -> TensorChoices:
        """The other signatures of a tensor, each with the whole plan made again around it."""

    def rows_choices(
        self, plan: PlanData, rows: Sequence[Collective], most: int, time_limit_seconds: float
    ) -> Iterator[tuple[Collective, RowChoices]]:
        """The same of the tensors of rows of `merged_collectives`, and what to write to do without
        each; as many rows as there is time for."""

    def hold(self, plan: PlanData, name: str, nd: NdSbp) -> PlanData:
        """The plan with a tensor held to a signature, and everything else planned again."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One inserted collective.

    Arguments:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "ragged_all_to_all" or
        "send".
      tensor, shape, dtype: the logical tensor. If it is no argument, result or gradient of an argument, it is
        named after the op that makes it.
      before, after: its N-D signatures.
      axes: names of the placement axes that take part; for a send, the numbers of the two placements.
      group_size: the number of devices that exchange data.
      count: times per step; once in a loop of unknown length.
      wire_bytes: what one device sends per step, bytes.
      seconds: estimated time per step; a loop of unknown length counts `WHILE_TRIPS` times.
      exposed_seconds: the part of it in which kernels wait, estimated; 0.0 for a send of every micro-batch,
        whose delay is in the timeline.
      source: the user's line that caused it, such as "gpt.py:41".
      reason: one sentence.
      name: the name of its instructions in the compiled program, such as "row12": its position among the
        collectives of its placement. "" for a send, which has no instruction.
      message: what it is sent in, if XLA sends it with others: the name of the first of them.
    """

    kind: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    before: NdSbp
    after: NdSbp
    axes: tuple[str, ...]
    group_size: int
    count: int
    wire_bytes: float
    seconds: float
    exposed_seconds: float
    source: str
    reason: str
    name: str = ""
    message: str = ""

    @property
    def cost(self) -> tuple[float, float]:
        """What it is ranked by: the time that kernels wait for it, then the time that it takes."""
        return self.exposed_seconds, self.seconds


def merged_collective(same: Sequence[Collective]) -> Collective:
    """Collectives that are alike as one."""
    return replace(
        same[0],
        tensor=common(c.tensor for c in same),
        name="+".join(c.name for c in same if c.name),
        message="+".join(sorted({x for c in same for x in c.message.split("+") if x})),
        count=sum(c.count for c in same),
        wire_bytes=sum(c.wire_bytes for c in same),
        seconds=sum(c.seconds for c in same),
        exposed_seconds=sum(c.exposed_seconds for c in same),
    )


CUT_OFF = "the search was cut off by "
"""How the note begins of a search that was."""
SAME = 1e-7
"""Seconds that differ by less than this part are the same: sums of tens of thousands of terms."""


def _gap(seconds: float, bound: float) -> float:
    """How far a time is from a bound, relative."""
    gap = (seconds - bound) / seconds if seconds > 0 else 0.0
    return 0.0 if -SAME <= gap <= PROVEN else gap


@dataclass(frozen=True, repr=False)
class PlanData:
    """What a program will do, and why. `Plan` (passes/face.py) is the same with its ways to be shown.

    Arguments:
      name: the function's name.
      placement, hardware: where it runs and what it is planned for.
      collectives: all of them, in order of execution.
      seconds: estimated time of one step, ops and collectives one after the other; what the search minimises.
      step_seconds: the same with collectives beside computation, where XLA runs them so, and with the copies
        of results to where they belong.
      bound: a proven lower bound on the estimate of every plan with these pins, seconds.
      step_bound: the same of `step_seconds`: what kernels take at least, whatever runs beside them.
      memory_bytes: peak per device, estimated.
      in_sbp, out_sbp: signatures at rest of arguments and results, as `jax.Array`s arrive and leave.
      in_paths, out_paths: their names.
      notes: remarks: ops without a rule, uneven sizes that are gathered, arguments that are moved.
      physical: the program itself; None for a plan that was loaded from a file.
      donated: positions of the arguments whose memory the results may take.
      program: of a plan that was loaded, what its file says of the program.
      replanner: who can make it again; None for a plan that was loaded, copied by pickle,
        or is that of one stage.
      cheapest_seconds: what the cheapest plan that was found takes, one thing after the other, if this one
        was preferred for its shorter step.
      writer: who can write it as Python; None as of the replanner, but for stages, too, there is one.
      choice: the signature of every op, to be taken by another compilation (`Options(plan=...)`); of a
        program with stages, each of these has its own.
      stages: of a program with stages, the plan of each placement, in which a loop over micro-batches counts
        as often as it runs; else (). `collectives` are those of all placements, then the sends between them.
      schedule: the order of the micro-batches; None without them.
      timeline: the schedule, simulated with the estimated times; likewise.
      figures: the costs of every stage; () without micro-batches.
      memory: per placement, the peak per device with this schedule, bytes.
      places: what every placement holds besides micro-batches; () without these.
      program_stages: the program taken apart, a `Stages` (passes/pipeline/stages.py); None for a plan from a
        file.
    """

    name: str
    placement: Placement
    hardware: Hardware
    collectives: tuple[Collective, ...]
    seconds: float
    step_seconds: float
    bound: float
    memory_bytes: float
    in_sbp: tuple[NdSbp, ...]
    out_sbp: tuple[NdSbp, ...]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    notes: tuple[str, ...]
    physical: Physical | None = field(default=None, compare=False, repr=False)
    cheapest_seconds: float | None = None
    step_bound: float = 0.0
    donated: tuple[int, ...] = ()
    program: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    replanner: Replans | None = field(default=None, compare=False, repr=False)
    writer: Writes | None = field(default=None, compare=False, repr=False)
    choice: ChoiceRecord | None = field(default=None, compare=False, repr=False)
    stages: tuple[PlanData, ...] = ()
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    figures: tuple[StageFigures, ...] = ()
    memory: tuple[float, ...] = ()
    places: tuple[PlaceFigures, ...] = ()
    program_stages: Any = field(default=None, compare=False, repr=False)

    @property
    def parts(self) -> tuple[PlanData, ...]:
        """The plan of each placement; mostly there is one."""
        return self.stages or (self,)

    @cached_property
    def form_cache(self) -> dict[str, Any]:
        """What one form of the plan has found of it, for the next ones: a large program takes seconds."""
        return {}

    @property
    def cut_short(self) -> bool:
        """Whether `Options(time_limit=...)` has ended a search for it."""
        return any(note.startswith(CUT_OFF) for p in (self, *self.stages) for note in p.notes)

    @property
    def has_program(self) -> bool:
        """Whether the program is known: of a plan that was made here, or whose file has it."""
        return any(p.physical is not None or p.program is not None for p in self.parts)

    @property
    def sends(self) -> tuple[Collective, ...]:
        """The transfers between placements."""
        return self.collectives[sum(len(p.collectives) for p in self.stages) :] if self.stages else ()

    @property
    def wire_bytes(self) -> float:
        """The most bytes that one device sends per step: within its placement, and to others."""
        if not self.stages:
            return sum(c.wire_bytes for c in self.collectives)
        sent = [p.wire_bytes for p in self.stages]
        for c in self.sends:
            sent[int(c.axes[0])] += c.wire_bytes
        return max(sent)

    @property
    def exposed_seconds(self) -> float:
        """The part of `step_seconds` in which kernels wait for collectives; the most of any placement."""
        if self.stages:
            return max(p.exposed_seconds for p in self.stages)
        return sum(c.exposed_seconds for c in self.collectives)

    @property
    def overlaps(self) -> bool:
        """Whether anything runs beside something else."""
        return self.step_seconds < self.seconds * (1 - ROUNDING)

    @property
    def gap(self) -> float:
        """How far `seconds` can be from their optimum, relative; 0.0 is proven optimal (to `PROVEN`).

        A plan that was preferred for its shorter step may be dearer one thing after the other than the bound.
        Of several placements it is the largest gap.
        """
        return max(p.gap for p in self.stages) if self.stages else self._gap_of(self.seconds)

    @property
    def live(self) -> tuple[float, ...]:
        """Per placement, the most micro-batches of its stages that are held at once."""
        return () if self.schedule is None else peaks(self.schedule, units(self.schedule.stages))

    @property
    def cheapest_gap(self) -> float:
        """How far the cheapest plan that was found can be from the optimum, this one or another."""
        return self._gap_of(self.seconds if self.cheapest_seconds is None else self.cheapest_seconds)

    @property
    def step_gap(self) -> float:
        """How far `step_seconds` can be from the shortest step there is, relative; the bound is not tight.

        Of several placements it is the largest gap.
        """
        if self.stages:
            return max(p.step_gap for p in self.stages)
        return _gap(self.step_seconds, self.step_bound)

    def _gap_of(self, seconds: float) -> float:
        return _gap(seconds, self.bound)

    @property
    def fits(self) -> bool:
        """Whether the estimated peak is within what a device has."""
        return self.memory_bytes <= self.hardware.memory_bytes

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Per kind of collective: how many are executed, and their bytes."""
        count: Counter[str] = Counter()
        wire: dict[str, float] = {}
        for c in self.collectives:
            count[c.kind] += c.count
            wire[c.kind] = wire.get(c.kind, 0.0) + c.wire_bytes
        return {k: (n, wire[k]) for k, n in count.items()}

    def merged_collectives(self) -> tuple[tuple[Collective, int], ...]:
        """Collectives that differ in nothing a reader cares about as one row, with how many there are.

        Names that differ in an index only, as those of layers do, are one name with `[*]`.
        """
        rows: dict[Any, list[Collective]] = {}
        for c in self.collectives:
            why = without_indices(c.reason)
            key = (c.kind, c.shape, c.dtype, c.before, c.after, c.axes, c.source, why)
            rows.setdefault(key, []).append(c)
        return tuple(
            (replace(merged_collective(same), reason=common(c.reason for c in same)), len(same))
            for same in rows.values()
        )

    def part(self, index: int) -> tuple[PlanData, int]:
        """The plan of the placement that a collective belongs to, and its number there."""
        for plan in self.parts:
            if index < len(plan.collectives):
                return plan, index
            index -= len(plan.collectives)
        return self, index + len(self.collectives) - len(self.sends)
