"""Candidates: every N-D signature that each op, argument and result may have.

Words: docs/glossary.md.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbp.annotation import Pin
from sbp.compat import core
from sbp.compat.exact_keys import key_of
from sbp.compat.untyped import DType
from sbp.layout import every_signature, split_shape
from sbp.notation.named_axes import Levels
from sbp.passes.plan.traffic import Lifetime, OperandCopy, OpTraffic
from sbp.passes.program.control import Port, ports
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.passes.program.narrow_values import narrowest_dtypes
from sbp.passes.program.views import op_of, rows_of
from sbp.placement import Placement
from sbp.rules import Row
from sbp.signature import B, NdSbp, P, Partial, Signature, Split

Partials = frozenset[str]
_Shapes = tuple[tuple[int, ...], ...]
NONE: Partials = frozenset()
SUM: Partials = frozenset(["sum"])
# Parameters that hold functions: rules do not look at them, and they would spoil the memo.
OPAQUE = (
    "jaxpr",
    "update_jaxpr",
    "branches",
    "call_jaxpr",
    "cond_jaxpr",
    "body_jaxpr",
    "sharding",
    "out_sharding",
    "samples",
)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One N-D signature of an op.

    Arguments:
      operands, results: a signature each.
      strict: per operand, whether a sum must come as a sum: zeros filled in could turn into NaN.
      rows: the 1-D row that holds along each axis, outer to inner.
    """

    operands: tuple[NdSbp, ...]
    results: tuple[NdSbp, ...]
    strict: tuple[bool, ...]
    rows: tuple[Row, ...]

    @property
    def signatures(self) -> tuple[tuple[NdSbp, ...], tuple[NdSbp, ...]]:
        """How operands and results lie."""
        return self.operands, self.results

    @property
    def partial_results(self) -> int:
        """How many of its results are still to be reduced."""
        return sum(any(isinstance(x, Partial) for x in nd) for nd in self.results)


@dataclass(frozen=True)
class Candidates:
    """The strategies of all ops of a graph on a placement.

    Arguments:
      graph, placement: what is planned and where.
      partials: per value, the reductions that it can naturally wait for.
      dims: per value, the dims that may be split.
      strategies: per node id; a control-flow op has none of its own.
      ports: per id of a control-flow op, the signatures of each of its ports.
      traffic: per node id, what goes through memory.
      lives: when values lie there.
      operand_copies: and what is copied for libraries.
      times: per node id, from when until when it runs.
      narrower: per value that was widened, the narrower type that holds all of it, and in which it is sent.
    """

    graph: Graph
    placement: Placement
    partials: Mapping[int, Partials]
    dims: Mapping[int, tuple[int, ...]]
    strategies: Mapping[int, tuple[Strategy, ...]]
    ports: Mapping[int, tuple[tuple[NdSbp, ...], ...]]
    traffic: Mapping[int, OpTraffic] = field(default_factory=dict)
    lives: tuple[Lifetime, ...] = ()
    operand_copies: tuple[OperandCopy, ...] = ()
    times: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    narrower: Mapping[int, DType] = field(default_factory=dict)


@dataclass(frozen=True)
class _Memo:
    """Strategies by what they depend on; identical layers are enumerated once."""

    strategies: dict[Hashable, tuple[Strategy, ...]] = field(default_factory=dict)
    reach: dict[Hashable, tuple[Partials, ...]] = field(default_factory=dict)


def pin_of(node: Node) -> Pin | None:
    """What an annotation node says."""
    pin = node.params.get("pin")
    return pin if isinstance(pin, Pin) and node.op == "sbp_annotate" else None


def is_as_asked(nd: NdSbp, levels: Levels) -> bool:
    """Whether a signature is as asked along every axis of which something is said.

    >>> is_as_asked((Split(0), B), (Split(0), None)), is_as_asked((B, Split(0)), (Split(0), None))
    (True, False)
    """
    return all(want is None or want == s for want, s in zip(levels, nd, strict=True))


def enumerate_candidates(
    graph: Graph,
    placement: Placement,
    pinned_inputs: Mapping[int, NdSbp],
    *,
    strict_nonfinite: bool = False,
) -> Candidates:
    """The candidates of every op.

    Arguments:
      pinned_inputs: signatures of values that are arguments with a given signature.
      strict_nonfinite: whether a sum is added up before anything is computed from it.
    """
    found = _Enumeration(graph, placement.shape, strict_nonfinite)
    found.partials.update(dict.fromkeys(graph.inputs, NONE))
    found.visit(graph.nodes)
    dims = _dims(graph, pinned_inputs)
    borders = {
        n.id: tuple(port_signatures(p, graph, dims, found.partials, placement) for p in ports(n))
        for n in graph.walk()
        if n.bodies
    }
    narrower = narrowest_dtypes(graph)
    return Candidates(graph, placement, found.partials, dims, found.strategies, borders, narrower=narrower)


