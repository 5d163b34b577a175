"""THE list of passes: from a JAX function to the physical program and its plan.

Each pass is a function from `State` to `State`; `holds` says what must be true after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sbp.errors import raise_all
from sbp.hardware import Hardware
from sbp.passes import memory, pins, spec
from sbp.passes.boxing import Boxings, Network
from sbp.passes.buckets import bucket_collectives
from sbp.passes.explain import Plan, explain
from sbp.passes.lookups import Transfer, check_wire, mark_lookups
from sbp.passes.parts import mark_owners, parts_notes, strict_notes
from sbp.passes.physical import Compute, Physical, insert_boxing
from sbp.passes.plan.candidates import Candidates, enumerate_candidates
from sbp.passes.plan.model import Assignment, Crossing, choose
from sbp.passes.rows import train_rows
from sbp.passes.sampling import with_samples
from sbp.passes.trace import Traced
from sbp.placement import Placement
from sbp.signature import NdSbp


@dataclass(frozen=True)
class Request:
    """What is asked of the compiler.

    Arguments:
      name: the function's name.
      placement, hardware: where it runs, and what it is planned for.
      in_sbp, out_sbp: per leaf, the user's signature or None for AUTO.
      ties: per result leaf, the argument leaf that it comes back as, or None.
      ways_in, ways_out: as of `Boundary`.
      notes: remarks for the plan.
      time_limit_seconds: for the search.
      memory_limit_bytes: per device; a plan over it is refused.
      transfer: how rows of split tables travel.
      strict_nonfinite: whether a sum is added up before anything is computed from it.
      example: the leaves of the arguments of a call, as far as they are known.
      again: whether the example takes the place of an earlier one that others were not like.
    """

    name: str
    placement: Placement
    hardware: Hardware
    in_sbp: tuple[NdSbp | None, ...]
    out_sbp: tuple[NdSbp | None, ...]
    ties: tuple[int | None, ...]
    ways_in: tuple[Crossing | None, ...] = ()
    ways_out: tuple[Crossing | None, ...] = ()
    notes: tuple[str, ...] = ()
    time_limit_seconds: float | None = None
    memory_limit_bytes: float | None = None
    transfer: Transfer = field(default_factory=Transfer)
    strict_nonfinite: bool = False
    example: tuple[Any, ...] = ()
    again: bool = False


@dataclass(frozen=True)
class State:
    """A program on its way through the passes; each one fills in its field."""

    request: Request
    traced: Traced
    boxings: Boxings
    candidates: Candidates | None = None
    assignment: Assignment | None = None
    physical: Physical | None = None
    plan: Plan | None = None


@dataclass(frozen=True)
class Pass:
    """One pass: its name, what it does, and what must hold after it."""

    name: str
    run: Callable[[State], State]
    holds: Callable[[State], None]


def find_rows(s: State) -> State:
    """Finds tables that are looked up and trained by rows."""
    graph, notes = train_rows(s.traced.graph, s.request.transfer, s.traced.in_paths)
    graph = with_samples(mark_lookups(graph, s.request.transfer), s.request.example, s.request.again)
    traced = replace(s.traced, graph=graph)
    return replace(s, traced=traced, request=replace(s.request, notes=(*s.request.notes, *notes)))


def honour_pins(s: State) -> State:
    """Checks every annotation, and honours uneven signatures of arguments and results inside."""
    graph, r = s.traced.graph, s.request
    raise_all(pins.check_annotations(graph, r.placement))
    graph = pins.pin_inputs(graph, _with_consts(s, r.in_sbp), r.placement)
    graph = pins.pin_outputs(graph, r.out_sbp, r.placement)
    return replace(s, traced=replace(s.traced, graph=graph))


def list_candidates(s: State) -> State:
    """Lists every N-D signature of every op."""
    graph = s.traced.graph
    pinned = {
        v: nd for v, nd in zip(graph.inputs, _with_consts(s, s.request.in_sbp), strict=True) if nd is not None
    }
    strict = s.request.strict_nonfinite
    candidates = enumerate_candidates(graph, s.request.placement, pinned, strict_nonfinite=strict)
    raise_all(pins.check_partials(candidates, s.boxings))
    return replace(s, candidates=candidates)


def choose_signatures(s: State) -> State:
    """Chooses the signatures with the least estimated time, over the whole graph at once."""
    assert s.candidates is not None
    r = s.request
    asked = pins.boundary(s.traced.graph, _with_consts(s, r.in_sbp), r.out_sbp, r.ties, r.placement)
    asked = replace(asked, ways_in=r.ways_in, ways_out=r.ways_out)
    assignment = choose(s.candidates, asked, s.boxings, r.time_limit_seconds)
    return replace(s, assignment=assignment)


def box(s: State) -> State:
    """Inserts the collectives."""
    assert s.candidates is not None and s.assignment is not None
    return replace(s, physical=insert_boxing(s.candidates, s.assignment, s.boxings))


def find_owners(s: State) -> State:
    """Marks the reductions that bring bits of one device each, and compute nothing."""
    assert s.physical is not None
    return replace(s, physical=mark_owners(s.physical))


def bucket(s: State) -> State:
    """Brings small collectives together."""
    assert s.physical is not None
    return replace(s, physical=bucket_collectives(s.physical, s.request.hardware))


def write_plan(s: State) -> State:
    """Writes down every collective with its reason."""
    assert s.physical is not None and s.assignment is not None
    paths = s.traced.in_paths, s.traced.out_paths
    r, graph = s.request, s.traced.graph
    computed = (step for step, _ in s.physical.walk() if isinstance(step, Compute))
    raise_all(check_wire(graph, ((step.node, step.strategy.operands) for step in computed)))
    uneven = pins.uneven_notes(r.in_sbp, r.out_sbp, s.traced, r.placement)
    notes = (*r.notes, *uneven, *pins.effect_notes(graph, r.placement), *parts_notes(s.physical))
    plan = explain(s.request.name, s.physical, s.boxings, s.assignment.bound, paths, notes)
    memory.check_limit(plan, s.request.memory_limit_bytes)
    return replace(s, plan=plan)


CHAIN: tuple[Pass, ...] = (
    Pass("rows", find_rows, lambda s: spec.check_graph(s.traced.graph)),
    Pass("pins", honour_pins, lambda s: spec.check_graph(s.traced.graph)),
    Pass("candidates", list_candidates, lambda s: spec.check_candidates(s.candidates)),  # type: ignore[arg-type]
    Pass("choice", choose_signatures, lambda s: spec.check_assignment(s.candidates, s.assignment, s.boxings)),  # type: ignore[arg-type]
    Pass("boxing", box, lambda s: spec.check_physical(s.physical)),  # type: ignore[arg-type]
    Pass("owners", find_owners, lambda s: spec.check_physical(s.physical)),  # type: ignore[arg-type]
    Pass("buckets", bucket, lambda s: spec.check_physical(s.physical)),  # type: ignore[arg-type]
    Pass("plan", write_plan, lambda s: None),
)


def compile_plan(traced: Traced, request: Request, *, check: bool = False) -> Plan:
    """Runs the chain.

    Arguments:
      traced: the logical graph.
      request: what is asked.
      check: whether the contract of each pass is checked after it.

    Raises:
      SbpError: for annotations that cannot be honoured, all of them at once.
      SpecError: with `check`, if a pass broke its contract.
    """
    boxings = Boxings(Network(request.placement, request.hardware))
    if check:
        spec.check_graph(traced.graph)
    plan = _run_chain(State(request, traced, boxings), check)
    if not request.strict_nonfinite:
        return plan
    usual = replace(request, strict_nonfinite=False, memory_limit_bytes=None)
    notes = strict_notes(plan, _run_chain(State(usual, traced, boxings), check))
    return replace(plan, notes=(*plan.notes, *notes))


def _run_chain(state: State, check: bool) -> Plan:
    for p in CHAIN:
        state = p.run(state)
        if check:
            p.holds(state)
    assert state.plan is not None
    return state.plan


def _with_consts(s: State, signatures: Sequence[NdSbp | None]) -> list[NdSbp | None]:
    """Signatures of all inputs: the arrays that the function closes over are AUTO."""
    return [*signatures, *[None] * len(s.traced.graph.consts)]
