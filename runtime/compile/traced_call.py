"""A traced call: traced once, and planned for a placement, or for many."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import NamedSharding

from sbp.compat.mesh import explicit_types
from sbp.compat.untyped import Prefix, PyTree
from sbp.errors import ArgumentError, SbpError, raise_all
from sbp.hardware.catalogue import hardware_for
from sbp.options import FOLLOW, Options
from sbp.passes.chain import compile_plan
from sbp.passes.explain.constraint_gaps import cost_notes
from sbp.passes.face import with_writer
from sbp.passes.pipeline.schedule_choice import no_stages_problem
from sbp.passes.plan.constraints import ConstrainedGraph, IgnoredConstraint, apply_constraints
from sbp.passes.plan.pins import check_annotations
from sbp.passes.plan.solve import Progress
from sbp.passes.program.graph import Source
from sbp.passes.program.scan_residuals import keep_in_scans
from sbp.passes.program.trace import TracedProgram, trace
from sbp.passes.replan.replanner import with_replanner
from sbp.passes.request import Request
from sbp.placement import Placement
from sbp.runtime.cache.cache_folder import cache_of
from sbp.runtime.call import arguments, modules
from sbp.runtime.call.binding import Call, Parameters
from sbp.runtime.call.in_sbp_binding import InSbpBinding, bind_in_sbp
from sbp.runtime.call.usage_errors import terms_of
from sbp.runtime.compile.plan_reuse import ReusedPlan, adopt, given_plan
from sbp.runtime.compile.search_progress import search_line
from sbp.runtime.compile.stages import Signatures, build_pipeline, is_pipeline
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.execute.exchange_replan import counting_of
from sbp.runtime.lower.sampling import with_samples
from sbp.runtime.nan_checks.findings import watch_of
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.source.module import write_source
from sbp.runtime.target.devices import cudnn_of

NOTHING_AHEAD = (
    "ExchangeOptions(prefetch=True): no keys are sent ahead, since no exchange outside of loops has ids that "
    "come from arguments alone, and from none that is donated"
)


@dataclass(frozen=True)
class TracedCall:
    """One call of a function, traced.

    Arguments:
      fn: the function.
      call, own: the call, and the parameters of the function.
      avals: of the call's leaves.
      traced: the logical graph.
      weak: per result, whether it is weakly typed.
    """

    fn: Callable[..., PyTree]
    call: Call
    own: Parameters
    avals: tuple[arguments.Abstract, ...]
    traced: TracedProgram
    weak: tuple[bool, ...]

    def with_kept_share(self, share: float) -> TracedCall:
        """The same with scans that keep a share of what they compute twice; see `Options.scan_kept`."""
        graph = keep_in_scans(self.traced.graph, share)
        return self if graph is self.traced.graph else replace(self, traced=replace(self.traced, graph=graph))

    def constrain(
        self, placement: Placement, options: Options, follow: Callable[[Source], bool]
    ) -> tuple[TracedCall, ConstrainedGraph]:
        """The same with every annotation as a signature on a placement.

        Arguments:
          follow: whether JAX's own constraints are followed.

        Raises:
          AnnotationError: for all annotations that name missing axes.
        """
        stages = options.pipeline.stages is not None and placement.ndim > 1
        stage = placement.split(0)[0] if stages else None
        found = apply_constraints(self.traced, placement, stage, follow)
        raise_all(found.problems)
        return replace(self, traced=found.traced), found

    def signatures(self, in_sbp: Prefix, out_sbp: Prefix) -> Signatures:
        """The user's signatures of its arguments and results."""
        graph = self.traced.graph
        args, kwargs = self.call.trace_args([arguments.struct(a) for a in self.avals])
        out = jax.tree.unflatten(self.traced.out_tree, [graph.operand(x) for x in graph.outputs])
        return Signatures(self.traced, args, kwargs, out, bind_in_sbp(in_sbp, self.call, self.own), out_sbp)


def read(
    fn: Callable[..., PyTree],
    call: Call,
    own: Parameters,
    avals: Sequence[arguments.Abstract],
    asked: InSbpBinding,
    placement: Placement,
) -> TracedCall:
    """Traces a call.

    Arguments:
      avals: of its leaves.
      asked, placement: `in_sbp`, and its placement: it may be the reason why the function cannot be traced.

    Raises:
      SbpError: for signatures that do not fit, and modules whose state is lost; else the error of the trace.
    """
    args, kwargs = call.trace_args([arguments.struct(a) for a in avals])
    weak: list[bool] = []
    watch = modules.ModuleWatch(fn, call.static)

    @functools.wraps(fn, updated=())
    def watched(*args: PyTree, **kwargs: PyTree) -> PyTree:
        out = watch(*args, **kwargs, **call.static_kwargs)
        weak[:] = map(arguments.is_weak, jax.tree.leaves(out))
        return out

    try:
        with cudnn_of(placement):
            traced = _traced(watched, call, avals)
    except Exception as e:
        problems = asked.misread(args, kwargs, call.paths(fn), placement)
        raise_all([*problems, *(e.problems if isinstance(e, SbpError) else ())] if problems else ())
        raise
    with cudnn_of(placement):
        raise_all(watch.lost_changes(call.full(args), kwargs))
    return TracedCall(fn, call, own, tuple(avals), traced, tuple(weak))


