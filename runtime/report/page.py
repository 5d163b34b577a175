"""A report as HTML: the plan's page with the simulated step beside it, and the short form of notebooks."""

from __future__ import annotations

from html import escape

from sbp.passes.render.page import figures_table, heading, short
from sbp.passes.render.web_page import PageTable, plan_page
from sbp.runtime.report.simulated_step import simulated_step
from sbp.runtime.report.text import HEADINGS, NUMBERS, cells, costliest, figures, remarks
from sbp.runtime.target.comparison import ComparedProgram


def report_page(report: ComparedProgram) -> str:
    """The page of the plan, with tables of the compiled program."""
    shown, _ = costliest(report)
    tables = [
        PageTable(f"Compiled for {report.target}", [("", "plan and compiled program"), *figures(report)]),
        PageTable("Compiled collectives", [HEADINGS, *(cells(report, c) for c in shown)], NUMBERS),
    ]
    tables += [PageTable(name, [(name,), *((line,) for line in lines)]) for name, lines in remarks(report)]
    simulated = simulated_step(report)
    return plan_page(report.plan, tables=tables, beside=() if simulated is None else (simulated,))


def report_html(report: ComparedProgram) -> str:
    """The short form."""
    where = f"on {report.plan.placement}, compiled for {report.target}"
    return short([heading(report.plan.name, where, figures(report)), *section(report)])


def section(report: ComparedProgram) -> list[str]:
    """The collectives of the compiled program, and what is not as planned."""
    shown, rest = costliest(report)
    out = list[str]()
    if shown:
        out.append(figures_table([HEADINGS, *(cells(report, c) for c in shown)], NUMBERS))
        out += [f'<p class="soft">{escape(rest)}</p>'] if rest else []
    for name, lines in remarks(report):
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        out.append(f"<h3>{escape(name)}</h3><ul>{items}</ul>")
    return out
