"""Aligns a step of a compiled program with the plan: from instructions to steps and rows."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sbp.passes.explain.collectives import ROW_SCOPE
from sbp.passes.explain.measurement import MeasuredCollective, MeasuredSpan, MeasuredStep
from sbp.passes.explain.plan import Collective
from sbp.runtime.hlo.groups import Groups, device_groups
from sbp.runtime.hlo.parser import Instruction, Module
from sbp.runtime.profile.trace import TracedStep
from sbp.runtime.profile.trace_attribution import KERNEL, SENDING, WAITING, StepAttribution, account, arrivals
from sbp.runtime.target.collective_matching import RowMatch
from sbp.runtime.target.collective_sites import CompiledCollective
from sbp.runtime.target.comparison import ComparedProgram

MARK = "step"
"""Of the name of a step's instructions, before its number."""
_MARKS = re.compile(re.escape(ROW_SCOPE) + rf"({MARK}\d+(?:\+{MARK}\d+)*)")
_AROUND = ("while", "conditional", "call")
"""What has an event on a CPU that only surrounds those of others."""
_UNSEEN = ("get-tuple-element", "tuple", "bitcast", "copy-done", "async-done")
"""What is no op when it runs: what reads it reads what it was made of."""


@dataclass(frozen=True)
class ProgramReader:
    """The instructions of a compiled program, read from its text.

    Arguments:
      estimates: per step of the program, the seconds of one execution, by its number.
    """

    module: Module
    estimates: Sequence[float]

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Other names of an instruction in a profile: as it was scheduled, or of the one that starts it."""
        known = {x.name for _, x in self.module.instructions}
        found: dict[str, str] = {}
        for _, x in self.module.instructions:
            scheduled = x.metadata.get("scheduling_name", x.name)
            if scheduled not in known:
                found[scheduled] = x.name
            if x.opcode == "async-start":
                found.update(
                    (x.name, self.module.computations[c].root) for c in x.called_computations("calls")
                )
        return found

    @cached_property
    def containers(self) -> frozenset[str]:
        """Instructions that only surround others."""
        return frozenset(x.name for _, x in self.module.instructions if x.opcode in _AROUND)

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Per instruction, the instructions of its computation that read its result."""
        found: dict[str, tuple[str, ...]] = {}
        for computation in self.module.computations.values():
            direct: dict[str, list[Instruction]] = {}
            for x in computation.instructions.values():
                for name in x.operands:
                    direct.setdefault(name, []).append(x)
            # Users stand behind what they use.
            for name in reversed(computation.instructions):
                own = direct.get(name, [])
                seen = [[x.name] if x.opcode not in _UNSEEN else found[x.name] for x in own]
                found[name] = tuple(dict.fromkeys(n for names in seen for n in names))
        return found

    def shares(self, name: str) -> Mapping[int, float]:
        """The steps of the program that an instruction belongs to, with a share for each.

        Steps in one kernel share it by their estimated times.
        """
        return self._shares.get(name, {})

    @cached_property
    def _shares(self) -> Mapping[str, Mapping[int, float]]:
        return {x.name: self._shared(x) for _, x in self.module.instructions}

    def _shared(self, x: Instruction) -> Mapping[int, float]:
        steps = list(dict.fromkeys(self._steps(x)))
        seconds = [self.estimates[k] for k in steps]
        total = math.fsum(seconds)
        if not total:
            return dict.fromkeys(steps, 1 / len(steps)) if steps else {}
        return {k: s / total for k, s in zip(steps, seconds, strict=True)}

    def _steps(self, x: Instruction) -> Iterator[int]:
        """The numbers of steps in its name, and in the names of the ops that it has fused."""
        for marks in _MARKS.findall(x.path):
            yield from (int(mark.removeprefix(MARK)) for mark in marks.split("+"))
        if x.opcode in _AROUND:
            return
        for called in x.inner:
            for inner in self.module.computations[called].instructions.values():
                yield from self._steps(inner)

    def groups(self, names: Sequence[str], devices: Sequence[int]) -> Mapping[str, Groups]:
        """Per collective, the groups of devices that exchange data.

        Arguments:
          devices: the number of each partition's device in its process.
        """
        wanted, found = set(names), dict[str, Groups]()
        for _, x in self.module.instructions:
            if x.name in wanted:
                ids = device_groups(x, self.module.header)
                found[x.name] = tuple(tuple(devices[p] for p in g if p < len(devices)) for g in ids)
        return found


