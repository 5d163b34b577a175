"""What every form of a plan says: its rows, totals and signatures, in words."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sbp.passes.explain.plan import Collective, PlanData, merged_collective
from sbp.passes.schedule.spans import Timeline
from sbp.text.units import bytes_text, seconds_text

# What a tool may show at once before it groups.
MAX_ROWS = 24
LEAST_WAIT = 0.005
"""Of the time in a loop: less is not said to be for the slowest placement."""
MOST_PLACES = 4
"""Placements whose figures are listed one by one."""


def gap_text(gap: float) -> str:
    """How good the plan is known to be.

    >>> gap_text(0.0), gap_text(0.0123)
    ('proven optimal', 'at most 1.23 % from the optimum')
    """
    return "proven optimal" if gap == 0.0 else f"at most {100 * gap:.3g} % from the optimum"


def proof_text(plan: PlanData) -> str:
    """How good the cheapest plan is known to be, and at what: little is proven of a step with overlap."""
    known = gap_text(plan.cheapest_gap)
    serial = plan.overlaps and plan.cheapest_seconds is None
    return f"{known} in serial time" if serial else known


def step_proof_text(plan: PlanData) -> str:
    """How good the step with overlap is known to be; "" where nothing overlaps."""
    return f"its step is at most {100 * plan.step_gap:.3g} % from the shortest" if plan.overlaps else ""


def verdict_text(plan: PlanData) -> str:
    """How good a plan is known to be; the best of all plans may still not fit."""
    known = proof_text(plan)
    if plan.cheapest_seconds is not None:
        known = (
            f"chosen for its step of {seconds_text(plan.step_seconds)} with overlap; the cheapest plan takes "
            f"{seconds_text(plan.cheapest_seconds)} one thing after the other, {known}"
        )
    known = "; ".join(filter(None, (known, step_proof_text(plan))))
    known = known if plan.fits else f"does not fit its device; {known} among plans of any size"
    return f"CUT SHORT by its limit on time; {known}" if plan.cut_short else known


def misfit_text(plan: PlanData) -> str:
    """What a reader must see first of a plan that is too large for its device; "" for one that is not."""
    if plan.fits:
        return ""
    return (
        f"DOES NOT FIT: {bytes_text(plan.memory_bytes)} at the peak per device by the estimate, "
        f"and {plan.hardware.name} has {bytes_text(plan.hardware.memory_bytes)}"
    )


def capacity_text(plan: PlanData) -> str:
    """How much memory a device has, if that is known, to stand behind what a plan needs."""
    capacity = plan.hardware.memory_bytes
    return f", of {bytes_text(capacity)}" if math.isfinite(capacity) else ""


def kind_text(kind: str) -> str:
    """The name of a collective as people write it.

    >>> kind_text("all_reduce")
    'all-reduce'
    """
    return kind.replace("_", "-")


def tensor_text(c: Collective) -> str:
    """The dtype and shape of a collective's tensor."""
    return f"{c.dtype}[{', '.join(map(str, c.shape))}]"


