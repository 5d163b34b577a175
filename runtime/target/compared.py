"""The plan of a program beside what XLA made of it: collectives, bytes, memory, and the simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import networkx as nx

from sbp.passes.boxing.moves import Move
from sbp.passes.explain.collectives import talking
from sbp.passes.explain.plan import Collective
from sbp.passes.face import Plan
from sbp.passes.physical.program import Box
from sbp.rates.chips import Chip
from sbp.runtime.look.hlo_text import Module, parse
from sbp.runtime.look.meter import HasText, Meter, MeteredCollective, read_hlo, text_of
from sbp.runtime.look.origins import Origin, origins_of, rows_in, rows_of
from sbp.runtime.target.events import Event, Simulation
from sbp.runtime.target.simulate import simulate
from sbp.talk.exchange import OVERFLOW

TOLERANCE = 0.01
"""How far bytes of the compiled program may be from those of the plan before the report says so, relative."""


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
class CompiledCollective:
    """One collective of the compiled program, at one call site.

    Arguments:
      instruction: its name there.
      kind, group_size: as of `Collective`.
      count: executions per step.
      wire_bytes: what one device sends per step.
      asynchronous: whether kernels may run while it is under way.
      rows: the names of the plan's collectives that it is executed for.
      source: the user's line.
      conditional: whether it runs only if a bucket of keys of a sparse exchange is fuller than planned.
      seconds, exposed_seconds: simulated, per step: how long it takes, and how long kernels wait for it; None
        where no chip is known.
      during: the kernels that run while it is under way, by name.
    """

    instruction: str
    kind: str
    group_size: int
    count: int
    wire_bytes: float
    asynchronous: bool
    rows: tuple[str, ...]
    source: str
    conditional: bool = False
    seconds: float | None = None
    exposed_seconds: float | None = None
    during: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFate:
    """What became of one collective of the plan.

    Arguments:
      row: its name.
      instructions: those that are executed for it; of one that XLA removed, those of its equal.
      remark: one sentence; "" if it is one instruction of the planned kind, and its own.
      explained: whether it is known why it is not as planned.
      removed: whether XLA left it out.
      changed: whether XLA makes another kind of collective of it.
    """

    row: str
    instructions: tuple[str, ...]
    remark: str = ""
    explained: bool = True
    removed: bool = False
    changed: bool = False


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
    rows: tuple[RowFate, ...]
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
    plan: Plan, compiled: HasMemory, chip: Chip | None, lowered_text: Callable[[], str]
) -> ComparedProgram:
    """A compiled program beside its plan.

    Arguments:
      plan: what it was compiled from.
      compiled: XLA's executable.
      chip: what it is compiled for, whose rates the schedule is simulated with; None for no simulation.
      lowered_text: gives the program as XLA was given it, with names; asked only where XLA left rows out.

    Raises:
      HloTextError: if the backend gives no text, or one that cannot be read.
    """
    text = text_of(compiled)
    module, meter = parse(text), read_hlo(text)
    simulation = None if chip is None else simulate(text, chip)
    origins, meant = origins_of(compiled), rows_of(compiled, plan)
    found = [_collective(m, meter, meant, origins, module) for m in _sites(meter)]
    found = found if simulation is None else _timed(found, simulation)
    return ComparedProgram(
        plan=plan,
        target=plan.hardware.name if chip is None else chip.description,
        collectives=tuple(found),
        rows=_fates(plan, found, lowered_text),
        memory=_memory(compiled),
        simulation=simulation,
        origins=origins,
    )


def _relative(a: float, b: float) -> float:
    return (a - b) / b if b else 0.0 if a == b else math.inf


def _sites(meter: Meter) -> list[MeteredCollective]:
    """The collectives of a program; those of an instruction whose computation has two callers are one."""
    sites: dict[str, MeteredCollective] = {}
    for c in meter.collectives:
        if c.instruction in sites:
            same = sites[c.instruction]
            c = replace(c, count=c.count + same.count, wire_bytes=c.wire_bytes + same.wire_bytes)
        sites[c.instruction] = c
    return list(sites.values())


def _collective(
    m: MeteredCollective,
    meter: Meter,
    meant: Mapping[str, tuple[Collective, ...]],
    origins: Mapping[str, Origin],
    module: Module,
) -> CompiledCollective:
    return CompiledCollective(
        instruction=m.instruction,
        kind=m.kind,
        group_size=m.group_size,
        count=m.count,
        wire_bytes=m.wire_bytes,
        asynchronous=_is_asynchronous(m.instruction, module),
        rows=tuple(c.name for c in meant.get(m.instruction, ())),
        source=origins[m.instruction].source,
        conditional=OVERFLOW in m.source,
    )


def _is_asynchronous(name: str, module: Module) -> bool:
    """Whether an instruction has a `-start` and a `-done`, or stands in a computation of its own that has.

    XLA writes those that it schedules back to back without the two halves, or marks them `is_sync`.
    """
    wrapped = {
        called: x
        for computation in module.computations.values()
        for x in computation.instructions.values()
        if x.opcode == "async-start"
        for called in x.called("calls")
    }
    for title, computation in module.computations.items():
        x = computation.instructions.get(name)
        if x is not None:
            begun = x if x.opcode.endswith("-start") else wrapped.get(title)
            return begun is not None and '"is_sync":true' not in "".join(
                begun.attributes.get("backend_config", ())
            )
    return False


def _timed(found: Sequence[CompiledCollective], simulation: Simulation) -> list[CompiledCollective]:
    """The collectives with their simulated times."""
    events: dict[str, list[Event]] = {}
    for e in simulation.events:
        events.setdefault(e.instruction, []).append(e)
    out = []
    for c in found:
        same = events.get(c.instruction, ())  # one per caller of its computation
        out.append(
            replace(
                c,
                seconds=math.fsum(e.seconds for e in same),
                exposed_seconds=math.fsum(e.exposed_seconds for e in same),
                during=tuple(dict.fromkeys(name for e in same for name in e.during)),
            )
        )
    return out


def _memory(compiled: HasMemory) -> MemoryUse | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryUse(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
    )


def _fates(
    plan: Plan, found: Sequence[CompiledCollective], lowered_text: Callable[[], str]
) -> tuple[RowFate, ...]:
    """What became of each row: by the instructions that name it, and for the others by what they were."""
    of: dict[str, list[CompiledCollective]] = {c.name: [] for c in plan.collectives}
    for c in found:
        for row in c.rows:
            of[row].append(c)
    bytes_of = _bytes_together(plan, found)
    lost = [c.name for c in plan.collectives if not of[c.name]]
    gone = _gone(plan, lost, of, lowered_text) if lost else {}
    return tuple(gone.get(c.name) or _kept(c, of[c.name], bytes_of[c.name]) for c in plan.collectives)


def _bytes_together(plan: Plan, found: Sequence[CompiledCollective]) -> Mapping[str, tuple[float, float]]:
    """Per row: bytes of plan and program, of all rows and instructions that are connected with it."""
    rows = {c.name: c.wire_bytes for c in plan.collectives}
    graph = nx.Graph()
    graph.add_nodes_from(rows)
    for c in found:
        graph.add_edges_from((row, (c.instruction,)) for row in c.rows)
    sent = {c.instruction: 0.0 if c.conditional else c.wire_bytes for c in found}
    out: dict[str, tuple[float, float]] = {}
    for group in nx.connected_components(graph):
        planned = math.fsum(rows[x] for x in group if isinstance(x, str))
        compiled = math.fsum(sent[x[0]] for x in group if not isinstance(x, str))
        out.update({x: (planned, compiled) for x in group if isinstance(x, str)})
    return out


def _kept(row: Collective, made: Sequence[CompiledCollective], sent: tuple[float, float]) -> RowFate:
    """The fate of a row that instructions name."""
    names = tuple(c.instruction for c in made)
    remarks = []
    others = {c.kind for c in made} - {row.kind}
    if others:
        remarks.append(f"XLA makes {' and '.join(sorted(others)).replace('_', '-')} of it")
    with_others = sorted({r for c in made for r in c.rows if r != row.name})
    if with_others:
        remarks.append(f"sent together with {_listed(with_others)}")
    if len(names) > 1:
        remarks.append(f"sent by {len(names)} instructions")
    planned, compiled = sent
    same = abs(compiled - planned) <= TOLERANCE * max(planned, 1.0)
    if not same:
        remarks.append(f"XLA sends {compiled:.4g} bytes for {planned:.4g} planned")
    return RowFate(row.name, names, "; ".join(remarks), same, changed=bool(others))


def _listed(rows: Sequence[str]) -> str:
    """
    >>> _listed(["row1"]), _listed(["row1", "row2", "row3", "row4"])
    ('row1', 'row1, row2 and 2 more')
    """
    return ", ".join(rows) if len(rows) < 4 else f"{', '.join(rows[:2])} and {len(rows) - 2} more"


def _gone(
    plan: Plan,
    lost: Sequence[str],
    of: Mapping[str, Sequence[CompiledCollective]],
    lowered_text: Callable[[], str],
) -> dict[str, RowFate]:
    """The fates of rows that no instruction names."""
    meaning = _meanings(plan)
    sent = {meaning[name]: name for name, made in of.items() if made and name in meaning}
    lowered, out = rows_in(lowered_text()), {}
    for name in lost:
        twin = sent.get(meaning[name]) if name in meaning else None
        if twin is not None:
            remark = f"removed: equal to {twin}, which XLA sends once for both"
        elif name not in lowered:
            remark = "removed: nothing reads it"
        else:
            remark = "removed: XLA knows the value, or that nothing reads it"
        made = tuple(c.instruction for c in of[twin]) if twin else ()
        out[name] = RowFate(name, made, remark, removed=True)
    return out


def _meanings(plan: Plan) -> dict[str, tuple[int, Move]]:
    """What each row that is a move moves, and how: equal ones give equal tensors."""
    if plan.physical is None:
        return {}
    steps = [what for what, _ in talking(plan.physical)]
    return {
        c.name: (s.value, s.move) for c, s in zip(plan.collectives, steps, strict=True) if isinstance(s, Box)
    }
