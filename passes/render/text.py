"""A plan as text: the table that `print(plan)` shows."""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.rest_lines import rest_lines
from sbp.passes.explain.words import (
    MAX_ROWS,
    TableRow,
    kind_text,
    misfit_text,
    over_text,
    rest_text,
    rows,
    share_text,
    tensor_text,
    totals,
    verdict_text,
)
from sbp.passes.render.stage_tables import columns, place_heading, send_rows, stage_rows
from sbp.passes.render.terminal import MAX_WIDTH, draw_rules, fit_lines, terminal_width
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

MAX_TENSOR = 44
MIN_REASON = 40
EXPOSED = "time\nexposed"
HEADINGS = ("", "collective", "tensor", "before -> after", "over", "sent", EXPOSED, "why")
FIGURES = ("", "sent", EXPOSED)
_NUMBERS = re.compile(r"\b(stage|stages|placement) [\d, and]+")
_INDICES = re.compile(r"\[[\d|]+\]")
"""What differs between the texts of equal placements."""


@dataclass(frozen=True)
class Shown:
    """How a table is shown.

    Arguments:
      by_time: whether the costliest row comes first; else they are in order of execution.
      rows: how many, at the most.
    """

    by_time: bool = True
    rows: float = MAX_ROWS


COSTLIEST = Shown()


def plan_text(plan: PlanData, width: int | None = None, how: Shown = COSTLIEST) -> str:
    """The plan as text, without colour.

    Arguments:
      width: columns of a line; by default those of the terminal. Without one only the table has a width.
    """
    width = terminal_width() if width is None else width
    parts = [heading(plan), *([text] if (text := misfit_text(plan)) else []), ""]
    if not plan.stages:
        parts += [*table_lines(plan, width, how), *totals_lines(totals(plan)), *signature_lines(plan)]
        return fit_lines("\n".join([*parts, *note_lines(plan)]), width)
    parts += totals_lines(totals(plan))
    for title, lines in (("stages", stage_rows(plan)), ("sent between placements", send_rows(plan))):
        if len(lines) > 1:
            parts += ["", title, *columns(lines, width)]
    return fit_lines("\n".join([*parts, *note_lines(plan), *_places(plan, width, how)]), width)


def heading(plan: PlanData) -> str:
    """The program, where it runs, and the hardware that it is planned for."""
    hardware = f"planned for {plan.hardware.name}"
    if not plan.stages:
        return f"{plan.name} on {plan.placement}, {hardware}"
    places, s = f"on {len(plan.stages)} placements of {plan.placement}", plan.schedule
    if s is None:
        return f"{plan.name} {places}, {hardware}"
    order = f"{s.microbatches} micro-batches, schedule {s.name}"
    return f"{plan.name}: {s.stages} stages {places}, {order}, {hardware}"


def _places(plan: PlanData, width: int | None, how: Shown) -> Iterator[str]:
    """The placements one by one; one that is like an earlier one only says so."""
    known: dict[str, int] = {}
    for i in range(len(plan.stages)):
        body = _place_text(plan, i, width, how)
        same = known.setdefault(_INDICES.sub("[*]", _NUMBERS.sub(r"\1 *", body)), i)
        yield from ("", place_heading(plan, i), *([f"  as placement {same}"] if same != i else ["", body]))


def _place_text(plan: PlanData, place: int, width: int | None, how: Shown) -> str:
    """The collectives of one placement, and its figures."""
    p = plan.stages[place]
    moving = sum(c.seconds for c in p.collectives)
    per_step = f"{sum(c.count for c in p.collectives)} per step"
    exposed = f" ({seconds_text(p.exposed_seconds)} exposed)" if p.overlaps else ""
    total = (
        f"collectives  {per_step}, {bytes_text(p.wire_bytes)} sent per device, {seconds_text(moving)} of "
        f"{seconds_text(p.seconds)}{exposed}; {bytes_text(plan.memory[place])} at the peak per device"
    )
    return "\n".join([*table_lines(p, width, how), total, *signature_lines(p, plan)])


