"""Plans a traced program with stages, and makes what runs it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sbp.compat.untyped import Prefix, PyTree
from sbp.errors import Problem, raise_all
from sbp.hardware.catalogue import hardware_for
from sbp.notation.resolve import resolve, scalar_notes
from sbp.options import Options
from sbp.passes.chain import compile_stages
from sbp.passes.face import with_writer
from sbp.passes.pipeline.op_placement import placements_of
from sbp.passes.plan.solve import Progress
from sbp.passes.program.graph import Graph
from sbp.passes.program.ties import Ties, ties
from sbp.passes.program.trace import TracedProgram
from sbp.passes.replan.stages_replanner import with_stages_replanner
from sbp.passes.request import Asked, Signed, StagesRequest
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.orders import GENERATORS
from sbp.passes.schedule.requirements import V
from sbp.placement import Placement
from sbp.runtime.cache.cache_folder import cache_of
from sbp.runtime.call.in_sbp_binding import InSbpBinding
from sbp.runtime.call.usage_errors import terms_of
from sbp.runtime.nan_checks.findings import watch_of
from sbp.runtime.pipeline.program import CompiledPipeline, Drivers, Results, may_help
from sbp.runtime.pipeline.stacked_arguments import stacked_leaves
from sbp.runtime.source.module import write_source
from sbp.runtime.source.pipeline_module import write_staged
from sbp.signature import NdSbp


@dataclass(frozen=True)
class Signatures:
    """The user's signatures of arguments and results.

    Arguments:
      args, kwargs, out: the trees, of shapes.
      in_sbp, out_sbp: as given to `compile`; the former bound to the arguments.
      remarks: on what the program itself annotates.
    """

    traced: TracedProgram
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]
    out: PyTree
    in_sbp: InSbpBinding
    out_sbp: Prefix
    remarks: Sequence[str] = ()

    def on(self, placement: Placement) -> tuple[list[NdSbp | None], list[NdSbp | None], list[Problem]]:
        """Signatures of all leaves of arguments and results on a placement, and the problems."""
        ins, wrong = self.in_sbp.resolve(self.args, self.kwargs, self.traced.in_paths, placement)
        outs, also = resolve(self.out_sbp, self.out, self.traced.out_paths, placement, "out_sbp")
        return ins, outs, [*wrong, *also]

    def ties(self, ins: Sequence[NdSbp | None], outs: Sequence[NdSbp | None]) -> Ties:
        """The argument that each result is the next value of, given the signatures of all leaves."""
        return ties(self.traced, self.args, self.kwargs, self.out, ins, outs)

    @property
    def notes(self) -> list[str]:
        """Remarks on the signatures."""
        remarks = [*self.remarks, *self.in_sbp.notes(self.args, self.kwargs, self.traced.in_paths)]
        return remarks + scalar_notes(self.out_sbp, self.out, self.traced.out_paths, "out_sbp")

    def leaf_signatures(self) -> Asked:
        """The same for the leaves of a placement; an argument of several counts for the first one."""
        signed: dict[int, Placement] = {}

        def asked(placement: Placement, given: Sequence[int], back: Sequence[int]) -> tuple[Signed, Signed]:
            ins, outs, problems = self.on(placement)
            fresh = [i for i in given if signed.setdefault(i, placement) == placement]
            names = {self.traced.in_paths[i] for i in fresh} | {self.traced.out_paths[i] for i in back}
            every = {*self.traced.in_paths, *self.traced.out_paths}
            raise_all([p for p in problems if (at := p.where.split(": ")[0]) in names or at not in every])
            kept = [ins[i] if i in fresh or not problems else None for i in given]
            return kept, [outs[i] for i in back]

        return asked


def is_pipeline(graph: Graph, placement: Placement) -> bool:
    """Whether ops of a program belong to other placements than its own."""
    return any(p.ranks != placement.ranks or p.shape != placement.shape for p in placements_of(graph))


def build_pipeline(
    signatures: Signatures,
    placement: Placement,
    options: Options,
    name: str,
    donate: tuple[int, ...],
    weak: tuple[bool, ...],
    progress: Progress | None = None,
) -> CompiledPipeline:
    """Plans a program with stages.

    Arguments:
      placement: that of the whole program; its devices are those of the stages.
      donate: positions of donated leaves.
      weak: per result, whether it is weakly typed.
      progress: called with the progress of a search.

    Raises:
      SbpError: for invalid placements, annotations or schedules, all problems of a kind at once.
    """
    traced = signatures.traced
    found = placements_of(traced.graph)
    wrong = [*_check_placements(found, placement), *_check_stages(found, placement, options)]
    raise_all([*wrong, *_check_options(options)])
    count, cut = options.pipeline.stages, tuple[Placement, ...]()
    if count is not None:
        cut = stage_placements(placement, count, options.pipeline.schedule)
    stacked = None if count is None else stacked_leaves(traced, placement, count)
    tied = signatures.ties(*signatures.on(placement)[:2])
    request = StagesRequest(
        name=name,
        placement=placement,
        hardware=lambda p: options.hardware or hardware_for(p.kind),
        signatures=signatures.leaf_signatures(),
        ties=tied.arguments,
        cut=cut,
        rank_of=_rank_of(options.pipeline.schedule, len(set(cut)) or len(found)),
        schedule=options.pipeline.schedule,
        notes=(*signatures.notes, *tied.notes),
        terms=terms_of(options, progress),
        donated=donate,
    )
    program = traced
    if stacked is not None:
        program, request = stacked.unstacked_scan.traced, stacked.request(request)
    staged = compile_stages(program, request)
    places = [stage.placement for stage in staged.plan.stages]
    threads = options.pipeline.threads
    # All processes must come to a transfer in one order, which threads would not keep.
    if request.terms.peers is not None or (
        threads is None and not may_help(places, staged.schedule is not None)
    ):
        threads = False
    writer = partial(write_staged, whole=stacked is None)
    plan = with_writer(with_stages_replanner(staged, program, request), write_source, writer)
    drivers = Drivers(threads)
    shared = tuple(tie is None for tie in tied.arguments)
    made = staged.stages, staged.schedule, plan, donate, weak, drivers
    return CompiledPipeline(
        *made, stacked, traced, Results(placement, shared), cache_of(options), watch_of(options)
    )


def _rank_of(schedule: object, ranks: int) -> Sequence[int] | None:
    """The rank of each stage, as far as the schedule fixes it: a V passes its last rank twice."""
    if isinstance(schedule, Schedule):
        return schedule.rank_of
    return V.example(ranks, 2) if _is_v(schedule) else None


def _is_v(schedule: object) -> bool:
    """Whether a schedule of that name goes forth and back over its ranks."""
    return isinstance(schedule, str) and schedule in GENERATORS and GENERATORS[schedule].asks.map is V


def _check_placements(found: Sequence[Placement], whole: Placement) -> Iterator[Problem]:
    """Checks that stages lie on the program's devices, each on its own."""
    taken: dict[int, Placement] = {}
    for p in found:
        away = sorted(set(p.ranks) - set(whole.ranks))
        if p.kind != whole.kind or away:
            yield _no_stage(p, whole, "it has devices that the program's placement does not have")
            continue
        if len(p.ranks) == len(whole.ranks):
            same = "it is the program's own, of which the other stages are parts"
            other = "it has all the devices, in another hierarchy: compile on it instead"
            yield _no_stage(p, whole, same if p.shape == whole.shape else other)
            continue
        clash = next((taken[r] for r in p.ranks if r in taken), None)
        if clash is not None:
            yield _no_stage(p, whole, f"it shares devices with {clash}")
        taken.update(dict.fromkeys(p.ranks, p))


