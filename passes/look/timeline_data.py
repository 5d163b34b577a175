"""When what runs in a step, and what a device holds meanwhile, as the page of a plan draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sbp.passes.explain.plan import Collective
from sbp.passes.explain.words import kind_text
from sbp.passes.look.outline import Outline
from sbp.passes.program.names import PHASES

LANES = ("kernels", "network")
SPAN = ("lane", "from", "to", "kind", "label", "title", "stage", "row")


def step_timeline(
    outline: Outline, every: Sequence[Collective], row_of: Mapping[str, int], seconds: float
) -> dict[str, Any] | None:
    """The simulated step of a program; None where nothing runs beside anything.

    Arguments:
      every: the collectives of the plan.
      row_of: the row that is shown for each, by its name.
      seconds: of the step.
    """
    program = outline.program
    if "timeline" not in program:
        return None
    at_leaf = [outline.leaf.get(id(step), 0) for step in program["steps"]]
    spans = list[tuple[Any, ...]]()
    # Kernels of a part of the program that follow each other are one span.
    kernels = ((start, end, part_of(outline, at_leaf[i])) for start, end, i in program["timeline"]["kernels"])
    for (phase, title), some in groupby(kernels, key=lambda x: x[2]):
        own = list(some)
        for start, end in _runs([(a, b) for a, b, _ in own]):
            spans.append((0, start, end, phase, title, f"{phase}: {title}", 0, None))
    for start, end, rows in program["timeline"]["sent"]:
        first = every[rows[0]]
        more = f" and {len(rows) - 1} more, sent as one" if len(rows) > 1 else ""
        title = f"{kind_text(first.kind)} of {first.tensor}{more}"
        spans.append((1, start, end, first.kind, kind_text(first.kind), title, 0, row_of[first.name]))
    course = program["course"]
    held = list(zip(course["seconds"], course["bytes"], strict=True)) if "seconds" in course else []
    return {
        "name": "one step on one device, simulated in the order of XLA's scheduler",
        "seconds": seconds,
        "lanes": list(LANES),
        "spans": {name: [s[k] for s in spans] for k, name in enumerate(SPAN)},
        "held": [held] if held else [],
        "holder": "the device",
    }


def part_of(outline: Outline, leaf: int) -> tuple[str, str]:
    """The phase of a line, and the part of it, such as a layer."""
    at = leaf
    around = [at]
    while outline.groups[at].parent > 0:
        at = outline.groups[at].parent
        around.append(at)
    kinds = [outline.groups[k] for k in reversed(around)]
    phase = next((g.title for g in kinds if g.kind == "phase"), PHASES[0])
    inside = [g.title for g in kinds if g.kind != "phase"]
    return phase, inside[0] if inside else phase


def _runs(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of which those that touch are one."""
    found = list[tuple[float, float]]()
    for start, end in spans:
        if found and start - found[-1][1] <= 1e-12:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def memory_data(program: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a device holds, over the step and at the peak; None where that is not known."""
    if "peak" not in program:
        return None
    names, values = program["names"], program["values"]
    live = sorted(program["peak"], key=lambda x: -x[2])
    return {
        "course": program.get("course", {}).get("bytes", []),
        "between_bytes": program["between_bytes"],
        "live": {
            "name": [names[str(v)] for v, _, _ in live],
            "type": [f"{values[str(v)][1]}[{', '.join(map(str, values[str(v)][0]))}]" for v, _, _ in live],
            "sbp": [nd for _, nd, _ in live],
            "bytes": [n for _, _, n in live],
        },
    }
