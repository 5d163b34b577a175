"""The page of a plan: one file that needs nothing from outside, from file:// too.

Scripts and styles lie in web/ as they are; libraries, with their licences, in web/vendor/. The browser is
told to load nothing (Content-Security-Policy), and all that comes from a program is data in it, never markup.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from sbp.passes.explain.choices import TensorChoices
from sbp.passes.explain.plan import PlanData
from sbp.passes.look import pipeline_text
from sbp.passes.look.colours import every_mark, marks_css
from sbp.passes.look.diff import diff_text
from sbp.passes.look.diff_data import diff_data
from sbp.passes.look.page_data import choices_data, data_text, page_data, row_key
from sbp.passes.look.pipeline_data import pipeline_data
from sbp.passes.look.text import plan_text
from sbp.passes.pipeline.plan import PipelineData
from sbp.passes.schedule.spans import Timeline

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


NO_CHOICES: Mapping[str, Sequence[TensorChoices]] = MappingProxyType({})


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


def plan_page(
    plan: PlanData,
    measured: Sequence[tuple[str, str]] = (),
    tables: Sequence[PageTable] = (),
    timelines: Sequence[Timeline] = (),
    choices: Mapping[str, Sequence[TensorChoices]] = NO_CHOICES,
) -> str:
    """The whole page of a plan.

    Arguments:
      measured: more figures, each with its name.
      tables: more of them, behind those of the plan.
      timelines: instead of the plan's own, such as it and a measured one.
      choices: what tensors could lie as instead, by the keys of their rows.
    """
    text = pipeline_text.plan_text(plan, 120) if isinstance(plan, PipelineData) else plan_text(plan, 120)
    more = [{"title": t.title, "rows": t.rows, "numbers": list(t.numbers)} for t in tables]
    data = data_of(plan, timelines) | {"measured": measured, "tables": more}
    rows = {row_key(c): c for c, _ in plan.merged()}
    data |= {
        "choices": [
            choices_data(one, rows.get(name), plan) for name, found in choices.items() for one in found
        ]
    }
    return document(f"{plan.name} on {plan.placement}", data, text)


def data_of(plan: PlanData, timelines: Sequence[Timeline] = ()) -> dict[str, Any]:
    """What the page of a plan is given."""
    return pipeline_data(plan, timelines) if isinstance(plan, PipelineData) else page_data(plan)


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
    scripts = [f"<script data-worker>{web_file(name)}</script>" for name in IN_WORKER]
    scripts += [f"<script>{web_file(name)}</script>" for name in IN_PAGE]
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
