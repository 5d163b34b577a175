"""The search for signatures: one pool, to which every source adds, of which the best is the plan.

1. The cheapest plan one thing after the other, with its bound.
2. Where collectives run beside kernels: the space around it is explored (explore.py).
3. If the best of these needs more memory than there is: the same under the limit (limited_space.py).
4. Where the user's time ended any of this: plans that people write by hand (floor.py).
"""

import math
from dataclasses import dataclass, replace

from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain import notes
from sbp.passes.explain.plan import SAME
from sbp.passes.physical.enumeration import WeighedPlan, shortest_by_trying
from sbp.passes.physical.evaluate import OVERLAPPING, Evaluator
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.memory import SmallestPeak
from sbp.passes.plan import constants
from sbp.passes.plan.bounds import least_seconds, solve_indexed
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
from sbp.passes.plan.network import IndexedNetwork, Infeasible
from sbp.passes.plan.seeds import seeds_for
from sbp.passes.plan.start_points import states_of
from sbp.passes.request import Request
from sbp.passes.search.explore import Explorer
from sbp.passes.search.floor import CutModel, CutOff, add_floor, axes_alike, axis_groups
from sbp.passes.search.limited_space import LimitedProblem, LimitedSpace
from sbp.passes.search.pool import PlanCandidate, Pool, Space


@dataclass(frozen=True)
class FoundSignatures:
    """What a search has found.

    Arguments:
      assignment: a signature for everything.
      notes: remarks on the search.
      smallest: what is nearest to fitting, if nothing was found that fits.
      is_cut: whether the user's time ended the search.
      takes: the figures of the finished program of this assignment, if it was made.
    """

    assignment: ChosenSignatures
    notes: tuple[str, ...] = ()
    smallest: SmallestPeak | None = None
    is_cut: bool = False
    takes: Evaluator | None = None


