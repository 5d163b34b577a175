"""What a search found: a row per hierarchy, the best one first."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from sbp.hardware.catalogue import Hardware
from sbp.passes.face import Plan
from sbp.placement import Placement
from sbp.text.units import bytes_text, seconds_text

SOLVED_GAP = 0.1
"""A plan that may be longer than the best one by more than this part ranks behind those that are solved."""
SHOWN_GAP = 5e-4
UNSOLVED, TOO_LARGE = "not searched to the end", "too large for the devices"
"""The titles of these, and of those that do not fit."""
HEADINGS = ("hierarchy", "stages", "micro-batches", "kept", "time", "memory", "sent", "gap", "what it does")
RIGHT = (False, True, True, True, True, True, True, True, False)


@dataclass(frozen=True)
class RankedPlan:
    """A hierarchy with its plan.

    Arguments:
      placement: the devices in this hierarchy; with stages, these lie along the first axis.
      stages: how many the model was cut into; 0 for a model in one piece.
      microbatches: of a search over their numbers; 0 for the function as it is.
      scan_kept: the share of what scans over checkpointed layers could keep that they do keep.
      plan: None where there is none.
      words: what the plan does, axis by axis.
      trouble: why there is no plan, or what is wrong with it; "" of one that can be used.
    """

    placement: Placement
    stages: int = 0
    microbatches: int = 0
    scan_kept: float = 0.0
    plan: Plan | None = None
    words: str = ""
    trouble: str = ""

    @property
    def seconds(self) -> float:
        """The estimated time of a step; infinite without a plan."""
        # The time of a step is more than the sum of its parts, where a plan knows it.
        plan = self.plan
        return math.inf if plan is None else plan.step_seconds

    def __str__(self) -> str:
        parts = [
            *(f"{n} {of}" for n, of in ((self.stages, "stages"), (self.microbatches, "micro-batches")) if n),
            *([f"{self.scan_kept:.0%} kept"] if self.scan_kept else []),
        ]
        return f"{self.shape} ({', '.join(parts)})" if parts else self.shape

    @property
    def usable(self) -> bool:
        """Whether there is a plan, and it fits the devices."""
        return self.plan is not None and not self.trouble

    @property
    def is_solved(self) -> bool:
        """Whether its plan was searched to the end, and is known to be near the best of its hierarchy."""
        return self.plan is not None and not self.plan.cut_short and self.gap <= SOLVED_GAP

    @property
    def gap(self) -> float:
        """By which part the best plan of the hierarchy may be faster; of stages the most of any."""
        return 0.0 if self.plan is None else max(p.cheapest_gap for p in self.plan.parts)

    @property
    def title(self) -> str:
        """Under which it stands in a table; "" for the first rows."""
        return TOO_LARGE if not self.usable else "" if self.is_solved else UNSOLVED

    @property
    def shape(self) -> str:
        """The hierarchy, such as "128x8"."""
        return "x".join(map(str, self.placement.shape))

    @property
    def order(self) -> tuple[bool, bool, float, int, float]:
        """By which rows are sorted: what fits by time (fewer axes first), what is solved before what is not;
        then what does not fit by memory."""
        behind = not self.is_solved if self.usable else self.plan is None
        # Estimates that a reader sees as equal are.
        seconds = float(f"{self.seconds:.3g}")
        memory = math.inf if self.plan is None else self.plan.memory_bytes
        return (not self.usable, behind, seconds if self.usable else memory, self.placement.ndim, memory)


@dataclass(frozen=True)
class Ranking:
    """What a search found; `print` shows it as a table.

    Arguments:
      name: of the function.
      devices, hardware: what was planned for.
      rows: the best one first, those that cannot be used last.
      seconds: that the search took.
      notes: remarks.
    """

    name: str
    devices: int
    hardware: Hardware
    rows: tuple[RankedPlan, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> RankedPlan | None:
        """The row with the least estimated time among those that fit; None if none does."""
        return min((row for row in self.rows if row.usable), key=lambda row: row.seconds, default=None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        best = self.best
        found = "none fits" if best is None else f"best {best.shape}, {seconds_text(best.seconds)}"
        return (
            f"<Ranking {self.name} on {self.devices} x {self.hardware.name}: {len(self.rows)} plans, {found}>"
        )

    def _lines(self) -> Iterator[str]:
        capacity = self.hardware.memory_bytes
        has = f" of {bytes_text(capacity)}" if math.isfinite(capacity) else ""
        count = f"{self.devices:,} x {self.hardware.name}{has}"
        tried = f"{len(self.rows)} hierarchies planned in {seconds_text(self.seconds)}"
        yield f"{self.name} on {count}: {tried}, the best first"
        shown = [row for row in self.rows if row.plan is not None]
        cells = [HEADINGS, *map(_cells, shown)]
        # Columns in which nothing is said are left out.
        kept = [i for i in range(len(HEADINGS)) if any(row[i] for row in cells[1:])]
        width = [max(len(row[i]) for row in cells) for i in range(len(HEADINGS))]

        def line(row: Sequence[str]) -> str:
            cells = (row[i].rjust(width[i]) if RIGHT[i] else row[i].ljust(width[i]) for i in kept)
            return f"  {'  '.join(cells)}".rstrip()

        yield from ("", line(HEADINGS)) if shown else ()
        for title, some in groupby(shown, lambda row: row.title):
            yield from ("", title) if title else ()
            yield from (line(_cells(row)) for row in some)
        yield from self._refused()
        if any(row.gap >= SHOWN_GAP for row in shown):
            yield from (
                "",
                "gap: the best plan of the hierarchy may be faster by so much; more effort may find it",
            )
        yield from ("", *(f"note: {note}" for note in self.notes)) if self.notes else ()

    def _refused(self) -> Iterator[str]:
        """Rows without a plan, those with the same trouble together."""
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if row.plan is None:
                reasons.setdefault(row.trouble, []).append(str(row))
        if reasons:
            yield from ("", "no plan")
        yield from (f"  {', '.join(names)}: {trouble}" for trouble, names in reasons.items())


def _cells(row: RankedPlan) -> Sequence[str]:
    assert row.plan is not None
    return (
        row.shape,
        str(row.stages or ""),
        str(row.microbatches or ""),
        f"{row.scan_kept:.0%}" if row.scan_kept else "",
        seconds_text(row.seconds),
        bytes_text(row.plan.memory_bytes),
        bytes_text(row.plan.wire_bytes),
        f"{row.gap:.1%}" if row.gap >= SHOWN_GAP else "",
        row.words,
    )
