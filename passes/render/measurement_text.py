"""A measured step as text: its parts, its collectives and its lines, each beside the estimate."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from sbp.passes.explain.measurement import GroupTime, MeasuredStep, group_times, kernels_estimate
from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.words import kind_text
from sbp.passes.render.program_data import program_data
from sbp.passes.render.stage_tables import columns
from sbp.passes.render.terminal import fit_lines
from sbp.text.units import seconds_text

WIDTH = 80
ROWS = 12
"""Of a table, those that took longest."""
MIN_TENSOR = 6
MOST_TIMES, LEAST = 1000, 1e-8
"""The largest ratio that is told, and the least estimate, in seconds, that it is told of."""
Cells: TypeAlias = tuple[str, ...]
"""A line of a table."""


def measured_text(
    plan: PlanData, step: MeasuredStep, width: int = WIDTH, estimated: float | None = None
) -> str:
    """The tables of a measured step.

    Arguments:
      width: columns of a line.
      estimated: the whole step, seconds, if the plan is that of one placement of several.
    """
    parts = [["", *columns(part_rows(plan, step, estimated))]]
    if plan.collectives:
        rows = collective_rows(plan, step)
        parts += [
            ["", *columns(_narrowed(rows[: ROWS + 1], width)), *_rest(rows, step)],
            [fit_lines(line, width) for line in remark_lines(plan, step)],
        ]
    groups = group_rows(plan, step)
    if len(groups) > 1:
        parts.append(["", *columns(_narrowed(groups[: ROWS + 1], width)), *_smaller(plan, step)])
    return "\n".join(line for lines in parts for line in lines)


def ratio_text(seconds: float | None, estimated: float | None) -> str:
    """The ratio of a measured time to its estimate; "" if there is no time, or the estimate is near zero.

    >>> ratio_text(0.002, 0.001), ratio_text(0.1234, 0.001), ratio_text(0.001, 0.0), ratio_text(None, 1.0)
    ('2.00', '123', '', '')
    """
    if seconds is None or not estimated or estimated < LEAST or seconds > MOST_TIMES * estimated:
        return ""
    # Two decimals of a ratio from 100 on would make the table of parts wider than `WIDTH`.
    return f"{seconds / estimated:.{2 if seconds < 99.99 * estimated else 0}f}"


def part_rows(plan: PlanData, step: MeasuredStep, estimated: float | None = None) -> list[Cells]:
    """Kernels, collectives, waiting and the rest, which add up to the step; see `measured_text`."""
    program = program_data(plan)
    kernels = None if program is None else kernels_estimate(program)
    parts: list[tuple[str, float, float | None]] = [
        ("kernels", step.kernel_seconds, kernels),
        ("collectives, nothing beside them", step.exposed_seconds, plan.exposed_seconds),
        ("waiting for other devices", step.waiting_seconds, None),
        ("unattributed: until the first op began", step.before_seconds, None),
        ("unattributed: between ops", step.between_seconds, None),
        ("unattributed: until all results were there", step.after_seconds, None),
        ("step", step.seconds, plan.step_seconds if estimated is None else estimated),
    ]
    rows: list[Cells] = [("where the time went", step.word, "share", "estimated", "ratio")]
    for name, seconds, planned in parts:
        told = "" if planned is None else seconds_text(planned)
        rows.append((name, seconds_text(seconds), _share(seconds, step), told, ratio_text(seconds, planned)))
    return rows


def collective_rows(plan: PlanData, step: MeasuredStep) -> list[Cells]:
    """Headings, and a line per row of the plan that has a time, the longest first."""
    found = [(c, step.of(c)) for c, _ in plan.merged_collectives()]
    found.sort(key=lambda x: -(x[1].seconds or 0.0))
    rows: list[Cells] = [("collective", "tensor", "line", "x", step.word, "share", "estimated", "ratio")]
    for c, m in found:
        if m.seconds is not None:
            seconds = seconds_text(m.seconds), _share(m.seconds, step), seconds_text(c.seconds)
            ratio = ratio_text(m.seconds, c.seconds)
            rows.append((kind_text(c.kind), c.tensor, c.source, str(m.times), *seconds, ratio))
    return rows


def remark_lines(plan: PlanData, step: MeasuredStep) -> Iterator[str]:
    """The rows without a time, and why."""
    for c, _ in plan.merged_collectives():
        m = step.of(c)
        if m.seconds is None:
            yield f"  {kind_text(c.kind)} of {c.tensor} at {c.source}: not {step.word}: {m.remark}"


def group_rows(plan: PlanData, step: MeasuredStep) -> list[Cells]:
    """Headings, and a line per pass and line of the user's."""
    rows: list[Cells] = [("kernels of", "line", "ops", step.word, "share", "estimated", "ratio")]
    for g in _groups(plan, step):
        seconds = seconds_text(g.seconds), _share(g.seconds, step), seconds_text(g.estimated_seconds)
        ops = str(g.ops) if g.ops else ""
        rows.append((g.phase, g.source, ops, *seconds, ratio_text(g.seconds, g.estimated_seconds)))
    return rows


def _groups(plan: PlanData, step: MeasuredStep) -> Sequence[GroupTime]:
    program = program_data(plan)
    return [] if program is None else group_times(program, step)


def _share(seconds: float, step: MeasuredStep) -> str:
    return f"{seconds / step.seconds:.1%}" if step.seconds else ""


def _rest(rows: Sequence[Cells], step: MeasuredStep) -> list[str]:
    """A line on the rows that are not shown."""
    left = len(rows) - 1 - ROWS
    sent = seconds_text(sum(c.seconds or 0.0 for c in step.collectives))
    return [f"  and {left} smaller; all together {sent}"] if left > 0 else []


def _smaller(plan: PlanData, step: MeasuredStep) -> list[str]:
    left = _groups(plan, step)[ROWS:]
    return [f"  and {len(left)} smaller: {seconds_text(sum(g.seconds for g in left))}"] if left else []


def _narrowed(rows: Sequence[Cells], width: int) -> list[Cells]:
    """The same rows with shorter names of tensors, or without them, so that lines fit the terminal."""
    if "tensor" not in rows[0]:
        return list(rows)
    at = rows[0].index("tensor")
    widths = [max(len(r[k]) for r in rows) + 2 for k in range(len(rows[0]))]
    room = width - (sum(widths) - widths[at])
    if room - 2 < MIN_TENSOR:
        return [r[:at] + r[at + 1 :] for r in rows]
    cut = room - 2
    return [(*r[:at], r[at] if len(r[at]) <= cut else f"{r[at][: cut - 3]}...", *r[at + 1 :]) for r in rows]
