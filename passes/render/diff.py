"""Two plans side by side: what one sends that the other does not, by the time that it costs.

The lines of the user are matched first, who may have edited the file in between.
"""

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any

from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.rest_lines import collapse
from sbp.passes.explain.words import kind_text, over_text, tensor_text, verdict_text
from sbp.passes.physical.program import Box
from sbp.passes.program.names import without_indices
from sbp.passes.render.program_data import line_data
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

Lines = Mapping[str, Mapping[str, Any]]
"""By line, such as "gpt.py:41", the text around it."""


def lines_of(plan: PlanData) -> Lines:
    """The user's lines in a plan."""
    if plan.stages:
        return {where: line for p in plan.stages for where, line in lines_of(p).items()}
    if plan.physical is None:
        return {} if plan.program is None else dict(plan.program.get("lines", {}))
    found = (s.source if isinstance(s, Box) else s.node.source for s, _ in plan.physical.walk())
    return {str(s): line_data(s) for s in found if s.file}


def same_lines(a: Lines, b: Lines) -> dict[str, str]:
    """What lines of one program are called in another.

    A line is the nearest one with the same text; one whose text is not there has moved with the line before
    it that is.

    >>> line = lambda first, *text: {"first": first, "text": text}
    >>> a = {"f.py:3": line(3, "h = x @ w"), "f.py:4": line(4, "return h")}
    >>> b = {"f.py:3": line(3, "h = annotate(x @ w, B)"), "f.py:5": line(5, "return h")}
    >>> same_lines(a, b)
    {'f.py:3': 'f.py:3', 'f.py:4': 'f.py:5'}
    """
    texts: dict[tuple[str, str], list[int]] = {}
    for where in b:
        file, number = _place(where)
        texts.setdefault((file, _text(b, where)), []).append(number)
    found: dict[str, str] = {}
    moved: dict[str, int] = {}
    for where in sorted(a, key=_place):
        file, number = _place(where)
        if text := _text(a, where):
            # Lines that are written alike have moved as what is before them.
            expected = number + moved.get(file, 0)
            near = min(texts.get((file, text), ()), key=lambda n: abs(n - expected), default=None)
            if near is not None:
                moved[file] = near - number
        found[where] = f"{file}:{number + moved.get(file, 0)}"
    return found


def _place(where: str) -> tuple[str, int]:
    file, _, number = where.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def _text(lines: Lines, where: str) -> str:
    """A line without white space around it; "" for none."""
    line = lines[where]
    at = _place(where)[1] - line["first"]
    return str(line["text"][at]).strip() if 0 <= at < len(line["text"]) else ""


MOST_LISTED = 20
"""Leaves that only one plan has, of arguments and of results."""
Total = tuple[Collective, int, float, float]
NO_LINES: Mapping[str, str] = MappingProxyType({})


def row_key(c: Collective, lines: Mapping[str, str] = NO_LINES) -> Hashable:
    """What a reader would call the same in two plans.

    Arguments:
      lines: what its line is called in the other plan, if its file was edited in between.
    """
    where = lines.get(c.source, c.source)
    return c.kind, without_indices(c.tensor), c.shape, c.dtype, c.before, c.after, c.axes, where


def _totals(plan: PlanData, lines: Mapping[str, str] = NO_LINES) -> dict[Hashable, Total]:
    """Collectives that a reader would call the same, with times, bytes and seconds."""
    out: dict[Hashable, Total] = {}
    for c in plan.collectives:
        key = row_key(c, lines)
        first, times, wire, seconds = out.get(key, (c, 0, 0.0, 0.0))
        out[key] = first, times + c.count, wire + c.wire_bytes, seconds + c.seconds
    return out