def _check_stages(found: Sequence[Placement], whole: Placement, options: Options) -> Iterator[Problem]:
    """Checks that stages are either marked or counted, and fit the first axis."""
    count = options.pipeline.stages
    if count is None:
        return
    where, fix = f"PipelineOptions(stages={count!r})", f"stages={whole.shape[0]}"
    if found:
        legal, why = "sbp.on in the model, or a number of stages", "the model says itself what its stages are"
        yield Problem("argument", where, f"ops on {found[0]}", legal, why, "leave one of them out")
    elif isinstance(count, bool) or not isinstance(count, int) or count < 1 or count % whole.shape[0]:
        why = f"stages lie along the first axis of {whole}, the same number on each part of it"
        yield Problem("argument", where, f"stages={count!r}", f"a multiple of {whole.shape[0]}", why, fix)


def _check_options(options: Options) -> Iterator[Problem]:
    """Refuses options that programs with stages do not have."""
    legal = "a program of one placement for it"
    if options.plan is not None:
        why = "the signatures of a plan are those of one placement"
        yield Problem(
            "argument", "Options(plan=...)", "a program with stages", legal, why, "in_sbp and out_sbp"
        )
    if options.exchange.count_keys:
        why = "exchanges inside of stages are not counted"
        fix = "count in a program without sbp.on"
        yield Problem(
            "argument", "ExchangeOptions(count_keys=True)", "a program with stages", legal, why, fix
        )
    if options.exchange.prefetch:
        why = "a stage has no dense part of its own to hide the keys of another batch under"
        fix = "leave the option out: micro-batches overlap with each other"
        yield Problem("argument", "ExchangeOptions(prefetch=True)", "a program with stages", legal, why, fix)


def stage_placements(whole: Placement, stages: int, schedule: object) -> tuple[Placement, ...]:
    """The placements of stages along the first axis: around in a loop, or forth and back in a V."""
    parts = whole.split(0)
    if _is_v(schedule) and stages == 2 * len(parts):
        return (*parts, *reversed(parts))
    return tuple(parts[s % len(parts)] for s in range(stages))


def _no_stage(p: Placement, whole: Placement, why: str) -> Problem:
    return Problem(
        "placement",
        f"sbp.on({p})",
        f"ranks {list(p.ranks)}",
        f"parts of {whole} that have no device in common",
        why,
        f"with sbp.on(placement.split({whole.axes[0]!r})[0]): ...",
    )
