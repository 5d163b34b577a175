"""Which applications of an op stand on its page: of the samples in tests/rules those that show something."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.trace import trace
from sbp.passes.program.views import communication_of, op_of
from sbp.rules import Communication, Op, Row, Rule, lookup
from sbp.rules.registry import valid_rows
from sbp.signature import NdSbp, Signature, Split

SAMPLES = Path(__file__).resolve().parents[2] / "rules"
# Over four devices the samples' sizes mostly leave padding; over two and five most of them divide.
GROUPS = (4, 2, 5)
# Ops that jax 0.10 does not have: their applications stand alone, so that they can be left out there.
NEWER = frozenset({"log2", "one_minus_square", "polynomial"})


@dataclass(frozen=True, eq=False)
class Application:
    """One application of an op, as an axis of `group` devices sees it."""

    graph: Graph
    node: Node
    group: int

    @cached_property
    def operands(self) -> tuple[Any, ...]:
        """Shape and dtype of each operand."""
        return tuple(map(self.graph.operand, self.node.inputs))

    @cached_property
    def results(self) -> tuple[Any, ...]:
        """Shape and dtype of each result."""
        return tuple(self.graph.values[v] for v in self.node.outputs)

    @property
    def rule(self) -> Rule:
        """What the registry has for the op."""
        found = lookup(self.node.op)
        assert found is not None
        return found

    @cached_property
    def op(self) -> Op:
        """The op before anything is split."""
        shapes = ([tuple(x.shape) for x in xs] for xs in (self.operands, self.results))
        return op_of(self.graph, self.node, *shapes, self.group)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every valid signature, in the registry's order."""
        return valid_rows(self.rule, self.op)

    def communication(self, row: Row) -> tuple[Communication, ...]:
        """What the body sends."""
        return communication_of(self.graph, self.node, lying(row), (self.group,))

    def uneven(self, row: Row) -> list[int]:
        """The sizes that the row splits and the axis does not divide."""
        each = [*zip(self.operands, row.operands, strict=True), *zip(self.results, row.results, strict=True)]
        sizes = [x.shape[s.dim] for x, s in each if isinstance(s, Split)]
        return sorted({n for n in sizes if n % self.group})


def lying(row: Row) -> tuple[list[NdSbp], list[NdSbp]]:
    """A row as signatures on one axis."""
    return [(s,) for s in row.operands], [(s,) for s in row.results]


@cache
def samples() -> dict[str, list[Any]]:
    """The samples of the tests of the rules, by op."""
    found: dict[str, list[Any]] = {}
    for file in sorted(SAMPLES.glob("samples_*.py")):
        for one in importlib.import_module(f"tests.rules.{file.stem}").SAMPLES:
            found.setdefault(one.name, []).append(one)
    return found


def chosen(names: Sequence[str]) -> list[Application]:
    """The applications of the ops of one rule: the first of each, and those that show something new.

    New is a row, whatever its dims are called, a set of rows on the first axis, or padding where there was
    none, and the other way round. So a change of a rule brings or takes few applications, and leaves the
    order of the others.
    """
    seen: set[Hashable] = set()
    kept = []
    for name in names:
        for i, one in enumerate(_candidates(name)):
            found = _shown(one)
            if not i or not found <= seen:
                kept.append(one)
            if name not in NEWER:
                seen |= found
    return kept


def _shown(one: Application) -> set[Hashable]:
    rows = [_kinds(one, row) for row in one.rows]
    padded = {
        ("padding", _communication(one, row), bool(one.uneven(row))) for row in one.rows if has_split(row)
    }
    return {*rows, *padded, *([frozenset(rows)] if one.group == GROUPS[0] else [])}


def _candidates(name: str) -> Iterator[Application]:
    graphs = [trace(one.fn, one.args, {}).graph for one in samples().get(name, [])]
    for group in GROUPS:
        for graph in graphs:
            yield from (Application(graph, node, group) for node in graph.walk() if node.op == name)


def has_split(row: Row) -> bool:
    """Whether the row cuts anything."""
    return any(isinstance(s, Split) for s in (*row.operands, *row.results))


def _communication(one: Application, row: Row) -> frozenset[str]:
    return frozenset(t.kind for t in one.communication(row))


def _kinds(one: Application, row: Row) -> Hashable:
    """What tells a row from others of a rule: not which dims it names."""

    def kind(s: Signature) -> str:
        return "S" if isinstance(s, Split) else str(s)

    flags = row.moves, row.multiplies, row.owned, row.needs_finite(one.op), bool(row.fills)
    return tuple(map(kind, row.operands)), tuple(map(kind, row.results)), flags, _communication(one, row)
