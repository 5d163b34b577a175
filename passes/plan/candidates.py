"""Candidates: every N-D signature that each op, argument and result may have."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp import compat
from sbp.annotation import Pin
from sbp.layout import is_even, split_shape
from sbp.passes.graph import Const, Graph, Node
from sbp.placement import Placement
from sbp.rules import Op, Row, Rule, lookup
from sbp.rules.registry import valid_rows
from sbp.signature import B, NdSbp, P, Partial, Signature, Split

Partials = frozenset[str]
NONE: Partials = frozenset()
# Parameters that hold functions: rules do not look at them, and they would spoil the memo.
_OPAQUE = ("jaxpr", "update_jaxpr", "branches", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "sharding", "out_sharding")


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


@dataclass(frozen=True)
class Candidates:
    """The strategies of all ops of a graph on a placement.

    Arguments:
      graph, placement: what is planned and where.
      partials: per value, the reductions that it can naturally wait for.
      dims: per value, the dims that may be split.
      strategies: per node.
    """

    graph: Graph
    placement: Placement
    partials: Mapping[int, Partials]
    dims: Mapping[int, tuple[int, ...]]
    strategies: tuple[tuple[Strategy, ...], ...]


@dataclass(frozen=True)
class _Memo:
    """Strategies by what they depend on; identical layers are enumerated once."""

    strategies: dict[Hashable, tuple[Strategy, ...]] = field(default_factory=dict)
    reach: dict[Hashable, tuple[Partials, ...]] = field(default_factory=dict)


def pin_of(node: Node) -> Pin | None:
    """What an annotation node says."""
    pin = node.params.get("pin")
    return pin if isinstance(pin, Pin) and node.op == "sbp_annotate" else None


def enumerate_candidates(graph: Graph, placement: Placement, pinned_inputs: Mapping[int, NdSbp]) -> Candidates:
    """The candidates of every op.

    Arguments:
      pinned_inputs: signatures of values that are arguments with a given signature.
    """
    memo = _Memo()
    partials: dict[int, Partials] = dict.fromkeys(graph.inputs, NONE)
    strategies = []
    for node in graph.nodes:
        ops = tuple(partials[x] if not isinstance(x, Const) else NONE for x in node.inputs)
        key = _key(graph, node, ops)
        pin = pin_of(node)
        if pin is not None and pin.nd is not None:
            strategies.append((Strategy((pin.nd,), (pin.nd,), (True,), ()),))
            reach: tuple[Partials, ...] = (frozenset(s.op for s in pin.nd if isinstance(s, Partial)),)
        else:
            if key not in memo.strategies:
                memo.strategies[key], memo.reach[key] = _strategies(graph, node, placement.shape, ops)
            strategies.append(memo.strategies[key])
            reach = memo.reach[key]
        partials.update(zip(node.outputs, reach, strict=True))
    return Candidates(graph, placement, partials, _dims(graph, pinned_inputs), tuple(strategies))


def _dims(graph: Graph, pinned_inputs: Mapping[int, NdSbp]) -> dict[int, tuple[int, ...]]:
    """Dims worth splitting: longer than 1, or named by an annotation of the value."""
    wanted: dict[int, set[int]] = {
        v.id: {d for d, n in enumerate(v.shape) if n > 1} for v in graph.values
    }
    pins = [(v, nd) for v, nd in pinned_inputs.items()]
    for node in graph.nodes:
        pin = pin_of(node)
        if pin is not None and pin.nd is not None:
            pins += [(v, pin.nd) for v in (*node.inputs, *node.outputs) if not isinstance(v, Const)]
    for v, nd in pins:
        wanted[v].update(s.dim for s in nd if isinstance(s, Split))
    return {v: tuple(sorted(d)) for v, d in wanted.items()}


def _key(graph: Graph, node: Node, ops: Sequence[Partials]) -> Hashable:
    """What the strategies of a node depend on."""
    params = tuple(sorted((k, _hashable(v)) for k, v in node.params.items() if k not in _OPAQUE))
    return (
        node.op,
        params,
        tuple((graph.operand(x).shape, str(graph.operand(x).dtype)) for x in node.inputs),
        tuple((graph.values[v].shape, str(graph.values[v].dtype)) for v in node.outputs),
        tuple(ops),
    )


def _hashable(x: Any) -> str:
    return repr(x)


def make_op(graph: Graph, node: Node, shapes: Sequence[Any], results: Sequence[Any], group: int) -> Op:
    """The rule's view of a node, given what the outer axes left of its shapes."""
    return Op(
        node.op,
        tuple(shapes),
        tuple(results),
        tuple(graph.operand(x).dtype for x in node.inputs),
        tuple(graph.values[v].dtype for v in node.outputs),
        node.params,
        group,
    )


