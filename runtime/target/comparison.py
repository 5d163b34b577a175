"""The plan of a program beside what XLA made of it: collectives, bytes, memory, and the simulated step."""

from __future__ import annotations

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
from sbp.runtime.target.collective_sites import CompiledCollective, collectives_of, timed
from sbp.runtime.target.events import Simulation
from sbp.runtime.target.simulation import simulate


class MemoryStats(Protocol):
    """XLA's figures of one executable, bytes per device."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


class HasMemory(HasText, Protocol):
    """What a report needs of a `jax.stages.Compiled`."""

    def memory_analysis(self) -> MemoryStats | None: ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What one device holds, in bytes, by XLA.

    Arguments:
      arguments, results, temporary: as XLA's buffer assignment has them.
      aliased: results that lie in the memory of donated arguments.
    """

    arguments: int
    results: int
    temporary: int
    aliased: int

    @property
    def peak(self) -> int:
        """All of it together."""
        return self.arguments + self.results + self.temporary - self.aliased


@dataclass(frozen=True, repr=False)
class ComparedProgram:
    """Plan against compiled program. `ProgramReport` (report.py) is the same with its ways to be shown.

    Arguments:
      plan: of the program.
      target: what XLA compiled for.
      collectives: of the compiled program, in the order of its text.
      rows: what became of each collective of the plan, in the plan's order.
      memory: by XLA; None where the backend does not say.
      simulation: of the compiled schedule on the target; None where its rates are not known.
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
        """What one device sends per step as compiled, but for what runs only if data demand it."""
        return math.fsum(c.wire_bytes for c in self.collectives if not c.conditional)

    @property
    def byte_error(self) -> float:
        """How far the compiled program's bytes are from the plan's, relative to the plan's."""
        return _relative(self.wire_bytes, self.plan.wire_bytes)

    @property
    def memory_error(self) -> float:
        """How far the plan's memory is from XLA's, relative to XLA's; NaN where XLA does not say."""
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
    def unexplained(self) -> tuple[str, ...]:
        """What is not known to be right: a sentence each."""
        added = [
            f"{c.instruction} ({c.kind}, {c.source or 'no line'}) is for no collective of the plan"
            for c in self.collectives
            if not c.rows
        ]
        return (*added, *(f"{r.row}: {r.remark}" for r in self.rows if not r.explained))


def compared(
    plan: Plan,
    compiled: HasMemory,
    chip: Chip | None,
    lowered_text: Callable[[], str],
    domain_devices: int | None = None,
) -> ComparedProgram:
    """A compiled program beside its plan.

    Arguments:
      plan: what it was compiled from.
      compiled: XLA's executable.
      chip: what it is compiled for, whose rates the schedule is simulated with; None for no simulation.
      lowered_text: gives the program as XLA was given it, with names; asked only where XLA left rows out.
      domain_devices: devices that NVLink connects, if not as many as usual for the chip.

    Raises:
      HloTextError: if the backend gives no text, or one that cannot be read.
    """
    text = text_of(compiled)
    module, meter = parse(text), read_hlo(text)
    ranks = plan.placement.ranks
    simulation = None if chip is None else simulate(text, chip, domain_devices=domain_devices, ranks=ranks)
    origins = origins_of(compiled)
    found = shared_code(plan, collectives_of(module, meter, compiled, plan, origins))
    found = found if simulation is None else timed(found, simulation)
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
    """What one device holds, by XLA; None where the backend does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryUse(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
    )
