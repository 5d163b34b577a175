"""What a user calls a tensor of a program with stages, and which tensors of which placements that means."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sbp.compat.untyped import DType
from sbp.passes.explain.targets import (
    NamedTensors,
    Target,
    TensorEntry,
    target_of,
    tensor_text,
    tensors_called,
)
from sbp.passes.pipeline.cut import transfers_inside
from sbp.passes.pipeline.stages import Stages, physical_of
from sbp.passes.program.names import common, without_indices
from sbp.passes.program.role import Part, Phase
from sbp.signature import NdSbp, Split

_PARTS = {Phase.FORWARD: "forward", Phase.INPUT: "backward", Phase.WEIGHT: "backward"}
_OUTSIDE = {Phase.BEFORE: "before the micro-batches", Phase.AFTER: "update"}


def stack_sbp(nd: NdSbp) -> NdSbp:
    """How the stack of all micro-batches lies where each of them lies so.

    >>> stack_sbp((Split(0), Split(2)))
    (S(1), S(3))
    """
    return tuple(Split(s.dim + 1) if isinstance(s, Split) else s for s in nd)


def slice_sbp(nd: NdSbp) -> NdSbp | None:
    """The other way; None where the micro-batches themselves are split.

    >>> slice_sbp((Split(1), Split(3))), slice_sbp((Split(0),))
    ((S(0), S(2)), None)
    """
    if any(isinstance(s, Split) and s.dim == 0 for s in nd):
        return None
    return tuple(Split(s.dim - 1) if isinstance(s, Split) else s for s in nd)


@dataclass(frozen=True)
class StagesTarget:
    """Tensors that a name means: of one kind, held together on all of their placements.

    Arguments:
      name: what they are called.
      shape, dtype: of each; of what is sent for every micro-batch, those of one.
      signatures: how the first of them lies; of what is sent, as it is made and as it arrives.
      parts: by position of a placement, the same among what the plan of that placement names.
      sent: whether it goes from one placement to another.
      inside: whether it is sent for every micro-batch: plans of placements then have the stack of all.
      where: the stages and placements that they belong to, in words.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    signatures: tuple[NdSbp, ...]
    parts: Mapping[int, Target]
    sent: bool
    inside: bool
    where: str

    @property
    def text(self) -> str:
        """The name, with dtype and shape."""
        return f"{self.name}, {tensor_text(self.shape, self.dtype)}"

    @property
    def count(self) -> int:
        """How many tensors; what is sent is one on all of its placements."""
        counts = [part.count for part in self.parts.values()]
        return max(counts) if self.sent else sum(counts)

    @property
    def is_op_result(self) -> bool:
        """Whether ops make it, and it may be a sum of parts."""
        return any(part.values for part in self.parts.values())

    def local(self, nd: NdSbp) -> NdSbp:
        """A signature as plans of placements have it."""
        return stack_sbp(nd) if self.inside else nd

    def whole(self, nd: NdSbp) -> NdSbp | None:
        """The other way; None for one that only a plan of a placement could have."""
        return slice_sbp(nd) if self.inside else nd