def diff_text(a: PlanData, b: PlanData, names: tuple[str, str] = ("a", "b")) -> str:
    """The difference of two plans as text; collectives that both have are not listed."""
    lines = [
        f"{names[0]}: {a.name} on {a.placement}, {a.hardware.name}",
        f"{names[1]}: {b.name} on {b.placement}, {b.hardware.name}",
        "",
    ]
    figures: list[tuple[str, Callable[[PlanData], float], Callable[[float], str]]] = [
        ("collectives", lambda p: sum(c.count for c in p.collectives), lambda x: f"{x:.0f}"),
        ("wire", lambda p: p.wire_bytes, bytes_text),
        ("time", lambda p: p.seconds, seconds_text),
        ("memory", lambda p: p.memory_bytes, bytes_text),
    ]
    if a.overlaps or b.overlaps:
        figures[3:3] = [
            ("overlapped", lambda p: p.step_seconds, seconds_text),
            ("exposed", lambda p: p.exposed_seconds, seconds_text),
        ]
    for name, figure, text in figures:
        x, y = figure(a), figure(b)
        change = "" if x == y else f"  ({100 * (y - x) / x:+.1f} %)" if x else "  (new)"
        lines.append(f"{name:<12} {text(x):>10} -> {text(y):>10}{change}")
    if a.stages and b.stages:
        lines.append(f"{'schedule':<12} {_schedule(a)} -> {_schedule(b)}")
    lines.append(f"{'plan':<12} {verdict_text(a)} -> {verdict_text(b)}")
    lines += _collectives(a, b, names) + _signatures(a, b)
    return "\n".join(lines)


def _schedule(plan: PlanData) -> str:
    """The name of a schedule, and its bubble."""
    if plan.schedule is None or plan.timeline is None:
        return "none"
    return f"{plan.schedule.name}, bubble {plan.timeline.bubble_fraction:.1%}"


def _collectives(a: PlanData, b: PlanData, names: tuple[str, str]) -> list[str]:
    ours, theirs = _totals(a, same_lines(lines_of(a), lines_of(b))), _totals(b)
    rows = []
    for key in {**ours, **theirs}:
        first = theirs.get(key) or ours[key]
        times = (theirs[key][1] if key in theirs else 0) - (ours[key][1] if key in ours else 0)
        wire = (theirs[key][2] if key in theirs else 0.0) - (ours[key][2] if key in ours else 0.0)
        seconds = (theirs[key][3] if key in theirs else 0.0) - (ours[key][3] if key in ours else 0.0)
        if times or wire:
            rows.append((seconds, wire, times, first[0]))
    if not rows:
        return ["", "the same collectives"]
    lines = ["", f"what {names[1]} does more (+) or less (-) than {names[0]}"]
    for seconds, wire, times, c in sorted(rows, key=lambda r: (-abs(r[0]), str(r[3]))):
        sign = "+" if wire >= 0 else "-"
        lines.append(
            f"  {sign} {abs(times) or '':>3} {kind_text(c.kind):<14} "
            f"{bytes_text(abs(wire)):>8} {seconds_text(abs(seconds)):>8}  "
            f"{c.source:<14} {without_indices(c.tensor)} {tensor_text(c)} "
            f"{format_sbp(c.before)} -> {format_sbp(c.after)} over {over_text(c)}"
        )
    return lines


def _signatures(a: PlanData, b: PlanData) -> list[str]:
    """Leaves of arguments and results with other signatures."""
    lines = []
    for title, pairs in changed_signatures(a, b).items():
        both = [f"  {path}  {old} -> {new}" for path, old, new in pairs if old and new]
        lines += ["", f"{title} with other signatures", *both] if both else []
        for sign, which in (("-", 1), ("+", 2)):
            only = [pair for pair in pairs if pair[which] and not pair[3 - which]]
            lines += [f"  {sign} {pair[0]} {pair[which]}" for pair in only]
    return lines


def changed_signatures(a: PlanData, b: PlanData) -> dict[str, list[tuple[str, str, str]]]:
    """Arguments and results with other signatures: (path, before, after), "" where one plan has none such."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for title, before, after in (
        (
            "arguments",
            dict(zip(a.in_paths, a.in_sbp, strict=True)),
            dict(zip(b.in_paths, b.in_sbp, strict=True)),
        ),
        (
            "results",
            dict(zip(a.out_paths, a.out_sbp, strict=True)),
            dict(zip(b.out_paths, b.out_sbp, strict=True)),
        ),
    ):
        both = [p for p in before if p in after and before[p] != after[p]]
        # Two signatures as one, so that leaves with the same change are one line.
        pairs = collapse(both, [(*before[p], *after[p]) for p in both], [*before])
        n = a.placement.ndim
        rows = [
            *((path, format_sbp(nd[:n]), format_sbp(nd[n:])) for path, nd, _ in pairs),
            *((p, format_sbp(before[p]), "") for p in [p for p in before if p not in after][:MOST_LISTED]),
            *((p, "", format_sbp(after[p])) for p in [p for p in after if p not in before][:MOST_LISTED]),
        ]
        found[title] = rows
    return found
