"""The timeline of a schedule as a picture, and as a trace for Perfetto and Chrome."""

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from sbp.passes.render.colours import ACTIONS
from sbp.passes.render.svg_parts import GROUND, INK, INK_ON_COLOUR, LINE, MARGIN, SOFT, document
from sbp.passes.schedule.actions import SENDS, Action, Kind
from sbp.passes.schedule.spans import Span, Timeline
from sbp.text.units import seconds_text

WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "gradient of inputs",
    Kind.W: "gradient of weights",
    Kind.SEND_F: "value on the way",
    Kind.SEND_B: "gradient on the way",
}
LABELS, LANE, WIRE, GAP = 62.0, 26.0, 5.0, 7.0
"""The width of the names of ranks; the heights of a lane, of its strip of transfers, and between lanes."""


def timeline_svg(
    timelines: Sequence[Timeline], title: str = "", time_text: Callable[[float], str] = seconds_text
) -> str:
    """A picture: a lane per rank, the numbers of micro-batches in the boxes, bubbles left empty.

    Later stages of a rank are darker. What runs together shares the height of its lane. The strip below a
    lane shows transfers, at the sender.

    Arguments:
      timelines: drawn one above the other on one scale, for instance a simulated and a measured one.
      title: the heading; without it, the name of the first timeline.
      time_text: how times are written.
    """
    boxes = max(len(t.compute_spans(rank)) for t in timelines for rank in range(t.ranks))
    width = min(2400.0, max(820.0, 17.0 * boxes))
    scale = width / (max(t.makespan for t in timelines) or 1)
    whole = width + LABELS + 2 * MARGIN
    body, y = list[str](), 74.0 + MARGIN
    for t in timelines:
        part, height = _block(t, scale, width, time_text)
        body += [f'<g transform="translate({MARGIN:g},{y:.1f})">', *part, "</g>"]
        y += height + 22
    head = title or timelines[0].name
    heading = _text(MARGIN, 38, head, 19, f'font-weight="700" fill="{INK}"')
    return document(whole, y, head, [heading, *_legend(timelines), *body])


def as_estimate(timeline: Timeline) -> Timeline:
    """A simulated timeline, with a name that says so."""
    return Timeline(f"{timeline.name}, estimated", timeline.spans)


def _text(x: float, y: float, text: str, size: float, more: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" {more}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, border: str = "none") -> str:
    box = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.4):.2f}" height="{height:.1f}"'
    return f'<rect {box} rx="1.5" fill="{fill}" stroke="{border}" stroke-width="0.8"/>'


def _legend(timelines: Sequence[Timeline]) -> Iterator[str]:
    """What the colours mean that are in the picture."""
    there = {s.action.kind for t in timelines for spans in t.spans for s in spans}
    x = MARGIN
    for kind, (fill, border, _) in ACTIONS.items():
        if kind in there:
            yield _rect(x, 56, 16, 12, fill, border)
            yield _text(x + 22, 66.5, WORDS[kind], 11.5, f'fill="{INK}"')
            x += 22 + 6.3 * len(WORDS[kind]) + 22


def _block(
    t: Timeline, scale: float, width: float, time_text: Callable[[float], str]
) -> tuple[list[str], float]:
    """One timeline with its heading and axis, and its height."""
    wires = any(s.action.kind in SENDS for spans in t.spans for s in spans)
    pitch = LANE + (WIRE + 2) * wires + GAP
    figures = f"{time_text(t.makespan)}, bubble {t.bubble_fraction:.1%}"
    out = [_text(0, 12, f"{t.name}: {t.ranks} ranks, {figures}", 12.5, f'font-weight="600" fill="{INK}"')]
    bottom = 22 + pitch * t.ranks
    for x, label in _ticks(t.makespan, scale, time_text):
        out += [
            f'<path d="M{LABELS + x:.1f},20 V{bottom:.1f}" stroke="{LINE}" stroke-width="0.6"/>',
            _text(LABELS + x, bottom + 12, label, 10, f'text-anchor="middle" fill="{SOFT}"'),
        ]
    stages = sorted({s.action.stage for spans in t.spans for s in spans})
    for rank, spans in enumerate(t.spans):
        y = 22 + pitch * rank
        own = [s for s in stages if any(span.action.stage == s for span in spans)]
        out.append(_text(0, y + 17, f"rank {rank}", 11.5, f'fill="{SOFT}"'))
        out.append(_rect(LABELS, y, width, LANE, GROUND))
        out += _boxes(t, rank, own, y, scale, time_text)
        for s in spans:
            if s.action.kind in SENDS:
                at, length = LABELS + (s.start - t.start) * scale, (s.end - s.start) * scale
                strip = _rect(at, y + LANE + 2, length, WIRE, ACTIONS[s.action.kind].fill)
                out.append(f"<g><title>{_title(s, time_text)}</title>{strip}</g>")
    return out, bottom + 16