def measured_step(
    traced: Sequence[TracedStep],
    compared: ComparedProgram,
    reader: ProgramReader,
    devices: Sequence[int],
    how: str,
) -> MeasuredStep:
    """The step of median length, aligned with the plan.

    Arguments:
      compared: the program beside its plan.
      devices: per partition, the number of its device in its process.
    """
    step = sorted(traced, key=lambda s: s.seconds)[len(traced) // 2].within
    known = reader.aliases
    events = tuple(
        replace(e, instruction=known.get(e.instruction, e.instruction))
        for e in step.events
        if e.device in devices
    )
    step = replace(step, events=events)
    containers = reader.containers if step.surrounds else frozenset[str]()
    groups = reader.groups([c.instruction for c in compared.collectives], devices)
    found = account(step, groups, containers, sorted({e.device for e in events}))
    per_step, added = [0.0] * len(reader.estimates), 0.0
    for name, seconds in found.by_cause[KERNEL].items():
        shares = reader.shares(name)
        for k, share in shares.items():
            per_step[k] += share * seconds
        added += 0.0 if shares else seconds
    return MeasuredStep(
        "measured",
        how,
        found.seconds,
        found.devices,
        tuple(per_step),
        added,
        tuple(collective_times(compared, found)),
        found.idle_before,
        found.idle_between,
        found.idle_after,
        tuple(_spans(step, reader, compared, groups)),
    )


def collective_times(compared: ComparedProgram, found: StepAttribution) -> Iterator[MeasuredCollective]:
    """The time of each row, and of collectives without a row."""
    rows = {c.name: c for c in compared.plan.collectives}
    sites = {c.instruction: c for c in compared.collectives}
    for fate in compared.rows:
        own = [sites[name] for name in fate.instructions if name in sites and fate.row in sites[name].rows]
        seen = [c for c in own if found.times[c.instruction]]
        if not seen:
            yield MeasuredCollective(fate.row, None, remark=_unseen(fate, own))
            continue
        shares = [(c.instruction, share_of(rows, fate.row, c.rows)) for c in seen]
        yield MeasuredCollective(
            fate.row,
            math.fsum(found.collectives[name] * share for name, share in shares),
            math.fsum(found.by_cause[SENDING][name] * share for name, share in shares),
            math.fsum(found.by_cause[WAITING][name] * share for name, share in shares),
            sum(found.times[c.instruction] for c in seen),
            "; ".join(_remarks(fate, own, found)),
        )
    for c in compared.collectives:
        if not c.rows and found.times[c.instruction]:
            name = c.instruction
            yield MeasuredCollective(
                "",
                found.collectives[name],
                found.by_cause[SENDING][name],
                found.by_cause[WAITING][name],
                found.times[name],
                f"{name} ({c.kind}) is for no collective of the plan",
            )


def share_of(rows: Mapping[str, Collective], row: str, together: Sequence[str]) -> float:
    """The share of an instruction that belongs to one of its rows, by their estimated times."""
    total = math.fsum([rows[name].seconds for name in together])
    return rows[row].seconds / total if total else 1 / len(together)


def _unseen(fate: RowMatch, own: Sequence[CompiledCollective]) -> str:
    """Why a row has no time."""
    if fate.removed or not own:
        return fate.remark or "no instruction of the compiled program is for it"
    if all(c.conditional for c in own):
        return "it runs only if a bucket of keys is fuller than planned"
    return f"the profile has no event of {', '.join(c.instruction for c in own)}"


def _remarks(fate: RowMatch, own: Sequence[CompiledCollective], found: StepAttribution) -> Iterator[str]:
    """What else the time of a row includes, or what it lacks."""
    if fate.remark:
        shared = any(len(c.rows) > 1 for c in own)
        yield fate.remark + (": time by their estimates" if shared else "")
    for c in own:
        times = found.times[c.instruction]
        if times < c.count and not c.conditional:
            yield f"{c.instruction} was seen {times} x of {c.count}"


def _spans(
    step: TracedStep, reader: ProgramReader, compared: ComparedProgram, groups: Mapping[str, Groups]
) -> Iterator[MeasuredSpan]:
    """The timeline of the first device."""
    came = arrivals(step.events, groups)
    first = min((e.device for e in step.events), default=0)
    rows = {c.instruction: c.rows for c in compared.collectives}
    for e in step.events:
        if e.device != first or (step.surrounds and e.instruction in reader.containers):
            continue
        shares = reader.shares(e.instruction)
        most = max(shares, key=lambda k: shares[k], default=-1)
        start, end = e.start - step.start, e.end - step.start
        if e.instruction not in rows:
            yield MeasuredSpan(start, end, most, label=e.instruction or e.kernel or "not named")
            continue
        own, last = rows[e.instruction], came.get(e, e.start) - step.start
        if last > start:
            yield MeasuredSpan(start, last, most, own, sends=True, waits=True, label=e.instruction)
        yield MeasuredSpan(last, end, most, own, sends=True, label=e.instruction)
