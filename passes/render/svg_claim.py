"""The head of a picture: the plan's figures, where the time goes, and what the colours mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.words import as_one, kind_text, messages, share_text, verdict_text
from sbp.passes.render.colours import KERNELS, mark_of
from sbp.passes.render.folded_graph import kinds_of
from sbp.passes.render.outline import Outline
from sbp.passes.render.svg_parts import (
    ALARM,
    GROUND,
    INK,
    INK_ON_COLOUR,
    LINE,
    NARROW,
    SOFT,
    WARN,
    Spot,
    fit_text,
    flow_layout,
    rect,
    text_at,
)
from sbp.passes.render.timeline_data import step_timelines
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

BAR, LEAST_SHARE = 24.0, 0.09
"""The height of the bar; the share of it beyond which a part has room for its name."""
COSTLIEST = 5
STREAM, GAP = 20.0, 0.4
"""The height of the lane of kernels, and of that of what is sent; the width of a gap that nobody sees."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step: kernels of a phase, or what they wait for collectives of a kind."""

    name: str
    seconds: float
    kind: str = ""


def step_parts(plan: PlanData, outline: Outline) -> list[StepPart]:
    """The step, split into kernels by phase and what they wait for each kind of collective."""
    holds = {g.parent for g in outline.groups if g.kind == "phase"}
    phases: dict[str, float] = {}
    for k, g in enumerate(outline.groups):
        if g.kind == "phase" and k not in holds:
            phases[g.title] = phases.get(g.title, 0.0) + g.seconds
    exposed: dict[str, float] = {}
    for c in plan.collectives:
        exposed[c.kind] = exposed.get(c.kind, 0.0) + c.exposed_seconds
    kernels, counted = plan.step_seconds - sum(exposed.values()), sum(phases.values())
    parts = [StepPart(name, kernels * seconds / counted) for name, seconds in phases.items() if counted]
    parts = parts or [StepPart("kernels", kernels)]
    parts += [
        StepPart(kind_text(k), seconds, k) for k, seconds in sorted(exposed.items(), key=lambda x: -x[1])
    ]
    return [p for p in parts if p.seconds > 0]


def claim(plan: PlanData, outline: Outline, spot: Spot, listed: bool) -> tuple[list[str], float]:
    """The head of a picture, and where it ends.

    Arguments:
      spot: where it begins, and how wide it may be.
      listed: whether the costliest collectives are listed.
    """
    name = (
        f'<text x="{spot.x:.1f}" y="{spot.y + 14:.1f}" font-size="19" font-weight="700" fill="{INK}">'
        f'{text_of(plan.name)}<tspan dx="8" font-size="14" font-weight="400" fill="{SOFT}">'
        f"on {text_of(plan.placement)}</tspan></text>"
    )
    out, y = [name], spot.y + 36
    figures = [
        f"{seconds_text(plan.step_seconds)} per step, estimated",
        f"{bytes_text(plan.wire_bytes)} sent per device",
        f"{bytes_text(plan.memory_bytes)} at the peak per device",
        verdict_text(plan),
    ]
    lines = list(flow_layout([NARROW * 12.5 * len(f) for f in figures], spot.width, 22))
    for f, (x, line) in zip(figures, lines, strict=True):
        wrong = WARN if plan.cut_short else SOFT
        fill = SOFT if f is not figures[-1] else wrong if plan.fits else ALARM
        out.append(text_at(spot.x + x, y + 17 * line, f, 12.5, fill=fill))
    y += 17 * lines[-1][1] + 14
    parts, place = step_parts(plan, outline), Spot(spot.x, 0, spot.width, 0)
    for draw in (_bar, _legend, *((_costliest,) if listed else ())):
        drawn, y = draw(plan, parts, replace(place, y=y))
        out += drawn
    return out, y


