"""`search`: a function planned for every hierarchy of so many devices, which need not be here."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from sbp.compat.untyped import Prefix, PyTree
from sbp.errors import Problem, SbpError, raise_all
from sbp.hardware.catalogue import Hardware, hardware_for
from sbp.hardware.hierarchies import MOST_AXES, hierarchies
from sbp.options import Options
from sbp.passes.explain.internal_errors import public
from sbp.passes.explain.parallelism import named_state, parallelism_text
from sbp.passes.face import Plan
from sbp.passes.pipeline.op_placement import loop_of, placements_of
from sbp.passes.program.scan_residuals import computes_twice
from sbp.placement import for_placement, placement
from sbp.runtime.compile.traced_call import TracedCall, build
from sbp.runtime.program.compile import compile
from sbp.runtime.search.ranking import RankedPlan, Ranking
from sbp.signature import AUTO

SEARCH_SECONDS = 300.0
STAGES = (2, 4, 8, 16)
"""Numbers of stages that are tried for a function with micro-batches."""
KEPT = (0.0, 0.4, 1.0)
"""Shares that are tried of what scans over checkpointed layers could keep: nothing, what costs least memory
(in a transformer what its attention needs, and its result), and all."""


@dataclass(frozen=True)
class PlanSearch:
    """Plans a function for every hierarchy; call it with the function's arguments. Made by `sbp.search`.

    Arguments:
      fn: the function; with `microbatches`, from their number to the function.
      devices, kind: the devices.
      in_sbp: as of `sbp.compile`, or a function from the placement to it.
      out_sbp, options: as of `sbp.compile`.
      donate_argnums, static_argnums: as of `sbp.compile`.
      axes: of a hierarchy, at the most.
      stages: numbers of stages to cut a function with micro-batches into.
      microbatches: numbers of micro-batches; () for the function as it is.
      residual_shares: shares of what scans over checkpointed layers could keep.
      seconds: after so many no other plan is begun.
      report: is told what is being planned.
    """

    fn: Callable[..., PyTree]
    devices: int
    kind: str
    in_sbp: Prefix
    out_sbp: Prefix
    options: Options
    donate_argnums: int | Iterable[int]
    static_argnums: int | Iterable[int]
    axes: int
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    residual_shares: tuple[float, ...]
    seconds: float
    report: Callable[[str], None]

    @property
    def hardware(self) -> Hardware:
        """What is planned for."""
        return self.options.hardware or hardware_for(self.kind)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Ranking:
        """The plans for such arguments (arrays or `ShapeDtypeStruct`s), the best one first.

        Raises:
          SbpError: for a function, arguments or options that no hierarchy could be planned with.
        """
        begun = time.perf_counter()
        run = _Run(self, begun + self.seconds)
        for count in self.microbatches or (0,):
            run.plan_all(self._read(count, args, kwargs), count)
        rows = tuple(sorted(run.rows, key=lambda row: row.order))
        name = getattr(self.fn, "__name__", "program")
        notes = (*self._notes(), *dict.fromkeys(run.notes))
        return Ranking(name, self.devices, self.hardware, rows, time.perf_counter() - begun, notes)

    def _read(self, microbatches: int, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> TracedCall:
        """The function traced, once for all hierarchies."""
        self.report("tracing")
        fn = self.fn(microbatches) if microbatches else self.fn
        return compile(
            fn,
            placement(self.kind, shape=(self.devices,)),
            donate_argnums=self.donate_argnums,
            static_argnums=self.static_argnums,
            options=replace(self.options, check=False),
        ).trace(*args, **kwargs)

    def shapes(self, stages: int) -> tuple[tuple[int, ...], ...]:
        """Hierarchies, with stages along the first axis if there are any."""
        domains = [link.devices for link in self.hardware.links if link.devices < self.devices]
        if not stages:
            return tuple(hierarchies(self.devices, domains, self.axes))
        if self.devices % stages or self.devices == stages or self.axes < 2:
            return ()
        inner = hierarchies(self.devices // stages, domains, self.axes - 1)
        return tuple((stages, *shape) for shape in inner)

    def _notes(self) -> Iterator[str]:
        domain = self.hardware.links[0].devices
        if domain < self.devices and self.devices % domain:
            below = self.devices // domain * domain
            yield (
                f"{self.devices:,} devices are no whole domains of {domain}, so axes are cut otherwise; "
                f"{below:,} or {below + domain:,} are"
            )


@dataclass
class _Run:
    """A search under way.

    Arguments:
      asked: what is planned.
      until: when no other plan is begun, by the clock of `time.perf_counter`.
    """

    asked: PlanSearch
    until: float
    rows: list[RankedPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plan_all(self, traced_call: TracedCall, microbatches: int) -> None:
        """Plans every hierarchy, then pipelines with more and more stages while that is worth it."""
        self.plan_shapes(traced_call, 0, microbatches)
        if loop_of(traced_call.traced.graph) is None or placements_of(traced_call.traced.graph):
            return
        for stages, more in pairwise((*sorted(self.asked.stages), 0)):
            if not self.asked.shapes(stages):
                continue
            self.plan_shapes(traced_call, stages, microbatches)
            if more and (self.over or not self.improves(stages, microbatches)):
                few = f" with {microbatches} micro-batches" if microbatches else ""
                why = "the search's time was over" if self.over else "fewer are faster"
                self.notes.append(f"more than {stages} stages{few} were not planned: {why}")
                return

    @property
    def over(self) -> bool:
        """Whether the time of the search is over."""
        return time.perf_counter() > self.until

    def improves(self, stages: int, microbatches: int) -> bool:
        """Whether the last number of stages is better than all before it, or none of these can be used."""
        mine = [r for r in self.rows if r.microbatches == microbatches and r.usable]
        now = min((r.seconds for r in mine if r.stages == stages), default=None)
        before = min((r.seconds for r in mine if r.stages < stages), default=None)
        return before is None or (now is not None and now < before)

    def plan_shapes(self, traced_call: TracedCall, stages: int, microbatches: int) -> None:
        """Plans every hierarchy with a number of stages."""
        shapes = self.asked.shapes(stages)
        for i, shape in enumerate(shapes, 1):
            axes = ("stage", *_axes(len(shape) - 1)) if stages else None
            row = RankedPlan(placement(self.asked.kind, shape=shape, axes=axes), stages, microbatches)
            if self.over:
                taken = f"{self.asked.seconds:.0f} s of the search were over"
                self.rows.append(replace(row, trouble=taken))
                continue
            self.asked.report(f"planning {row}, {i} of {len(shapes)}")
            self.plan_kept(traced_call, row)

    def plan_kept(self, traced_call: TracedCall, row: RankedPlan) -> None:
        """Plans a hierarchy, with scans that keep more and more while that fits and helps."""
        least = math.inf
        for share in (
            self.asked.residual_shares
            if computes_twice(traced_call.traced.graph)
            else self.asked.residual_shares[:1]
        ):
            if math.isfinite(least) and self.over:
                return
            found = self.plan_row(traced_call, replace(row, scan_kept=share))
            self.rows.append(found)
            if not found.usable or found.seconds >= least:
                return
            least = found.seconds

    def plan_row(self, traced_call: TracedCall, row: RankedPlan) -> RankedPlan:
        """A row with its plan, or with the reason why it has none."""
        asked = self.asked
        in_sbp = for_placement(asked.in_sbp, row.placement)
        try:
            options = self.options(row.stages, row.scan_kept)
            plan = build(traced_call, row.placement, in_sbp, asked.out_sbp, options, False).plan
        except SbpError as e:
            return replace(row, trouble="; ".join(dict.fromkeys(map(_reason, e.problems[:2]))))
        trouble = "" if plan.fits else "does not fit"
        return replace(row, plan=plan, words=_words(traced_call, plan), trouble=trouble)

    def options(self, stages: int, kept: float) -> Options:
        """The options of one plan."""
        given = self.asked.options
        pipeline = replace(given.pipeline, stages=stages) if stages else given.pipeline
        check = given.check if given.check is not None else False
        # Who calls is told which plan is being made; a second line on the terminal would write over that.
        asked = replace(given, pipeline=pipeline, check=check, progress=False)
        return replace(asked, scan_kept=kept)


def _reason(p: Problem) -> str:
    """What is wrong, in a line."""
    return f"{p.got}, and {p.legal} is legal" if p.kind == "memory" else f"{p.got}: {p.why}"


def _axes(count: int) -> tuple[str, ...]:
    return {1: ("data",), 2: ("data", "model")}.get(count, tuple(f"x{i}" for i in range(count)))


def _words(traced_call: TracedCall, plan: Plan) -> str:
    """What the plan does; of a pipeline, what most of its stages do."""
    traced = traced_call.traced
    ties = traced_call.signatures(AUTO, AUTO).ties(
        [None] * len(traced.in_paths), [None] * len(traced.out_paths)
    )
    state = set(named_state(traced.in_paths, ties.arguments))
    if not plan.stages:
        return parallelism_text(plan, state)
    # Parts of a stack are state where the stack is.
    state |= {path for stage in plan.stages for path in stage.in_paths if path.rpartition("[")[0] in state}
    said = [parallelism_text(stage, state) for stage in plan.stages]
    return f"{len(said)} pipeline, each {max(dict.fromkeys(said), key=said.count)}"


@public
def search(
    fn: Callable[..., PyTree],
    devices: int,
    kind: str = "h100",
    *,
    in_sbp: Prefix = AUTO,
    out_sbp: Prefix = AUTO,
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
    options: Options | None = None,
    axes: int = MOST_AXES,
    stages: Iterable[int] = STAGES,
    microbatches: Iterable[int] = (),
    kept: Iterable[float] = KEPT,
    seconds: float = SEARCH_SECONDS,
    said: Callable[[str], None] = lambda what: None,
) -> PlanSearch:
    """Finds the best hierarchy of a number of devices for a function: call the result with the arguments.

    The function is traced once and planned for every factorisation of the devices that fits the domains of
    fast links. If it has micro-batches (`sbp.microbatch`) and no stages, pipelines are planned too. To
    compile a row of the ranking, use its placement with `PipelineOptions(stages=row.stages)` and
    `Options(scan_kept=row.kept)`.

    Arguments:
      fn: a single-device JAX function, such as a train step; with `microbatches`, a function from their
        number to the step.
      devices: the number of devices. They need not be here.
      kind: as for `sbp.placement`.
      in_sbp: as for `sbp.compile`, or a function from a placement to it.
      out_sbp, donate_argnums, static_argnums: as for `sbp.compile`.
      options: as for `sbp.compile`; `time_limit` and `effort` are for each plan, and `stages` fixes
        the number of stages.
      axes: the most axes of a hierarchy.
      stages: numbers of stages to try, in this order, as long as the step gets faster.
      microbatches: numbers of micro-batches to try.
      kept: values of `Options.scan_kept` to try, in this order, as long as they fit and the step gets faster.
      seconds: after this time no further plan is begun.
      said: a function that is called with what is being planned.

    Raises:
      SbpError: for wrong arguments; it lists all problems.

    >>> import jax.numpy as jnp
    >>> found = search(lambda w, x: jnp.tanh(x @ w), 8, axes=2)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    >>> sorted(row.shape for row in found.rows)
    ['4x2', '8']
    """
    options = options or Options()
    # A number of stages among the options is the only one then.
    only = options.pipeline.stages
    asked = tuple(stages) if only is None else (only,), tuple(microbatches)
    shares = tuple(kept) if not options.scan_kept else (options.scan_kept,)
    raise_all([*_wrong(devices, axes, asked), *_wrong_shares(shares)])
    return PlanSearch(
        fn=fn,
        devices=devices,
        kind=placement(kind, shape=(1,)).kind,
        in_sbp=in_sbp,
        out_sbp=out_sbp,
        options=replace(options, pipeline=replace(options.pipeline, stages=None)),
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        axes=axes,
        stages=asked[0],
        microbatches=asked[1],
        residual_shares=shares,
        seconds=seconds,
        report=said,
    )


def _wrong(devices: int, axes: int, asked: tuple[Sequence[int], Sequence[int]]) -> Iterator[Problem]:
    """What is wrong with the numbers that a search is given."""
    given = (
        ("devices", devices, 1, "they are all used by every plan", "devices=1024"),
        ("axes", axes, 1, "a hierarchy has so many at the most", f"axes={MOST_AXES}"),
        *(("stages", n, 2, "the model is cut into so many", "stages=(2, 4, 8)") for n in asked[0]),
        *(("microbatches", n, 1, "the batch is cut into so many", "microbatches=(8, 16)") for n in asked[1]),
    )
    for name, n, least, why, fix in given:
        if isinstance(n, bool) or not isinstance(n, int) or n < least:
            legal = f"a whole number of at least {least}"
            yield Problem("argument", f"search({name}=...)", f"{n!r:.60}", legal, why, fix)


def _wrong_shares(kept: Sequence[float]) -> Iterator[Problem]:
    """What is wrong with the shares that scans are to keep."""
    if not kept or any(isinstance(x, bool) or not 0 <= x <= 1 for x in kept):
        legal, why = "numbers from 0 to 1", "scans keep these shares of what they compute twice"
        yield Problem("argument", "search(kept=...)", f"{kept!r:.60}", legal, why, f"kept={KEPT}")
