"""The search for signatures: the cheapest plan, the cheapest that fits, the one with the shortest step."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain import notes
from sbp.passes.physical.evaluate import OVERLAPPING, Evaluator
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.fit import (
    FittedSignatures,
    LimitedProblem,
    LimitedStart,
    SmallestPeak,
    seconds_of_fastest,
)
from sbp.passes.physical.hidden import (
    MOST_CELLS,
    STAGE_WORK,
    ShortestStep,
    grouped_looks,
    looks_for,
    shortest_step,
)
from sbp.passes.physical.hidden_limited import shortest_within
from sbp.passes.physical.known_layouts import KnownLayouts
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cheapest import SOLVER_SHARE, cheapest
from sbp.passes.plan.grouped import axes_alike, axis_groups
from sbp.passes.plan.hurried import (
    FEW_SHARE,
    LEAST_SHARE,
    MODEL_SHARE,
    BuiltModel,
    OutOfTime,
    TimedModel,
    least_seconds,
    model_in_time,
)
from sbp.passes.plan.model import Boundary, ChosenSignatures
from sbp.passes.plan.network import Infeasible
from sbp.passes.plan.seeds import seed_name, seeds_for
from sbp.passes.request import Request

ROOM_SHARE = 4.0
"""What the model under a limit on memory and the first plan of its search take at least, of what the model
without one does, or of what reading the program does."""
LOOKS_SHARE = 0.5
"""What a look at one more plan takes at least, of what the passes before the search do."""


@dataclass(frozen=True)
class FoundSignatures:
    """What a search has found.

    Arguments:
      assignment: a signature for everything.
      notes: remarks on the search.
      smallest: what is nearest to fitting, if nothing was found that fits.
      is_final: whether the search ended by itself, not with its time.
      takes: the figures of the finished program of this assignment, if it was made.
    """

    assignment: ChosenSignatures
    notes: tuple[str, ...] = ()
    smallest: SmallestPeak | None = None
    is_final: bool = True
    takes: Evaluator | None = None


@dataclass(frozen=True)
class Choosing:
    """A search for signatures."""

    candidates: Candidates
    asked: Boundary
    boxings: Boxings
    request: Request

    def run(self) -> FoundSignatures:
        """The plan with the shortest step that fits, as far as it is found."""
        r = self.request
        built, fastest = self._fastest()
        takes, needed = self._looked_at(fastest)
        problem = self.candidates, self.asked, self.boxings, r.donated, r.limit_bytes
        limited = LimitedProblem(*problem, r.seconds_left, r.terms.progress, r.whole_step)
        found, remarks = FittedSignatures(fastest, needed), tuple[str, ...]()
        if needed > r.limit_bytes:
            takes = None
            found, remarks = self._fitted(built, fastest, limited)
            found = replace(found, needed_bytes=needed)
        if found.smallest is not None:
            return FoundSignatures(fastest, smallest=found.smallest)
        chosen = found.assignment
        if chosen is not fastest:
            took = fastest.seconds, chosen.seconds
            remarks = (notes.fitted_note(r.limit_bytes, needed, *took), *remarks)
        shortest, left_out = ShortestStep(chosen, takes=takes), tuple[str, ...]()
        if r.seconds_left is None or r.seconds_left > LOOKS_SHARE * r.before_seconds:
            with r.phases.of("plans looked at", needed=False):
                shortest, left_out = self._shortest(built, chosen, limited, found.start, takes)
        late = notes.time_notes(shortest.assignment, r)
        remarks = (*remarks, *left_out, *late)
        return FoundSignatures(shortest.assignment, remarks, is_final=not late, takes=shortest.takes)

    @cached_property
    def clock(self) -> Clock:
        """What plans of all strategies take."""
        return Clock(self.candidates, self.boxings)

    def _looked_at(self, fastest: ChosenSignatures) -> tuple[Evaluator | None, float]:
        """The program of the cheapest assignment, and what it needs; None and no bytes if any may."""
        if math.isinf(self.request.limit_bytes):
            return None, 0.0
        with self.request.phases.of("memory"):
            takes = self.clock.program(fastest, self.request.donated)
            return takes, takes.peak_bytes()

    def _fitted(
        self, built: BuiltModel, fastest: ChosenSignatures, limited: LimitedProblem
    ) -> tuple[FittedSignatures, tuple[str, ...]]:
        """The cheapest that is found to fit; of parallelisms by name, where there is no time to search."""
        r, phases = self.request, self.request.phases
        if self._has_time_for_room(built):
            with phases.of("search under the limit on memory", needed=False):
                return limited.keep_limit(fastest), ()
        least = ROOM_SHARE * r.before_seconds
        quick = KnownLayouts(limited, self.clock, built, lambda: r.seconds_left, least)
        with phases.of("layouts that may fit"):
            found = quick.by_name(fastest)
        if found is None:
            with phases.of("layers that compute again"):
                found = quick.by_price(fastest)
        if found is None:
            with phases.of("search among few signatures"):
                found = quick.of_few(fastest)
        if found is None:  # to refuse a program that fits would be worse than to be late
            with phases.of("search under the limit on memory"):
                return replace(limited, time_limit_seconds=least).keep_limit(fastest), ()
        return FittedSignatures(found.assignment), (notes.known_layout_note(found.what),)

    def _has_time_for_room(self, built: BuiltModel) -> bool:
        """Whether there is time for the model under a limit on memory, and to search in it."""
        left = self.request.seconds_left
        return left is None or (built.is_whole and left >= ROOM_SHARE * built.seconds)

    def _fastest(self) -> tuple[BuiltModel, ChosenSignatures]:
        """The cheapest assignment, with the model that it was found in."""
        r, left = self.request, self.request.seconds_left
        given, begun, phases = (self.candidates, self.asked, self.boxings), r.phases.now(), r.phases
        seconds = seconds_of_fastest(self.candidates.graph, r.limit_bytes, left)
        # Where the model of all strategies is given up, there is time for that of few.
        kept = FEW_SHARE * r.before_seconds
        is_late = left is not None and left - kept < LEAST_SHARE * r.before_seconds
        built = model_in_time(*given, seconds and max(0.0, seconds - kept), is_late, phases)
        try:
            fastest = self._solved(built, begun, seconds)
        except Infeasible:
            if built.is_whole:
                raise
            # What the user asks for may need strategies that differ from axis to axis.
            built = model_in_time(*given, None, phases=phases)
            fastest = self._solved(built, begun, seconds)
        if not built.is_whole:
            with phases.of("what ops take at least"):
                bound = min(least_seconds(self.candidates, self.boxings), fastest.seconds)
            fastest = replace(fastest, bound=bound)
        return built, fastest

    def _solved(self, built: BuiltModel, begun: float, seconds: float | None) -> ChosenSignatures:
        """The solver has some time even where the model took all: a plan of none is worth nothing."""
        phases = self.request.phases
        if seconds is not None:
            taken = phases.now() - begun
            seconds = max(seconds - taken, SOLVER_SHARE * min(taken, built.seconds))
        with phases.of("search"):
            return cheapest(built.model, built.network, seconds, self.request.terms.progress)

    def _shortest_grouped(
        self,
        chosen: ChosenSignatures,
        limited: LimitedProblem,
        start: LimitedStart | None,
        takes: Evaluator | None,
    ) -> tuple[ShortestStep, tuple[str, ...]]:
        """The same on many axes: strategies that use groups of these as one are looked at."""
        r = self.request
        kept = ShortestStep(chosen, takes=takes), notes.large_notes(r.hardware)
        if start is not None or r.hardware.platform not in OVERLAPPING:
            return kept
        groups = axis_groups(r.placement, r.hardware)
        names = tuple(map(seed_name, seeds_for(r.placement.ndim, len(groups[0]))))
        given = axes_alike(self.candidates, groups), self.asked, self.boxings
        left = math.inf if r.seconds_left is None else r.seconds_left
        model = TimedModel(*given, r.phases.now() + MODEL_SHARE * left, r.phases.now)
        try:
            network = model.build_indexed()
        except Infeasible:
            return kept
        except OutOfTime:
            return kept[0], (notes.starts_note((), names),)
        if network.cells > MOST_CELLS:
            return kept
        dense = network.dense()
        more = r.seconds_left, r.donated, len(groups[0]), grouped_looks(dense), r.phases, takes
        found = shortest_step(model, dense, chosen, limited.fits_program, *more)
        return found, (notes.starts_note(found.looked, found.left, found.compared),) if found.left else ()

    def _shortest(
        self,
        built: BuiltModel,
        chosen: ChosenSignatures,
        limited: LimitedProblem,
        start: LimitedStart | None,
        takes: Evaluator | None,
    ) -> tuple[ShortestStep, tuple[str, ...]]:
        """What fits with the shortest step, where collectives run beside kernels; and a remark."""
        r, model, network = self.request, built.model, built.network
        if network.cells > MOST_CELLS:
            return self._shortest_grouped(chosen, limited, start, takes)
        if start is None:
            dense = network.dense()
            looks = None if r.whole_step else looks_for(dense, STAGE_WORK)
            more = r.seconds_left, r.donated, 1, looks, r.phases, takes
            found = shortest_step(model, dense, chosen, limited.fits_program, *more)
            chosen = found.assignment
            start = limited.start() if found.passed_over and self._has_time_for_room(built) else None
        if start is not None:
            found = shortest_within(limited, start, chosen, r.seconds_left)
        return found, (notes.starts_note(found.looked, found.left, found.compared),) if found.left else ()