def _strategies(
    graph: Graph, node: Node, hierarchy: tuple[int, ...], ops: Sequence[Partials]
) -> tuple[tuple[Strategy, ...], tuple[Partials, ...]]:
    """All N-D strategies of a node and the partials of its results: rows along each axis on what remains."""
    rule = lookup(node.op)
    shapes = tuple(graph.operand(x).shape for x in node.inputs)
    results = tuple(graph.values[v].shape for v in node.outputs)
    chains: list[tuple[tuple[Row, ...], Any, Any]] = [((), shapes, results)]
    for group in hierarchy:
        memo: dict[Any, list[Row]] = {}
        grown = []
        for rows, ins, outs in chains:
            if (ins, outs) not in memo:
                op = make_op(graph, node, ins, outs, group)
                memo[ins, outs] = [r for r in valid_rows(rule, op) if natural(r, ops)]
            for row in memo[ins, outs]:
                left = tuple(split_shape(s, r, group) for s, r in zip(ins, row.operands, strict=True))
                made = tuple(split_shape(s, r, group) for s, r in zip(outs, row.results, strict=True))
                grown.append(((*rows, row), left, made))
        chains = grown
    unique: dict[Any, Strategy] = {}
    for rows, _, _ in chains:
        strategy = _combine(rows, len(shapes), len(results))
        if not _mixed(strategy):
            unique.setdefault((strategy.operands, strategy.results), strategy)
    reach = tuple(
        frozenset(s.op for st in unique.values() for s in st.results[i] if isinstance(s, Partial))
        for i in range(len(results))
    )
    return tuple(unique.values()), reach


def natural(row: Row, ops: Sequence[Partials]) -> bool:
    """Whether the partial operands of a row can really be partial: one of them is, and the others are or may be filled."""
    wanted = [(i, s.op) for i, s in enumerate(row.operands) if isinstance(s, Partial)]
    have = [op in ops[i] for i, op in wanted]
    if not wanted or all(have):
        return True
    making = any(isinstance(s, Split) for s in row.operands)
    return all(h or i in row.fills for h, (i, _) in zip(have, wanted, strict=True)) and (any(have) or making)


def _combine(rows: tuple[Row, ...], n_operands: int, n_results: int) -> Strategy:
    operands = tuple(tuple(r.operands[i] for r in rows) for i in range(n_operands))
    results = tuple(tuple(r.results[i] for r in rows) for i in range(n_results))
    strict = tuple(
        any(r.operands[i] == P and i not in r.fills for r in rows) for i in range(n_operands)
    )
    return Strategy(operands, results, strict, rows)


def _mixed(strategy: Strategy) -> bool:
    """Whether some tensor waits for two different reductions at once: never useful, and they do not commute."""
    return any(
        len({s for s in nd if isinstance(s, Partial)}) > 1 for nd in (*strategy.operands, *strategy.results)
    )


def rest_signatures(shape: Sequence[int], dtype: Any, placement: Placement) -> tuple[NdSbp, ...]:
    """Signatures that a `jax.Array` of this shape can have on the placement: no P, no padding."""
    one_d: list[Signature] = [B]
    if not compat.is_key(dtype):
        one_d += [Split(d) for d, n in enumerate(shape) if n > 1]
    every = itertools.product(one_d, repeat=placement.ndim)
    return tuple(nd for nd in every if is_even(shape, nd, placement.shape))


def rule_of(node: Node) -> Rule | None:
    """The rule of a node's op, if there is one."""
    return lookup(node.op)
