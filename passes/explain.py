"""The plan: every collective of a program, what it costs, and why it is there."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sbp.hardware import Hardware
from sbp.passes.boxing import Boxings
from sbp.passes.graph import Const, Graph
from sbp.passes.moves import itemsize, wire_bytes
from sbp.passes.names import Names, common, without_indices
from sbp.passes.physical import Border, Box, Compute, Physical, Step, peak_bytes, total_seconds
from sbp.passes.plan.candidates import rule_of
from sbp.passes.plan.cost import talk_seconds, talks_of
from sbp.passes.reasons import Reasons
from sbp.placement import Placement
from sbp.rules.registry import Talk, unknown_functions
from sbp.signature import NdSbp

ROW_SCOPE = "sbp."


@dataclass(frozen=True, slots=True)
class Collective:
    """One inserted collective.

    Arguments:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "ragged_all_to_all" or
        "send".
      tensor, shape, dtype: the logical tensor; one that is neither an argument nor a result, nor a gradient
        of an argument, is called by the op that makes it.
      before, after: its N-D signatures.
      axes: names of the placement axes that take part; of a send, the numbers of the two placements.
      group_size: devices that talk to each other.
      count: times per step.
      wire_bytes: what one device sends per step, bytes.
      seconds: estimated time per step.
      source: the user's line that caused it, such as "gpt.py:41".
      reason: one sentence.
      name: what its instructions are called in the compiled program, such as "row12": its position among the
        collectives of its placement. "" for a send, which is no instruction.
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
    source: str
    reason: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Forms:
    """How a kind of plan is shown and written."""

    line: Callable[[Any], str]
    text: Callable[[Any], str]
    html: Callable[[Any], str]
    save: Callable[[Any, str | os.PathLike[str]], None]


def together(same: Sequence[Collective]) -> Collective:
    """Collectives that are alike as one."""
    return replace(
        same[0],
        tensor=common(c.tensor for c in same),
        name="+".join(c.name for c in same if c.name),
        count=sum(c.count for c in same),
        wire_bytes=sum(c.wire_bytes for c in same),
        seconds=sum(c.seconds for c in same),
    )


@dataclass(frozen=True, repr=False)
class Plan:
    """What a program will do, and why; `print` shows it, `repr` is one line.

    Arguments:
      name: the function's name.
      placement, hardware: where it runs and what it is planned for.
      collectives: all of them, in order of execution.
      seconds: estimated time of one step.
      bound: a proven lower bound on the estimate of every plan with these pins, seconds.
      memory_bytes: peak per device, estimated.
      in_sbp, out_sbp: signatures at rest of arguments and results, as `jax.Array`s arrive and leave.
      in_paths, out_paths: their names.
      notes: remarks: ops without a rule, uneven sizes that are gathered, arguments that are moved.
      physical: the program itself; None for a plan that was loaded from a file.
    """

    name: str
    placement: Placement
    hardware: Hardware
    collectives: tuple[Collective, ...]
    seconds: float
    bound: float
    memory_bytes: float
    in_sbp: tuple[NdSbp, ...]
    out_sbp: tuple[NdSbp, ...]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    notes: tuple[str, ...]
    physical: Physical | None = field(default=None, compare=False, repr=False)

    @property
    def wire_bytes(self) -> float:
        """What one device sends per step, bytes."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def gap(self) -> float:
        """How far the estimate can be from the optimum, relative; 0.0 is proven optimal."""
        if self.seconds <= 0:
            return 0.0
        gap = (self.seconds - self.bound) / self.seconds
        return gap if gap > 1e-6 else 0.0

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

    def merged(self) -> tuple[tuple[Collective, int], ...]:
        """Collectives that differ in nothing a reader cares about as one row, with how many there are.

        Names that differ in an index only, as those of layers do, are one name with `[*]`.
        """
        rows: dict[Any, list[Collective]] = {}
        for c in self.collectives:
            why = without_indices(c.reason)
            key = (c.kind, c.shape, c.dtype, c.before, c.after, c.axes, c.source, why)
            rows.setdefault(key, []).append(c)
        return tuple(
            (replace(together(same), reason=common(c.reason for c in same)), len(same))
            for same in rows.values()
        )

    def part(self, index: int) -> tuple[Plan, int]:
        """The plan of one placement that a collective belongs to, and its number there."""
        return self, index

    def _forms(self) -> Forms:
        from sbp.passes import save, show

        return Forms(show.plan_line, show.plan_text, show.plan_html, save.save_plan)

    def __str__(self) -> str:
        return self._forms().text(self)

    def __repr__(self) -> str:
        return self._forms().line(self)

    def _repr_html_(self) -> str:
        return self._forms().html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan; the suffix chooses the form: .json, .html, .dot or .svg, with stages .trace.json.

        Raises:
          ValueError: for another suffix.
        """
        self._forms().save(self, path)


def explain(
    name: str,
    physical: Physical,
    boxings: Boxings,
    bound: float,
    paths: tuple[Sequence[str], Sequence[str]],
    notes: Sequence[str],
) -> Plan:
    """The plan of a physical program."""
    graph, placement, network = physical.graph, physical.placement, boxings.network
    reasons = Reasons(physical, Names(graph, *paths))
    collectives = tuple(
        replace(
            _collective(s, n, physical, boxings, reasons)
            if isinstance(s, Box)
            else _inside(s, n, physical, boxings, reasons),
            name=row_name(i),
        )
        for i, (s, n) in enumerate(talking(physical))
    )
    return Plan(
        name,
        placement,
        network.hardware,
        collectives,
        total_seconds(physical, boxings),
        bound,
        peak_bytes(physical),
        physical.inputs[: len(paths[0])],
        physical.outputs,
        tuple(paths[0]),
        tuple(paths[1]),
        (*notes, *_no_rule(graph, physical)),
        named(physical, reasons),
    )


