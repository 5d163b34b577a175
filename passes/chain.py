"""THE lists of passes: from a JAX function to the physical program and its plan.

A pass is a function from one of the records below to the next; `holds` says what must be true of what it
gives. A program of one placement goes through `PLACEMENT`, one with stages through `STAGES`, whose pass
"placements" sends what each placement computes through `PLACEMENT`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sbp.errors import MemoryLimitError, raise_all
from sbp.passes import spec
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain import memory, notes
from sbp.passes.explain.collectives import explain
from sbp.passes.explain.notes import everywhere_notes, recomputed_notes
from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.plan_figures import with_bounds
from sbp.passes.face import Plan, with_forms
from sbp.passes.pass_manager import Chain, chain_of
from sbp.passes.physical.buckets import bucket_collectives
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.exchanges import join_exchanges
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.kernel_merges import merge_ops
from sbp.passes.physical.memory import SmallestPeak
from sbp.passes.physical.owners import mark_owners
from sbp.passes.physical.program import Compute, Physical
from sbp.passes.pipeline.auto_stages import cut_model
from sbp.passes.pipeline.check import check_schedule, check_stages
from sbp.passes.pipeline.op_placement import OpPlacements, find_places, placements_of
from sbp.passes.pipeline.order import Order, find_order
from sbp.passes.pipeline.plan import pipeline_plan
from sbp.passes.pipeline.planning import plan_shares
from sbp.passes.pipeline.schedule_choice import schedule_for
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.sums import add_inside, split_sums
from sbp.passes.plan import constants, pins
from sbp.passes.plan.bounds import relaxed_bound
from sbp.passes.plan.candidates import Candidates, enumerate_candidates
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.model import Boundary, ChosenSignatures
from sbp.passes.plan.record import ChoiceRecord
from sbp.passes.program.duplicates import without_duplicates, without_inverse_views
from sbp.passes.program.graph import Graph
from sbp.passes.program.hoist import hoist_casts, hoist_narrowing
from sbp.passes.program.trace import TracedProgram
from sbp.passes.recall import Recall
from sbp.passes.request import Peers, Request, StagesRequest
from sbp.passes.rows.lookups import check_wire, mark_lookups
from sbp.passes.rows.tables import rows_of_loops, train_rows
from sbp.passes.schedule.actions import Schedule
from sbp.passes.search.search import FoundSignatures, Search
from sbp.signature import NdSbp

# What goes from pass to pass, for one placement.


@dataclass(frozen=True)
class Logical:
    """What is asked, and the logical graph."""

    request: Request
    traced: TracedProgram
    boxings: Boxings

    @property
    def graph(self) -> Graph:
        """Of the program."""
        return self.traced.graph

    @property
    def asked_inputs(self) -> list[NdSbp | None]:
        """Signatures of all inputs; those of arrays that the function closes over are open (None)."""
        return [*self.request.in_sbp, *[None] * len(self.graph.consts)]

    def with_graph(self, graph: Graph) -> Logical:
        """The same with another graph."""
        return replace(self, traced=replace(self.traced, graph=graph))


@dataclass(frozen=True)
class Listed(Logical):
    """With every N-D signature of every op."""

    candidates: Candidates

    @property
    def boundary(self) -> Boundary:
        """What is asked of arguments and results."""
        r = self.request
        costs = r.in_costs, r.out_costs
        return pins.boundary(self.graph, self.asked_inputs, r.out_sbp, r.ties, r.placement, costs)


@dataclass(frozen=True)
class Chosen(Listed):
    """With one signature for each op, argument and result; the smallest peak if no plan fits; and the figures
    of the finished program, if the search has made it."""

    assignment: ChosenSignatures
    asked_boundary: Boundary
    smallest: SmallestPeak | None
    recall: Recall
    record: ChoiceRecord
    takes: Evaluator | None


@dataclass(frozen=True)
class Placed(Chosen):
    """With the collectives in place."""

    physical: Physical


def find_rows(s: Logical) -> Logical:
    """Finds tables that are looked up and trained by rows."""
    r = s.request
    strict = r.terms.strict_nonfinite
    graph, remarks = train_rows(s.graph, r.terms.transfer, s.traced.in_paths, strict=strict)
    graph = mark_lookups(graph, r.terms.transfer)
    graph = graph if r.with_sample is None else r.with_sample(graph)
    return replace(s.with_graph(graph), request=replace(r, notes=(*r.notes, *remarks)))


def check_pins(s: Logical) -> Logical:
    """Checks every annotation; nothing is asked for along axes of one device."""
    raise_all(pins.check_annotations(s.graph, s.request.placement))
    return replace(s, request=s.request.on_wide_axes)


def merge_equals(s: Logical) -> Logical:
    """Computes once what is computed twice, and nothing that is undone; pins keep equal values apart."""
    return s.with_graph(without_duplicates(without_inverse_views(s.graph)))


def hoist_weights(s: Logical) -> Logical:
    """Takes casts of weights out of loops over micro-batches, where there is room."""
    r = s.request
    if not r.whole_step:  # the loop of a stage is cut into pieces, and what leaves it has left it
        return s
    return s.with_graph(hoist_narrowing(s.graph, constants.CASTS_SHARE * r.limit_bytes * r.placement.size))


def list_candidates(s: Logical) -> Listed:
    """Lists every N-D signature of every op."""
    pinned = {v: nd for v, nd in zip(s.graph.inputs, s.asked_inputs, strict=True) if nd is not None}
    strict = s.request.terms.strict_nonfinite
    candidates = enumerate_candidates(s.graph, s.request.placement, pinned, strict_nonfinite=strict)
    raise_all(pins.check_partials(candidates, s.boxings))
    candidates = replace(candidates, **vars(merge_ops(s.graph)))
    return Listed(**vars(s), candidates=candidates)


def choose_signatures(s: Listed) -> Chosen:
    """Chooses the signatures with the shortest estimated step, over the whole graph at once."""
    r = s.request
    asked = s.boundary
    rest = memory.at_rest(s.graph, (s.traced.in_paths, s.traced.out_paths), asked, r.placement, r.donated)
    memory.check_rest(r.name, rest, r.placement, r.hardware, r.terms.memory_limit_bytes, r.donated)
    recall = Recall(s.candidates, asked, s.boxings, r)
    found, record = _chosen(s, recall) if r.terms.peers is None else _chosen_by_one(s, recall, r.terms.peers)
    s = replace(s, request=replace(r, notes=(*r.notes, *record.notes)))
    return Chosen(
        **vars(s),
        assignment=found.assignment,
        asked_boundary=asked,
        smallest=found.smallest,
        recall=recall,
        record=record,
        takes=found.takes if r.whole_step else None,
    )


def _chosen(s: Listed, recall: Recall) -> tuple[FoundSignatures, ChoiceRecord]:
    """What is known already, or is found now."""
    if (known := recall.recorded_choice()) is not None:
        return FoundSignatures(known[0]), known[1]
    found = Search(s.candidates, recall.boundary, s.boxings, s.request).run()
    return found, recall.keep(found)


def _chosen_by_one(s: Listed, recall: Recall, peers: Peers) -> tuple[FoundSignatures, ChoiceRecord]:
    """The same where one process chooses for all."""
    if not peers.leads:
        record = peers.hear(recall.question)
        return FoundSignatures(recall.signatures_of(record)), record
    try:
        found, record = _chosen(s, recall)
    except Exception as e:
        peers.refuse(recall.question, e)
        raise
    peers.tell(recall.question, record)
    return found, record


def box(s: Chosen) -> Placed:
    """Inserts the collectives; where the search has looked at the program, it is made already."""
    if s.takes is not None:
        return Placed(**vars(s), physical=s.takes.physical)
    at_once = not s.request.whole_step
    return Placed(**vars(s), physical=insert_boxing(s.candidates, s.assignment, s.boxings, at_once=at_once))


def find_owners(s: Placed) -> Placed:
    """Marks the reductions that bring bits of one device each, and compute nothing."""
    return s if s.takes is not None else replace(s, physical=mark_owners(s.physical))


def bucket(s: Placed) -> Placed:
    """Brings small collectives together, and exchanges of rows."""
    joined = join_exchanges(s.physical if s.takes else bucket_collectives(s.physical, s.request.hardware))
    return replace(s, physical=joined, takes=s.takes if joined is s.physical else None)


def write_plan(s: Placed) -> PlanData:
    """Writes down every collective with its reason."""
    r = s.request
    computed = (step for step, _ in s.physical.walk() if isinstance(step, Compute))
    raise_all(check_wire(s.graph, ((step.node, step.strategy.operands) for step in computed)))
    takes = s.takes or Evaluator(s.physical, s.boxings.network, r.donated)
    remarks = (
        *r.notes,
        *notes.uneven_notes(r.in_sbp, r.out_sbp, s.traced, takes),
        *notes.whole_notes(r.in_sbp, s.physical.inputs, s.traced.in_paths),
        *notes.whole_notes(r.out_sbp, s.physical.outputs, s.traced.out_paths),
        *everywhere_notes(s.physical, r.in_sbp, s.traced.in_paths, s.boxings.network),
        *notes.effect_notes(s.graph, r.placement),
        *notes.parts_notes(s.physical),
        *notes.again_notes(s.physical),
        *recomputed_notes(s.candidates, s.assignment, s.physical, s.boxings.network),
    )
    plan = explain(r.name, takes, s.assignment.bound, (s.traced.in_paths, s.traced.out_paths), remarks)
    record = s.record
    if plan.gap < 0:
        # Versions are made from each other in a way that the search did not price: its bound is not of all.
        bound = relaxed_bound(
            s.candidates, s.asked_boundary, s.boxings, Effort().at_most(constants.BOUND_SECONDS)
        )
        record = s.recall.update_bound(replace(record, bound=bound))
    plan = with_bounds(plan, record, s.candidates, s.boxings, s.assignment.cheapest_seconds)
    if plan.memory_bytes > r.limit_bytes:
        asked = r.terms.memory_limit_bytes
        raise MemoryLimitError(memory.over_limit(plan, asked, s.smallest, r.donated))
    return memory.with_warning(plan, takes.at_peak) if r.whole_step else plan


PLACEMENT: Chain[Logical, PlanData] = (
    chain_of("rows", find_rows, lambda s: spec.check_graph(s.graph))
    .then("pins", check_pins, lambda s: spec.check_graph(s.graph))
    .then("equals", merge_equals, lambda s: spec.check_graph(s.graph))
    .then("hoist", hoist_weights, lambda s: spec.check_graph(s.graph))
    .then("candidates", list_candidates, lambda s: spec.check_candidates(s.candidates))
    .then("choice", choose_signatures, lambda s: spec.check_assignment(s.candidates, s.assignment, s.boxings))
    .then("boxing", box, lambda s: spec.check_physical(s.physical))
    .then("owners", find_owners, lambda s: spec.check_owners(s.physical))
    .then("buckets", bucket, lambda s: spec.check_physical(s.physical))
    .then("report", write_plan, spec.check_plan)
)


def compile_plan(traced: TracedProgram, request: Request) -> Plan:
    """The plan of a program of one placement.

    Arguments:
      traced: the logical graph.
      request: what is asked.

    Raises:
      SbpError: for annotations that cannot be honoured, all of them at once.
      InternalError: for a fault of a pass.
    """
    boxings, terms = Boxings(Network(request.placement, request.hardware)), request.terms
    if terms.check:
        spec.check_graph(traced.graph)
    request = request.with_effort(2 if terms.strict_nonfinite else 1)
    plan = PLACEMENT.run(Logical(request, traced, boxings), terms.check)
    if terms.strict_nonfinite:
        usual = replace(request.terms, strict_nonfinite=False, memory_limit_bytes=math.inf)
        # The plan says what strictness costs on the wire; that takes a second search. The boxings are shared.
        other_request = replace(request, terms=usual, record=None).with_effort()
        other = PLACEMENT.run(Logical(other_request, traced, boxings), terms.check)
        plan = replace(plan, notes=(*plan.notes, *notes.strict_notes(plan, other)))
    return with_forms(plan)


# What goes from pass to pass, for a program with stages.


@dataclass(frozen=True)
class Whole:
    """What is asked, and the logical graph of the whole program; `graph` is what passes have made of it."""

    request: StagesRequest
    traced: TracedProgram
    graph: Graph


@dataclass(frozen=True)
class Ordered(Whole):
    """With the places of all ops, and the stages that follow from them."""

    where: OpPlacements
    order: Order


@dataclass(frozen=True)
class Planned(Ordered):
    """With a plan for every placement."""

    stages: Stages


@dataclass(frozen=True)
class Scheduled(Planned):
    """With the order in which the stages run; None without micro-batches."""

    schedule: Schedule | None


@dataclass(frozen=True)
class Staged:
    """A program with stages, ready to be run."""

    stages: Stages
    schedule: Schedule | None
    plan: Plan


def divide_into_stages(s: Whole) -> Whole:
    """Divides a model that does not say what its stages are."""
    r = s.request
    if not r.cut:
        return s
    graph = cut_model(s.graph, r.cut, r.hardware(r.placement), r.terms.memory_limit_bytes, r.layers)
    return replace(s, traced=replace(s.traced, graph=graph), graph=graph)


def hoist(s: Whole) -> Whole:
    """Takes casts of weights out of the loop over micro-batches, and sums over them into scans."""
    return replace(s, graph=add_inside(rows_of_loops(hoist_narrowing(hoist_casts(s.graph), math.inf))))


def keep_sums_apart(s: Whole) -> Ordered:
    """Finds places and stages, and keeps what each stage adds up over micro-batches apart."""
    # Places are found twice: a sum that is split by stages has ops of its own on every placement then.
    placements, wanted = placements_of(s.traced.graph), s.request.rank_of
    where = find_places(s.graph, placements)
    graph = split_sums(s.graph, where, find_order(s.graph, where, wanted))
    where = find_places(graph, placements)
    return Ordered(**vars(replace(s, graph=graph)), where=where, order=find_order(graph, where, wanted))


def plan_placements(s: Ordered) -> Planned:
    """Plans what each placement computes, one after the other."""
    stages = plan_shares(s.request, s.traced, s.graph, s.where, s.order, compile_plan)
    return Planned(**vars(s), stages=stages)


def choose_schedule(s: Planned) -> Scheduled:
    """Makes the schedule that is asked for, or looks for one."""
    r = s.request
    schedule, remarks = schedule_for(s.stages, r.schedule, r.terms.memory_limit_bytes)
    return Scheduled(**vars(replace(s, request=replace(r, notes=(*r.notes, *remarks)))), schedule=schedule)


def write_stages(s: Scheduled) -> Staged:
    """Writes down what every placement does, and what is sent between them."""
    r = s.request
    plan = pipeline_plan(r.name, r.placement, s.stages, s.schedule, r.notes)
    return Staged(s.stages, s.schedule, with_forms(plan))


STAGES: Chain[Whole, Staged] = (
    chain_of("divide", divide_into_stages, lambda s: spec.check_graph(s.graph))
    .then("hoist", hoist, lambda s: spec.check_graph(s.graph))
    .then("sums", keep_sums_apart, lambda s: spec.check_graph(s.graph))
    .then("placements", plan_placements, lambda s: check_stages(s.stages))
    .then("schedule", choose_schedule, lambda s: check_schedule(s.stages, s.schedule))
    .then("report", write_stages, lambda s: spec.check_plan(s.plan))
)


def compile_stages(traced: TracedProgram, request: StagesRequest) -> Staged:
    """The plans, the schedule and the pieces of a program with stages.

    Raises:
      SbpError: for scopes, annotations or a schedule that cannot be had, all problems of a kind at once.
      InternalError: for a fault of a pass.
    """
    return STAGES.run(Whole(request, traced, traced.graph), request.terms.check)
