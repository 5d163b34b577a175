"""A report as HTML: a section of the plan's page, and the short form that notebooks show."""

from __future__ import annotations

from html import escape

from sbp.passes.look.page import figures_table, heading, plan_page, short
from sbp.runtime.target.compared import ComparedProgram
from sbp.runtime.target.report_text import HEADINGS, NUMBERS, cells, costliest, figures, remarks


def report_page(report: ComparedProgram) -> str:
    """The page of the plan, with a section on the compiled program."""
    title = f"<h2>Compiled for {escape(report.target)}</h2>"
    return plan_page(report.plan, sections=[title, *section(report)])


def report_html(report: ComparedProgram) -> str:
    """The short form."""
    where = f"on {report.plan.placement}, compiled for {report.target}"
    return short([heading(report.plan.name, where, figures(report)), *section(report)[1:]])


def section(report: ComparedProgram) -> list[str]:
    """Figures, the collectives of the compiled program, and what is not as planned."""
    shown, rest = costliest(report)
    out = [figures_table([("", "plan and compiled program"), *figures(report)], ())]
    if shown:
        out.append(figures_table([HEADINGS, *(cells(report, c) for c in shown)], NUMBERS))
        out += [f'<p class="soft">{escape(rest)}</p>'] if rest else []
    for name, lines in remarks(report):
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        out.append(f"<h3>{escape(name)}</h3><ul>{items}</ul>")
    return out
