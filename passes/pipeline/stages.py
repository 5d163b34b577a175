"""A program taken apart: what every placement computes, and its plan.

Words: docs/glossary.md.

What a reader calls the tensors that go from one placement to another: by their stages, ops and lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Physical
from sbp.passes.pipeline.cut import cut
from sbp.passes.pipeline.op_placement import OpPlacements
from sbp.passes.pipeline.order import Order
from sbp.passes.pipeline.slots import Cut
from sbp.passes.pipeline.split import Subgraph
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.names import Names
from sbp.passes.program.role import Phase
from sbp.passes.program.trace import TracedProgram
from sbp.passes.request import Request


@dataclass(frozen=True)
class Stages:
    """A program taken apart.

    Arguments:
      name: the function's name.
      traced: the whole.
      where: its placements.
      stages: per stage, the position of its placement.
      microbatches: how many there are; 0 for a program without a loop over them.
      subgraphs, plans: per placement.
      labels: the words for what goes from one placement to another.
      requests: per placement, what its plan was asked for: what a plan that is made again begins with.
    """

    name: str
    traced: TracedProgram
    where: OpPlacements
    stages: tuple[int, ...]
    microbatches: int
    subgraphs: tuple[Subgraph, ...]
    plans: tuple[PlanData, ...]
    labels: Labels
    requests: tuple[tuple[TracedProgram, Request], ...] = field(default=(), compare=False, repr=False)

    def cuts(self, merged: bool) -> tuple[Cut, ...]:
        """The pieces of every placement; `merged` as of `cut`."""
        return self._merged if merged else self._apart

    @cached_property
    def _merged(self) -> tuple[Cut, ...]:
        return tuple(cut(s, physical_of(p), True) for s, p in zip(self.subgraphs, self.plans, strict=True))

    @cached_property
    def _apart(self) -> tuple[Cut, ...]:
        return tuple(cut(s, physical_of(p), False) for s, p in zip(self.subgraphs, self.plans, strict=True))


def physical_of(plan: PlanData) -> Physical:
    """The program of a plan that was made just now."""
    assert plan.physical is not None
    return plan.physical


@dataclass(frozen=True)
class Labels:
    """The words for one program that has been taken apart.

    Arguments:
      graph: the whole.
      names: what its tensors are called.
    """

    graph: Graph
    where: OpPlacements
    order: Order
    names: Names

    @cached_property
    def _makers(self) -> dict[int, Node]:
        return self.graph.producers()

    @cached_property
    def _users(self) -> dict[int, list[Node]]:
        return {v: [n for n, _ in uses] for v, uses in self.graph.consumers().items()}

    def receive_labels(self, values: Sequence[int]) -> list[str]:
        """Names for values that come from another placement."""
        return _apart(f"from {self.maker(v)}: {self.tensor(v)}" for v in values)

    def send_labels(self, values: Sequence[int]) -> list[str]:
        """Names for values that go to others."""
        return _apart(f"to {self.readers(v)}: {self.tensor(v)}" for v in values)

    def tensor(self, v: int) -> str:
        """What a value is, and the line that makes it."""
        return f"{self.names.of(v)}, {self.source(v)}" if v in self._makers else self.names.of(v)

    def source(self, v: int) -> str:
        """The line that makes a value."""
        return str(self._makers[v].source) if v in self._makers else "?"

    def maker(self, v: int) -> str:
        """Who makes a value: a stage, or a placement before or after the loop over micro-batches."""
        place, node = self.where.home(v), self._makers.get(v)
        stage = None if node is None else self.stage(node, place)
        return f"placement {place}" if stage is None else f"stage {stage}"

    def readers(self, v: int) -> str:
        """Who wants a value."""
        places = [(n, p) for n in self._users.get(v, ()) for p in self.where.nodes.get(n.id, ())]
        away = [(n, p) for n, p in places if p not in self.where.values[v]]
        stages = sorted({s for n, p in away if (s := self.stage(n, p)) is not None})
        if stages:
            return _several("stage", stages)
        return _several("placement", sorted({p for _, p in away})) if away else "another placement"

    def stage(self, node: Node, place: int) -> int | None:
        """The stage of an op, if it runs for every micro-batch."""
        part = self.order.parts.get((node.id, place))
        return None if part is None or part.phase in (Phase.BEFORE, Phase.AFTER) else part.at


def _several(what: str, numbers: Sequence[int]) -> str:
    """A few numbers in words.

    >>> _several("stage", [1]), _several("stage", [1, 2, 5])
    ('stage 1', 'stages 1, 2 and 5')
    """
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _apart(names: Iterable[str]) -> list[str]:
    """The same, numbered where several are alike.

    >>> _apart(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    seen: Counter[str] = Counter()
    out = []
    for name in names:
        seen[name] += 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return out
