"""Insertion: the moves that bring every value to where the chosen signatures want it."""

from __future__ import annotations

from collections.abc import Sequence

from sbp.passes.boxing.moves import Move
from sbp.passes.boxing.paths import Boxings, makes_sum
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, grouped
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.model import ChosenSignatures, boxing_of
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Node
from sbp.signature import NdSbp


class _Insertion:
    """Walks the ops of one body (or of the program) and brings every value where it is wanted.

    `have` lists the versions of each value that exist. `filled` has those that were made by putting zeros
    beside a whole value: such a sum may not serve a *strict* user, to whom zero times infinity would be NaN.
    """

    def __init__(
        self, c: Candidates, a: ChosenSignatures, boxings: Boxings, have: dict[int, list[NdSbp]]
    ) -> None:
        self.c, self.a, self.boxings = c, a, boxings
        self.graph = c.graph
        self.have = {v: list(nds) for v, nds in have.items()}
        self.filled: set[Version] = set()
        self.steps: list[Step] = []

    def bring(self, v: int, wanted: NdSbp, user: int, strict: bool) -> None:
        """Makes the version `wanted` of a value, from the cheapest one that exists."""
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
        table, j = boxing.strict_seconds if strict else boxing.seconds, boxing.index[wanted]
        # A sum made by filling is no source: its zeros would meet what the next move computes.
        sources = [nd for nd in self.have[v] if (v, nd) not in self.filled]
        source = min(sources, key=lambda nd: table[boxing.index[nd], j])
        self.take(v, boxing.path(source, wanted, strict=strict), user)

    def take(self, v: int, path: tuple[Move, ...], user: int) -> None:
        fresh = False
        for move in path:
            fresh = fresh or makes_sum(move)
            if move.after not in self.have[v] or (not fresh and (v, move.after) in self.filled):
                self.steps.append(Box(v, move, user))
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
                    self.bring(x, wanted, node.id, strict)
            self.steps.append(Compute(node, strategy))
            for v, nd in zip(node.outputs, strategy.results, strict=True):
                self.have[v] = [nd]

    def border(self, node: Node) -> None:
        """A loop or a branch: what enters is brought to its port outside, what leaves inside."""
        wired, inside = ports(node), self.a.ports[node.id]
        for port, nd in zip(wired, inside, strict=True):
            x = node.inputs[port.operand] if port.operand is not None else None
            if isinstance(x, int):
                self.bring(x, port.outer(nd), node.id, True)
        bodies = []
        for k, body in enumerate(node.bodies):
            inner = _Insertion(self.c, self.a, self.boxings, self.have)
            inner.have.update({v: [nd] for p, nd in zip(wired, inside, strict=True) for v in p.enters})
            inner.run(body.nodes)
            for port, nd in zip(wired, inside, strict=True):
                for x in port.left_by(k):
                    if isinstance(x, int):
                        inner.bring(x, nd, node.id, True)
            bodies.append(grouped(inner.steps))
        self.steps.append(Border(node, inside, tuple(bodies)))
        for port, nd in zip(wired, inside, strict=True):
            if port.result is not None:
                self.have[node.outputs[port.result]] = [port.outer(nd)]


def insert_boxing(candidates: Candidates, assignment: ChosenSignatures, boxings: Boxings) -> Physical:
    """Puts the moves between the ops; a value is boxed once to each signature that is asked for."""
    graph = candidates.graph
    have = {v: [nd] for v, nd in zip(graph.inputs, assignment.inputs, strict=True)}
    main = _Insertion(candidates, assignment, boxings, have)
    main.run(graph.nodes)
    for i, (x, wanted) in enumerate(zip(graph.outputs, assignment.outputs, strict=True)):
        if not isinstance(x, Const):
            main.bring(x, wanted, -1 - i, False)
    at_rest = assignment.inputs, assignment.outputs
    return Physical(graph, candidates.placement, grouped(main.steps), *at_rest, candidates.traffic)
