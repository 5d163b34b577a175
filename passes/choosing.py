"""The search for signatures: the cheapest plan, the cheapest that fits, the one with the shortest step."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain import notes
from sbp.passes.physical.fit import LimitedProblem, LimitedStart, SmallestPeak, seconds_of_fastest
from sbp.passes.physical.hidden import MOST_CELLS, STAGE_WORK, WORK, shortest_step
from sbp.passes.physical.hidden_limited import shortest_within
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cheapest import SOLVER_SHARE, cheapest
from sbp.passes.plan.hurried import LATE, BuiltModel, least_seconds, model_in_time
from sbp.passes.plan.indexed import IndexedNetwork
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
from sbp.passes.plan.network import Infeasible
from sbp.passes.request import Request


@dataclass(frozen=True)
class FoundSignatures:
    """What a search has found.

    Arguments:
      assignment: a signature for everything.
      notes: remarks on the search.
      smallest: what is nearest to fitting, if nothing was found that fits.
      is_final: whether the search ended by itself, not with its time.
    """

    assignment: ChosenSignatures
    notes: tuple[str, ...] = ()
    smallest: SmallestPeak | None = None
    is_final: bool = True


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
        seconds = seconds_of_fastest(self.candidates.graph, r.limit_bytes, r.seconds_left)
        model, network, fastest = self._fastest(seconds)
        problem = self.candidates, self.asked, self.boxings, r.donated, r.limit_bytes
        limited = LimitedProblem(*problem, r.seconds_left, r.terms.progress, r.whole_step)
        found = limited.keep_limit(fastest)
        if found.smallest is not None:
            return FoundSignatures(fastest, smallest=found.smallest)
        chosen, remarks = found.assignment, list[str]()
        if chosen is not fastest:
            took = fastest.seconds, chosen.seconds
            remarks.append(notes.fitted_note(r.limit_bytes, found.needed_bytes, *took))
        chosen, left_out = self._shortest(model, network, chosen, limited, found.start)
        late = notes.time_notes(chosen, r)
        return FoundSignatures(chosen, (*remarks, *left_out, *late), is_final=not late)

    def _fastest(self, seconds: float | None) -> tuple[Model, IndexedNetwork, ChosenSignatures]:
        """The cheapest assignment, with the model that it was found in.

        Arguments:
          seconds: for both; None for no limit.
        """
        r = self.request
        begun, limit, left = time.monotonic(), r.terms.time_limit_seconds, r.seconds_left
        is_late = limit is not None and left is not None and left + r.kept_seconds < LATE * limit
        built = model_in_time(self.candidates, self.asked, self.boxings, seconds, is_late)
        try:
            fastest = self._solved(built, begun, seconds)
        except Infeasible:
            if built.is_whole:
                raise
            # What the user asks for may need strategies that differ from axis to axis.
            built = model_in_time(self.candidates, self.asked, self.boxings, None)
            fastest = self._solved(built, begun, seconds)
        if not built.is_whole:
            bound = min(least_seconds(self.candidates, self.boxings), fastest.seconds)
            fastest = replace(fastest, bound=bound)
        return built.model, built.network, fastest

    def _solved(self, built: BuiltModel, begun: float, seconds: float | None) -> ChosenSignatures:
        """The solver has some time even where the model took all: a plan of none is worth nothing."""
        if seconds is not None:
            taken = time.monotonic() - begun
            seconds = max(seconds - taken, SOLVER_SHARE * min(taken, built.seconds))
        return cheapest(built.model, built.network, seconds, self.request.terms.progress)

    def _shortest(
        self,
        model: Model,
        network: IndexedNetwork,
        chosen: ChosenSignatures,
        limited: LimitedProblem,
        start: LimitedStart | None,
    ) -> tuple[ChosenSignatures, tuple[str, ...]]:
        """What fits with the shortest step, where collectives run beside kernels; and a remark."""
        r = self.request
        if r.seconds_left == 0.0:
            return chosen, ()
        if network.cells > MOST_CELLS:
            return chosen, notes.large_notes(r.hardware)
        if start is None:
            given = model, network.dense(), chosen, limited.fits, r.seconds_left, r.donated
            found = shortest_step(*given, WORK if r.whole_step else STAGE_WORK)
            chosen = found.assignment
            start = limited.start() if found.passed_over else None
        if start is not None:
            found = shortest_within(limited, start, chosen, r.seconds_left)
        return found.assignment, (notes.starts_note(found.looked, found.left),) if found.left else ()
