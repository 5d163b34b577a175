"""From a traced program with stages to one that can be planned and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbp.errors import Problem, raise_all
from sbp.hardware import hardware_for
from sbp.options import Options
from sbp.passes.graph import Graph
from sbp.passes.lookups import Transfer
from sbp.passes.pipeline.chain import Asked, Job, plan_stages
from sbp.passes.pipeline.plan import pipeline_plan
from sbp.passes.pipeline.where import placements_of
from sbp.passes.trace import Traced
from sbp.placement import Placement
from sbp.resolve import resolve
from sbp.runtime import arguments
from sbp.runtime.pipeline.program import BuiltPipeline, schedule_for
from sbp.signature import NdSbp


@dataclass(frozen=True)
class Signatures:
    """What the user asked of arguments and results.

    Arguments:
      args, kwargs, out: the trees, of shapes.
      in_sbp, out_sbp: as given to `compile`.
    """

    traced: Traced
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    in_sbp: Any
    out_sbp: Any

    def on(self, placement: Placement) -> tuple[list[NdSbp | None], list[NdSbp | None], list[Problem]]:
        """Signatures of all leaves of arguments and results, read for a placement, and what is wrong."""
        paths = self.traced.in_paths
        ins, wrong = arguments.resolve_inputs(self.in_sbp, self.args, self.kwargs, paths, placement)
        outs, also = resolve(self.out_sbp, self.out, self.traced.out_paths, placement, "out_sbp")
        return ins, outs, [*wrong, *also]

    def asked(self) -> Asked:
        """The same for the leaves that a placement has; an argument of several is signed on its first one."""
        signed: set[int] = set()

        def asked(placement: Placement, given: Sequence[int], back: Sequence[int]) -> Any:
            ins, outs, problems = self.on(placement)
            fresh = [i for i in given if i not in signed]
            signed.update(given)
            names = {self.traced.in_paths[i] for i in fresh} | {self.traced.out_paths[i] for i in back}
            every = {*self.traced.in_paths, *self.traced.out_paths}
            mine = [p for p in problems if (at := p.where.split(": ")[0]) in names or at not in every]
            raise_all(mine)
            kept = [ins[i] if i in fresh or not problems else None for i in given]
            return kept, [outs[i] for i in back]

        return asked


def is_pipeline(graph: Graph, placement: Placement) -> bool:
    """Whether ops of a program belong to other placements than its own."""
    return any(p.ranks != placement.ranks or p.shape != placement.shape for p in placements_of(graph))


def build_pipeline(
    signatures: Signatures, placement: Placement, options: Options, name: str, donate: tuple[int, ...]
) -> BuiltPipeline:
    """Plans a program with stages.

    Arguments:
      placement: that of the whole program; its devices are those of the stages.

    Raises:
      SbpError: for placements, annotations or a schedule that cannot be had, all problems of a kind at once.
    """
    traced = signatures.traced
    raise_all(_check_placements(placements_of(traced.graph), placement))
    outs = signatures.on(placement)[1]
    job = Job(
        name=name,
        hardware=_hardware(options),
        asked=signatures.asked(),
        ties=arguments.ties(signatures.args, signatures.out, outs),
        time_limit_seconds=options.time_limit,
        memory_limit_bytes=options.memory_limit,
        transfer=Transfer(options.exchange_capacity, options.exchange_dtype),
        check=bool(options.check),
    )
    stages = plan_stages(traced, job)
    schedule = schedule_for(stages, options.schedule)
    plan = pipeline_plan(name, placement, stages, schedule)
    return BuiltPipeline(stages, schedule, plan, donate, options.threads)


def _hardware(options: Options) -> Callable[[Placement], Any]:
    return lambda placement: options.hardware or hardware_for(placement.kind)


def _check_placements(found: Sequence[Placement], whole: Placement) -> Iterator[Problem]:
    """Stages lie on the program's devices, each on its own."""
    taken: dict[int, Placement] = {}
    for p in found:
        away = sorted(set(p.ranks) - set(whole.ranks))
        if p.kind != whole.kind or away:
            yield _no_stage(p, whole, "it has devices that the program's placement does not have")
            continue
        clash = next((taken[r] for r in p.ranks if r in taken), None)
        if clash is not None:
            yield _no_stage(p, whole, f"it shares devices with {clash}")
        taken.update(dict.fromkeys(p.ranks, p))


def _no_stage(p: Placement, whole: Placement, why: str) -> Problem:
    return Problem(
        "placement",
        f"sbp.on({p})",
        f"ranks {list(p.ranks)}",
        f"parts of {whole} that have no device in common",
        why,
        f"with sbp.on(placement.split({whole.axes[0]!r})[0]): ...",
    )