def streams(plan: PlanData, outline: Outline, at: Spot) -> tuple[list[str], float]:
    """The step as it is simulated: kernels above, what is sent meanwhile below; and where that ends.

    Where the upper lane is empty kernels wait. Nothing, where nothing runs beside anything.
    """
    row_of = dict.fromkeys((c.name for c in plan.collectives), 0)
    found = step_timelines(outline, plan.collectives, row_of, plan.step_seconds)
    if not found or not plan.overlaps:
        return [], at.y
    out, y = [text_at(at.x, at.y + 18, "The step", 13, font_weight="600", fill=INK)], at.y + 26
    left, width = at.x + 62, at.width - 62
    for k, name in enumerate(("kernels", "sent")):
        top = y + k * (STREAM + 4)
        out += [
            text_at(at.x, top + 14, name, 11.5, fill=SOFT),
            rect(Spot(left, top, width, STREAM), 0, GROUND),
        ]
    seconds = found[0]["seconds"] or 1.0
    for lane, kind, start, end in _joined(found[0]["spans"], GAP * seconds / width):
        x0, x1 = (left + width * min(1.0, t / seconds) for t in (start, end))
        fill = mark_of(kind).fill if lane else _kernels(kind)
        out.append(rect(Spot(x0, y + lane * (STREAM + 4), max(0.5, x1 - x0), STREAM), 0, fill))
    y += 2 * STREAM + 4
    for k in range(5):
        anchor = "start" if k == 0 else "end" if k == 4 else "middle"
        label = seconds_text(seconds * k / 4)
        out.append(text_at(left + width * k / 4, y + 13, label, 11, text_anchor=anchor, fill=SOFT))
    return out, y + 24


def _joined(spans: Mapping[str, Sequence[Any]], gap: float) -> list[tuple[int, str, float, float]]:
    """(lane, kind, start, end) of spans; those of a kind between which no gap is to be seen are one.

    Arguments:
      gap: what cannot be seen, seconds.
    """
    found = list[tuple[int, str, float, float]]()
    columns = (spans[name] for name in ("lane", "kind", "from", "to"))
    for lane, kind, start, end in sorted(zip(*columns, strict=True), key=lambda s: (s[0], s[2])):
        if found and found[-1][:2] == (lane, kind) and start - found[-1][3] < gap:
            found[-1] = lane, kind, found[-1][2], max(end, found[-1][3])
        else:
            found.append((lane, kind, start, end))
    return found


def text_of(x: object) -> str:
    """Anything as text that may stand in markup."""
    return str(x).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _kernels(phase: str) -> str:
    return KERNELS.get(phase, KERNELS["kernel"]).fill


def _fill(part: StepPart) -> str:
    return mark_of(part.kind).fill if part.kind else _kernels(part.name)


def _bar(plan: PlanData, parts: Sequence[StepPart], at: Spot) -> tuple[list[str], float]:
    """The step as a bar, its parts as wide as they take."""
    out, x, total = list[str](), at.x, sum(p.seconds for p in parts) or 1.0
    for p in parts:
        share = p.seconds / total
        width, border = at.width * share, mark_of(p.kind).border if p.kind else "none"
        inner = 0.7 if p.kind else 0.0
        box = rect(
            Spot(x + inner, at.y + inner, max(0.6, width - 1 - 2 * inner), BAR - 2 * inner),
            2,
            _fill(p),
            border,
            1.4,
        )
        out.append(f"<g><title>{p.name}: {seconds_text(p.seconds)}, {share:.1%}</title>{box}")
        if share >= LEAST_SHARE:
            middle, said = x + width / 2, fit_text(f"{p.name} {share:.0%}", width - 8, 12 * NARROW)
            out.append(text_at(middle, at.y + 16, said, 12, text_anchor="middle", fill=INK_ON_COLOUR))
        out.append("</g>")
        x += width
    return out, at.y + BAR + 10


