"""The page of a plan: one file that needs nothing from outside, from file:// too.

Scripts and styles lie in web/ as they are; libraries, with their licences, in web/vendor/. The browser is
told to load nothing (Content-Security-Policy), and all that comes from a program is data in it, never markup.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Protocol

from sbp.errors import ArgumentError, Problem
from sbp.passes.explain.choices import RowChoices
from sbp.passes.explain.measurement import MeasuredStep, same_plan
from sbp.passes.explain.plan import PlanData
from sbp.passes.render.colours import every_mark, marks_css
from sbp.passes.render.diff import diff_text
from sbp.passes.render.diff_data import diff_data
from sbp.passes.render.joined_parts import joined_data
from sbp.passes.render.page_data import choices_data, data_text, page_data, removal_data, row_key
from sbp.passes.render.text import plan_text
from sbp.passes.schedule.spans import Timeline
from sbp.text.units import seconds_text

IN_WORKER = ("vendor/dagre.min.js", "layout.js")
IN_PAGE = (
    "vendor/cytoscape.min.js",
    "words.js",
    "model.js",
    "graph.js",
    "devices.js",
    "claim.js",
    "diff.js",
    "rows.js",
    "timeline.js",
    "panels.js",
    "measured.js",
    "printed.js",
    "detail.js",
    "app.js",
)
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; worker-src blob:; "
    "img-src data: blob:"
)


@cache
def web_file(name: str) -> str:
    """The text of a file of the page."""
    return (files(__package__) / "web" / name).read_text(encoding="utf-8")


NO_CHOICES: Mapping[str, RowChoices] = MappingProxyType({})


@dataclass(frozen=True)
class PageTable:
    """A further table of a page.

    Arguments:
      rows: texts, the first row being the headings.
      numbers: headings of columns that are aligned to the right.
    """

    title: str
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()


class PageProfile(Protocol):
    """What a page takes of a profile (runtime/profile/profile.py has it)."""

    @property
    def plan(self) -> PlanData:
        """Of the program that ran."""

    @property
    def step_breakdowns(self) -> Sequence[MeasuredStep]:
        """A step, divided, per placement; none where it was not."""

    @property
    def timelines(self) -> Sequence[Timeline]:
        """Of a pipeline, those that were measured and simulated."""

    def figures(self) -> Sequence[tuple[str, str]]:
        """More figures, each with its name."""

    def tables(self) -> Sequence[PageTable]:
        """More tables."""


def profiled_page(
    plan: PlanData, profile: PageProfile, choices: Mapping[str, RowChoices] = NO_CHOICES
) -> str:
    """The page of a plan with what its program took.

    Raises:
      ArgumentError: for the profile of another program.
    """
    if not same_plan(plan, profile.plan):
        raise ArgumentError(
            Problem(
                "argument",
                "Plan.save(profile=...)",
                f"a profile of {_said(profile.plan)}",
                f"one of {_said(plan)}",
                "the measured times would stand beside estimates of another program",
                "plan.save('plan.html', profile=program.profile(*args)), both of the same arguments",
            )
        )
    return plan_page(
        plan, profile.figures(), profile.tables(), profile.timelines, choices, profile.step_breakdowns
    )


def _said(plan: PlanData) -> str:
    times = sum(c.count for c in plan.collectives)
    return f"{plan.name!r} on {plan.placement}, {times} collectives, {seconds_text(plan.seconds)}"


def plan_page(
    plan: PlanData,
    measured: Sequence[tuple[str, str]] = (),
    tables: Sequence[PageTable] = (),
    timelines: Sequence[Timeline] = (),
    choices: Mapping[str, RowChoices] = NO_CHOICES,
    beside: Sequence[MeasuredStep] = (),
) -> str:
    """The whole page of a plan.

    Arguments:
      measured: more figures, each with its name.
      tables: more of them, behind those of the plan.
      timelines: instead of the plan's own, such as it and a measured one.
      choices: what tensors could lie as instead, by the keys of their rows.
      beside: what a step took, per placement, to stand beside the estimates.
    """
    more = [{"title": t.title, "rows": t.rows, "numbers": list(t.numbers)} for t in tables]
    data = data_of(plan, timelines, beside) | {"measured": measured, "tables": more}
    rows = {row_key(c): c for c, _ in plan.merged_collectives()}
    data |= {
        "choices": [
            choices_data(one, rows.get(name), plan)
            for name, found in choices.items()
            for one in found.tensors
        ],
        "removals": [
            removal_data(found.removal, rows[name], plan)
            for name, found in choices.items()
            if found.removal is not None
        ],
    }
    return document(f"{plan.name} on {plan.placement}", data, plan_text(plan, 120))


def data_of(
    plan: PlanData, timelines: Sequence[Timeline] = (), beside: Sequence[MeasuredStep] = ()
) -> dict[str, Any]:
    """What the page of a plan is given."""
    if plan.stages:
        return joined_data(plan, timelines, beside)
    return page_data(plan, beside[0] if beside else None)


def diff_page(a: PlanData, b: PlanData, names: tuple[str, str] = ("a", "b")) -> str:
    """The page of two plans side by side."""
    data = diff_data((a, data_of(a)), (b, data_of(b)), names)
    return document(f"{names[0]} and {names[1]}: {b.name}", data, diff_text(a, b, names))


def document(title: str, data: Mapping[str, Any], without_scripts: str) -> str:
    """A page.

    Arguments:
      data: what its scripts show.
      without_scripts: the same as text, for who has none.
    """
    # A script would end at "</script"; no file here says it, which a test makes sure of.
    scripts = [
        *(f"<script data-worker>{web_file(name)}</script>" for name in IN_WORKER),
        *(f"<script>{web_file(name)}</script>" for name in IN_PAGE),
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{marks_css()}\n{web_file('style.css')}</style></head>",
            f'<body><main id="app"></main><noscript><pre>{escape(without_scripts)}</pre></noscript>',
            f'<script type="application/json" id="marks">{data_text(every_mark())}</script>',
            f'<script type="application/json" id="plan-data">{data_text(data)}</script>',
            *scripts,
            "</body></html>\n",
        ]
    )
