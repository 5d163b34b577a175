"""Decisions of a plan that constraints of JAX cannot express, for users who run it by `jax.jit`.

What constraints would cost or save that a plan leaves out.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import TypeAlias

from sbp.compat import core
from sbp.errors import SbpError
from sbp.layout import is_even
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move
from sbp.passes.explain.choices import changes
from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.plan_figures import figures_of
from sbp.passes.physical.program import Box, Compute, Physical, Step, reads, writes
from sbp.passes.plan.constraints import IgnoredConstraint
from sbp.passes.plan.cost import local_bytes
from sbp.passes.program.graph import Source
from sbp.signature import B, Partial
from sbp.text.units import bytes_text, seconds_text

TimedSteps: TypeAlias = Sequence[tuple[Step, int]]
"""Steps, with how often each is executed."""

MOST_NAMES = 3
"""Tensors that a decision names."""


@dataclass(frozen=True, slots=True)
class ConstraintGap:
    """A kind of decision.

    Arguments:
      what: the decision.
      tensors: the first tensors, with their lines.
      count: how many there are.
      cost: the cost without it, in words.
    """

    what: str
    tensors: tuple[str, ...]
    count: int
    cost: str

    def __str__(self) -> str:
        more = f" and {self.count - len(self.tensors)} more" if self.count > len(self.tensors) else ""
        return f"{self.what}: {', '.join(self.tensors)}{more}; {self.cost}"


def constraint_gaps(plan: PlanData) -> tuple[ConstraintGap, ...]:
    """The decisions of a plan that constraints cannot express; none for a plan from a file.

    Arguments:
      plan: of one placement.
    """
    physical = plan.physical
    if physical is None:
        return ()
    network = Network(plan.placement, plan.hardware)
    steps = list(physical.walk())
    found = (
        _waiting(physical, network, steps),
        _together(network, steps),
        _again(physical, steps),
        _uneven(physical, steps),
        _own(plan, steps),
    )
    return tuple(u for each in found for u in each)


def _tensors(physical: Physical, at: Sequence[tuple[int, object]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{physical.graph.values[v]} at {source}" for v, source in at))[:MOST_NAMES]


def _waiting(physical: Physical, network: Network, steps: TimedSteps) -> Iterator[ConstraintGap]:
    """Partial sums that ops compute with before they are added up."""
    found: dict[int, tuple[object, float]] = {}
    for step, times in steps:
        for v, nd in reads(step) if isinstance(step, Compute) else ():
            axes = tuple(a for a, s in enumerate(nd) if isinstance(s, Partial))
            if axes and isinstance(step, Compute):
                value, whole = (
                    physical.graph.values[v],
                    tuple(B if a in axes else s for a, s in enumerate(nd)),
                )
                move = Move("all_reduce", axes, nd, whole, nd[axes[0]], B)
                each = network.wire_bytes(move, value.shape, value.dtype) * times
                found[v] = step.node.source, max(each, found.get(v, (None, 0.0))[1])
    if found:
        most = max(each for _, each in found.values())
        tensors = _tensors(physical, [(v, source) for v, (source, _) in found.items()])
        cost = (
            "on automatic axes, or where JAX refuses it, jit adds each up where it is made: at most "
            f"{bytes_text(most)} more per tensor"
        )
        yield ConstraintGap("sums that wait", tensors, len(found), cost)


def _together(network: Network, steps: TimedSteps) -> Iterator[ConstraintGap]:
    """Collectives that are sent as one."""
    buckets: dict[int, list[Box]] = {}
    for step, _ in steps:
        if isinstance(step, Box) and step.bucket >= 0:
            buckets.setdefault(step.bucket, []).append(step)
    many = [boxes for boxes in buckets.values() if len(boxes) > 1]
    if many:
        count = sum(map(len, many))
        seconds = sum(
            (len(b) - 1) * network.collective_seconds(b[0].move.kind, b[0].move.axes, 0.0) for b in many
        )
        cost = f"XLA may combine them or not: up to {seconds_text(seconds)} more"
        yield ConstraintGap("collectives in buckets", (f"{count} in {len(many)}",), 1, cost)


def _again(physical: Physical, steps: TimedSteps) -> Iterator[ConstraintGap]:
    """Tensors that are gathered twice, so that they need not be kept."""
    found = [step for step, _ in steps if isinstance(step, Box) and step.after is not None]
    if found:
        values = [physical.graph.values[b.value] for b in found]
        kept = sum(core.itemsize(v.dtype) * math.prod(v.shape) for v in values)
        tensors = _tensors(physical, [(b.value, b.source) for b in found])
        cost = f"jit may make them once and keep them: up to {bytes_text(kept)} at the peak"
        yield ConstraintGap("tensors that are gathered again", tensors, len(found), cost)


def _uneven(physical: Physical, steps: TimedSteps) -> Iterator[ConstraintGap]:
    """Splits that do not divide a tensor."""
    found: dict[int, tuple[object, float]] = {}
    hierarchy = physical.placement.shape
    for step in (s for s, _ in steps if isinstance(s, Compute)):
        for v, nd in writes(step):
            value = physical.graph.values[v]
            whole = math.prod(value.shape) * core.itemsize(value.dtype)
            if not is_even(value.shape, nd, hierarchy):
                found[v] = step.node.source, whole - local_bytes(value.shape, value.dtype, nd, hierarchy)
    if found:
        tensors = _tensors(physical, [(v, source) for v, (source, _) in found.items()])
        most = max(each for _, each in found.values())
        cost = f"on explicit axes such a dim is whole: at most {bytes_text(most)} more per tensor and device"
        yield ConstraintGap("splits that do not divide", tensors, len(found), cost)


def _own(plan: PlanData, steps: TimedSteps) -> Iterator[ConstraintGap]:
    """Ops that exchange data themselves, such as halos and exchanges of rows."""
    found = [s for s, _ in steps if isinstance(s, Compute) and s.rows]
    if found:
        names = {row for s in found for row in s.rows}
        sent = sum(c.wire_bytes for c in plan.collectives if c.name in names)
        tensors = tuple(dict.fromkeys(f"{s.node.op} at {s.node.source}" for s in found))
        cost = f"jit sends what XLA thinks of; the plan {bytes_text(sent)}"
        yield ConstraintGap("ops that send", tensors[:MOST_NAMES], len(tensors), cost)


SECONDS = 20.0
"""How long plans are made that follow one line each; then no other is begun."""


def cost_notes(
    ignored: Sequence[IgnoredConstraint],
    plan: PlanData,
    planned: Callable[[Callable[[Source], bool]], PlanData],
) -> list[str]:
    """A remark for each line whose constraints a plan leaves out: what it would take to follow them.

    Arguments:
      planned: makes the plan that follows the constraints of some lines.
    """
    lines: dict[Source, list[IgnoredConstraint]] = {}
    for i in ignored:
        lines.setdefault(i.source, []).append(i)
    return list(_each(list(lines.items()), plan, planned))


def _each(
    lines: Sequence[tuple[Source, Sequence[IgnoredConstraint]]],
    plan: PlanData,
    planned: Callable[[Callable[[Source], bool]], PlanData],
) -> Iterator[str]:
    until = time.monotonic() + SECONDS
    for k, (source, asked) in enumerate(lines):
        if time.monotonic() > until:
            yield f"constraints of {len(lines) - k} more lines were left out, and not priced"
            return
        more = f" and {len(asked) - 1} more" if len(asked) > 1 else ""
        try:
            found = planned(partial(eq, source))
        except SbpError as e:
            yield f"left out: {asked[0]}{more}: it could not be followed: {e.problems[0].why}"
            continue
        seconds, overlapped, sent, memory = changes(figures_of(found), figures_of(plan))
        yield (
            f"left out: {asked[0]}{more}: to follow it, {seconds}, {overlapped} with overlap, {sent} sent, "
            f"{memory} at the peak"
        )
