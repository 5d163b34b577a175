"""The plan of a pipeline as text: its figures, its stages, what is sent, and the plan of each placement."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from sbp.passes.explain.plan import Collective, PlanData, together
from sbp.passes.explain.words import capacity_text, kind_text, over_text, tensor_text, verdict_text
from sbp.passes.pipeline.plan import PipelineData
from sbp.passes.program.names import without_indices
from sbp.passes.render.text import (
    COSTLIEST,
    Shown,
    misfit_lines,
    note_lines,
    short_figures,
    signature_lines,
    table_lines,
    totals_lines,
)
from sbp.passes.render.width import fitted, terminal_width
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
MOST_PLACES = 4
"""Placements whose figures are listed one by one."""
_NUMBERS = re.compile(r"\b(stage|stages|placement) [\d, and]+")
_INDICES = re.compile(r"\[[\d|]+\]")


def plan_text(plan: PipelineData, width: int | None = None, how: Shown = COSTLIEST) -> str:
    """The plan of a pipeline as text; `width` and `how` as of a plan's."""
    width = terminal_width() if width is None else width
    parts = [heading(plan), *misfit_lines(plan), "", *totals_lines(figures(plan))]
    for title, lines in (("stages", stage_rows(plan)), ("sent between placements", send_rows(plan))):
        if len(lines) > 1:
            parts += ["", title, *columns(lines, width)]
    parts += note_lines(plan)
    known: dict[str, int] = {}
    for i in range(len(plan.stages)):
        body = _place_text(plan, i, width, how)
        same = known.setdefault(_alike(body), i)
        parts += ["", place_heading(plan, i), *([f"  as placement {same}"] if same != i else ["", body])]
    return fitted("\n".join(parts), width)


def plan_line(plan: PipelineData) -> str:
    """The plan of a pipeline in one line."""
    stages = f"{len(plan.stages)} placements"
    if plan.schedule is not None:
        stages = f"{plan.schedule.stages} stages on {stages}, schedule {plan.schedule.name}"
    return f"<PipelinePlan {plan.name} on {plan.placement}: {stages}, {short_figures(plan)}>"


def heading(plan: PipelineData) -> str:
    """What it is."""
    places = f"{len(plan.stages)} placements"
    if plan.schedule is None:
        return f"{plan.name} on {places} of {plan.placement}, planned for {plan.hardware.name}"
    s = plan.schedule
    return (
        f"{plan.name}: {s.stages} stages on {places} of {plan.placement}, {s.microbatches} micro-batches, "
        f"schedule {s.name}, planned for {plan.hardware.name}"
    )


def figures(plan: PipelineData) -> list[tuple[str, str]]:
    """The figures of the whole plan, each with its name."""
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
            ("bubble", f"{plan.timeline.bubble_fraction:.1%} of all placements' time in the loop, estimated"),
            ("live", f"{_listed(plan.live, '{:g}'.format)} micro-batches at the most"),
        ]
    kinds = [f"{n} {kind_text(k)} {bytes_text(b)}" for k, (n, b) in plan.by_kind().items()]
    return [
        *out,
        ("memory", f"{_listed(plan.memory, bytes_text)} at the peak per device{capacity_text(plan)}"),
        ("moved", ", ".join(kinds) or "nothing"),
        ("wire", f"{bytes_text(plan.wire_bytes)} sent per device per step at the most"),
        ("plan", verdict_text(plan)),
    ]


def _estimated(plan: PipelineData) -> str:
    step = f"{seconds_text(plan.step_seconds)} per step, estimated"
    return f"{step} ({seconds_text(plan.seconds)} without overlap)" if plan.overlaps else step


def _listed(figures: Sequence[float], text: Callable[[float], str]) -> str:
    """What placements have, in their order; of many only the largest.

    >>> _listed([3.0, 2.0], str), _listed([2.0, 2.0], str), _listed([1.0, 5.0, 4.0, 3.0, 2.0], str)
    ('3.0 (placement 0); 2.0 (placement 1)', '2.0', '5.0 (placement 1)')
    """
    texts = [text(x) for x in figures]
    if len(set(texts)) == 1:
        return texts[0]
    places = range(len(texts)) if len(texts) <= MOST_PLACES else [figures.index(max(figures))]
    return "; ".join(f"{texts[i]} (placement {i})" for i in places)


def stage_rows(plan: PipelineData) -> list[tuple[str, ...]]:
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


def send_rows(plan: PipelineData) -> list[tuple[str, ...]]:
    """The table of what is sent, with its headings; what is below 1 kB and a tenth of the largest as one."""
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


def merged_sends(plan: PipelineData) -> list[Collective]:
    """What is sent, equal tensors of one line as one."""
    return [together(same) for same in alike_sends(plan)]


def alike_sends(plan: PipelineData) -> list[list[Collective]]:
    """What is sent, equal tensors of one line together."""
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


def place_heading(plan: PipelineData, place: int) -> str:
    """A placement and the stages that live there."""
    stages = [str(i) for i, s in enumerate(plan.figures) if s.place == place]
    lives = f", stage{'s' * (len(stages) > 1)} {' and '.join(stages)}" if stages else ""
    return f"placement {place}: {plan.stages[place].placement}{lives}"


def _place_text(plan: PipelineData, place: int, width: int | None, how: Shown) -> str:
    """The collectives of one placement, and its figures."""
    p = own_signatures(plan.stages[place])
    moving = sum(c.seconds for c in p.collectives)
    per_step = f"{sum(c.count for c in p.collectives)} per step"
    exposed = f" ({seconds_text(p.exposed_seconds)} exposed)" if p.overlaps else ""
    total = (
        f"collectives  {per_step}, {bytes_text(p.wire_bytes)} sent per device, {seconds_text(moving)} of "
        f"{seconds_text(p.seconds)}{exposed}; {bytes_text(plan.memory[place])} at the peak per device"
    )
    return "\n".join([*table_lines(p, width, how), total, *signature_lines(p, plan)])


def own_signatures(plan: PlanData) -> PlanData:
    """A placement's plan with the program's arguments and results only; the rest is among the sends."""
    ins = [(p, nd) for p, nd in zip(plan.in_paths, plan.in_sbp, strict=True) if not p.startswith("from ")]
    outs = [(p, nd) for p, nd in zip(plan.out_paths, plan.out_sbp, strict=True) if not p.startswith("to ")]
    return replace(
        plan,
        in_paths=tuple(p for p, _ in ins),
        in_sbp=tuple(nd for _, nd in ins),
        out_paths=tuple(p for p, _ in outs),
        out_sbp=tuple(nd for _, nd in outs),
    )


def _alike(text: str) -> str:
    """A text without what differs between equal layers of two placements."""
    return _INDICES.sub("[*]", _NUMBERS.sub(r"\1 *", text))