class Search:
    """A search for signatures.

    Arguments:
      candidates: of every op.
      asked: of arguments and results.
      request: what is asked for else.
    """

    def __init__(self, candidates: Candidates, asked: Boundary, boxings: Boxings, request: Request) -> None:
        self.candidates, self.asked, self.boxings, self.request = candidates, asked, boxings, request
        self.clock = Clock(candidates, boxings)
        self.effort = request.effort
        self.pool = Pool(request.limit_bytes, self.effort.count)
        self.bound, self.edge_cells, self.is_large = 0.0, math.inf, False
        self.start: PlanCandidate | None = None
        """Where a search under a limit begins, if not at the best: more effort must not lead it astray."""

    def run(self) -> FoundSignatures:
        """The plan with the shortest step that fits, as far as it is found."""
        base: PlanCandidate | None = None
        try:
            space, base = self.cheapest()
            # Whether nothing is much cheaper.
            if not (proven := base.assignment.seconds <= (1.0 + constants.CLOSE) * self.bound):
                self.add_floor(base)
            self.explore(space, base)
        except CutOff:
            self.bound = least_seconds(self.candidates, self.boxings)
        if base is None or (self.effort.count.is_cut and proven):
            self.add_floor(base)
        fastest = self.pool.best
        assert fastest is not None
        if self.pool.fits(fastest):
            return self.answer(fastest)
        self.pool.bind()
        fitted = self.fit(self.start or fastest)
        best = self.pool.best
        if best is None:
            assert isinstance(fitted, SmallestPeak)
            return FoundSignatures(fastest.assignment, smallest=fitted)
        fits = self.pool.limit_bytes, fastest.memory_bytes
        return self.answer(
            best, notes.fitted_note(*fits, fastest.times.step_seconds, best.times.step_seconds)
        )

    def effort_part(self, seconds: float) -> Effort:
        """The effort of a part of the search."""
        return self.effort.at_most(seconds * self.request.terms.effort)

    # Without a limit on memory.

    def cheapest(self) -> tuple[Space | None, PlanCandidate]:
        """The space of the program, and the cheapest plan; no space if it is too large to be written down."""
        model = CutModel(self.candidates, self.asked, self.boxings, self.effort.count.is_over)
        network = model.build_indexed()
        solution = solve_indexed(
            network,
            effort=self.effort_part(constants.SOLVE_SECONDS),
            progress=self.request.terms.progress,
        )
        if not math.isfinite(solution.cost):
            raise CutOff
        self.bound, self.edge_cells = solution.bound, network.edge_cells
        assignment = model.chosen_signatures(solution.states, solution.cost, solution.bound)
        takes = self.clock.program(assignment, self.request.donated)
        base = self.pool.add(
            PlanCandidate(assignment, takes, self.clock, "the cheapest plan", solution.states)
        )
        if not self.overlaps(base):
            return None, base
        return self.space(model, network, base)

    def overlaps(self, base: PlanCandidate) -> bool:
        """Whether any collective may run beside kernels."""
        return self.request.hardware.platform in OVERLAPPING and bool(
            base.times.sent_seconds or base.times.body_sent_seconds
        )

    def space(
        self, model: Model, network: IndexedNetwork, base: PlanCandidate
    ) -> tuple[Space | None, PlanCandidate]:
        """The space of a model, or of groups of axes where it is too large, and the cheapest plan in it; None
        where that is too large too.

        Arguments:
          base: the cheapest plan of the model.
        """
        few = self.few(base, network.cells)
        if few is not self.candidates:
            model = CutModel(few, self.asked, self.boxings, self.effort.count.is_over)
            network = model.build_indexed()
        if network.cells > constants.WRITTEN_CELLS:
            return None, base
        if few is not self.candidates:
            base = replace(base, states=tuple(states_of(model, network.dense(), base.assignment)))
        return Space(model, network.dense(), self.clock, self.request.donated, self.bound), base

    def few(self, known: PlanCandidate, cells: float) -> Candidates:
        """The signatures that do the same along neighbouring axes, and those of a plan.

        All of them where the tables have few enough cells, or there are no such axes.
        """
        if cells <= constants.WRITTEN_CELLS or len(self.groups) == self.request.placement.ndim:
            return self.candidates
        return axes_alike(self.candidates, self.groups, known.assignment)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Axes between hosts, and those within."""
        return axis_groups(self.request.placement, self.request.hardware)

    def explore(self, space: Space | None, base: PlanCandidate) -> None:
        """Looks at other plans of a space."""
        if space is None:
            self.is_large = self.overlaps(base)
            return
        # Of groups of axes the first is the outer one.
        outer = 1 if space.model.c is self.candidates else len(self.groups[0])
        loops = any(n.bodies for n in self.candidates.graph.nodes)
        seeds = seeds_for(self.request.placement.ndim, outer, loops=loops)
        explorer = Explorer(space, self.pool, base, seeds, self.effort_part(constants.EXPLORE_SECONDS))
        explorer.run(constants.MOST_TURNS, self.request.terms.effort)
        self.start = explorer.first

    def add_floor(self, base: PlanCandidate | None) -> None:
        """What is there although the search was cut off."""
        try:
            add_floor(self.pool, self.clock, self.asked, self.request.donated)
        except Infeasible:
            if base is not None:
                return
            # What the user asks for needs signatures that differ from axis to axis.
            model = Model(self.candidates, self.asked, self.boxings)
            space = Space(model, model.build(), self.clock, self.request.donated)
            found = space.solve(space.network.unary, "the cheapest plan", Effort())
            if found is None:
                raise
            self.pool.add(found)

    # Under a limit on memory.

    def fit(self, fastest: PlanCandidate) -> PlanCandidate | SmallestPeak:
        """The cheapest that fits, and what is explored from it; the smallest peak where nothing fits."""
        found, peaks = None, list[SmallestPeak]()
        for problem in self.limited_problems(fastest):
            space = LimitedSpace(problem, self.pool, self.clock, self.bound)
            if problem.by_chain and not space.room_model.has_chains:
                continue  # it is the same as the one before
            found = space.fit(fastest, self.effort)
            if isinstance(found, PlanCandidate):
                break
            peaks.append(found)
        else:
            bound = min(x.bound_bytes for x in peaks)
            found = replace(min(peaks, key=lambda x: x.bytes), bound_bytes=bound)
        found = self.tried_out(found)
        if isinstance(found, PlanCandidate) and self.overlaps(found) and found.states:
            effort = self.effort_part(constants.LIMITED_SECONDS)
            explorer = Explorer(space, self.pool, space.best(found), (), effort)
            explorer.run(constants.MOST_TURNS, self.request.terms.effort)
        return found

    def limited_problems(self, fastest: PlanCandidate) -> list[LimitedProblem]:
        """What is planned under the limit, one after the other until something fits: groups of axes where
        there are too many plans, all, and all with a count that takes longer."""
        r = self.request
        given = self.candidates, self.asked, self.boxings, r.donated, r.limit_bytes, r.terms.progress
        whole, few = LimitedProblem(*given, recomputes=r.whole_step), self.few(fastest, self.edge_cells)
        problems = [] if few is self.candidates else [replace(whole, candidates=few, proves=False)]
        return [*problems, whole, *([replace(whole, by_chain=True, proves=False)] if r.whole_step else [])]

    def tried_out(self, found: PlanCandidate | SmallestPeak) -> PlanCandidate | SmallestPeak:
        """The same, or what is shorter and fits in a program so small that all plans can be looked at."""
        below, bound = math.inf, self.bound
        if isinstance(found, PlanCandidate):
            below, bound = found.times.step_seconds, found.assignment.bound

        def weighed(assignment: ChosenSignatures) -> WeighedPlan:
            takes = self.clock.program(assignment, self.request.donated)
            fits = takes.peak_bytes() <= self.pool.limit_bytes
            return WeighedPlan(takes.schedule.seconds if fits else math.inf, takes.seconds(), fits)

        better = shortest_by_trying(self.candidates, self.asked, self.boxings, weighed, below, bound)
        if better is None:
            return found
        takes = self.clock.program(better, self.request.donated)
        return self.pool.add(PlanCandidate(better, takes, self.clock, "all plans there are"))

    # What was found.

    def answer(self, best: PlanCandidate, *remarks: str) -> FoundSignatures:
        """The best plan, with the bound and the time of the cheapest one."""
        known, is_cut = self.pool.counted, self.effort.count.is_cut
        cheapest = min(known, key=lambda x: x.times.seconds)
        bound = max(self.bound, *(x.assignment.bound for x in known))
        chosen = replace(best.assignment, bound=min(bound, cheapest.assignment.seconds))
        if best.times.seconds > cheapest.times.seconds * (1 + SAME):
            chosen = replace(chosen, cheapest_seconds=cheapest.times.seconds)
        large = (notes.LARGE_NOTE,) if self.is_large else ()
        cut = (notes.cut_note(self.request.terms.time_limit_seconds),) if is_cut else ()
        return FoundSignatures(chosen, (*remarks, *large, *cut), is_cut=is_cut, takes=best.takes)
