"""What is asked of the compiler: of a program of one placement, and of one with stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from sbp.hardware.catalogue import Hardware
from sbp.layout import on_wide_axes
from sbp.passes.plan.effort import Effort, until_over
from sbp.passes.plan.model import BoundaryCost
from sbp.passes.plan.record import ChoiceRecord
from sbp.passes.plan.solve import Progress
from sbp.passes.program.graph import Graph
from sbp.passes.rows.lookups import Transfer
from sbp.passes.schedule.actions import Schedule
from sbp.placement import Placement
from sbp.signature import NdSbp

Signed: TypeAlias = Sequence[NdSbp | None]
Asked: TypeAlias = Callable[[Placement, Sequence[int], Sequence[int]], tuple[Signed, Signed]]
"""What the user asked of some arguments and results (by position), read for a placement."""


class PlanStore(Protocol):
    """What searches have found before, by what they were asked."""

    def load(self, key: str) -> ChoiceRecord | None:
        """What was saved under a key, if it can be read."""

    def save(self, key: str, record: ChoiceRecord) -> None:
        """Keeps what was found."""

    def has(self, key: str) -> bool:
        """Whether something was saved under a key."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a search is asked.

    Arguments:
      digest: of all that its answer depends on, as far as that can be written down.
      exact: whether all of it can.
      name: of the program.
      lines: what was asked, in words.
    """

    digest: str
    exact: bool
    name: str
    lines: tuple[str, ...]


class Peers(Protocol):
    """Other processes that must choose the same signatures: one of them chooses for all."""

    @property
    def leads(self) -> bool:
        """Whether this one chooses."""

    def tell(self, question: Question, record: ChoiceRecord) -> None:
        """Tells the others what was chosen."""

    def refuse(self, question: Question, error: Exception) -> None:
        """Tells the others why nothing could be chosen."""

    def hear(self, question: Question) -> ChoiceRecord:
        """What was chosen."""


@dataclass(frozen=True)
class Terms:
    """What holds for every placement of a program.

    Arguments:
      effort: how much is searched, in units of the usual.
      time_limit_seconds: when a search is cut off, from the first pass of a placement; of a program with
        stages, for all of them together. None for never.
      memory_limit_bytes: per device; a plan over it is refused. None for what the device has.
      transfer: how rows of split tables travel.
      strict_nonfinite: whether a sum is added up before anything is computed from it.
      check: whether the contract of each pass is checked after it.
      store: where searches are looked up and kept; None to search every time.
      progress: is told how far a search is.
      peers: processes that must have the same plan; None where there are no others.
    """

    effort: float = 1.0
    time_limit_seconds: float | None = None
    memory_limit_bytes: float | None = None
    transfer: Transfer = field(default_factory=Transfer)
    strict_nonfinite: bool = False
    check: bool = False
    store: PlanStore | None = None
    progress: Progress | None = None
    peers: Peers | None = None


@dataclass(frozen=True)
class Request:
    """What is asked of a program of one placement.

    Arguments:
      name: the function's name.
      placement, hardware: where it runs, and what it is planned for.
      in_sbp, out_sbp: per leaf, the user's signature or None for AUTO.
      ties: per result leaf, the argument leaf that it comes back as, or None.
      in_costs, out_costs: per leaf, what it takes beyond the program, as `Boundary` has them.
      notes: remarks for the plan.
      terms: limits, and how rows travel.
      donated: positions of the argument leaves whose memory the results may take.
      with_sample: gives the lookups of a graph the ids of a batch, where one is at hand.
      whole_step: whether the plan's peak is that of a step. For a placement that works on micro-batches it is
        not: its plan holds the stacks of all of them at once, and the schedule is checked instead.
      most_bytes: what the plan of a placement that works on micro-batches may need, per device.
      record: the signatures to take instead of searching.
      effort: what the search may do; its work is counted there.
    """

    name: str
    placement: Placement
    hardware: Hardware
    in_sbp: tuple[NdSbp | None, ...]
    out_sbp: tuple[NdSbp | None, ...]
    ties: tuple[int | None, ...]
    in_costs: tuple[BoundaryCost | None, ...] = ()
    out_costs: tuple[BoundaryCost | None, ...] = ()
    notes: tuple[str, ...] = ()
    terms: Terms = field(default_factory=Terms)
    donated: tuple[int, ...] = ()
    with_sample: Callable[[Graph], Graph] | None = None
    whole_step: bool = True
    most_bytes: float = math.inf
    record: ChoiceRecord | None = None
    effort: Effort = field(default_factory=Effort, compare=False, repr=False)

    @property
    def on_wide_axes(self) -> Request:
        """The same, which says nothing along axes of one device."""

        def told(nd: NdSbp | None) -> NdSbp | None:
            return nd and on_wide_axes(nd, self.placement.shape)

        return replace(self, in_sbp=tuple(map(told, self.in_sbp)), out_sbp=tuple(map(told, self.out_sbp)))

    def with_effort(self, parts: int = 1) -> Request:
        """The same, whose time begins now, in one of so many parts that share the limit."""
        limit = self.terms.time_limit_seconds
        limit = None if limit is None else limit / parts
        return replace(self, terms=replace(self.terms, time_limit_seconds=limit), effort=until_over(limit))

    @property
    def limit_bytes(self) -> float:
        """What the plan may need per device."""
        if not self.whole_step:
            return self.most_bytes
        asked = self.terms.memory_limit_bytes
        return self.hardware.memory_bytes if asked is None else asked


@dataclass(frozen=True)
class StagesRequest:
    """What is asked of a program with stages.

    Arguments:
      name: the function's name.
      placement: that of the whole program.
      hardware: what a placement is planned for.
      signatures: signatures of arguments and results.
      ties: per result, the argument that it comes back as, or None.
      cut: the placements of the stages that the model is to be cut into; () if it says them itself.
      layers: per stage, the layers of a scan that was cut into them; () of a model without one.
      rank_of: stage -> placement, as the schedule wants it; None for any.
      schedule: its name, the schedule itself, or None for the usual one.
      notes: remarks for the plan.
      terms: limits, and how rows travel.
      donated: positions of the argument leaves whose memory the results may take.
    """

    name: str
    placement: Placement
    hardware: Callable[[Placement], Hardware]
    signatures: Asked
    ties: tuple[int | None, ...]
    cut: tuple[Placement, ...] = ()
    layers: tuple[int, ...] = ()
    rank_of: Sequence[int] | None = None
    schedule: str | Schedule | None = None
    notes: tuple[str, ...] = ()
    terms: Terms = field(default_factory=Terms)
    donated: tuple[int, ...] = ()