def over_text(c: Collective) -> str:
    """Over which axes, and how many devices talk to each other."""
    if c.kind == "send":
        return "placement " + " to ".join(c.axes)
    return f"{' x '.join(c.axes)} ({c.group_size} devices)"


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the table.

    Arguments:
      collective: the collectives of the row as one: their bytes and seconds added up.
      times: how many are executed per step.
      tensors: how many different ones it stands for.
      exposed_seconds: what kernels wait for its message; None if that is the message of the row above.
    """

    collective: Collective
    times: int
    tensors: int = 1
    exposed_seconds: float | None = None


def rows(
    plan: PlanData, limit: float = MAX_ROWS, *, by_time: bool = True
) -> tuple[tuple[TableRow, ...], tuple[TableRow, ...]]:
    """The rows to show, and those that are left for a summary.

    Equal collectives are one row. If there are more than `limit`, those of the messages that cost the least
    are left over (`Collective.cost`).

    Arguments:
      by_time: whether the costliest comes first; else they are in order of execution.
    """
    every = [r for same in messages(plan) for r in same]
    most = int(min(limit, len(every)))
    shown, rest = every[:most], every[most:]
    if not by_time:
        place = {c: k for k, (c, _) in enumerate(plan.merged_collectives())}
        shown.sort(key=lambda r: place[r.collective])
    return tuple(shown), tuple(rest)


def messages(plan: PlanData) -> list[list[TableRow]]:
    """The rows, those together that are sent in the same messages, the costliest first."""
    sent: dict[object, list[tuple[Collective, int]]] = {}
    for c, n in plan.merged_collectives():
        key = c.message if c.message and not plan.stages else len(sent)
        sent.setdefault(key, []).append((c, n))
    found = []
    for same in sent.values():
        same.sort(key=lambda x: x[0].cost, reverse=True)
        waits = sum(c.exposed_seconds for c, _ in same)
        found.append([TableRow(c, c.count, n, None if k else waits) for k, (c, n) in enumerate(same)])
    return sorted(found, key=lambda x: as_one(x).collective.cost, reverse=True)


def as_one(same: Sequence[TableRow]) -> TableRow:
    """The rows of a message as one."""
    if len(same) == 1:
        return same[0]
    c = merged_collective([r.collective for r in same])
    tensor = f"{same[0].collective.tensor}, in a message with {len(same) - 1} more"
    return TableRow(replace(c, tensor=tensor), c.count, sum(r.tensors for r in same), c.exposed_seconds)


def share_text(plan: PlanData, r: TableRow) -> str:
    """In what part of a step kernels wait for the message of a row; it stands at the first of its rows."""
    if plan.step_seconds <= 0:
        return ""
    return "with above" if r.exposed_seconds is None else f"{r.exposed_seconds / plan.step_seconds:.1%}"


def rest_text(rest: Sequence[TableRow]) -> str:
    """The summary of what is not shown."""
    times, sent = sum(r.times for r in rest), sum(r.collective.wire_bytes for r in rest)
    seconds = sum(r.collective.seconds for r in rest)
    return (
        f"and {times} smaller: {seconds_text(seconds)}, {bytes_text(sent)} in all; "
        "Plan.collectives has every one"
    )


def totals(plan: PlanData) -> list[tuple[str, str]]:
    """The figures of the whole plan, each with its name."""
    if plan.stages:
        return _stage_totals(plan)
    count = f"{sum(c.count for c in plan.collectives)} per step"
    return [
        ("collectives", ": ".join([count, *([", ".join(kinds)] if (kinds := _kinds(plan)) else [])])),
        ("wire", f"{bytes_text(plan.wire_bytes)} sent per device per step"),
        ("time", time_text(plan)),
        ("memory", f"{bytes_text(plan.memory_bytes)} at the peak per device{capacity_text(plan)}"),
        ("plan", verdict_text(plan)),
    ]


def _kinds(plan: PlanData) -> list[str]:
    """Per kind of collective, how many there are, and their bytes."""
    return [f"{n} {kind_text(k)} {bytes_text(b)}" for k, (n, b) in plan.by_kind().items()]


def _stage_totals(plan: PlanData) -> list[tuple[str, str]]:
    out = []
    if plan.timeline is None:
        out.append(("time", f"{_estimated(plan)}, one placement after the other"))
    else:
        outside = plan.step_seconds - float(plan.timeline.makespan)
        out = [
            (
                "time",
                f"{_estimated(plan)}; {seconds_text(outside)} outside the loop",
            ),
            (
                "bubble",
                f"{plan.timeline.bubble_fraction:.1%} of all placements' time in the loop, estimated"
                + bubble_cause(plan.timeline),
            ),
            ("live", f"{_of_places(plan.live, '{:g}'.format)} micro-batches at the most"),
        ]
    return [
        *out,
        ("memory", f"{_of_places(plan.memory, bytes_text)} at the peak per device{capacity_text(plan)}"),
        ("moved", ", ".join(_kinds(plan)) or "nothing"),
        ("wire", f"{bytes_text(plan.wire_bytes)} sent per device per step at the most"),
        ("plan", verdict_text(plan)),
    ]


def bubble_cause(timeline: Timeline) -> str:
    """How much of the time that placements wait in a loop is for the slowest of them; "" if hardly any.

    >>> from sbp.passes.schedule.actions import Action, Kind
    >>> from sbp.passes.schedule.spans import Span
    >>> first, second = Action(Kind.F, 0, 0), Action(Kind.F, 1, 0)
    >>> spans = ((Span(0, first, 0.0, 4.0),), (Span(1, second, 4.0, 6.0),))
    >>> bubble_cause(Timeline("two", spans))
    ': 16.7% for placement 0, the slowest, the rest as the loop fills and empties'
    """
    busy = [float(seconds) for seconds in timeline.busy]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    waits = (busy[slowest] - sum(busy) / len(busy)) / float(timeline.makespan)
    if waits < LEAST_WAIT:
        return ""
    return f": {waits:.1%} for placement {slowest}, the slowest, the rest as the loop fills and empties"


def _estimated(plan: PlanData) -> str:
    step = f"{seconds_text(plan.step_seconds)} per step, estimated"
    return f"{step} ({seconds_text(plan.seconds)} without overlap)" if plan.overlaps else step


def _of_places(figures: Sequence[float], text: Callable[[float], str]) -> str:
    """What placements have, in their order; of many only the largest.

    >>> _of_places([3.0, 2.0], str), _of_places([2.0, 2.0], str), _of_places([1.0, 5.0, 4.0, 3.0, 2.0], str)
    ('3.0 (placement 0); 2.0 (placement 1)', '2.0', '5.0 (placement 1)')
    """
    texts = [text(x) for x in figures]
    if len(set(texts)) == 1:
        return texts[0]
    places = range(len(texts)) if len(texts) <= MOST_PLACES else [figures.index(max(figures))]
    return "; ".join(f"{texts[i]} (placement {i})" for i in places)


def time_text(plan: PlanData) -> str:
    """How long a step takes, and how long with nothing beside anything."""
    serial, moving = seconds_text(plan.seconds), sum(c.seconds for c in plan.collectives)
    if not plan.overlaps:
        return f"{serial} per step, estimated; {seconds_text(moving)} of it in collectives"
    return (
        f"{seconds_text(plan.step_seconds)} per step with overlap, estimated "
        f"({seconds_text(plan.exposed_seconds)} of communication exposed); {serial} one thing after the other"
    )
