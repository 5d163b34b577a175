"""Insertion: the moves that bring every value to where the chosen signatures want it.

Each tensor is sent in the narrowest type that holds all of what is sent, or all that is read of it. A tensor
that was widened goes as what it was, and one that is only read to be narrowed goes as what it becomes.
XLA:GPU exchanges such conversions with collectives that copy (collective_quantizer.cc); written down here,
plans say what is sent, and programs send it on every platform.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from sbp.compat.untyped import DType
from sbp.passes.boxing.moves import Move, copies, makes_sum
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.program import (
    Border,
    Box,
    Compute,
    Physical,
    Step,
    Version,
    group_by_barrier,
    reads,
    writes,
)
from sbp.passes.physical.recompute import with_copies
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.model import ChosenSignatures, boxing_of
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Graph, Node
from sbp.passes.program.narrow_values import REARRANGING, holds
from sbp.signature import NdSbp, Partial


def send_narrow(physical: Physical, narrower: Mapping[int, DType]) -> Physical:
    """The same program, its moves told in which type they send.

    Arguments:
      narrower: per value that was widened, the type that holds all of it.
    """
    readers = _Readers(physical.graph)
    readers.add(physical.steps)
    readers.at_end.update(zip((x for x in physical.graph.outputs), physical.outputs, strict=True))
    return replace(physical, steps=_told(physical.steps, narrower, readers, set()))


def _told(
    steps: Sequence[Step], narrower: Mapping[int, DType], readers: _Readers, exact: set[Version]
) -> tuple[Step, ...]:
    """The steps of one body; `exact` has the versions that nothing was computed of since they were widened,
    and is added to."""
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Border):
            bodies = (_told(body, narrower, readers, set(exact)) for body in step.bodies)
            step = replace(step, bodies=tuple(bodies))
        elif isinstance(step, Compute):
            if any(v in narrower for v in step.node.outputs):
                exact.update(v for v in writes(step) if v[0] in narrower)
        else:
            before, after = (step.value, step.move.before), (step.value, step.move.after)
            if before in exact and not isinstance(step.move.old, Partial):
                exact.add(after)
            else:
                exact.discard(after)
            if copies(step.move):
                narrow = narrower[step.value] if before in exact else readers.need(after)
                step = step if narrow is None else replace(step, sent_as=narrow)
        out.append(step)
    return tuple(out)


@dataclass
class _Readers:
    """Who reads which version; `at_end` has those that leave.

    Arguments:
      of: per value, each reader of it under some signature.
    """

    graph: Graph
    of: dict[int, list[tuple[NdSbp, Step]]] = field(default_factory=lambda: defaultdict(list))
    at_end: set[tuple[object, object]] = field(default_factory=set)
    known: dict[Version, DType | None] = field(default_factory=dict)

    def add(self, steps: Sequence[Step]) -> None:
        for step in steps:
            for v, nd in reads(step):
                self.of[v].append((nd, step))
            if isinstance(step, Border):
                for body in step.bodies:
                    self.add(body)

    def need(self, version: Version) -> DType | None:
        """The narrower type to which all who read a version narrow it first."""
        if version not in self.known:
            self.known[version] = None  # while it is looked for: of a loop of moves nobody narrows
            readers = (step for nd, step in self.of.get(version[0], ()) if nd == version[1])
            found = {self._needed(step, version) for step in readers}
            if len(found) == 1 and version not in self.at_end:
                self.known[version] = found.pop()
        return self.known[version]

    def _needed(self, step: Step, version: Version) -> DType | None:
        if isinstance(step, Box):
            return None if isinstance(step.move.old, Partial) else self.need((step.value, step.move.after))
        if isinstance(step, Border) or step.node.barrier >= 0 or _operands(step) != [version]:
            return None
        if step.node.op == "convert_element_type":
            wide, narrow = (self.graph.values[v].dtype for v in (version[0], step.node.outputs[0]))
            return narrow if holds(narrow, wide) else None
        return self.need(writes(step)[0]) if step.node.op in REARRANGING and len(writes(step)) == 1 else None


def _operands(step: Compute) -> list[Version]:
    pairs = zip(step.node.inputs, step.strategy.operands, strict=True)
    return [(x, nd) for x, nd in pairs if not isinstance(x, Const)]


End: TypeAlias = tuple[NdSbp, int, bool]
"""How a value leaves, who asks for it so, and whether a sum must come as a sum."""
Ends: TypeAlias = Mapping[int, Sequence[End]]
Computes: TypeAlias = dict[tuple[int, int], Compute]
"""Ops by the ids of their node and their strategy, which they hold."""


class _Insertion:
    """Walks the ops of one body (or of the program) and brings every value where it is wanted.

    `have` lists the versions of each value that exist. `filled` has those that were made by putting zeros
    beside a whole value: such a sum may not serve a *strict* user, to whom zero times infinity would be NaN.
    `cluster` has the cluster of uses that each value is in, and `dropped` the versions that earlier ones had;
    `after` is what the user at hand waits for beside the value that is brought, and
    `anchors` what a barrier of copies waits for.
    """

    def __init__(
        self,
        c: Candidates,
        a: ChosenSignatures,
        boxings: Boxings,
        have: dict[int, list[NdSbp]],
        leaving: Ends | None = None,
        computes: Computes | None = None,
    ) -> None:
        self.c, self.a, self.boxings, self.leaving = c, a, boxings, leaving
        self.computes: Computes = {} if computes is None else computes
        self.graph = c.graph
        self.have = {v: list(nds) for v, nds in have.items()}
        self.filled: set[Version] = set()
        self.steps: list[Step] = []
        self.cluster: dict[int, int] = {}
        self.dropped: set[Version] = set()
        self.order: dict[int, int] = {}
        self.after: Version | None = None
        self.anchors: Mapping[int, int] = {}

    def bring(self, v: int, wanted: NdSbp, user: int, strict: bool) -> None:
        """Makes the version `wanted` of a value, from the cheapest one that exists."""
        nearer = self.enter(v, user) if v in self.a.clusters else None
        have = self.have[v]
        if wanted in have and not (strict and (v, wanted) in self.filled):
            return
        boxing = boxing_of(self.boxings, self.c, self.graph.values[v].shape, self.graph.values[v].dtype, v)
        # What the search has priced is a star: to the share once, and from there to each user. A direct way
        # from another version may be shorter still; then the plan is cheaper than what was priced, never
        # dearer.
        share = self.a.shares.get(v)
        if share is not None and share not in have:
            self.take(v, boxing.path(have[0], share, strict=True), user)
        if nearer is not None and nearer not in self.have[v]:
            self.take(v, boxing.path(share or have[0], nearer, strict=True), user)
            if wanted == nearer:
                return
        table, j = boxing.strict_seconds if strict else boxing.seconds, boxing.index[wanted]
        # A sum made by filling is no source: its zeros would meet what the next move computes.
        sources = [nd for nd in self.have[v] if (v, nd) not in self.filled]
        source = min(sources, key=lambda nd: table[boxing.index[nd], j])
        self.take(v, boxing.path(source, wanted, strict=strict), user)

    def bring_after(self, v: int, wanted: NdSbp, node: Node, strict: bool) -> None:
        """Makes a version for an op or a loop; what is made again is not before the op is about to run."""
        if v not in self.a.clusters:
            self.bring(v, wanted, node.id, strict)
            return
        self.after = self.waits_for(node, v)
        self.bring(v, wanted, node.id, strict)
        self.after = None

    def enter(self, v: int, user: int) -> NdSbp | None:
        """Goes to the cluster of a user, and gives its share; earlier ones leave only the value's share."""
        at, clusters = self.cluster.get(v, 0), self.a.clusters.get(v, ())
        now = next((k for k, c in enumerate(clusters) if user in c.users), at)
        if now != at:
            kept = {self.have[v][0], self.a.shares.get(v)}
            self.dropped.update((v, nd) for nd in self.have[v] if nd not in kept)
            self.have[v] = [nd for nd in self.have[v] if nd in kept]
            self.cluster[v] = now
        return clusters[now].share if clusters else None

    def waits_for(self, node: Node, v: int) -> Version | None:
        """The operand of an op that is computed last, beside a value: nothing for the op is made before."""
        inputs = [self.anchors[node.barrier]] if node.barrier in self.anchors else node.inputs
        others = [x for x in inputs if not isinstance(x, Const) and x != v]
        last = max(others, key=lambda x: self.order.get(x, -1), default=None)
        return (last, self.have[last][0]) if last in self.order else None

    def take(self, v: int, path: tuple[Move, ...], user: int) -> None:
        fresh = False
        for move in path:
            fresh = fresh or makes_sum(move)
            if move.after not in self.have[v] or (not fresh and (v, move.after) in self.filled):
                again = move.is_collective and (v, move.after) in self.dropped
                self.steps.append(Box(v, move, user, after=self.after if again else None))
                self.have[v] = [*dict.fromkeys([*self.have[v], move.after])]
                (self.filled.add if fresh else self.filled.discard)((v, move.after))

    def run(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.bodies:
                self.border(node)
                continue
            strategy = self.a.strategies[node.id]
            for x, wanted, strict in zip(node.inputs, strategy.operands, strategy.strict, strict=True):
                if not isinstance(x, Const):
                    self.bring_after(x, wanted, node, strict)
            self.steps.append(self.compute(node, strategy))
            for v, nd in zip(node.outputs, strategy.results, strict=True):
                self.have[v] = [nd]
                self.order[v] = len(self.steps)
                if self.leaving:
                    self.leave(v)

    def compute(self, node: Node, strategy: Strategy) -> Compute:
        """An op under its signature, one object for all plans."""
        key = id(node), id(strategy)
        if key not in self.computes:
            self.computes[key] = Compute(node, strategy)
        return self.computes[key]

    def leave(self, v: int) -> None:
        """Brings a value that another placement waits for to where it leaves."""
        for wanted, user, strict in (self.leaving or {}).get(v, ()):
            self.bring(v, wanted, user, strict)

    def border(self, node: Node) -> None:
        """A loop or a branch: what enters is brought to its port outside, what leaves inside."""
        wired, inside = ports(node), self.a.ports[node.id]
        for port, nd in zip(wired, inside, strict=True):
            x = node.inputs[port.operand] if port.operand is not None else None
            if isinstance(x, int):
                self.bring_after(x, port.outer(nd), node, True)
        bodies = []
        for k, body in enumerate(node.bodies):
            ends = [
                (x, (nd, node.id, True))
                for port, nd in zip(wired, inside, strict=True)
                for x in port.left_by(k)
                if isinstance(x, int)
            ]
            early = self.early_ends(ends)
            inner = _Insertion(self.c, self.a, self.boxings, self.have, early, self.computes)
            inner.have.update({v: [nd] for p, nd in zip(wired, inside, strict=True) for v in p.enters})
            inner.run(body.nodes)
            for x, (nd, user, strict) in ends:
                inner.bring(x, nd, user, strict)
            bodies.append(group_by_barrier(inner.steps))
        self.steps.append(Border(node, inside, tuple(bodies)))
        for port, nd in zip(wired, inside, strict=True):
            if port.result is not None:
                self.have[node.outputs[port.result]] = [port.outer(nd)]
                self.order[node.outputs[port.result]] = len(self.steps)
                self.leave(node.outputs[port.result])

    def early_ends(self, ends: Iterable[tuple[int, End]]) -> Ends | None:
        """What leaves a body at once; None where it may wait until the end."""
        if self.leaving is None:
            return None
        found: dict[int, list[End]] = {}
        for x, end in ends:
            found.setdefault(x, []).append(end)
        return found


def insert_boxing(
    candidates: Candidates,
    assignment: ChosenSignatures,
    boxings: Boxings,
    *,
    at_once: bool = False,
    computes: Computes | None = None,
) -> Physical:
    """Puts the moves between the ops; a value is boxed once to each signature that is asked for.

    What is recomputed is so in the program that this gives: its graph has the ops that run again.

    Arguments:
      at_once: whether what leaves the program or a body is boxed as soon as it is made. Another stage may
        wait for it: it must not be made from a version that is there only later, as one for the backward.
      computes: the ops of other plans of the program, which are added to.
    """
    copied = with_copies(candidates, assignment)
    candidates, assignment, graph = copied.candidates, copied.assignment, copied.candidates.graph
    have = {v: [nd] for v, nd in zip(graph.inputs, assignment.inputs, strict=True)}
    results = enumerate(zip(graph.outputs, assignment.outputs, strict=True))
    ends = [(x, (wanted, -1 - i, False)) for i, (x, wanted) in results if not isinstance(x, Const)]
    main = _Insertion(candidates, assignment, boxings, have, {} if at_once else None, computes)
    main.leaving, main.anchors = main.early_ends(ends), copied.anchors
    main.run(graph.nodes)
    for x, (wanted, user, strict) in ends:
        main.bring(x, wanted, user, strict)
    at_rest = assignment.inputs, assignment.outputs
    steps = group_by_barrier(main.steps)
    physical = Physical(graph, candidates.placement, steps, *at_rest, candidates.traffic)
    return send_narrow(physical, candidates.narrower)
