"""The meter: wire bytes read from compiled HLO text, the second count beside the plan's own figure.

It shares no code with the planner and knows only the text of one HLO module. Rules to keep in mind:

* bytes are those of the *compiled* program: XLA on CPU widens bf16, f8 and s4 collectives;
* rounds of sparse exchanges that run only if a bucket of keys is fuller than planned are kept apart;
* a conditional counts as its most expensive branch, because which branch runs is not in the text;
* sizes come from the operands, which mean the same in the sync, `-start` and async-wrapped forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Protocol

import networkx as nx

from sbp.runtime.look.hlo_text import (
    Computation,
    HloTextError,
    Instruction,
    Module,
    Tokens,
    closing,
    integers,
    pairs,
    parse,
    split,
    tokenize,
    unquote,
)
from sbp.runtime.look.hlo_trips import trip_count
from sbp.talk.exchange import OVERFLOW


class HasText(Protocol):
    """What `read_compiled` needs of a `jax.stages.Compiled`."""

    def as_text(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class MeteredCollective:
    """One collective of a compiled program, at one call site.

    `payload_bytes` is one device's tensor (all_gather: the output, reduce_scatter: the input), summed over
    the operands of a combined collective. `count` is the executions per step. `wire_bytes` is what one device
    sends per step in a bandwidth-optimal algorithm, all executions together. `source` is
    "op_name (file:line)", or "".
    """

    kind: str
    group_size: int
    payload_bytes: int
    count: int
    wire_bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Meter:
    """Every collective of one compiled program that puts bytes on the wire.

    Arguments:
      collectives: what a step executes.
      unknown_trip_counts: the loops (with collectives inside) that are counted as one trip.
      overflow: the rounds of sparse exchanges that run only if a bucket of keys is fuller than planned, one
        of each exchange; no part of the other figures.
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
        """Bytes that one device sends besides, for one more round of every exchange that has such rounds."""
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
    """Every collective that puts bytes on the wire, in all branches: its instruction, and one execution."""
    walk = _Walk(module)
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            found = walk.collective(computation, instruction)
            if found is not None:
                yield instruction.name, found


# Sub-byte types take a whole byte unless the layout says E(bits), as in XLA's own ShapeUtil.
_DTYPES_OF_BYTES = {
    0: "token opaque",
    1: "pred s1 u1 s2 u2 s4 u4 s8 u8 f4e2m1fn f8e3m4 f8e4m3 f8e4m3b11fnuz f8e4m3fn f8e4m3fnuz f8e5m2 "
    "f8e5m2fnuz f8e8m0fnu",
    2: "s16 u16 f16 bf16",
    4: "s32 u32 f32",
    8: "s64 u64 f64 c64",
    16: "c128",
}
_DTYPE_BYTES = {name: size for size, names in _DTYPES_OF_BYTES.items() for name in names.split()}


