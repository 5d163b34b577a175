"""Compiles the pieces of a pipeline without running them, as its processes would, and reports their needs.

In: a plan, and devices that may be absent. Out: a `PipelineReport`. Used by: `Program.report`.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sbp.passes.boxing.links import Network
from sbp.passes.physical.program import Physical
from sbp.passes.pipeline.edges import edges_of
from sbp.passes.pipeline.slots import Cut, Piece, Slot
from sbp.passes.pipeline.times import TransferTime, estimated_times, ways
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.actions import Kind
from sbp.passes.schedule.communication import issue_order
from sbp.passes.schedule.simulate import simulate as simulate_schedule
from sbp.placement import Placement
from sbp.rates.chips import Chip
from sbp.runtime.hlo.meter import read_hlo, text_of
from sbp.runtime.lower.lowering import ProgramName
from sbp.runtime.pipeline.memory import MemoryWalk, PieceNeeds
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.pipeline.stage_programs import Slots, given_away, traced_piece
from sbp.runtime.pipeline.transfer_engine import StageTransfer, relays_of
from sbp.runtime.report.pipeline_comparison import ComparedPlace, ComparedTransfer, CompiledPiece
from sbp.runtime.report.report import PipelineReport
from sbp.runtime.target.comparison import memory_of
from sbp.runtime.target.simulation import simulate

MeshOf: TypeAlias = Callable[[Placement], Mesh]
"""The mesh of a placement, over devices that need not be here."""


@dataclass(frozen=True)
class CompiledText:
    """A program that XLA has compiled.

    Arguments:
      program: XLA's executable.
      size_bytes: of it, serialised; None if the backend cannot serialise it.
      cpu_seconds: of lowering and compiling, of all threads.
    """

    program: jax.stages.Compiled
    size_bytes: int | None
    cpu_seconds: float


@dataclass
class Compiler:
    """Compiles programs, each text once.

    Arguments:
      platform: to lower for; None for that of the devices.
    """

    platform: str | None
    texts: dict[str, CompiledText] = field(default_factory=dict)

    def get(self, trace: Callable[[], jax.stages.Traced]) -> tuple[str, CompiledText]:
        """A program by its key, and what was made of it."""
        began = time.process_time()
        traced = trace()
        platforms = None if self.platform is None else (self.platform,)
        lowered = traced.lower() if platforms is None else traced.lower(lowering_platforms=platforms)
        key = hashlib.sha256(f"{lowered.args_info}{lowered.as_text()}".encode()).hexdigest()
        if key not in self.texts:
            made = lowered.compile()
            self.texts[key] = CompiledText(made, _size(made), time.process_time() - began)
        return key, self.texts[key]


def _size(compiled: jax.stages.Compiled) -> int | None:
    executable: Any = compiled.runtime_executable()
    try:
        return len(executable.serialize())
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


@dataclass(frozen=True)
class _Reporting:
    built: CompiledPipeline
    mesh_of: MeshOf
    chip: Chip | None
    domain_devices: int | None
    compiling: Compiler

    def report(self) -> PipelineReport:
        built = self.built
        stages, plan = built.stages, built.plan
        merged = built.schedule is None or not built.schedule.splits
        cuts = stages.cuts(merged)
        slots = [Slots(c.physical, self.mesh_of(c.physical.placement)) for c in cuts]
        pieces = [self.pieces(c, s, merged) for c, s in zip(cuts, slots, strict=True)]
        needs = {
            (k, part): PieceNeeds(found.memory.temporary, found.memory.results - found.memory.aliased, gone)
            for k, own in enumerate(pieces)
            for part, (found, gone) in own.items()
            if found.memory is not None
        }
        known = len(needs) == sum(map(len, pieces))
        order = () if built.schedule is None else issue_order(built.schedule, edges_of(cuts))
        walk = MemoryWalk(cuts, slots, stages.stages, order, stages.microbatches, needs)
        peaks = walk.peaks() if known else [None] * len(cuts)
        places = tuple(
            ComparedPlace(
                plan=p,
                stages=tuple(s for s, at in enumerate(stages.stages) if at == k),
                pieces=tuple(found for found, _ in own.values()),
                peak=peak,
            )
            for k, (p, own, peak) in enumerate(zip(plan.stages, pieces, peaks, strict=True))
        )
        timeline, step = self.simulate(cuts, places)
        return PipelineReport(
            plan=plan,
            target=plan.hardware.name if self.chip is None else self.chip.description,
            collectives=(),
            rows=(),
            memory=None,
            simulation=None,
            origins={},
            places=places,
            ways=tuple(self.ways(cuts, slots)),
            timeline=timeline,
            simulated_seconds=step,
        )

    def pieces(
        self, cut: Cut, slots: Slots, merged: bool
    ) -> dict[Part, tuple[CompiledPiece, frozenset[Slot]]]:
        """The pieces of a placement, in an order in which they can run, each with slots it may donate."""
        built, stages = self.built, self.built.stages
        donate = (
            built.donate if built.stacked_leaves is None else built.stacked_leaves.donated_parts(built.donate)
        )
        taken, title = given_away(slots, cut, donate), ProgramName(stages.name, stages.traced.source)
        ranks = cut.physical.placement.ranks
        out = {}
        for i, piece in enumerate(cut.pieces):
            gone = taken.get(i, set())
            key, made = self.compiling.get(
                partial(traced_piece, slots, piece, stages.microbatches, gone, title)
            )
            text = text_of(made.program)
            simulation = None
            if self.chip is not None:
                simulation = simulate(text, self.chip, domain_devices=self.domain_devices, ranks=ranks)
            out[piece.part] = (
                CompiledPiece(
                    part=piece.part,
                    name=_name(piece.part, merged),
                    times=_times(piece, stages.microbatches),
                    program=key,
                    size_bytes=made.size_bytes,
                    cpu_seconds=made.cpu_seconds,
                    wire_bytes=read_hlo(text).wire_bytes,
                    memory=memory_of(made.program),
                    simulation=simulation,
                ),
                frozenset(gone),
            )
        return out

    def simulate(self, cuts: Sequence[Cut], places: Sequence[ComparedPlace]) -> tuple[Any, float | None]:
        """The schedule with simulated times of pieces, and the seconds of a step; None without rates."""
        stages = self.built.stages
        seconds = {
            (k, p.part): None if p.simulation is None else p.simulation.seconds
            for k, place in enumerate(places)
            for p in place.pieces
        }
        if any(s is None for s in seconds.values()):
            return None, None

        def taken(physical: Physical, piece: Piece, network: Network) -> float:
            place = next(k for k, c in enumerate(cuts) if c.physical is physical)
            return seconds[place, piece.part] or 0.0

        once = sum(way.seconds(stages) for way in ways(stages, cuts) if not way.inside)
        outside = max(
            sum(p.simulation.seconds for p in place.pieces if p.simulation is not None and p.is_outside)
            for place in places
        )
        if self.built.schedule is None:
            return None, outside + once
        times = estimated_times(stages, cuts, taken)
        timeline = simulate_schedule(self.built.schedule, times, edges_of(cuts))
        return timeline, float(timeline.makespan) + outside + once

    def ways(self, cuts: Sequence[Cut], slots: Sequence[Slots]) -> list[ComparedTransfer]:
        """The transfers between placements, compiled as by processes that have one placement each."""
        stages = self.built.stages
        return [
            self.way(way, self.transfer(way, cuts, slots), stages.microbatches) for way in ways(stages, cuts)
        ]

    def transfer(self, way: TransferTime, cuts: Sequence[Cut], slots: Sequence[Slots]) -> StageTransfer:
        """A tensor that is sent, on the devices of both sides: senders first, as XLA wants them in order."""
        out, into = cuts[way.source], cuts[way.target]
        leaves = (out.micro_sends if way.inside else out.sends)[way.value]
        comes = (into.micro_receives if way.inside else into.receives)[way.value]
        a, b = slots[way.source], slots[way.target]
        joint = self.mesh_of(_side_by_side(a.physical.placement, b.physical.placement))
        devices = joint.devices.flatten()
        one, two = (
            Mesh(part.reshape(s.mesh.devices.shape), s.mesh.axis_names)
            for s, part in ((a, devices[: a.mesh.size]), (b, devices[a.mesh.size :]))
        )
        held = a.struct(leaves)
        lying = NamedSharding(one, a.spec(leaves)), NamedSharding(two, b.spec(comes))
        return StageTransfer(held.shape, held.dtype, *lying)

    def way(self, way: TransferTime, transfer: StageTransfer, microbatches: int) -> ComparedTransfer:
        """One transfer."""
        crossing = transfer.process_transfer
        key, made = self.compiling.get(lambda: crossing.program.trace(crossing.struct))
        return ComparedTransfer(
            source=way.source,
            target=way.target,
            inside=way.inside,
            times=microbatches if way.inside else 1,
            tensor=self.built.stages.labels.names.of(way.value),
            program=key,
            size_bytes=made.size_bytes,
            cpu_seconds=made.cpu_seconds,
            shard_bytes=float(np.prod(crossing.local)) * np.dtype(crossing.dtype).itemsize,
            relaid=sum(relays_of(transfer, crossing)),
        )


def _name(part: Part, merged: bool) -> str:
    if part.phase in (Phase.BEFORE, Phase.AFTER):
        return f"{part.phase} {part.at}" if part.at else str(part.phase)
    return f"{Kind.B if merged and part.phase is Phase.INPUT else part.phase}{part.at}"


def _times(piece: Piece, microbatches: int) -> int:
    return 1 if piece.part.phase in (Phase.BEFORE, Phase.AFTER) else microbatches


def _side_by_side(a: Placement, b: Placement) -> Placement:
    """The devices of two placements in a row."""
    return Placement(a.kind, (*a.ranks, *b.ranks), (a.size + b.size,), ("way",))


def pipeline_report(
    built: CompiledPipeline,
    mesh_of: MeshOf,
    chip: Chip | None,
    platform: str | None = None,
    domain_devices: int | None = None,
) -> PipelineReport:
    """The report of the compiled pieces of a pipeline.

    Arguments:
      mesh_of: the devices to compile for.
      chip: the chip whose rates pieces are simulated with; None for no simulation.
      platform: to lower for; None for that of the devices.
      domain_devices: devices that NVLink connects, if not the chip's default.
    """
    return _Reporting(built, mesh_of, chip, domain_devices, Compiler(platform)).report()
