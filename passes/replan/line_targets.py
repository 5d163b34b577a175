"""The tensors near a collective that a user can hold: at a line of the program, gradients, arguments."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.annotation import annotate_p
from sbp.passes.explain.collectives import InnerCollective, communication_steps
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.plan_figures import GRADIENT, moves_of
from sbp.passes.explain.reasons import Reasons
from sbp.passes.explain.targets import Target
from sbp.passes.physical.program import Box, Flow, Physical
from sbp.passes.program.graph import Const, Node
from sbp.passes.program.names import PHASES, Names, common, without_indices

FAR = 8
"""Ops between a collective and what is held for it, at the most."""
MOST = 16
"""Tensors that are looked at for a collective, the nearest; equal layers are one."""

Key = tuple[str, ...]
"""What is held together: by one line, or as one pattern of paths."""


@dataclass(frozen=True)
class LineTargets:
    """What can be held near the rows of a plan.

    Arguments:
      ties: per result, the argument that it comes back as, or None.
    """

    plan: PlanData
    physical: Physical
    rows: Sequence[Collective]
    ties: Sequence[int | None]

    @cached_property
    def flow(self) -> Flow:
        """The ways of the tensors."""
        return Flow(self.physical)

    @cached_property
    def names(self) -> Names:
        """What they are called."""
        return Names(self.physical.graph, self.plan.in_paths, self.plan.out_paths)

    @cached_property
    def _readers(self) -> Mapping[int, Sequence[Node]]:
        found: dict[int, list[Node]] = {}
        for node in self.physical.graph.walk():
            for x in node.inputs:
                if not isinstance(x, Const):
                    found.setdefault(x, []).append(node)
        return found

    @cached_property
    def _outputs(self) -> frozenset[int]:
        return frozenset(x for x in self.physical.graph.outputs if not isinstance(x, Const))

    @cached_property
    def _given(self) -> Mapping[int, int]:
        return {v: i for i, v in enumerate(self.physical.graph.inputs[: len(self.plan.in_paths)])}

    def key(self, v: int) -> Key | None:
        """With what a tensor is held; None for one that no user can hold by itself."""
        value = self.physical.graph.values[v]
        if not value.shape:
            return None
        alike = str(value.dtype), str(value.shape)
        if v in self._given:
            return "argument", without_indices(self.plan.in_paths[self._given[v]]), *alike
        made = self.flow.makers.get(v)
        if made is None or not made[0].source.file or made[0].op == annotate_p.name:
            return None
        node, name = made[0], self.names.of(v)
        if name.startswith(GRADIENT):
            return ("gradient", without_indices(name), *alike) if self._leaves(node, v, PHASES[2]) else None
        if self.names.phases[node.id] != PHASES[0] or not self._leaves(node, v, PHASES[0]):
            return None
        # One line is one annotation, whatever the shapes that it makes in several calls.
        return "line", str(node.source), node.op, str(len(value.shape))

    def _leaves(self, node: Node, v: int, phase: str) -> bool:
        """Whether something of a phase reads a tensor elsewhere than at the line that makes it."""
        at = str(node.source)
        users = [x for x in self._readers.get(v, ()) if self.names.phases[x.id] == phase]
        if phase == PHASES[2]:
            return bool(users) or v in self._outputs
        return (not users and v in self._outputs) or any(str(x.source) != at for x in users)

    def is_line(self, target: Target) -> bool:
        """Whether a target is what some tensors that a user can hold are."""
        return not target.values or self.key(target.values[0]) is not None

    @cached_property
    def _together(self) -> Mapping[Key, Sequence[int]]:
        """All tensors of a key."""
        found: dict[Key, list[int]] = {}
        for v in (*self._given, *(v for node in self.physical.graph.walk() for v in node.outputs)):
            if (v in self._given or v in self.flow.result_sbp) and (key := self.key(v)) is not None:
                found.setdefault(key, []).append(v)
        return found

    @cached_property
    def targets_near(self) -> Sequence[Sequence[Target]]:
        """What can be held near each row, the nearest first."""
        return [list(self._found(c)) for c in self.rows]

    def _found(self, c: Collective) -> Iterator[Target]:
        keys = dict.fromkeys(key for v in self._by_distance(c) if (key := self.key(v)) is not None)
        yield from (self.target(key) for key in [*keys][:MOST])

    def _by_distance(self, c: Collective) -> Iterator[int]:
        """Tensors near a row, the nearest first."""
        first = list[int]()
        for what in moves_of(self.physical, c):
            if isinstance(what, Box):
                first.append(what.value)
            elif isinstance(what, InnerCollective):
                first += [x for x in (*what.step.node.outputs, *what.step.node.inputs) if isinstance(x, int)]
        producers = self.physical.graph.producers()
        seen, queue = set(first), deque((v, 0) for v in dict.fromkeys(first))
        while queue:
            v, far = queue.popleft()
            yield v
            if far == FAR:
                continue
            node = producers.get(v)
            beside = [
                *(node.inputs if node is not None else ()),
                *(x for user in self._readers.get(v, ()) for x in (*user.outputs, *user.inputs)),
                *([self.flow.across[v]] if v in self.flow.across else []),
            ]
            for x in beside:
                if isinstance(x, int) and x not in seen:
                    seen.add(x)
                    queue.append((x, far + 1))

    def target(self, key: Key) -> Target:
        """The tensors of a key."""
        values = self._together[key]
        first = self.physical.graph.values[values[0]]
        if key[0] == "argument":
            at = tuple(self._given[v] for v in values)
            name = common(self.plan.in_paths[i] for i in at)
            return Target(name, first.shape, first.dtype, at, (), (), (self.physical.inputs[at[0]],))
        lying = (self.flow.result_sbp[values[0]], *(nd for _, nd in self.flow.readers.get(values[0], ())))
        node = self.flow.makers[values[0]][0]
        name = f"{common(self.names.of(v) for v in values)}, made at {node.source}"
        return Target(name, first.shape, first.dtype, (), (), tuple(values), tuple(dict.fromkeys(lying)))

    def sends_by_line(self, physical: Physical) -> Iterator[tuple[Box | InnerCollective, str]]:
        """All that a program sends, and the line of each."""
        reasons = Reasons(physical, Names(physical.graph, (), ()))
        for what, _ in communication_steps(physical):
            yield what, str(reasons.source(what) if isinstance(what, Box) else what.step.node.source)
