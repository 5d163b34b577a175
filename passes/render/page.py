"""A plan as HTML for notebooks: the short form. The page is another one (web_page.py)."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape

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
    tensor_text,
    totals,
)
from sbp.passes.render import stage_tables, text
from sbp.passes.render.colours import mark_of
from sbp.passes.render.stage_tables import place_heading, send_rows, stage_rows
from sbp.passes.render.svg import plan_svg
from sbp.passes.render.timeline import as_estimate, timeline_svg
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

HEADINGS = ("×", "collective", "tensor", "before → after", "over", "sent", "time", "exposed", "line", "why")
NUMBERS = ("×", "sent", "time", "exposed")
MONO = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
# Texts have the notebook's colour, which may be light on dark; pills and alarms have colours of their own.
STYLE = f"""
.sbp {{ font: 14px/1.45 Inter, "Helvetica Neue", Helvetica, Arial, sans-serif; color: inherit; }}
.sbp h1 {{ font-size: 22px; margin: 0 0 4px; }}
.sbp h1 small {{ font-weight: 400; opacity: 0.8; font-size: 15px; }}
.sbp h2 {{ font-size: 16px; margin: 28px 0 8px; }}
.sbp table {{ border-collapse: collapse; font: inherit; color: inherit; }}
.sbp td, .sbp th {{ text-align: left; vertical-align: top; padding: 4px 6px; }}
.sbp tbody tr {{ border-top: 1px solid rgba(128, 128, 128, 0.35); }}
.sbp tbody tr:hover {{ background: rgba(128, 128, 128, 0.12); }}
.sbp th {{ font-weight: 600; opacity: 0.8; white-space: nowrap; }}
.sbp .wide {{ overflow-x: auto; }}
.sbp table.rows {{ width: 100%; }}
.sbp table.rows td.tensor {{ min-width: 12em; overflow-wrap: anywhere; }}
.sbp table.rows td.why {{ min-width: 10em; max-width: 48em; }}
.sbp .n {{ text-align: right; white-space: nowrap; }}
.sbp .mono {{ font: {MONO}; white-space: nowrap; }}
.sbp td .mono {{ white-space: normal; }}
.sbp .soft, .sbp .totals td:first-child {{ opacity: 0.8; }}
.sbp .alarm {{ color: #b42318; background: #fdecea; font-weight: 600; margin: 4px 0; padding: 4px 8px; }}
.sbp .pill {{ color: #1b2430; border: 1.5px solid; border-radius: 9px; padding: 0 8px; white-space: nowrap; }}
.sbp .picture {{ overflow: auto; border: 1px solid rgba(128, 128, 128, 0.35); border-radius: 8px; }}
.sbp .picture svg {{ max-width: 100%; height: auto; }}
"""


def plan_html(plan: PlanData) -> str:
    """Totals, the table, and the picture to be unfolded; of several placements each of these."""
    name, _, rest = text.heading(plan).partition(" ")
    top = heading(name.rstrip(":"), rest, totals(plan), misfit_text(plan))
    if not plan.stages:
        return short([top, *table(plan), folded_picture(plan), notes(plan)])
    places = [
        f"<details><summary>{escape(place_heading(plan, i))}</summary>{''.join(_place(plan, i))}</details>"
        for i in range(len(plan.stages))
    ]
    return short([top, *_stages(plan), *places, notes(plan)])


def _stages(plan: PlanData) -> Iterator[str]:
    """The schedule, the stages, and what is sent between placements."""
    if plan.timeline is not None:
        svg = timeline_svg([as_estimate(plan.timeline)], f"{plan.name}: the schedule")
        yield "<h2>Timeline</h2>" + picture(svg)
    for title, lines in (("Stages", stage_rows(plan)), ("Sent between placements", send_rows(plan))):
        if len(lines) > 1:
            yield f"<h2>{title}</h2>" + figures_table(lines, stage_tables.NUMBERS)


def _place(plan: PlanData, place: int) -> list[str]:
    """One placement: its collectives, its picture, its arguments and results."""
    p = plan.stages[place]
    return [*table(p), *([picture(plan_svg(p))] if p.has_program else []), *signatures(p, plan)]


def short(body: Iterable[str]) -> str:
    """What notebooks show."""
    return f'<style>{STYLE}</style><div class="sbp">{"".join(body)}</div>'


def heading(title: str, where: str, figures: Sequence[tuple[str, str]], alarm: str = "") -> str:
    """What it is, and its figures with their names; in red, if not empty, what must be seen first."""
    lines = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in figures)
    return (
        f"<h1>{escape(title)} <small>{escape(where)}</small></h1>"
        + (f'<p class="alarm">{escape(alarm)}</p>' if alarm else "")
        + f'<table class="totals"><tbody>{lines}</tbody></table>'
    )


def table(plan: PlanData, limit: int = MAX_ROWS) -> list[str]:
    """The collectives of a plan."""
    return [_table(*rows(plan, limit))]


def signatures(plan: PlanData, whole: PlanData | None = None) -> list[str]:
    """How arguments and results lie at rest; `whole` as of `rest_lines`."""
    ins, outs = rest_lines(plan, whole)
    return [_signatures("argument", ins), _signatures("result", outs)]


def _table(shown: Sequence[TableRow], rest: Sequence[TableRow]) -> str:
    if not shown:
        return '<p class="soft">No collectives.</p>'
    head = "".join(f"<th{' class=n' if h in NUMBERS else ''}>{h}</th>" for h in HEADINGS)
    body = "\n".join(_row(r) for r in shown)
    tail = f'<p class="soft">{escape(rest_text(rest))}</p>' if rest else ""
    table = f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
    return f'<div class="wide">{table}</div>{tail}'


def _row(r: TableRow) -> str:
    c = r.collective
    fill, border, _ = mark_of(c.kind)
    style = f"background:{fill};border-color:{border}"
    return (
        f'<tr><td class="n" data-v="{r.times}">{r.times}</td>'
        f'<td><span class="pill" style="{style}">{kind_text(c.kind)}</span></td>'
        f'<td class="tensor">{escape(c.tensor)}<br>'
        f'<span class="mono soft">{escape(tensor_text(c))}</span></td>'
        f'<td class="mono">{escape(format_sbp(c.before))} →<br>{escape(format_sbp(c.after))}</td>'
        f"<td>{escape(over_text(c)).replace(' (', '<br>(')}</td>"
        f'<td class="n" data-v="{c.wire_bytes!r}">{bytes_text(c.wire_bytes)}</td>'
        f'<td class="n" data-v="{c.seconds!r}">{seconds_text(c.seconds)}</td>'
        f'<td class="n" data-v="{c.exposed_seconds!r}">{seconds_text(c.exposed_seconds)}</td>'
        f'<td class="mono">{escape(c.source)}</td><td class="why">{escape(c.reason)}</td></tr>'
    )


def _signatures(title: str, lines: Sequence[tuple[str, str, str]]) -> str:
    body = "".join(
        f'<tr><td class="mono">{escape(path)}</td><td class="mono">{escape(nd)}</td>'
        f'<td class="soft">{remark}</td></tr>'
        for path, nd, remark in lines
    )
    head = f"<thead><tr><th>{title}</th><th>signature</th><th></th></tr></thead>"
    return f"<table>{head}<tbody>{body}</tbody></table>" if lines else ""


def picture(svg: str) -> str:
    """A picture that may be larger than the page."""
    return f'<div class="picture">{svg}</div>'


def folded_picture(plan: PlanData) -> str:
    """The picture of a plan, to be unfolded."""
    if not plan.has_program:
        return ""
    return f"<details><summary>picture</summary>{picture(plan_svg(plan))}</details>"


def notes(plan: PlanData) -> str:
    """Remarks; those of several lines keep them."""
    items = "".join(
        f"<li>{f'<pre>{escape(note)}</pre>' if chr(10) in note else escape(note)}</li>" for note in plan.notes
    )
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


def figures_table(lines: Sequence[Sequence[str]], figures: Collection[str]) -> str:
    """A table of texts, the first line being its headings.

    Arguments:
      figures: headings of columns that are aligned to the right.
    """

    def cells(tag: str, line: Sequence[str]) -> str:
        sides = [' class="n"' if h in figures else "" for h in lines[0]]
        return "".join(f"<{tag}{side}>{escape(x)}</{tag}>" for x, side in zip(line, sides, strict=True))

    body = "\n".join(f"<tr>{cells('td', line)}</tr>" for line in lines[1:])
    return f"<table><thead><tr>{cells('th', lines[0])}</tr></thead><tbody>\n{body}\n</tbody></table>"
