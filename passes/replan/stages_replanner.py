"""Plans of programs with stages made again, with a tensor held on the placements that it belongs to.

All placements go through the passes as they did, one after the other, and the schedule is made and simulated
again. A placement that is asked the same as before keeps its plan: only those are planned again that hold the
tensor, and those that what they send changes.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sbp.errors import ArgumentError, Problem, SbpError, raise_all
from sbp.layout import at_rest
from sbp.passes.chain import STAGES, Ordered, Planned, Staged, Whole, compile_plan
from sbp.passes.explain.choices import HeldPlan, RowChoices, TensorChoices
from sbp.passes.explain.internal_errors import public
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.plan_figures import figures_of, made_by
from sbp.passes.explain.targets import Target
from sbp.passes.face import Plan
from sbp.passes.pass_manager import Chain
from sbp.passes.pipeline.planning import plan_shares
from sbp.passes.pipeline.stages import Stages, physical_of
from sbp.passes.pipeline.targets import NamedStagesTensors, StagesTarget
from sbp.passes.plan.effort import Effort, until_over
from sbp.passes.plan.marginals import HeldSolutions, cheapest_held
from sbp.passes.program.trace import TracedProgram
from sbp.passes.replan.near_problem import annotations_of
from sbp.passes.replan.removal import Hold
from sbp.passes.replan.replanner import HeldSearch, Replanner, check_held, held_note
from sbp.passes.request import Request, StagesRequest
from sbp.signature import NdSbp, format_sbp, normalise

_AT = next(i for i, p in enumerate(STAGES.passes) if p.name == "placements")
_ORDER: Chain[Whole, Ordered] = Chain(STAGES.passes[:_AT])
"""The passes before a placement is planned."""


Holds = tuple[Hold, ...]
"""What is held of one placement."""


@dataclass(frozen=True)
class StagesReplanner:
    """Makes the plan of a program with stages again.

    Arguments:
      traced, request: what `compile_stages` was given.
      stages: as they were planned.
      holds: by position of a placement, what is held there.
    """

    traced: TracedProgram = field(repr=False)
    request: StagesRequest = field(repr=False)
    stages: Stages = field(repr=False)
    holds: Mapping[int, Holds] = field(default_factory=dict)

    @public
    def hold(self, plan: PlanData, name: str, nd: NdSbp) -> Plan:
        """The plan with a tensor held to a signature, and everything else planned again.

        Raises:
          ArgumentError: for a name that means no tensor, or several kinds.
          SbpError: for a signature that the tensor cannot have, on one of its placements or at all.
        """
        target = NamedStagesTensors(plan.name, self.stages).find(name)
        nd = normalise(nd, len(target.shape))
        raise_all(self._problems(target, nd))
        found = self._made(target, nd, self.request.terms.memory_limit_bytes)
        return replace(found, notes=(held_note(target.text, nd, found, plan), *found.notes))

    @public
    def choices(self, plan: PlanData, name: str, most: int, time_limit_seconds: float) -> TensorChoices:
        """The other signatures of a tensor, each with the whole plan made again around it.

        Which are shown is found by the ops of the tensor's placements; what they cost, by the whole schedule.

        Arguments:
          most: how many of them.
          time_limit_seconds: for finding them, and as much for the plans.

        Raises:
          ArgumentError: for a name that means no tensor, or several kinds.
        """
        target = NamedStagesTensors(plan.name, self.stages).find(name)
        effort = until_over(2 * time_limit_seconds)
        signatures, rest = self._ranked(target, most, time_limit_seconds)
        held, unknown, impossible = list[HeldPlan](), rest.unknown, rest.impossible
        for nd in signatures:
            if held and effort.is_spent:
                unknown += 1
                continue
            try:
                # The fastest of all, as in a program of one placement: what does not fit says so.
                made = self._made(target, nd, math.inf)
            except SbpError:
                impossible += 1
            else:
                slack = made.seconds - made.bound if made.gap else 0.0
                held.append(HeldPlan(nd, figures_of(made), _makers(made.stages, target, watched=True), slack))
        held.sort(key=lambda h: (h.figures.step_seconds, h.figures.seconds))
        limit = self.request.terms.memory_limit_bytes
        return TensorChoices(
            target.text,
            target.count,
            _makers(self.stages.plans, target, watched=False),
            target.signatures,
            figures_of(plan),
            tuple(held),
            rest.slower,
            unknown,
            impossible,
            plan.hardware.memory_bytes if limit is None else limit,
            target.where,
        )

    def rows_choices(
        self, plan: PlanData, rows: Sequence[Collective], most: int, time_limit_seconds: float
    ) -> Iterator[tuple[Collective, RowChoices]]:
        """The same of the tensors of rows of the plan; none if a name means none, or several kinds.

        Arguments:
          time_limit_seconds: after which no other row is begun.
        """
        end = time.monotonic() + time_limit_seconds
        for c in rows:
            if (left := end - time.monotonic()) <= 0.0:
                return
            if choices := self._row(plan, c, most, left / 2):
                yield c, RowChoices(tuple(choices))

    def _row(self, plan: PlanData, c: Collective, most: int, seconds: float) -> list[TensorChoices]:
        for name in (c.tensor, f"{c.tensor} at {c.source}"):
            with suppress(ArgumentError):
                return [self.choices(plan, name, most, seconds)]
        return []

    def _problems(self, target: StagesTarget, nd: NdSbp) -> list[Problem]:
        """What keeps a target from lying as asked."""
        whole = Target(target.name, target.shape, target.dtype, values=(0,) if target.is_op_result else ())
        problems = [
            problem
            for place in target.parts
            for problem in check_held(whole, nd, self.stages.requests[place][1])
        ]
        if not problems and target.sent and not self._can_be_sent(target, nd):
            where, why = f"what if: {target.text}", "it is sent with its signature, and only even shards are"
            fix = "a dim that the axes divide, or B"
            problems.append(Problem("signature", where, format_sbp(nd), "an even split, or B", why, fix))
        return list(dict.fromkeys(problems))

    def _can_be_sent(self, target: StagesTarget, nd: NdSbp) -> bool:
        hierarchies = (self.stages.plans[place].placement.shape for place in target.parts)
        return all(at_rest(target.shape, nd, h) == nd for h in hierarchies)

    def _ranked(self, target: StagesTarget, most: int, seconds: float) -> tuple[list[NdSbp], HeldSolutions]:
        """The alternatives by what the ops of their placements take, one after the other; and the others."""
        effort = until_over(seconds)
        searches = [self._search(place, part, effort) for place, part in target.parts.items()]
        now = {target.signatures[0]} if target.is_op_result else set(target.signatures)
        every = [s.problem.signatures(s.target) for s in searches]
        others = [
            nd
            for nd in map(target.whole, every[0])
            if nd is not None
            and nd not in now
            and (not target.sent or self._can_be_sent(target, nd))
            and all(target.local(nd) in own for own in every)
        ]
        wanted, share = (most if len(searches) == 1 else len(others)), effort.seconds_left / len(searches)
        found = list[HeldSolutions]()
        for search in searches:
            states = [search.problem.held_states(search.target, target.local(nd)) for nd in others]
            found.append(cheapest_held(search.problem.network.dense(), states, wanted, effort.at_most(share)))
        costs = [{i: solution.cost for i, solution in one.solutions} for one in found]
        ordered = sorted(set(costs[0]).intersection(*costs), key=lambda i: (sum(c[i] for c in costs), i))
        rest = HeldSolutions(
            (),
            max(x.slower for x in found) + len(ordered[most:]),
            max(x.unknown for x in found),
            max(x.impossible for x in found),
        )
        return [others[i] for i in ordered[:most]], rest

    def _search(self, place: int, part: Target, effort: Effort) -> HeldSearch:
        """The planning problem of a placement, which tells how a target lies there."""
        replanner = Replanner(*self.stages.requests[place]).with_holds(self.holds.get(place, ()))
        return replanner.search(physical_of(self.stages.plans[place]), part, effort)

    def _made(self, target: StagesTarget, nd: NdSbp, limit_bytes: float | None) -> Plan:
        """The plan with a target held to a signature."""
        holds = dict(self.holds)
        for place, part in target.parts.items():
            holds[place] = (*holds.get(place, ()), (part, target.local(nd)))
        staged = self._staged(holds, limit_bytes)
        return replace(staged.plan, replanner=replace(self, stages=staged.stages, holds=holds))

    def _staged(self, holds: Mapping[int, Holds], limit_bytes: float | None) -> Staged:
        """All passes with some of every placement held; the model is cut as it was."""
        terms, r = self.request.terms, self.request
        ordered = _ORDER.run(Whole(r, self.traced, self.traced.graph), terms.check)
        asked = replace(r, terms=replace(terms, memory_limit_bytes=limit_bytes))
        planning = replace(STAGES.passes[_AT], run=self._planner(holds))
        rest: Chain[Ordered, Staged] = Chain((planning, *STAGES.passes[_AT + 1 :]))
        return rest.run(replace(ordered, request=asked), terms.check)

    def _planner(self, holds: Mapping[int, Holds]) -> Callable[[Ordered], Planned]:
        """The pass "placements", with some of every placement held."""
        known = {
            _key(request, self.holds.get(place, ())): plan
            for place, ((_, request), plan) in enumerate(
                zip(self.stages.requests, self.stages.plans, strict=True)
            )
        }

        def run(s: Ordered) -> Planned:
            places = {placement: place for place, placement in enumerate(s.where.placements)}

            def plan_one(traced: TracedProgram, request: Request) -> PlanData:
                held = holds.get(places[request.placement], ())
                found = known.get(_key(request, held))
                if found is not None:
                    return found
                if not held:
                    return compile_plan(traced, request)
                return replace(
                    Replanner(traced, request.with_effort()).with_holds(held).plan(), replanner=None
                )

            return Planned(
                **vars(s), stages=plan_shares(s.request, s.traced, s.graph, s.where, s.order, plan_one)
            )

        return run


def _key(request: Request, holds: Holds) -> Hashable:
    """The same for two plans of a placement that are asked the same."""
    return request.placement, request.in_sbp, request.out_sbp, request.ties, holds


def with_stages_replanner(staged: Staged, traced: TracedProgram, request: StagesRequest) -> Plan:
    """The plan of a program with stages, which can be made again.

    Arguments:
      traced, request: what `compile_stages` was given for it.
    """
    alone = replace(request, terms=replace(request.terms, peers=None))
    return replace(staged.plan, replanner=StagesReplanner(traced, alone, staged.stages))


def _makers(plans: Sequence[PlanData], target: StagesTarget, watched: bool) -> str:
    """The ops that make a target, with their signatures; "" for arguments, and for what is sent.

    Arguments:
      plans: per placement.
      watched: whether the target is held in these plans, by annotations behind the ops.
    """
    texts = list[str]()
    for place, part in target.parts.items():
        physical, values = physical_of(plans[place]), part.values
        if watched:
            made = annotations_of(physical.graph, dict.fromkeys(values))
            values = tuple(x for node in made.values() for x in node.inputs if isinstance(x, int))
        texts.append(made_by(physical, values))
    return "; ".join(filter(None, dict.fromkeys(texts)))
