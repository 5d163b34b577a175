"""The plan of a pipeline beside what XLA made of its pieces: bytes, memory, and the simulated step."""

import math
from dataclasses import dataclass

from sbp.passes.explain.plan import PlanData
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.spans import Timeline
from sbp.runtime.pipeline.memory import PeakMemory
from sbp.runtime.target.comparison import ComparedProgram, MemoryUse
from sbp.runtime.target.events import Simulation


@dataclass(frozen=True)
class CompiledPiece:
    """What XLA has made of a piece: what a stage runs in one go.

    Arguments:
      part: the phase and the stage; outside of the loop, how many hops between placements come first.
      name: how schedules call it, such as "F0"; "B0" is a backward that is one piece, and "after 1" comes
        after the loop, and after something that was sent behind it.
      times: how often it runs in a step.
      program: the key of its text: pieces that have the same one are compiled once per process.
      size_bytes: of the serialised executable; None where the backend cannot serialise it.
      cpu_seconds: of lowering and compiling it on the host, all threads added up; of equal ones, the first's.
      wire_bytes: what one device sends when it runs once.
      memory: by XLA; None where the backend does not say.
      simulation: of its schedule; None for chips whose rates are not known.
    """

    part: Part
    name: str
    times: int
    program: str
    size_bytes: int | None
    cpu_seconds: float
    wire_bytes: float
    memory: MemoryUse | None
    simulation: Simulation | None

    @property
    def is_outside(self) -> bool:
        """Whether it runs once, before or after the loop over micro-batches."""
        return self.part.phase in (Phase.BEFORE, Phase.AFTER)


@dataclass(frozen=True)
class ComparedPlace:
    """One placement: what each process with devices there has, if it has no others.

    Arguments:
      plan: of the placement, with its memory under the schedule.
      stages: those that live there.
      pieces: as they were compiled.
      peak: the most that a device holds, by XLA; None where the backend does not say.
    """

    plan: PlanData
    stages: tuple[int, ...]
    pieces: tuple[CompiledPiece, ...]
    peak: PeakMemory | None

    @property
    def programs(self) -> dict[str, CompiledPiece]:
        """The programs that are compiled there, by their keys: equal pieces have one."""
        return {p.program: p for p in reversed(self.pieces)}

    @property
    def size_bytes(self) -> int:
        """Of all serialised executables."""
        return sum(p.size_bytes or 0 for p in self.programs.values())

    @property
    def cpu_seconds(self) -> float:
        """Of lowering and compiling them."""
        return math.fsum(p.cpu_seconds for p in self.programs.values())

    @property
    def wire_bytes(self) -> float:
        """What one device sends to others of the placement per step, as compiled."""
        return math.fsum(p.times * p.wire_bytes for p in self.pieces)

    @property
    def memory_error(self) -> float:
        """How far the plan's memory is from XLA's, relative to XLA's; NaN where XLA does not say."""
        return math.nan if self.peak is None else self.plan.memory_bytes / self.peak.bytes - 1


@dataclass(frozen=True)
class ComparedTransfer:
    """A tensor's way from a placement to another one, where these are of different processes.

    Arguments:
      source, target: the positions of the placements.
      inside, times: whether it goes for every micro-batch, and how often in a step.
      program: the key of its text: ways that are alike have one.
      shard_bytes: what one device receives at a time.
      relaid: how many programs of one placement lay it anew, before or afterwards.
    """

    source: int
    target: int
    inside: bool
    times: int
    tensor: str
    program: str
    size_bytes: int | None
    cpu_seconds: float
    shard_bytes: float
    relaid: int


@dataclass(frozen=True, repr=False)
class ComparedPipeline(ComparedProgram):
    """Plan against compiled pieces. `PipelineReport` (report.py) is the same with its ways to be shown.

    There is no single program: `collectives`, `rows` and `origins` are empty, `memory` and `simulation` None.

    Arguments:
      places: per placement.
      ways: what is sent between placements.
      timeline: the schedule, with the simulated times of pieces; None without micro-batches or rates.
      simulated_seconds: of a step; None without rates.
    """

    places: tuple[ComparedPlace, ...] = ()
    ways: tuple[ComparedTransfer, ...] = ()
    timeline: Timeline | None = None
    simulated_seconds: float | None = None

    @property
    def wire_bytes(self) -> float:
        """What the devices of all placements send inside of these per step, one of each."""
        return math.fsum(p.wire_bytes for p in self.places)

    @property
    def byte_error(self) -> float:
        """How far that is from the plan's, relative to the plan's."""
        planned = math.fsum(p.plan.wire_bytes for p in self.places)
        return self.wire_bytes / planned - 1 if planned else 0.0 if not self.wire_bytes else math.inf

    @property
    def memory_error(self) -> float:
        """The largest error of a placement's memory; NaN where XLA does not say."""
        return max((p.memory_error for p in self.places), key=abs, default=math.nan)

    @property
    def fits(self) -> bool:
        """Whether every compiled placement is within the memory of a device."""
        return all(
            (p.plan.memory_bytes if p.peak is None else p.peak.bytes) <= p.plan.hardware.memory_bytes
            for p in self.places
        )