@dataclass(frozen=True)
class NamedStagesTensors:
    """All tensors of a program with stages.

    Arguments:
      name: the function's name.
      stages: as they are planned.
    """

    name: str
    stages: Stages

    def find(self, name: str) -> StagesTarget:
        """The tensors that a name means.

        Raises:
          ArgumentError: for a name that means none, with the nearest ones, or several kinds.
        """
        found = tensors_called(name, self.name, [*self.ends(), *self.transfers()], [*self.op_results()])
        first = found[0]
        places = sorted({e.place for e in found})
        sent = self._is_sent(first)
        parts = {p: target_of([e for e in found if e.place == p]) for p in places}
        words = dict.fromkeys(self._words(e, sent) for e in found)
        return StagesTarget(
            common(e.labels[0] for e in found),
            first.shape,
            first.dtype,
            tuple(e.signatures[0] for e in found[:2]) if sent else first.signatures,
            parts,
            sent,
            sent and self._is_inside(first),
            common_where([*words]),
        )

    @cached_property
    def _places(self) -> list[NamedTensors]:
        """Per placement, what its plan names but for what is sent: that has the names of both ends."""
        found = list[NamedTensors]()
        for subgraph, plan, (_, r) in zip(
            self.stages.subgraphs, self.stages.plans, self.stages.requests, strict=True
        ):
            ins, outs = plan.in_paths[: len(subgraph.arguments)], plan.out_paths[: len(subgraph.results)]
            found.append(NamedTensors(replace(plan, in_paths=ins, out_paths=outs), physical_of(plan), r.ties))
        return found

    def ends(self) -> Iterator[TensorEntry]:
        """Arguments and results of the whole program."""
        for p, tensors in enumerate(self._places):
            yield from (replace(e, place=p) for e in tensors.ends)

    def op_results(self) -> Iterator[TensorEntry]:
        """What ops make, on every placement: called as its plan calls it, or as the whole program does."""
        labels = self.stages.labels
        whole = len(labels.graph.values)  # what a pass adds to one placement has an id beyond these
        for p, tensors in enumerate(self._places):
            for e in tensors.op_results:
                names = [labels.names.of(e.at[1])] if e.at[1] < whole else []
                yield replace(e, place=p, loosely=(*e.loosely, *names))

    def transfers(self) -> Iterator[TensorEntry]:
        """What goes from one placement to another: an entry for each end, the one that sends it first.

        Both ends have the same names, and are held together, where their hierarchies are equal: as they are
        planned. Others lie as each of them likes.
        """
        for v in dict.fromkeys(
            v for subgraph in self.stages.subgraphs for v in (*subgraph.sends, *subgraph.micro_sends)
        ):
            ends = list(self._ends_of(v))
            what = without_indices(ends[0].full.partition(": ")[2])
            for e in ends:
                hierarchy = self.stages.plans[e.place].placement.shape
                same = [o for o in ends if self.stages.plans[o.place].placement.shape == hierarchy]
                labels = tuple(dict.fromkeys(label for o in same for label in o.labels))
                yield replace(e, labels=labels, kind=("sent", what, e.shape, str(e.dtype), hierarchy))

    def _ends_of(self, v: int) -> Iterator[TensorEntry]:
        """A value that is sent, as each of its placements has it."""
        for takes in (False, True):
            for p, g in enumerate(self.stages.subgraphs):
                once, inside = (g.receives, g.micro_receives) if takes else (g.sends, g.micro_sends)
                if v not in (*once, *inside):
                    continue
                plan, physical = self.stages.plans[p], physical_of(self.stages.plans[p])
                at = len(g.arguments if takes else g.results) + (*once, *inside).index(v)
                name = (plan.in_paths if takes else plan.out_paths)[at]
                outside = physical.inputs if takes else physical.outputs
                nd = transfers_inside(g, physical)[v] if v in inside else outside[at]
                value = physical.graph.values[v]
                shown = f"{name}, {tensor_text(value.shape, value.dtype)}"
                labels = tuple(dict.fromkeys((name, shown, without_indices(name), without_indices(shown))))
                where = ("argument" if takes else "result"), at
                yield TensorEntry(None, labels, shown, where, value.shape, value.dtype, (nd,), place=p)

    def _is_sent(self, e: TensorEntry) -> bool:
        subgraph = self.stages.subgraphs[e.place]
        most = {"argument": len(subgraph.arguments), "result": len(subgraph.results)}
        return e.at[0] in most and e.at[1] >= most[e.at[0]]

    def _is_inside(self, e: TensorEntry) -> bool:
        """Whether what is sent goes for every micro-batch: those stand last."""
        subgraph = self.stages.subgraphs[e.place]
        if e.at[0] == "argument":
            return e.at[1] >= len(subgraph.arguments) + len(subgraph.receives)
        return e.at[1] >= len(subgraph.results) + len(subgraph.sends)

    def _words(self, e: TensorEntry, sent: bool) -> str:
        """Where a tensor belongs."""
        if sent:
            return f"{'received' if e.at[0] == 'argument' else 'sent'} by placement {e.place}"
        part = self._makers[e.place].get(e.at[1]) if e.at[0] == "value" else None
        if part is None or not self.stages.microbatches:
            return f"on placement {e.place}"
        if part.phase in _OUTSIDE:
            return f"{_OUTSIDE[part.phase]}, on placement {e.place}"
        return f"stage {part.at}, {_PARTS[part.phase]}, on placement {e.place}"

    @cached_property
    def _makers(self) -> list[dict[int, Part]]:
        """Per placement, the part of a stage that makes each value."""
        graphs = (physical_of(plan).graph for plan in self.stages.plans)
        return [{v: n.role.part for n in g.walk() if n.role.part for v in n.outputs} for g in graphs]


MOST_WORDS = 3
"""Places that are named; of more the rest is counted."""


def common_where(words: Sequence[str]) -> str:
    """Places in one line.

    >>> common_where(["a", "b", "c", "d"])
    'a; b; c; and 1 more'
    """
    more = [f"and {len(words) - MOST_WORDS} more"] if len(words) > MOST_WORDS else []
    return "; ".join([*words[:MOST_WORDS], *more])