def _shape_bytes(shape: Tokens) -> int:
    """Bytes of a shape, tuples summed; a dynamic dimension `<=n` counts as n."""
    total = 0
    for index, token in enumerate(shape[:-1]):
        if shape[index + 1] != "[":
            continue
        if token not in _DTYPE_BYTES:
            known = ", ".join(sorted(_DTYPE_BYTES))
            raise HloTextError(f"unknown element type {token!r} in shape {''.join(shape)}; known: {known}")
        close = closing(shape, index + 1)
        elements = math.prod(integers(shape[index + 2 : close]))
        layout = shape[close + 1 : closing(shape, close + 1)] if shape[close + 1 : close + 2] == ["{"] else ()
        packed = [layout[i + 2] for i, word in enumerate(layout) if word == "E"]
        total += -(-elements * int(packed[0]) // 8) if packed else elements * _DTYPE_BYTES[token]
    return total


def _listed_group_size(tokens: Tokens) -> int:
    """Devices in the largest replica group; 0 when the list is empty, which means all.

    Three notations: `{{0,1},{2,3}}`, the iota `[groups,size]<=[...]`, and `mesh['a'=2,'b'=4] {'b'}`, whose
    axes may be sub-axes: `'b':(1)2` is of size 2.
    """
    if not tokens:
        return 0
    if tokens[0] == "[":
        return math.prod(integers(tokens[1 : closing(tokens, 0)])[1:])
    if tokens[0] == "{":
        return max((len(integers(part)) for part in split(tokens[1:-1])), default=0)
    if "{" not in tokens:
        raise HloTextError(f"replica_groups {' '.join(tokens)!r} is no list, iota or mesh[...] {{axes}}")
    sizes = pairs(tokens)
    axes = split(tokens[len(tokens) - list(reversed(tokens)).index("{") : -1])
    return math.prod(int(axis[-1] if ":" in axis else sizes[unquote(axis[0])]) for axis in axes)


def _group_size(instruction: Instruction, header: dict[str, str]) -> int:
    """Devices per group, in XLA's four group modes (replica, partition, both, flattened ids)."""
    replicas, partitions = (int(header.get(key, "1")) for key in ("replica_count", "num_partitions"))
    attributes = instruction.attributes
    # A mesh of permuted devices prints "mesh[...], device_ids=(...) {axes}": one value, two attributes.
    listed = _listed_group_size((*attributes.get("replica_groups", ()), *attributes.get("device_ids", ())))
    if "channel_id" not in attributes:
        return listed or replicas
    if attributes.get("use_global_device_ids") == ["true"]:
        return listed or replicas * partitions
    if _base_opcode(instruction) in ("all-reduce", "all-gather", "reduce-scatter"):
        return (listed or replicas) * partitions
    return listed or partitions


def _pair_group_size(tokens: Tokens) -> int:
    """Devices in the largest connected set of `{{source,target},...}`; at most 1: nothing is sent."""
    ids = integers(tokens)
    moves = nx.Graph(list(zip(ids[::2], ids[1::2], strict=True)))
    return max((len(group) for group in nx.connected_components(moves)), default=0)


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
_SEND_PAIRS = "_xla_send_recv_source_target_pairs"
_CALLERS = ("fusion", "call", "async", "custom-call")


def _base_opcode(instruction: Instruction) -> str:
    """`all-reduce-start` -> `all-reduce`; the `-done` and `-update` halves keep names that match nothing."""
    return instruction.opcode.removesuffix("-start")


class _Walk:
    """Measures computations from the entry down; each computation once, then scaled by its callers."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Meter] = {}

    def measure(self, name: str) -> Meter:
        if name not in self._known:
            computation = self._computation(name)
            parts = [self._instruction(computation, i) for i in computation.instructions.values()]
            self._known[name] = _total(parts)
        return self._known[name]

    def _computation(self, name: str) -> Computation:
        if name not in self._module.computations:
            raise HloTextError(f"computation {name!r} is called but not in the text; meter the whole module")
        return self._module.computations[name]

    def _instruction(self, computation: Computation, instruction: Instruction) -> Meter:
        opcode = _base_opcode(instruction)
        if opcode in _FORMS:
            found = self.collective(computation, instruction)
            meter = Meter((found,) if found else ())
            return _kept_apart(meter) if _is_overflow(instruction) else meter
        if opcode in _CALLERS:
            return _total(map(self.measure, instruction.called("calls", "to_apply", "called_computations")))
        if opcode == "while":
            return self._while(computation, instruction)
        if opcode == "conditional":
            names = instruction.called("branch_computations", "true_computation", "false_computation")
            branches = [self.measure(name) for name in names]
            dearest = max(branches, key=lambda meter: (meter.wire_bytes, meter.overflow_wire_bytes))
            return replace(dearest, unknown_trip_counts=_total(branches).unknown_trip_counts)
        return Meter(())

    def _while(self, computation: Computation, instruction: Instruction) -> Meter:
        (condition_name,), (body_name,) = instruction.called("condition"), instruction.called("body")
        condition, body = self.measure(condition_name), self.measure(body_name)
        if _is_overflow(instruction):
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
        data_bytes = sum(_shape_bytes(operand.shape) for operand in operands if operand)
        payload = data_bytes * group if form.output_payload else data_bytes
        wire = form.wire(group, payload) if group > 1 else 0.0
        if not wire:
            return None
        return MeteredCollective(form.kind, group, payload, 1, wire, self._source(instruction))

    def _group(self, form: _Form, instruction: Instruction) -> int:
        attributes = instruction.attributes
        if form.kind == "send":
            if attributes.get("is_host_transfer") == ["true"]:
                return 0
            extras = attributes.get("frontend_attributes", ())
            found = [_tail(part) for part in split(extras[1:-1]) if part[0] == _SEND_PAIRS]
            return _pair_group_size(found[0]) if found else 2
        if "source_target_pairs" in attributes:
            return _pair_group_size(attributes["source_target_pairs"])
        return _group_size(instruction, self._module.header)

    def _source(self, instruction: Instruction) -> str:
        """`op_name (file:line)`, from the instruction's metadata or the module's stack-frame tables."""
        metadata = pairs(instruction.attributes.get("metadata", ()))
        tables = self._module.tables
        frame = pairs(tables["StackFrames"].get(metadata.get("stack_frame_id", ""), ()))
        location = pairs(tables["FileLocations"].get(frame.get("file_location_id", ""), ()))
        names = tables["FileNames"].get(location.get("file_name_id", ""), ())
        file = metadata.get("source_file") or (unquote(names[0]) if names else "")
        line = metadata.get("source_line") or location.get("line", "")
        where = f"({PurePath(file).name}:{line})" if file else ""
        return f"{metadata.get('op_name', '')} {where}".strip()


def _tail(part: Tokens) -> Tokens:
    """The value of a frontend attribute; XLA prints a list of pairs bare or as a string."""
    return tokenize(unquote(part[2])) if part[2].startswith('"') else part[2:]


def _is_overflow(instruction: Instruction) -> bool:
    """Whether an instruction is of a round that runs only if a bucket of keys is fuller than planned."""
    return OVERFLOW in pairs(instruction.attributes.get("metadata", ())).get("op_name", "")


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