def row_name(position: int) -> str:
    """The name of a collective in the compiled program."""
    return f"row{position}"


def scope_of_rows(names: Sequence[str]) -> str:
    """The name scope of what is sent for some collectives; "" for none.

    >>> scope_of_rows(["row3", "row4"])
    'sbp.row3+row4'
    """
    return ROW_SCOPE + "+".join(names) if any(names) else ""


def named(physical: Physical, reasons: Reasons) -> Physical:
    """The same program, whose steps know their rows of the plan, and moves the line that caused them."""
    rows: dict[int, list[str]] = {}
    for row, what, _ in rows_of(physical):
        step = what if isinstance(what, Box) else what.step
        rows.setdefault(id(step), []).append(row_name(row))

    def tell(step: Step) -> Step:
        own = tuple(dict.fromkeys(rows.get(id(step), ())))
        if isinstance(step, Box):
            return replace(step, source=reasons.source(step), rows=own)
        if isinstance(step, Border):
            return replace(step, bodies=tuple(tuple(map(tell, body)) for body in step.bodies))
        return replace(step, rows=own) if own else step

    return replace(physical, steps=tuple(map(tell, physical.steps)))


@dataclass(frozen=True, slots=True)
class Inside:
    """A collective inside an op."""

    step: Compute
    talk: Talk


def talking(physical: Physical) -> list[tuple[Box | Inside, int]]:
    """One per `Plan.collectives`: the moves and the ops that send something, and how often each is run."""
    first: dict[int, tuple[Box | Inside, int]] = {}
    for row, what, times in rows_of(physical):
        first.setdefault(row, (what, times))
    return list(first.values())


def rows_of(physical: Physical) -> Iterator[tuple[int, Box | Inside, int]]:
    """What sends something: its position in `Plan.collectives`, the move or the op, and how often it is run.

    Moves over groups of one device and of empty tensors send nothing. What several ops ask of the same
    shards (a halo, forward and backward) XLA sends once: it is one row of the plan.
    """
    fresh = itertools.count()
    asked: dict[object, int] = {}
    for step, times in physical.walk():
        if isinstance(step, Box) and _talks(step, physical):
            yield next(fresh), step, times
        elif isinstance(step, Compute):
            talks = talks_of(physical.graph, step.node, step.strategy, physical.placement.shape)
            for t in talks:
                version = step.node.inputs[t.operand], step.strategy.operands[t.operand]
                same = *version, t.axes, t.sent, times
                if t.sent is None or same not in asked:
                    asked[same] = next(fresh)
                yield asked[same], Inside(step, t), times


def _talks(box: Box, physical: Physical) -> bool:
    value = physical.graph.values[box.value]
    size = itemsize(box.move, value.dtype)
    return wire_bytes(box.move, value.shape, size, physical.placement.shape) > 0


def _collective(box: Box, times: int, physical: Physical, boxings: Boxings, reasons: Reasons) -> Collective:
    value, placement, move = physical.graph.values[box.value], physical.placement, box.move
    size, group = itemsize(move, value.dtype), 1
    for a in move.axes:
        group *= placement.shape[a]
    return Collective(
        move.kind,
        reasons.names.of(box.value),
        value.shape,
        str(value.dtype),
        move.before,
        move.after,
        tuple(placement.axes[a] for a in move.axes),
        group,
        times,
        times * wire_bytes(move, value.shape, size, placement.shape),
        times * boxings.network.seconds(move, value.shape, size),
        str(reasons.source(box)),
        reasons.reason(box),
    )


def _inside(inside: Inside, times: int, physical: Physical, boxings: Boxings, reasons: Reasons) -> Collective:
    step, talk, placement = inside.step, inside.talk, physical.placement
    x, nd = step.node.inputs[talk.operand], step.strategy.operands[talk.operand]
    value = physical.graph.operand(x)
    return Collective(
        talk.kind,
        step.node.op if isinstance(x, Const) else reasons.names.of(x),
        value.shape,
        str(value.dtype),
        nd,
        nd,
        tuple(placement.axes[a] for a in talk.axes),
        math.prod(placement.shape[a] for a in talk.axes),
        times,
        times * talk.wire_bytes,
        times * talk_seconds(talk, boxings.network),
        str(step.node.source),
        reasons.inside(step, talk),
    )


def _no_rule(graph: Graph, physical: Physical) -> list[str]:
    """Ops that ran whole on every device because they have no rule, or none for a function that they hold."""
    found: dict[str, list[str]] = {}
    for step, _ in physical.walk():
        if isinstance(step, Compute):
            rule, op = rule_of(step.node), step.node.op
            functions = unknown_functions(rule, step.node.params) if rule else ()
            if rule is None or functions:
                held = f" with a function as {', '.join(functions)}" if functions else ""
                found.setdefault(op + held, []).append(str(step.node.source))
    return [f"no rule for {op}: gathered ({', '.join(dict.fromkeys(at))})" for op, at in found.items()]
