"""Signatures that need no search: those of a plan that is given, and those that an earlier search has found.

A search is kept under a digest of all that its answer depends on. What a function among an op's parameters
computes cannot be a part of that: then nothing is kept, unless a rule of the user's speaks for the op.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from sbp.errors import ArgumentError, Problem
from sbp.passes import spec
from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cost import node_seconds
from sbp.passes.plan.digest import GraphDigest, ParamText, digest_of, graph_digest, has_own_rule
from sbp.passes.plan.model import Boundary, ChosenSignatures
from sbp.passes.plan.record import ChoiceRecord, NotTaken, chosen_by, plain_ops, record_of, versions
from sbp.passes.program.views import held_bytes
from sbp.passes.request import Question, Request
from sbp.passes.search.search import FoundSignatures
from sbp.signature import format_sbp

OTHER_COSTS = (
    "the signatures are those of a plan for other hardware or options: how far they are from the best ones "
    "is not known here"
)


@dataclass(frozen=True)
class Recall:
    """One choice of signatures, and what it depends on."""

    candidates: Candidates
    boundary: Boundary
    boxings: Boxings
    request: Request

    def recorded_choice(self) -> tuple[ChosenSignatures, ChoiceRecord] | None:
        """What need not be searched for: what is given, else what was found before.

        Raises:
          ArgumentError: if what is given is for another program.
        """
        r = self.request
        if r.record is not None:
            return self._given(r.record)
        record = None if r.terms.store is None or self.key is None else r.terms.store.load(self.key)
        if record is None or record.program != self.graph.text:
            return None
        try:
            return self.signatures_of(record), record
        except (NotTaken, spec.SpecError):  # the file says something else than it was given
            return None

    def keep(self, found: FoundSignatures) -> ChoiceRecord:
        """The record of what was found; the store, if there is one, has it from now on.

        What does not fit, or was cut off, is not kept: the next search may do better.
        """
        asked, digests = (self.request.in_sbp, self.request.out_sbp), (self.graph.text, self.costs)
        record = record_of(self.candidates.graph, found.assignment, asked, digests, found.notes)
        return record if found.is_cut or found.smallest is not None else self.save(record)

    def save(self, record: ChoiceRecord) -> ChoiceRecord:
        """The record, which the store has from now on; what was given it does not keep."""
        r = self.request
        if r.terms.store is not None and r.record is None and self.key is not None:
            r.terms.store.save(self.key, record)
        return record

    def update_bound(self, record: ChoiceRecord) -> ChoiceRecord:
        """A record with another bound, which the store has if it has the record."""
        store = self.request.terms.store
        if store is not None and self.key is not None and store.has(self.key):
            self.save(record)
        return record

    def _given(self, record: ChoiceRecord) -> tuple[ChosenSignatures, ChoiceRecord]:
        try:
            if record.program != self.graph.text:
                raise NotTaken("", _difference(record, self.candidates), "a plan of this program")
            if record.costs != self.costs:
                record = replace(record, bound=0.0, costs=self.costs, notes=(*record.notes, OTHER_COSTS))
            return self.signatures_of(record), record
        except NotTaken as e:
            made = f"; that one was made by {record.made_by}" if record.made_by != versions() else ""
            raise ArgumentError(
                Problem(
                    "argument",
                    "Options(plan=...)" + (f": {e.where}" if e.where else ""),
                    e.got,
                    e.legal,
                    f"every op takes its signature from the plan, and has it there{made}",
                    "make the plan again with Program.plan(...), or leave the option out",
                )
            ) from None

    def signatures_of(self, record: ChoiceRecord) -> ChosenSignatures:
        """What a record says of this program.

        Raises:
          NotTaken, SpecError: if that is no choice for it.
        """
        chosen = chosen_by(record, self.candidates, self.boundary)
        spec.check_assignment(self.candidates, chosen, self.boxings)
        return chosen

    @cached_property
    def graph(self) -> GraphDigest:
        """The digest of the program."""
        return graph_digest(self.candidates.graph)

    @cached_property
    def costs(self) -> str:
        """The digest of what times are estimated from."""
        r = self.request
        own = self._own_rules()
        return digest_of(
            iter([repr(r.hardware), repr(r.terms.transfer), str(r.terms.strict_nonfinite), *own])
        )

    @cached_property
    def key(self) -> str | None:
        """The digest of all that the search depends on; None if not all of that can be written down."""
        return self.question.digest if self.question.exact else None

    @cached_property
    def question(self) -> Question:
        """What the search is asked."""
        r, graph, texts = self.request, self.candidates.graph, ParamText()
        lines = [
            self.graph.text,
            self.costs,
            repr(astuple(r.placement)),
            repr(self.boundary),
            repr((r.donated, r.whole_step, r.most_bytes)),
            repr((r.terms.effort, r.terms.memory_limit_bytes)),
            repr([graph.values[v].name for v in graph.inputs]),
            *(texts.of(n.params["samples"]) for n in graph.walk() if n.params.get("samples")),
        ]
        return Question(digest_of(iter(lines)), self.graph.exact and texts.exact, r.name, self._words())

    def _words(self) -> tuple[str, ...]:
        """What is asked, in words: to say what differs from what others ask."""
        r, graph = self.request, self.candidates.graph
        ends = [graph.values[v] for v in graph.inputs]
        given = (f"{v.name}: {v.dtype}{list(v.shape)}" for v in ends)
        asked = (
            f"{v.name} as {format_sbp(nd)}"
            for v, nd in zip(ends, self.boundary.inputs, strict=False)
            if nd is not None
        )
        limits = r.terms.time_limit_seconds, r.terms.memory_limit_bytes
        others = f"limits {limits}", f"hardware and options {self.costs[:8]}"
        return (str(r.placement), *given, *asked, *others, f"{len(graph.nodes)} ops, {self.graph.text[:8]}")

    def _own_rules(self) -> Iterator[str]:
        """What rules of the user's say of their ops: the rules are functions, so what they give stands."""
        c, network, seen = self.candidates, self.boxings.network, set[tuple[int, object]]()
        for node in plain_ops(c.graph):
            listed, traffic = c.strategies[node.id], c.traffic.get(node.id)
            # Equal ops share one list, which takes long to hash.
            if not has_own_rule(node) or (id(listed), traffic) in seen:
                continue
            seen.add((id(listed), traffic))
            for s in listed:
                seconds = node_seconds(c.graph, node, s, network, traffic)
                held = held_bytes(c.graph, node, s.signatures, c.placement.shape)
                yield f"{node.op} {s} {seconds} {held}"


def _difference(record: ChoiceRecord, candidates: Candidates) -> str:
    """How the program of a record differs from another one."""
    ops = plain_ops(candidates.graph)
    for i, (node, row) in enumerate(zip(ops, record.ops, strict=False)):
        planned = record.rows[row][0]
        if planned != node.op:
            return f"a plan of another program: its op {i} is {planned}, here {node.op} at {node.source}"
    if len(ops) != len(record.ops):
        return f"a plan of another program: of {len(record.ops)} ops, here are {len(ops)}"
    return "a plan of another program: of the same ops on other shapes, parameters or operands"
