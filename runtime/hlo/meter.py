"""The meter: wire bytes read from compiled HLO text, the second count beside the plan's own figure.

It shares no code with the planner and knows only the text of one HLO module. Rules to keep in mind:

* bytes are those of the *compiled* program: XLA on CPU widens bf16, f8 and s4 collectives;
* rounds of sparse exchanges that run only if a bucket of keys is fuller than planned are kept apart;
* a conditional counts as its most expensive branch, because which branch runs is not in the text;
* sizes come from the operands, which mean the same in the sync, `-start` and async-wrapped forms.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Protocol

from sbp.compat.exact_keys import memo
from sbp.runtime.hlo.groups import device_groups, moves_of
from sbp.runtime.hlo.parser import (
    Computation,
    HloTextError,
    Instruction,
    Module,
    parse,
)
from sbp.runtime.hlo.shapes import shape_bytes
from sbp.runtime.hlo.trip_counts import trip_count


class HasText(Protocol):
    """The part of a `jax.stages.Compiled` that `read_compiled` needs."""

    def as_text(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class MeteredCollective:
    """One collective of a compiled program, at one call site.

    `payload_bytes` is one device's tensor (all_gather: the output, reduce_scatter: the input), summed over
    the operands of a combined collective. `count` is the executions per step. `wire_bytes` is what one device
    sends per step in a bandwidth-optimal algorithm, all executions together. `source` is
    "op_name (file:line)", or "". `instruction` is its name in the program.
    """

    kind: str
    group_size: int
    payload_bytes: int
    count: int
    wire_bytes: float
    source: str
    instruction: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Meter:
    """Every collective of one compiled program that sends bytes.

    Arguments:
      collectives: those of a step.
      unknown_trip_counts: the loops (with collectives inside) that are counted as one trip.
      overflow: the rounds of sparse exchanges that run only if a bucket of keys is fuller than planned, one
        of each exchange; the other figures do not include them.
    """

    collectives: tuple[MeteredCollective, ...]
    unknown_trip_counts: tuple[str, ...] = ()
    overflow: tuple[MeteredCollective, ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return math.fsum(c.wire_bytes for c in self.collectives)

    @property
    def overflow_wire_bytes(self) -> float:
        """Bytes that one device sends in one more round of every exchange that has such rounds."""
        return math.fsum(c.wire_bytes for c in self.overflow)

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Executions per step and wire bytes per device per step, for each kind present."""
        totals: dict[str, tuple[int, float]] = {}
        for c in sorted(self.collectives, key=lambda c: c.kind):
            count, wire_bytes = totals.get(c.kind, (0, 0.0))
            totals[c.kind] = (count + c.count, wire_bytes + c.wire_bytes)
        return totals


def read_hlo(text: str) -> Meter:
    """Meter the text of one HLO module, as XLA prints it after optimisation.

    Raises HloTextError when the text has no entry computation or a collective that cannot be sized.

    >>> meter = read_hlo('''HloModule m, num_partitions=4
    ... ENTRY %main (p: f32[8]) -> f32[32] {
    ...   %p = f32[8]{0} parameter(0)
    ...   ROOT %g = f32[32]{0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0},
    ...     channel_id=1, use_global_device_ids=true
    ... }''')
    >>> meter.by_kind()
    {'all_gather': (1, 96.0)}
    """
    module = parse(text)
    if module.entry not in module.computations:
        raise HloTextError(
            f"no ENTRY computation in {len(text)} characters of text that begin with {text[:60]!r}; "
            "the meter reads optimised HLO, not StableHLO. Try read_compiled(jitted.lower(...).compile())"
        )
    return _Walk(module).measure(module.entry)


def read_compiled(compiled: HasText) -> Meter:
    """Meter a `jax.stages.Compiled`; raises HloTextError when its backend gives no text."""
    return read_hlo(text_of(compiled))


def text_of(compiled: HasText) -> str:
    """The HLO text of a `jax.stages.Compiled`; raises HloTextError when its backend gives none."""
    text = compiled.as_text()
    if text is None:
        raise HloTextError("compiled.as_text() gave None: this backend prints no HLO to be metered")
    return text


def each_collective(module: Module) -> Iterator[tuple[str, MeteredCollective]]:
    """Every collective that sends bytes, in all branches: its instruction, and one execution."""
    for computation, instruction in module.instructions:
        found = collective_of(module, computation, instruction)
        if found is not None:
            yield instruction.name, found


def collective_of(
    module: Module, computation: Computation, instruction: Instruction
) -> MeteredCollective | None:
    """One execution of a collective; None for anything else, and for one that sends nothing."""
    return _Walk(module).collective(computation, instruction)


@dataclass(frozen=True, slots=True)
class _Form:
    kind: str
    wire: Callable[[int, int], float]  # (group size, payload bytes) -> bytes that one device sends
    data_operands: int | None = None  # the operands that hold data; None: all of them
    output_payload: bool = False  # the payload is the output, group size times the operands


def _exchange(group: int, payload: int) -> float:
    return (group - 1) / group * payload


def _all_reduce(group: int, payload: int) -> float:
    return 2 * (group - 1) / group * payload


def _forward(group: int, payload: int) -> float:
    return float(payload)