def _legend(plan: PlanData, parts: Sequence[StepPart], at: Spot) -> tuple[list[str], float]:
    """What the colours mean: phases with their kernels' time, kinds with what is sent and waited for."""
    found = [(_fill(p), "none", f"{p.name} {seconds_text(p.seconds)}") for p in parts if not p.kind]
    waits = {p.kind: p.seconds for p in parts}
    for kind, count, wire in kinds_of(plan):
        exposed = f", {seconds_text(waits[kind])}" if kind in waits else ""
        word = f"{exposed} exposed" if exposed and plan.overlaps else exposed
        found.append((*mark_of(kind)[:2], f"{count} {kind_text(kind)}: {bytes_text(wire)}{word}"))
    places = list(flow_layout([22 + NARROW * 11.5 * len(label) for _, _, label in found], at.width, 18))
    out, y = list[str](), at.y
    for (fill, border, label), (x, line) in zip(found, places, strict=True):
        y = at.y + 18 * line
        out += [
            rect(Spot(at.x + x, y, 15, 11), 4, fill, border, 1.4),
            text_at(at.x + x + 21, y + 10, label, 11.5, fill=INK),
        ]
    return out, y + 22


def _costliest(plan: PlanData, parts: Sequence[StepPart], at: Spot) -> tuple[list[str], float]:
    """The rows that kernels wait for longest: for what share of the step, what, its bytes, its time, the
    user's line."""
    found = [as_one(same) for same in messages(plan)]
    shown, rest = found[:COSTLIEST], found[COSTLIEST:]
    out, y = (
        [
            text_at(at.x, at.y + 18, "The costliest collectives", 13, font_weight="600", fill=INK),
            text_at(at.x + 170, at.y + 18, "by the share of the step that waits for them", 11.5, fill=SOFT),
        ],
        at.y + 26,
    )
    right = at.x + at.width
    for r in shown:
        c, where = r.collective, fit_text(r.collective.source, 130, 11.5 * NARROW)
        out.append(f'<path d="M{at.x:.1f},{y:.1f} H{right:.1f}" stroke="{LINE}" stroke-width="0.6"/>')
        base, kind = y + 17, kind_text(c.kind)
        fill, border, _ = mark_of(c.kind)
        wide = 16 + 11.5 * NARROW * len(kind)
        move = f"{format_sbp(c.before)} → {format_sbp(c.after)}"
        room = at.width - 340 - 11.5 * NARROW * len(move) - wide
        times = f"{r.times} × " if r.times > 1 else ""
        what = (
            f"{times}{fit_text(c.tensor.replace('gradient of ', '∇ '), room - 7 * len(times), 12 * NARROW)}"
        )
        out += [
            "<g>" + f"<title>{text_of(c.reason)}</title>",
            text_at(at.x + 44, base, share_text(plan, r), 12, text_anchor="end", font_weight="600", fill=INK),
            rect(Spot(at.x + 54, y + 4, wide, 17), 8, fill, border, 1.3),
            text_at(at.x + 54 + wide / 2, base - 0.5, kind, 11.5, text_anchor="middle", fill=INK_ON_COLOUR),
            f'<text x="{at.x + 62 + wide:.1f}" y="{base:.1f}" font-size="12" fill="{INK}">{text_of(what)}'
            f'<tspan dx="8" font-size="11.5" fill="{SOFT}">{text_of(move)}</tspan></text>',
            text_at(right - 210, base, bytes_text(c.wire_bytes), 12, text_anchor="end", fill=INK),
            text_at(right - 140, base, seconds_text(c.seconds), 12, text_anchor="end", fill=INK),
            text_at(right, base, where, 11.5, text_anchor="end", fill=SOFT),
            "</g>",
        ]
        y += 25
    if rest:
        seconds, wire = (
            sum(f) for f in zip(*((r.collective.seconds, r.collective.wire_bytes) for r in rest), strict=True)
        )
        said = f"and {len(rest)} smaller: {seconds_text(seconds)}, {bytes_text(wire)} in all"
        out.append(text_at(at.x, y + 15, said, 11.5, fill=SOFT))
        y += 22
    return out, y + 4
