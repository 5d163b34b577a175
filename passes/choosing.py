"""The search for signatures: the cheapest plan, the cheapest that fits, the one with the shortest step."""

from __future__ import annotations

from dataclasses import dataclass

from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain import notes
from sbp.passes.physical.fit import LimitedProblem, SmallestPeak, seconds_of_fastest
from sbp.passes.physical.hidden import MOST_CELLS, shortest_step
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cheapest import built, cheapest
from sbp.passes.plan.indexed import IndexedNetwork
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
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
        model = Model(self.candidates, self.asked, self.boxings)
        network, seconds = built(model, seconds)
        fastest = cheapest(model, network, seconds, r.terms.progress)
        problem = self.candidates, self.asked, self.boxings, r.donated, r.limit_bytes
        limited = LimitedProblem(*problem, r.seconds_left, r.terms.progress, r.whole_step)
        found = limited.keep_limit(fastest)
        if found.smallest is not None:
            return FoundSignatures(fastest, smallest=found.smallest)
        chosen, remarks = found.assignment, list[str]()
        if chosen is not fastest:
            took = fastest.seconds, chosen.seconds
            remarks.append(notes.fitted_note(r.limit_bytes, found.needed_bytes, *took))
        chosen, left_out = self._shortest(model, network, chosen, limited)
        late = notes.time_notes(chosen, r)
        return FoundSignatures(chosen, (*remarks, *left_out, *late), is_final=not late)

    def _shortest(
        self, model: Model, network: IndexedNetwork, chosen: ChosenSignatures, limited: LimitedProblem
    ) -> tuple[ChosenSignatures, tuple[str, ...]]:
        """What fits with the shortest step, where collectives run beside kernels; and a remark."""
        r = self.request
        if not r.whole_step:
            return chosen, ()
        if network.cells > MOST_CELLS:
            return chosen, notes.large_notes(r.hardware)
        found = shortest_step(model, network.dense(), chosen, limited.fits, r.seconds_left)
        return found.assignment, (notes.starts_note(found.looked, found.left),) if found.left else ()