def plan_line(plan: PlanData) -> str:
    """The plan in one line."""
    stages = [f"{len(plan.stages)} placements"] if plan.stages else []
    if plan.schedule is not None:
        stages = [f"{plan.schedule.stages} stages on {stages[0]}, schedule {plan.schedule.name}"]
    figures = (
        *stages,
        f"{sum(c.count for c in plan.collectives)} collectives",
        f"{bytes_text(plan.wire_bytes)} sent per device",
        f"{seconds_text(plan.step_seconds)} estimated",
        f"{bytes_text(plan.memory_bytes)} at the peak",
        verdict_text(plan),
    )
    return f"<Plan {plan.name} on {plan.placement}: {', '.join(figures)}>"


def table_lines(plan: PlanData, width: int | None = None, how: Shown = COSTLIEST) -> list[str]:
    """The collectives and an empty line; nothing without collectives. Where a table is too wide, a list."""
    shown, rest = rows(plan, how.rows, by_time=how.by_time)
    if not shown:
        return []
    table = _table(plan, shown, width or MAX_WIDTH)
    lines = [line for r in shown for line in _listed(plan, r)] if table is None else [_render(table)]
    return [*lines, *([f"  {rest_text(rest)}"] if rest else []), ""]


def _listed(plan: PlanData, r: TableRow) -> list[str]:
    """A row without columns."""
    c, times = r.collective, f"{r.times} x " if r.times > 1 else ""
    part = share_text(plan, r)
    share = part and (f" (sent {part})" if r.exposed_seconds is None else f" ({part} of the step exposed)")
    return [
        f"  {times}{kind_text(c.kind)} of {c.tensor}, {tensor_text(c)}, at {c.source}",
        f"    {format_sbp(c.before)} -> {format_sbp(c.after)} over {over_text(c)}, "
        f"{bytes_text(c.wire_bytes)} sent, {seconds_text(c.seconds)}{share}",
        f"    {c.reason}",
    ]


def totals_lines(figures: Sequence[tuple[str, str]]) -> list[str]:
    """Figures with their names; what is long is broken."""
    indent = max(len(name) for name, _ in figures) + 2
    found = list[str]()
    for name, text in figures:
        first, rest = f"{name:<{indent}}", " " * indent
        found += wrap(text, MAX_WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return found


def signature_lines(plan: PlanData, whole: PlanData | None = None) -> list[str]:
    """Signatures of arguments and results at rest; `whole` as of `rest_lines`."""
    ins, outs = rest_lines(plan, whole)
    titled = (("arguments at rest, on each device", ins), ("results at rest", outs))
    return [x for title, lines in titled if lines for x in ("", title, *_aligned(lines))]


def note_lines(plan: PlanData) -> list[str]:
    """Remarks."""
    notes = [note.replace("\n", "\n    ") for note in plan.notes]
    return ["", "notes", *(f"  - {note}" for note in notes)] if notes else []


def _table(plan: PlanData, shown: Sequence[TableRow], most: int) -> Table | None:
    """A cell has two lines: what, and how exactly; the reason takes as many as it needs. None: too narrow."""
    lines = [_cells(plan, r) for r in shown]
    columns = list(zip(HEADINGS[:-1], *lines, strict=True))
    widths = [max(cell_len(part) for cell in column for part in cell.split("\n")) for column in columns]
    widths[2] = min(widths[2], MAX_TENSOR)
    left = most - sum(widths) - 2 * len(widths)
    longest = max(len(r.collective.reason) for r in shown)
    if left < min(MIN_REASON, longest):
        return None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading, width in zip(HEADINGS[:-1], widths, strict=True):
        table.add_column(heading, width=width, justify="right" if heading in FIGURES else "left")
    table.add_column(HEADINGS[-1], width=min(longest, left))
    for r, cells in zip(shown, lines, strict=True):
        table.add_row(*map(Text, cells), Text(r.collective.reason))
    return table


def _cells(plan: PlanData, r: TableRow) -> tuple[str, ...]:
    c = r.collective
    return (
        f"{r.times} x" if r.times > 1 else "",
        f"{kind_text(c.kind)}\n{c.source}",
        f"{c.tensor}\n{tensor_text(c)}",
        f"{format_sbp(c.before)}\n-> {format_sbp(c.after)}",
        over_text(c).replace(" (", "\n("),
        bytes_text(c.wire_bytes),
        f"{seconds_text(c.seconds)}\n{share_text(plan, r)}",
    )


def _render(table: Table) -> str:
    console = Console(file=io.StringIO(), width=MAX_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return draw_rules("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def _aligned(lines: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return [f"  {path:<{widths[0]}}  {nd:<{widths[1]}}  {remark}".rstrip() for path, nd, remark in lines]
