"""Plans made again: what else a tensor could lie as, and the plan in which it does.

What is held lies as if the user had said so: an argument or a result by `in_sbp` or `out_sbp`, what an op
makes by `sbp.annotate` behind that op, for all who read it. The passes that make any plan make this one too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sbp.errors import ArgumentError, Problem, raise_all
from sbp.layout import on_wide_axes
from sbp.notation.resolve import check_fit
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.chain import PLACEMENT, Logical, list_candidates
from sbp.passes.explain.choices import HeldPlan, RowChoices, TensorChoices, changes
from sbp.passes.explain.internal_errors import public
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.plan_figures import cause_of, figures_of, figures_of_program, made_by, sent_target
from sbp.passes.explain.reasons import Reasons
from sbp.passes.explain.targets import NamedTensors, Target
from sbp.passes.face import Plan, with_forms
from sbp.passes.pass_manager import Chain
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.program import Physical
from sbp.passes.plan.constants import PROVEN
from sbp.passes.plan.effort import Effort, until_over
from sbp.passes.plan.marginals import cheapest_held, held_network
from sbp.passes.plan.network import Solution
from sbp.passes.program.names import Names, without_indices
from sbp.passes.program.trace import TracedProgram
from sbp.passes.replan.line_targets import LineTargets
from sbp.passes.replan.near_problem import NearProblem, with_annotations
from sbp.passes.replan.removal import Hold, RowsSearch, tensor_choices
from sbp.passes.request import Request
from sbp.passes.search.explore import shortest
from sbp.passes.search.pool import PlanCandidate, Pool, Space
from sbp.signature import NdSbp, Partial, format_sbp, normalise

_AT = next(i for i, p in enumerate(PLACEMENT.passes) if p.name == "candidates")
_GRAPH: Chain[Logical, Logical] = Chain(PLACEMENT.passes[:_AT])
"""The passes that change the graph; values of a plan's program have the ids that these give."""
_REST: Chain[Logical, PlanData] = Chain(PLACEMENT.passes[_AT:])


@dataclass(frozen=True)
class Replanner:
    """Makes the plan of a program of one placement again.

    Arguments:
      traced, request: what `compile_plan` was given.
      pins: what ops make and is held, by value of the plan's graph.
    """

    traced: TracedProgram = field(repr=False)
    request: Request = field(repr=False)
    pins: Mapping[int, NdSbp] = field(default_factory=dict)

    def _tensors(self, plan: PlanData) -> NamedTensors:
        assert plan.physical is not None
        return NamedTensors(plan, plan.physical, self.request.ties)

    def logical(self) -> Logical:
        """The graph as it is planned."""
        r = self.request
        s = _GRAPH.run(Logical(r, self.traced, Boxings(Network(r.placement, r.hardware))), r.terms.check)
        return s.with_graph(with_annotations(s.graph, self.pins)) if self.pins else s

    def plan(self) -> Plan:
        """The plan, with who can make it again.

        Raises:
          SbpError: as `compile_plan` does.
        """
        plan = with_forms(_REST.run(self.logical(), self.request.terms.check))
        return replace(plan, replanner=self)

    @public
    def hold(self, plan: PlanData, name: str, nd: NdSbp) -> Plan:
        """The plan with a tensor held to a signature, and everything else planned again.

        Raises:
          ArgumentError: for a name that means no tensor, or several kinds.
          SbpError: for a signature that the tensor cannot have.
        """
        target = self._tensors(plan).find(name)
        nd = normalise(nd, len(target.shape))
        raise_all(check_held(target, nd, self.request))
        nd = on_wide_axes(nd, self.request.placement.shape)
        found = self.with_holds([(target, nd)]).plan()
        return replace(found, notes=(held_note(target.text, nd, found, plan), *found.notes))

    @public
    def choices(self, plan: PlanData, name: str, most: int, time_limit_seconds: float) -> TensorChoices:
        """The other signatures of a tensor, each with the whole plan made again around it.

        Arguments:
          most: how many of them, the cheapest.
          time_limit_seconds: for the search of all, and as much for their shortest steps.

        Raises:
          ArgumentError: for a name that means no tensor, or several kinds.
        """
        assert plan.physical is not None
        target, effort = self._tensors(plan).find(name), until_over(2 * time_limit_seconds)
        search = self.search(plan.physical, target, effort)
        others = search.problem.others(target)
        asked = [search.problem.held_states(target, nd) for nd in others]
        found = cheapest_held(search.problem.network.dense(), asked, most, effort.at_most(time_limit_seconds))
        plans = [search.plan_of(others[i], x) for i, x in found.solutions]
        return tensor_choices(plan, target, found, plans, self.request.limit_bytes)

    def rows_choices(
        self, plan: PlanData, rows: Sequence[Collective], most: int, time_limit_seconds: float
    ) -> Iterator[tuple[Collective, RowChoices]]:
        """The same of the tensors of rows of `merged_collectives`, and what to write to do without.

        Planned again is what is near a row, for the rest as the plan has it, in one problem for all rows.

        Arguments:
          time_limit_seconds: after which no other row is begun.
        """
        assert plan.physical is not None
        own = [list(self._targets(plan, c)) for c in rows]
        rows = [c for c, targets in zip(rows, own, strict=True) if targets]
        own = [targets for targets in own if targets]
        lines = LineTargets(plan, plan.physical, rows, self.request.ties)
        every = [t for k, targets in enumerate(own) for t in (*targets, *lines.targets_near[k])]
        opened = sorted({i for t in every for i in t.arguments})
        watched = dict.fromkeys(v for t in every for v in t.values)
        problem = self.with_holds((t, None) for t in every).problem(plan.physical, watched)
        search = RowsSearch(plan, self.request, problem, lines, own, rows, opened, self._planned)
        return search.each(most, time_limit_seconds)

    def _planned(self, holds: Sequence[Hold]) -> PlanData:
        """The whole plan with some tensors held."""
        for target, nd in holds:
            raise_all(check_held(target, nd, self.request))
        return self.with_holds(holds).plan()

    def _targets(self, plan: PlanData, c: Collective) -> Iterator[Target]:
        """What may be held to do without a row: its own tensors, then the argument that leads to it."""
        assert plan.physical is not None
        own = sent_target(plan.physical, c, self.request.ties)
        if own is not None:
            yield own
        reasons = Reasons(plan.physical, Names(plan.physical.graph, plan.in_paths, plan.out_paths))
        cause = cause_of(reasons, c)
        if cause and (own is None or cause != own.name):
            with suppress(ArgumentError):  # the name may mean tensors of several kinds
                yield self._tensors(plan).find(without_indices(cause))

    def search(self, physical: Physical, target: Target, effort: Effort) -> HeldSearch:
        """The plans in which a target is held.

        Arguments:
          physical: of the plan at hand.
        """
        opened = self.with_holds([(target, None)])
        problem = opened.problem(physical, dict.fromkeys(target.values))
        return HeldSearch(problem, target, opened.request, effort)

    def problem(self, physical: Physical, watched: Mapping[int, None]) -> NearProblem:
        """The planning problem with variables that tell how some values lie.

        Arguments:
          physical: of a plan.
        """
        s = self.logical()
        listed = list_candidates(s.with_graph(with_annotations(s.graph, watched)))
        return NearProblem(listed, physical, [*watched])

    def with_holds(self, holds: Iterable[tuple[Target, NdSbp | None]]) -> Replanner:
        """The same with some targets held; of one that is held to None nothing is said."""
        r, pinned = self.request, dict[int, NdSbp | None](self.pins)
        ins, outs, ties = list(r.in_sbp), list(r.out_sbp), list(r.ties)
        for target, nd in holds:
            for i in target.arguments:
                ins[i] = nd
            for j in target.results:
                outs[j], ties[j] = nd, None
            pinned |= dict.fromkeys(target.values, nd)
        request = replace(r, in_sbp=tuple(ins), out_sbp=tuple(outs), ties=tuple(ties))
        return Replanner(self.traced, request, {v: nd for v, nd in pinned.items() if nd is not None})