@dataclass
class _Enumeration:
    """Walks the graph once, bodies included, and collects strategies and reachable partials."""

    graph: Graph
    hierarchy: tuple[int, ...]
    strict_nonfinite: bool
    memo: _Memo = field(default_factory=_Memo)
    partials: dict[int, Partials] = field(default_factory=dict)
    strategies: dict[int, tuple[Strategy, ...]] = field(default_factory=dict)

    def of(self, x: Operand) -> Partials:
        """The reductions that an operand can wait for. A literal zero is a sum of zeros on every device."""
        if isinstance(x, Const):
            return SUM if np.all(np.asarray(x.value) == 0) else NONE
        return self.partials[x]

    def visit(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.bodies:
                self.border(node)
            else:
                self.op(node)

    def op(self, node: Node) -> None:
        pin = pin_of(node)
        if pin is not None and pin.nd is not None:
            self.strategies[node.id] = (Strategy((pin.nd,), (pin.nd,), (True,), ()),)
            reach: tuple[Partials, ...] = (frozenset(s.op for s in pin.nd if isinstance(s, Partial)),)
        else:
            ops = tuple(self.of(x) for x in node.inputs)
            key = _key(self.graph, node, ops)
            if key not in self.memo.strategies:
                made = _strategies(self.graph, node, self.hierarchy, ops, self.strict_nonfinite)
                self.memo.strategies[key], self.memo.reach[key] = made
            self.strategies[node.id], reach = self.memo.strategies[key], self.memo.reach[key]
            if pin is not None and pin.levels:
                fits = [s for s in self.strategies[node.id] if is_as_asked(s.results[0], pin.levels)]
                self.strategies[node.id] = tuple(fits)
        self.partials.update(zip(node.outputs, reach, strict=True))

    def border(self, node: Node) -> None:
        """Visits the bodies until a carried value can wait, at exit, for all that it waits for at entry.

        What it may wait for shrinks with every visit, so that ends.
        """
        wired = ports(node)
        at_entry = [
            self.of(node.inputs[p.operand]) if p.operand is not None and not p.whole else NONE for p in wired
        ]
        while True:
            for p, partials in zip(wired, at_entry, strict=True):
                self.partials.update(dict.fromkeys(p.enters, partials))
            for body in node.bodies:
                self.visit(body.nodes)
            at_exit = [self._at_exit(p, e) for p, e in zip(wired, at_entry, strict=True)]
            if at_exit == at_entry or all(
                not p.enters or a == b for p, a, b in zip(wired, at_entry, at_exit, strict=True)
            ):
                break
            at_entry = [b if p.enters else a for p, a, b in zip(wired, at_entry, at_exit, strict=True)]
        for p, partials in zip(wired, at_exit, strict=True):
            if p.result is not None:
                self.partials[node.outputs[p.result]] = partials

    def _at_exit(self, port: Port, entry: Partials) -> Partials:
        """What a port's value can wait for: all of its ends must agree."""
        ends = [self.of(x) for x in port.leaves]
        if port.whole:
            return NONE
        return (
            frozenset.intersection(*([entry] if port.enters else []), *ends) if ends or port.enters else entry
        )


def port_signatures(
    port: Port,
    graph: Graph,
    dims: Mapping[int, tuple[int, ...]],
    partials: Mapping[int, Partials],
    placement: Placement,
) -> tuple[NdSbp, ...]:
    """The signatures that the tensor of a port may have inside."""
    inside = [*port.enters, *(x for x in port.leaves if not isinstance(x, Const))]
    if port.whole or not inside:
        return ((B,) * placement.ndim,)
    value = graph.values[inside[0]]
    one_d: list[Signature] = [B]
    if not core.is_key(value.dtype):
        one_d += [Split(d) for d in dims[inside[0]] if value.shape[d] > 1]
    if value.dtype != bool and not core.is_key(value.dtype):
        natural_ = partials[port.enters[0]] if port.enters else _common(port, partials)
        one_d += [Partial(op) for op in sorted(natural_)]
    every = every_signature(one_d, placement.shape)
    return tuple(nd for nd in every if len({s for s in nd if isinstance(s, Partial)}) <= 1)


def _common(port: Port, partials: Mapping[int, Partials]) -> Partials:
    ends = [partials[x] for x in port.leaves if not isinstance(x, Const)]
    return frozenset.intersection(*ends) if len(ends) == len(port.leaves) else NONE


def _dims(graph: Graph, pinned_inputs: Mapping[int, NdSbp]) -> dict[int, tuple[int, ...]]:
    """Dims worth splitting: longer than 1, or named by an annotation of the value."""
    wanted: dict[int, set[int]] = {v.id: {d for d, n in enumerate(v.shape) if n > 1} for v in graph.values}
    pins: list[tuple[int, Levels]] = list(pinned_inputs.items())
    for node in graph.walk():
        pin = pin_of(node)
        if pin is not None and (pin.nd is not None or pin.levels):
            asked = pin.nd or pin.levels
            pins += [(v, asked) for v in (*node.inputs, *node.outputs) if not isinstance(v, Const)]
    for v, nd in pins:
        wanted[v].update(s.dim for s in nd if isinstance(s, Split))
    return {v: tuple(sorted(d)) for v, d in wanted.items()}


def _key(graph: Graph, node: Node, ops: Sequence[Partials]) -> Hashable:
    """What the strategies of a node depend on."""
    params = key_of({k: v is None if k in OPAQUE else v for k, v in node.params.items()})
    return (
        node.op,
        params,
        tuple((graph.operand(x).shape, graph.operand(x).dtype) for x in node.inputs),
        tuple((graph.values[v].shape, graph.values[v].dtype) for v in node.outputs),
        tuple(ops),
    )


def _strategies(
    graph: Graph, node: Node, hierarchy: tuple[int, ...], ops: Sequence[Partials], strict_nonfinite: bool
) -> tuple[tuple[Strategy, ...], tuple[Partials, ...]]:
    """All N-D strategies of a node and the partials of its results: rows along each axis on what remains."""
    shapes = tuple(graph.operand(x).shape for x in node.inputs)
    results = tuple(graph.values[v].shape for v in node.outputs)
    chains: list[tuple[tuple[_OneAxis, ...], _Shapes, _Shapes]] = [((), shapes, results)]
    numbers: dict[Any, int] = {}
    whole = _one_axis(Row((B,) * len(shapes), (B,) * len(results)), numbers)
    for group in hierarchy:
        if group == 1:
            chains = [((*taken, whole), ins, outs) for taken, ins, outs in chains]
            continue
        # What an axis may do depends on the shapes that the outer axes left, and on nothing else of them.
        # Most chains leave equal shapes (all B, or a sum), so the rule is asked a few times, not once per
        # chain.
        memo: dict[tuple[_Shapes, _Shapes], list[tuple[_OneAxis, _Shapes, _Shapes]]] = {}
        grown = []
        for taken, ins, outs in chains:
            if (ins, outs) not in memo:
                op = op_of(graph, node, ins, outs, group)
                memo[ins, outs] = [
                    (
                        _one_axis(row, numbers),
                        tuple(split_shape(s, r, group) for s, r in zip(ins, row.operands, strict=True)),
                        tuple(split_shape(s, r, group) for s, r in zip(outs, row.results, strict=True)),
                    )
                    for row in rows_of(node, op)
                    if natural(row, ops) and not (strict_nonfinite and row.needs_finite(op))
                ]
            grown += [((*taken, one), left, made) for one, left, made in memo[ins, outs]]
        chains = grown
    # Several chains may say the same signatures, such as two ways to a sum: the first has the better reason.
    unique: dict[tuple[int, ...], Strategy] = {}
    for taken, _, _ in chains:
        key = tuple(one.number for one in taken)
        if key not in unique and not _mixed(taken):
            unique[key] = _combine(taken)
    reach = tuple(
        frozenset(s.op for st in unique.values() for s in st.results[i] if isinstance(s, Partial))
        for i in range(len(results))
    )
    if graph.keeps_elements(node):
        return tuple(unique.values()), reach
    # Of strategies that cost the same the first is taken: one that reduces soon, beside more kernels.
    return tuple(sorted(unique.values(), key=lambda x: x.partial_results)), reach


@dataclass(frozen=True, slots=True)
class _OneAxis:
    """What an op does along one axis.

    Arguments:
      number: the same for the same signatures.
      strict: per operand, whether a sum must come as a sum.
      partials: per operand and result, the reduction that it waits for, or "".
    """

    row: Row
    number: int
    strict: tuple[bool, ...]
    partials: tuple[str, ...]


def _one_axis(row: Row, numbers: dict[Any, int]) -> _OneAxis:
    strict = tuple(s == P and i not in row.fills for i, s in enumerate(row.operands))
    partials = tuple(s.op if isinstance(s, Partial) else "" for s in (*row.operands, *row.results))
    return _OneAxis(row, numbers.setdefault((row.operands, row.results), len(numbers)), strict, partials)


def natural(row: Row, ops: Sequence[Partials]) -> bool:
    """Whether the operands that a row wants partial can be had so.

    At least one of them really is a sum (or the row makes one from a split); the others are, or may be
    filled: a whole value beside zeros is a sum too.
    """
    wanted = [(i, s.op) for i, s in enumerate(row.operands) if isinstance(s, Partial)]
    have = [op in ops[i] for i, op in wanted]
    if not wanted or all(have):
        return True
    making = any(isinstance(s, Split) for s in row.operands)
    # Only zeros are filled in: there is no boxing from a whole tensor to one that waits for an extremum.
    filled = [h or (i in row.fills and op == "sum") for h, (i, op) in zip(have, wanted, strict=True)]
    return all(filled) and (any(have) or making)


def _combine(taken: Sequence[_OneAxis]) -> Strategy:
    """The axes together, outer to inner."""
    rows = tuple(one.row for one in taken)
    operands = tuple(zip(*(r.operands for r in rows), strict=True))
    results = tuple(zip(*(r.results for r in rows), strict=True))
    strict = tuple(map(any, zip(*(one.strict for one in taken), strict=True)))
    return Strategy(operands, results, strict, rows)


def _mixed(taken: Sequence[_OneAxis]) -> bool:
    """Whether some tensor waits for two different reductions at once: useless, and they do not commute."""
    return any(len({*ops} - {""}) > 1 for ops in zip(*(one.partials for one in taken), strict=True))
