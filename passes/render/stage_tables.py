"""The tables of a program with stages: its stages, and the transfers between its placements."""

from collections.abc import Sequence

from sbp.passes.explain.plan import Collective, PlanData, merged_collective
from sbp.passes.explain.words import over_text, tensor_text
from sbp.passes.program.names import without_indices
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

SMALL = 1000
"""Bytes per step below which a send may go into a sum."""
SEND_HEADINGS = ("times", "tensor", "shape", "from to", "signature", "sent", "time", "line")
NUMBERS = frozenset(
    (
        "times",
        "x",
        "exposed",
        "stage",
        "F",
        "B",
        "I",
        "W",
        "kept",
        "weights",
        "sent",
        "time",
        "estimated",
        "alone",
        "together",
        "measured",
        "simulated",
        "share",
        "ratio",
        "ops",
    )
)
"""Headings of columns that hold figures."""


def stage_rows(plan: PlanData) -> list[tuple[str, ...]]:
    """The table of stages, with its headings: seconds of a micro-batch's actions, and bytes per device."""
    split = plan.schedule is not None and plan.schedule.splits
    kinds = ("F", "I", "W") if split else ("F", "B")
    out: list[tuple[str, ...]] = [("stage", "placement", *kinds, "kept", "weights")]
    for i, s in enumerate(plan.figures):
        backward = [s.input_seconds, s.weight_seconds]
        seconds = [s.forward_seconds, *(backward if split else [sum(backward)])]
        where = f"{s.place}: {plan.stages[s.place].placement}"
        kept = (bytes_text(s.residual_bytes), bytes_text(s.weight_bytes))
        out.append((str(i), where, *map(seconds_text, seconds), *kept))
    return out


def send_rows(plan: PlanData) -> list[tuple[str, ...]]:
    """The table of transfers, with its headings; those below 1 kB and a tenth of the largest are one row."""
    sends = merged_sends(plan)
    largest = max((c.wire_bytes for c in sends), default=0.0)
    small = [c for c in sends if c.wire_bytes < min(SMALL, largest / 10)]
    out: list[tuple[str, ...]] = [SEND_HEADINGS]
    for c in sends:
        if c not in small:
            out.append(
                (
                    str(c.count),
                    c.tensor,
                    tensor_text(c),
                    over_text(c).removeprefix("placement "),
                    f"{format_sbp(c.before)} -> {format_sbp(c.after)}",
                    bytes_text(c.wire_bytes),
                    seconds_text(c.seconds),
                    c.source,
                )
            )
    if small:
        count, size = sum(c.count for c in small), sum(c.wire_bytes for c in small)
        seconds = sum(c.seconds for c in small)
        out.append((str(count), "smaller ones", "", "", "", bytes_text(size), seconds_text(seconds), ""))
    return out


def merged_sends(plan: PlanData) -> list[Collective]:
    """The transfers, equal tensors of one line as one."""
    return [merged_collective(same) for same in alike_sends(plan)]


def alike_sends(plan: PlanData) -> list[list[Collective]]:
    """The transfers, equal tensors of one line together."""
    rows: dict[object, list[Collective]] = {}
    for c in plan.sends:
        key = without_indices(c.tensor), c.shape, c.dtype, c.axes, c.before, c.after, c.source
        rows.setdefault(key, []).append(c)
    return list(rows.values())


def columns(rows: Sequence[Sequence[str]], most: int | None = None) -> list[str]:
    """Rows as aligned columns, the first row being their headings; figures are aligned to the right.

    Arguments:
      most: columns of the terminal; rows that are wider are lists.

    >>> columns([("line", "time"), ("mlp.py:3", "2.00 ms"), ("mlp.py:12", "12 us")])
    ['  line          time', '  mlp.py:3   2.00 ms', '  mlp.py:12    12 us']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    out = []
    for row in rows:
        cells = zip(row, widths, rows[0], strict=True)
        out.append("  ".join(f"{x:>{w}}" if h in NUMBERS else f"{x:<{w}}" for x, w, h in cells))
    if most is not None and max(map(len, out)) + 2 > most:
        named = [[f"{h} {x}" for h, x in zip(rows[0], row, strict=True) if x] for row in rows[1:]]
        return [f"  {', '.join(cells)}" for cells in named]
    return [f"  {line}".rstrip() for line in out]


def place_heading(plan: PlanData, place: int) -> str:
    """A placement, and its stages."""
    stages = [str(i) for i, s in enumerate(plan.figures) if s.place == place]
    lives = f", stage{'s' * (len(stages) > 1)} {' and '.join(stages)}" if stages else ""
    return f"placement {place}: {plan.stages[place].placement}{lives}"
