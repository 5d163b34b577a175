"""What a report shows, and its forms: text, notebook, page, file."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape

from sbp.passes.explain.measurement import MeasuredStep
from sbp.passes.explain.plan import PlanData
from sbp.passes.render.page import figures_table, heading, short
from sbp.passes.render.stage_tables import columns
from sbp.passes.render.terminal import fit_lines, terminal_width
from sbp.passes.render.web_page import PageTable, plan_page
from sbp.passes.schedule.spans import Timeline


@dataclass(frozen=True)
class ReportTable:
    """A table of a report.

    Arguments:
      name: its heading in texts and notebooks; "" for none.
      page_name: its heading in the page.
      rows: texts, the first row being the headings.
      rest: a line on rows that are left out; "" for none.
    """

    name: str
    page_name: str
    rows: Sequence[Sequence[str]]
    rest: str = ""


@dataclass(frozen=True)
class Contents:
    """What a report shows.

    Arguments:
      plan: the plan.
      target: what XLA compiled for.
      title, summary: the first line, and the whole in one line.
      heading: what stands beside the plan, such as "compiled program".
      figures: each with its name.
      numbers: headings of columns that are aligned to the right.
      remarks: headings with their lines.
    """

    plan: PlanData
    target: str
    title: str
    summary: str
    heading: str
    figures: Sequence[tuple[str, str]]
    tables: Sequence[ReportTable]
    numbers: Collection[str]
    remarks: Sequence[tuple[str, Sequence[str]]] = ()


def contents_text(c: Contents, width: int | None = None) -> str:
    """A report as text.

    Arguments:
      width: columns of a line; by default those of the terminal.
    """
    label = max(len(name) for name, _ in c.figures)
    lines = [c.title, *(f"{name:<{label}}  {text}" for name, text in c.figures)]
    for t in c.tables:
        lines += ["", *filter(None, [t.name]), *columns(t.rows), *filter(None, [t.rest])]
    lines += [x for name, found in c.remarks for x in ("", name, *(f"  - {line}" for line in found))]
    return fit_lines("\n".join(lines), terminal_width() if width is None else width)


def contents_html(c: Contents) -> str:
    """The short form, for notebooks."""
    parts = [heading(c.plan.name, f"on {c.plan.placement}, compiled for {c.target}", c.figures)]
    for t in c.tables:
        parts += [
            f"<h3>{t.name}</h3>" if t.name else "",
            figures_table(t.rows, c.numbers),
            f'<p class="soft">{escape(t.rest)}</p>' if t.rest else "",
        ]
    for name, lines in c.remarks:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        parts.append(f"<h3>{escape(name)}</h3><ul>{items}</ul>")
    return short(parts)


def contents_page(c: Contents, timelines: Sequence[Timeline], beside: Sequence[MeasuredStep]) -> str:
    """The page of the plan, with tables of what was compiled.

    Arguments:
      timelines: the schedules to draw; () for the plan's own.
      beside: the simulated step, beside the plan's estimates.
    """
    tables = [
        PageTable(f"Compiled for {c.target}", [("", f"plan and {c.heading}"), *c.figures]),
        *(PageTable(t.page_name, t.rows, c.numbers) for t in c.tables),
        *(PageTable(name, [(name,), *((line,) for line in lines)]) for name, lines in c.remarks),
    ]
    return plan_page(c.plan, tables=tables, timelines=timelines, beside=beside)