def _boxes(
    t: Timeline, rank: int, own: Sequence[int], y: float, scale: float, time_text: Callable[[float], str]
) -> Iterator[str]:
    """The computing actions of a lane."""
    spans = t.compute_spans(rank)
    shared = {s for a, b in pairwise(spans) if b.start < a.end for s in (a, b)}
    for s in spans:
        fill, border, _ = ACTIONS[s.action.kind]
        depth = own.index(s.action.stage) / max(1, len(own) - 1)
        top = y + (LANE / 2) * (s in shared and s.action.kind is not Kind.F)
        height = LANE / 2 if s in shared else LANE
        x, length = LABELS + (s.start - t.start) * scale, (s.end - s.start) * scale
        number = str(s.action.microbatch)
        box = _rect(x, top, length, height, _mixed(fill, border, 0.45 * depth), border)
        if length >= 6.4 * len(number) + 1:
            more = f'text-anchor="middle" fill="{INK_ON_COLOUR}"'
            box += _text(x + length / 2, top + height / 2 + 3.6, number, 10, more)
        yield f"<g><title>{_title(s, time_text)}</title>{box}</g>"


def _title(s: Span, time_text: Callable[[float], str]) -> str:
    where = f"stage {s.action.stage}, micro-batch {s.action.microbatch}, rank {s.rank}"
    return escape(f"{s.action} ({where}): {time_text(s.start)} to {time_text(s.end)}")


def _mixed(light: str, dark: str, part: float) -> str:
    """A colour between two.

    >>> _mixed("#ffffff", "#000080", 0.5)
    '#8080c0'
    """
    pairs = zip(bytes.fromhex(light[1:]), bytes.fromhex(dark[1:]), strict=True)
    return "#" + bytes(round(a + (b - a) * part) for a, b in pairs).hex()


def _ticks(makespan: float, scale: float, time_text: Callable[[float], str]) -> Iterator[tuple[float, str]]:
    """(place, label) at round times, about 100 apart."""
    steps = (base * 10.0**power for power in range(-12, 12) for base in (1, 2, 5))
    step = next(s for s in steps if s * scale >= 90)
    yield from ((k * step * scale, time_text(k * step)) for k in range(int(makespan / step) + 1))


def chrome_trace(timelines: Sequence[Timeline], unit_seconds: float = 1.0) -> str:
    """The timelines as JSON in the trace event format, which Perfetto and Chrome open.

    Each timeline is a process and each rank a thread; transfers are asynchronous events of their rank.

    Arguments:
      timelines: shown one above the other, for instance a simulated and a measured one.
      unit_seconds: seconds per unit of the timelines' times.
    """
    events: list[dict[str, Any]] = []
    for pid, t in enumerate(timelines, 1):
        events += [
            _name("process_name", pid, 0, f"{t.name}, bubble {t.bubble_fraction:.1%}"),
            *(_name("thread_name", pid, rank, f"rank {rank}") for rank in range(t.ranks)),
        ]
        micro = 1e6 * unit_seconds
        for spans in t.spans:
            for s in spans:
                events += _events(s, pid, float(s.start - t.start) * micro, float(s.end - s.start) * micro)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _events(s: Span, pid: int, start: float, length: float) -> list[dict[str, Any]]:
    """One complete event; for a transfer the two of an asynchronous one, since many may be on the way."""
    a: Action = s.action
    shared = {"name": str(a), "cat": a.kind.name, "pid": pid, "tid": s.rank, "ts": start}
    args = {"stage": a.stage, "microbatch": a.microbatch, "rank": s.rank}
    if a.computes:
        return [{**shared, "ph": "X", "dur": length, "args": args}]
    shared |= {"id": f"{pid}.{a}", "args": {**args, "peer": a.peer}}
    return [{**shared, "ph": "b"}, {**shared, "ph": "e", "ts": start + length}]