def _traced(fn: Callable[..., PyTree], call: Call, avals: Sequence[arguments.Abstract]) -> TracedProgram:
    """The graph of a call, whose arguments have the types that the user's mesh gives them.

    A program for one device may use split arguments in ways for which JAX has no type under a mesh of
    explicit axes, and which it refuses with various errors. Then it is traced as if no argument were split.
    """
    types = explicit_types(call.leaves)
    if any(types):
        with contextlib.suppress(Exception):
            return _traced_as(fn, call, avals, types)
    return _traced_as(fn, call, avals, [None] * len(types))


def _traced_as(
    fn: Callable[..., PyTree],
    call: Call,
    avals: Sequence[arguments.Abstract],
    types: Sequence[NamedSharding | None],
) -> TracedProgram:
    args, kwargs = call.trace_args([arguments.struct(*a) for a in zip(avals, types, strict=True)])
    return trace(fn, call.full(args), kwargs, sorted(call.static))


def build(
    traced_call: TracedCall,
    placement: Placement,
    in_sbp: Prefix,
    out_sbp: Prefix,
    options: Options,
    concrete: bool,
) -> CompiledProgram | CompiledPipeline:
    """Plans a traced call for a placement.

    Arguments:
      concrete: whether the call will run.

    Raises:
      SbpError: for invalid signatures, annotations or options, all problems of a kind at once.
    """
    name, traced_call = (
        getattr(traced_call.fn, "__name__", "program"),
        traced_call.with_kept_share(options.scan_kept),
    )

    def planned(
        follow: Callable[[Source], bool], progress: Progress | None = None
    ) -> tuple[CompiledProgram | CompiledPipeline, Sequence[IgnoredConstraint]]:
        plain, constrained = traced_call.constrain(placement, options, follow)
        signatures = replace(plain.signatures(in_sbp, out_sbp), remarks=constrained.notes)
        return _build(
            plain, placement, signatures, options, concrete, progress
        ), constrained.ignored_constraints

    with search_line(f"planning {name}", options.progress) as progress:
        built, ignored = planned(lambda source: options.constraints == FOLLOW, progress)
        notes = cost_notes(ignored, built.plan, lambda follow: planned(follow)[0].plan)
        if notes:
            built.plan = replace(built.plan, notes=(*built.plan.notes, *notes))
        return built


def _build(
    traced_call: TracedCall,
    placement: Placement,
    signatures: Signatures,
    options: Options,
    concrete: bool,
    progress: Progress | None,
) -> CompiledProgram | CompiledPipeline:
    traced, call = traced_call.traced, traced_call.call
    name, donate = getattr(traced_call.fn, "__name__", "program"), call.donated_leaves(traced_call.own.donate)
    if is_pipeline(traced.graph, placement) or options.pipeline.stages is not None:
        return build_pipeline(signatures, placement, options, name, donate, traced_call.weak, progress)
    if options.pipeline.schedule is not None:
        raise ArgumentError(no_stages_problem(options.pipeline.schedule))
    request = request_of(traced_call, signatures, placement, options, progress)
    if not concrete and request.terms.peers is not None:
        request = replace(request, with_sample=None)  # to bring a batch together takes all processes
    plan = with_writer(with_replanner(compile_plan(traced, request), traced, request), write_source)
    lacking, count = counting_of(plan, concrete, options.exchange.count_keys)
    built = CompiledProgram(
        traced,
        plan,
        donate,
        traced_call.weak,
        lacking,
        count,
        request,
        watch=watch_of(options),
        cache=cache_of(options),
        reads_ahead=options.exchange.prefetch,
    )
    if built.reads_ahead and built.read_ahead is None:
        built.plan = replace(plan, notes=(*plan.notes, NOTHING_AHEAD))
    return built


def request_of(
    traced_call: TracedCall,
    signatures: Signatures,
    placement: Placement,
    options: Options,
    progress: Progress | None = None,
) -> Request:
    """The compiler's request for a traced call, for one placement without stages.

    Raises:
      SbpError: for invalid signatures and annotations, all of them at once.
    """
    traced, call = traced_call.traced, traced_call.call
    ins, outs, problems = signatures.on(placement)
    problems += check_annotations(traced.graph, placement)
    asked = ReusedPlan(tuple(ins), tuple(outs))
    if options.plan is not None:
        asked = adopt(given_plan(options.plan), traced, ins, outs, placement)
    raise_all([*problems, *asked.problems])
    tied = signatures.ties(asked.ins, asked.outs)
    terms, hardware = terms_of(options, progress), options.hardware or hardware_for(placement.kind)
    if (limit := terms.memory_limit_bytes) is not None and limit < hardware.memory_bytes:
        hardware = replace(hardware, scheduled_bytes=limit)
    return Request(
        name=getattr(traced_call.fn, "__name__", "program"),
        placement=placement,
        hardware=hardware,
        in_sbp=asked.ins,
        out_sbp=asked.outs,
        ties=tied.arguments,
        notes=(*signatures.notes, *tied.notes),
        terms=terms,
        donated=call.donated_leaves(traced_call.own.donate),
        with_sample=functools.partial(with_samples, example=tuple(call.leaves)),
        record=asked.record,
    )
