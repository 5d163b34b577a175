"""The collectives of a compiled program: their bytes, their rows of the plan, and their times."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sbp.passes.face import Plan
from sbp.runtime.hlo.meter import HasText, Meter, MeteredCollective
from sbp.runtime.hlo.origins import Origin, rows_of
from sbp.runtime.hlo.parser import Computation, Instruction, Module
from sbp.runtime.hlo.shapes import arrays
from sbp.runtime.target.events import Event, Simulation


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective of the compiled program, at one call site.

    Arguments:
      instruction: its name.
      kind, group_size: as in `Collective`.
      count: executions per step.
      wire_bytes: the bytes that one device sends per step.
      asynchronous: whether kernels may run beside it.
      dtypes: XLA's element types, one per tensor.
      rows: the names of the plan's collectives that it is executed for.
      source: the user's line.
      conditional: whether it runs only if a bucket of keys of a sparse exchange is fuller than planned.
      seconds, exposed_seconds: simulated, per step: its time, and the time in which kernels wait for it; None
        if the chip is not known.
      kernels_beside: the kernels that run beside it, by name.
    """

    instruction: str
    kind: str
    group_size: int
    count: int
    wire_bytes: float
    asynchronous: bool
    dtypes: tuple[str, ...]
    rows: tuple[str, ...]
    source: str
    conditional: bool = False
    seconds: float | None = None
    exposed_seconds: float | None = None
    kernels_beside: tuple[str, ...] = ()


def collectives_of(
    module: Module, meter: Meter, compiled: HasText, plan: Plan, origins: Mapping[str, Origin]
) -> list[CompiledCollective]:
    """The collectives of a program, in the order of its text.

    Arguments:
      module, meter: of the text of `compiled`.
    """
    places = {x.name: (computation, x) for computation, x in module.instructions}
    asynchronous, meant = asynchronous_names(module), rows_of(compiled, plan)
    overflow = {c.instruction for c in meter.overflow}
    return [
        CompiledCollective(
            instruction=m.instruction,
            kind=m.kind,
            group_size=m.group_size,
            count=m.count,
            wire_bytes=m.wire_bytes,
            asynchronous=m.instruction in asynchronous,
            dtypes=_dtypes(*places[m.instruction]),
            rows=tuple(c.name for c in meant.get(m.instruction, ())),
            source=origins[m.instruction].source,
            conditional=m.instruction in overflow,
        )
        for m in _sites(meter)
    ]


def with_times(found: Sequence[CompiledCollective], simulation: Simulation) -> list[CompiledCollective]:
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
                kernels_beside=tuple(dict.fromkeys(name for e in same for name in e.kernels)),
            )
        )
    return out


def _sites(meter: Meter) -> list[MeteredCollective]:
    """The collectives of a program; an instruction whose computation has two callers is one."""
    sites: dict[str, MeteredCollective] = {}
    for c in (*meter.collectives, *meter.overflow):
        if c.instruction in sites:
            same = sites[c.instruction]
            c = replace(c, count=c.count + same.count, wire_bytes=c.wire_bytes + same.wire_bytes)
        sites[c.instruction] = c
    return list(sites.values())


def asynchronous_names(module: Module) -> set[str]:
    """The instructions that have a `-start` and a `-done`, or lie in a computation that has them.

    XLA writes those that it schedules back to back without the two halves, or marks them `is_sync`.
    """
    out: set[str] = set()
    for _, x in module.instructions:
        if x.opcode.endswith("-start") and not x.is_synchronous:
            held = x.called_computations("calls") if x.opcode == "async-start" else ()
            out.update([x.name, *(name for c in held for name in module.computations[c].instructions)])
    return out


def _dtypes(computation: Computation, x: Instruction) -> tuple[str, ...]:
    operands = [computation.instructions[name] for name in x.operands if name in computation.instructions]
    return tuple(a.dtype for operand in operands for a in arrays(operand.shape))
