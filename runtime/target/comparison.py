"""Compares a plan with its compiled program: collectives, bytes, memory, and the simulated step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sbp.passes.face import Plan
from sbp.rates.chips import Chip
from sbp.runtime.hlo.meter import HasText, read_hlo, text_of
from sbp.runtime.hlo.origins import Origin, origins_of
from sbp.runtime.hlo.parser import parse
from sbp.runtime.target.collective_matching import RowMatch, fates, shared_code
from sbp.runtime.target.collective_sites import CompiledCollective, collectives_of, with_times
from sbp.runtime.target.events import Simulation
from sbp.runtime.target.simulation import simulate


class MemoryStats(Protocol):
    """XLA's figures of one executable, bytes per device."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


class HasMemory(HasText, Protocol):
    """The part of a `jax.stages.Compiled` that a report needs."""

    def memory_analysis(self) -> MemoryStats | None: ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of one device, in bytes, by XLA.

    Arguments:
      arguments, results, temporary: by XLA's buffer assignment.
      aliased: results in the memory of donated arguments.
    """

    arguments: int
    results: int
    temporary: int
    aliased: int

    @property
    def peak(self) -> int:
        """The sum."""
        return self.arguments + self.results + self.temporary - self.aliased


@dataclass(frozen=True, repr=False)
class ComparedProgram:
    """Plan against compiled program. `ProgramReport` (report/report.py) is the same with forms to show it.

    Arguments:
      plan: of the program.
      target: what XLA compiled for.
      collectives: of the compiled program, in the order of its text.
      rows: the match of each collective of the plan, in the plan's order.
      memory: by XLA; None if the backend has no figures.
      simulation: of the compiled schedule on the target; None if its rates are not known.
      origins: where each instruction comes from.
    """

    plan: Plan
    target: str
    collectives: tuple[CompiledCollective, ...]
    rows: tuple[RowMatch, ...]
    memory: MemoryUse | None
    simulation: Simulation | None
    origins: Mapping[str, Origin]

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends per step as compiled, without rounds that only some data need."""
        return math.fsum(c.wire_bytes for c in self.collectives if not c.conditional)

    @property
    def byte_error(self) -> float:
        """The error of the compiled program's bytes, relative to the plan's."""
        return _relative(self.wire_bytes, self.plan.wire_bytes)

    @property
    def memory_error(self) -> float:
        """The error of the plan's memory, relative to XLA's; NaN if XLA has no figures."""
        return math.nan if self.memory is None else _relative(self.plan.memory_bytes, self.memory.peak)

    @property
    def fits(self) -> bool:
        """Whether the compiled program is within the memory of a device."""
        peak = self.plan.memory_bytes if self.memory is None else self.memory.peak
        return peak <= self.plan.hardware.memory_bytes

    @property
    def tensors(self) -> Mapping[str, str]:
        """The tensor of each row of the plan, by the row's name."""
        return {c.name: c.tensor for c in self.plan.collectives}

    @property
    def kinds(self) -> Mapping[str, str]:
        """The kind of each row of the plan, by the row's name."""
        return {c.name: c.kind for c in self.plan.collectives}

    @property
    def unexplained_differences(self) -> tuple[str, ...]:
        """Differences without a known reason, a sentence each."""
        added = [
            f"{c.instruction} ({c.kind}, {c.source or 'no line'}) is for no collective of the plan"
            for c in self.collectives
            if not c.rows
        ]
        return (*added, *(f"{r.row}: {r.remark}" for r in self.rows if not r.explained))


def compare(
    plan: Plan,
    compiled: HasMemory,
    chip: Chip | None,
    lowered_text: Callable[[], str],
    domain_devices: int | None = None,
) -> ComparedProgram:
    """A compiled program beside its plan.

    Arguments:
      plan: the plan that it was compiled from.
      compiled: XLA's executable.
      chip: the chip whose rates the schedule is simulated with; None for no simulation.
      lowered_text: the program as XLA got it, with names; asked only if XLA left rows out.
      domain_devices: devices that NVLink connects, if not the chip's default.

    Raises:
      HloTextError: if the backend gives no text, or one that cannot be read.
    """
    text = text_of(compiled)
    module, meter = parse(text), read_hlo(text)
    ranks = plan.placement.ranks
    simulation = None if chip is None else simulate(text, chip, domain_devices=domain_devices, ranks=ranks)
    origins = origins_of(compiled)
    found = shared_code(plan, collectives_of(module, meter, compiled, plan, origins))
    found = found if simulation is None else with_times(found, simulation)
    return ComparedProgram(
        plan=plan,
        target=plan.hardware.name if chip is None else chip.description,
        collectives=tuple(found),
        rows=fates(plan, found, lowered_text),
        memory=memory_of(compiled),
        simulation=simulation,
        origins=origins,
    )


def _relative(a: float, b: float) -> float:
    return (a - b) / b if b else 0.0 if a == b else math.inf


def memory_of(compiled: HasMemory) -> MemoryUse | None:
    """The memory of one device, by XLA; None if the backend has no figures."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryUse(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
    )
