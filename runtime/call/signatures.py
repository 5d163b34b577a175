"""The user's signatures of arguments and results, read for a placement, with stages or without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp.compat.untyped import Prefix, PyTree
from sbp.errors import Problem, raise_all
from sbp.notation.resolve import resolve, scalar_notes
from sbp.passes.program.ties import Ties, ties
from sbp.passes.program.trace import TracedProgram
from sbp.passes.request import Asked, Signed
from sbp.placement import Placement
from sbp.runtime.call.in_sbp_binding import InSbpBinding
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
        paths = self.traced.in_paths
        ins, wrong = self.in_sbp.resolve(self.args, self.kwargs, paths, placement)
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

    def asked(self) -> Asked:
        """The same for the leaves of a placement; an argument of several counts for the first one."""
        signed: dict[int, Placement] = {}

        def asked(placement: Placement, given: Sequence[int], back: Sequence[int]) -> tuple[Signed, Signed]:
            ins, outs, problems = self.on(placement)
            fresh = [i for i in given if signed.setdefault(i, placement) == placement]
            names = {self.traced.in_paths[i] for i in fresh} | {self.traced.out_paths[i] for i in back}
            every = {*self.traced.in_paths, *self.traced.out_paths}
            mine = [p for p in problems if (at := p.where.split(": ")[0]) in names or at not in every]
            raise_all(mine)
            kept = [ins[i] if i in fresh or not problems else None for i in given]
            return kept, [outs[i] for i in back]

        return asked