@dataclass(frozen=True)
class HeldSearch:
    """Whole plans in which a target is held.

    Arguments:
      effort: for all that is looked at.
    """

    problem: NearProblem
    target: Target
    request: Request
    effort: Effort

    def _shortest(self, nd: NdSbp, found: Solution) -> PlanCandidate:
        """What has the shortest step with the target held, as the plan itself was chosen."""
        network = held_network(self.problem.network.dense(), self.problem.held_states(self.target, nd))
        clock = Clock(self.problem.s.candidates, self.problem.s.boxings)
        space = Space(self.problem.model, network, clock, self.request.donated, found.bound)
        pool = Pool(self.request.limit_bytes, self.effort.count)
        return shortest(space, pool, pool.add(space.look(tuple(found.states), "held")), self.effort)

    def plan_of(self, nd: NdSbp, found: Solution) -> HeldPlan:
        """The plan with the target held, near what was found."""
        takes = self._shortest(nd, found).takes
        made = made_by(takes.physical, [*self.problem.annotated_values.values()])
        slack = found.cost - found.bound if found.cost - found.bound > PROVEN * found.cost else 0.0
        return HeldPlan(nd, figures_of_program(takes), made, slack)


def with_replanner(plan: Plan, traced: TracedProgram, request: Request) -> Plan:
    """A plan that can be made again.

    Arguments:
      traced, request: what `compile_plan` was given for it.
    """
    nodes = () if plan.physical is None else plan.physical.graph.walk()
    if not any(node.params.get("samples") for node in nodes):
        # Nothing was computed from a batch: the plan must not keep it alive.
        request = replace(request, with_sample=None)
    # Who asks for it asks alone.
    request = replace(request, terms=replace(request.terms, peers=None))
    return replace(plan, replanner=Replanner(traced, request))


def held_note(tensor: str, nd: NdSbp, found: PlanData, plan: PlanData) -> str:
    """What it costs to hold a tensor, in words.

    Arguments:
      found, plan: the plan with the tensor held, and the one without.
    """
    time, overlapped, sent, memory = changes(figures_of(found), figures_of(plan))
    return (
        f"what if: {tensor} held to {format_sbp(nd)}: {time}, {overlapped} with overlap, "
        f"{sent} sent, {memory} at the peak"
    )


def check_held(target: Target, nd: NdSbp, request: Request) -> list[Problem]:
    """What keeps a target from lying as asked."""
    where = f"what if: {target.text}"
    problems = list(check_fit(nd, target.shape, target.dtype, where, request.placement))
    if not problems and not target.values and any(isinstance(s, Partial) for s in nd):
        legal, fix = "S(dim) or B", "B, or a tensor that an op makes"
        why = "P never crosses the boundary of a program: a jax.Array holds whole values"
        problems.append(Problem("signature", where, format_sbp(nd), legal, why, fix))
    return problems