_FORMS = {
    "all-reduce": _Form("all_reduce", _all_reduce),
    "all-gather": _Form("all_gather", _exchange, output_payload=True),
    "reduce-scatter": _Form("reduce_scatter", _exchange),
    "all-to-all": _Form("all_to_all", _exchange),
    # How much moves is known at run time only: this is the bound, the whole input exchanged.
    "ragged-all-to-all": _Form("ragged_all_to_all", _exchange, data_operands=1),
    "collective-permute": _Form("permute", _forward),
    # In a pipelined broadcast a device passes the tensor on once, as in a permute.
    "collective-broadcast": _Form("permute", _forward),
    "send": _Form("send", _forward, data_operands=1),
}
COLLECTIVES = frozenset(_FORMS)
_CALLERS = ("fusion", "call", "async", "custom-call")


def _base_opcode(instruction: Instruction) -> str:
    """`all-reduce-start` -> `all-reduce`; the `-done` and `-update` halves keep names that match nothing."""
    return instruction.opcode.removesuffix("-start")


class _Walk:
    """Measures computations from the entry down; each computation once, then scaled by its callers."""

    def __init__(self, module: Module) -> None:
        self._module = module

    @memo
    def measure(self, name: str) -> Meter:
        computation = self._computation(name)
        return _total([self._instruction(computation, i) for i in computation.instructions.values()])

    def _computation(self, name: str) -> Computation:
        if name not in self._module.computations:
            raise HloTextError(f"computation {name!r} is called but not in the text; meter the whole module")
        return self._module.computations[name]

    def _instruction(self, computation: Computation, instruction: Instruction) -> Meter:
        opcode = _base_opcode(instruction)
        if opcode in _FORMS:
            found = self.collective(computation, instruction)
            meter = Meter((found,) if found else ())
            return _kept_apart(meter) if instruction.is_overflow else meter
        if opcode in _CALLERS:
            return _total(map(self.measure, instruction.inner))
        if opcode == "while":
            return self._while(computation, instruction)
        if opcode == "conditional":
            names = instruction.called_computations(
                "branch_computations", "true_computation", "false_computation"
            )
            branches = [self.measure(name) for name in names]
            dearest = max(branches, key=lambda meter: (meter.wire_bytes, meter.overflow_wire_bytes))
            return replace(dearest, unknown_trip_counts=_total(branches).unknown_trip_counts)
        return Meter(())

    def _while(self, computation: Computation, instruction: Instruction) -> Meter:
        (condition_name,), (body_name,) = (
            instruction.called_computations("condition"),
            instruction.called_computations("body"),
        )
        condition, body = self.measure(condition_name), self.measure(body_name)
        if instruction.is_overflow:
            return _kept_apart(_total([condition, body]))
        if not condition.collectives and not body.collectives:
            return Meter((), (), (*condition.overflow, *body.overflow))
        trips = trip_count(self._module.computations, computation, instruction)
        if trips is None:
            label = f"{instruction.name} {self._source(instruction)}".strip()
            return _total([condition, body, Meter((), (label,))])
        # The condition also runs once more, to end the loop.
        return _total([_scale(condition, trips + 1), _scale(body, trips)])

    def collective(self, computation: Computation, instruction: Instruction) -> MeteredCollective | None:
        """One execution of a collective; None for anything else, and for one that sends nothing."""
        form = _FORMS.get(_base_opcode(instruction))
        if form is None:
            return None
        group = self._group(form, instruction)
        operands = [computation.instructions.get(name) for name in instruction.operands[: form.data_operands]]
        if "slice_sizes" in instruction.attributes or None in operands:
            raise HloTextError(
                f"cannot size {instruction.opcode} %{instruction.name}: each of its operands "
                f"({', '.join(instruction.operands)}) must be defined in its own computation, "
                "and the in-place form with slice_sizes is not read"
            )
        data_bytes = sum(shape_bytes(operand.shape) for operand in operands if operand)
        payload = data_bytes * group if form.output_payload else data_bytes
        wire = form.wire(group, payload) if group > 1 else 0.0
        if not wire:
            return None
        source = self._source(instruction)
        return MeteredCollective(form.kind, group, payload, 1, wire, source, instruction.name)

    def _group(self, form: _Form, instruction: Instruction) -> int:
        if form.kind == "send" and instruction.attributes.get("is_host_transfer") == ["true"]:
            return 0
        if form.kind == "send" and moves_of(instruction) is None:
            return 2
        return max(map(len, device_groups(instruction, self._module.header)), default=0)

    def _source(self, instruction: Instruction) -> str:
        """`op_name (file:line)`, the innermost frame."""
        file, line = next(self._module.frames(instruction), ("", 0))
        where = f"({PurePath(file).name}:{line})" if file else ""
        return f"{instruction.path} {where}".strip()


def _kept_apart(meter: Meter) -> Meter:
    return Meter((), (), (*meter.collectives, *meter.overflow))


def _total(meters: Iterable[Meter]) -> Meter:
    parts = list(meters)
    loops = dict.fromkeys(loop for part in parts for loop in part.unknown_trip_counts)
    found = tuple(c for part in parts for c in part.collectives)
    return Meter(found, tuple(loops), tuple(c for part in parts for c in part.overflow))


def _scale(meter: Meter, times: int) -> Meter:
    def scaled(found: Iterable[MeteredCollective]) -> tuple[MeteredCollective, ...]:
        each = (replace(c, count=c.count * times, wire_bytes=c.wire_bytes * times) for c in found)
        return tuple(each) if times else ()

    return replace(meter, collectives=scaled(meter.collectives), overflow=scaled(meter.overflow))
