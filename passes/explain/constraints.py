"""What constraints would cost or save that a plan leaves out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import eq

from sbp.errors import SbpError
from sbp.passes.evaluated import figures_of
from sbp.passes.explain.choices import changes
from sbp.passes.explain.plan import PlanData
from sbp.passes.plan.constraints import Ignored
from sbp.passes.program.graph import Source

SECONDS = 20.0
"""How long plans are made that follow one line each; then no other is begun."""


def cost_notes(
    ignored: Sequence[Ignored], plan: PlanData, planned: Callable[[Callable[[Source], bool]], PlanData]
) -> list[str]:
    """A remark for each line whose constraints a plan leaves out: what it would take to follow them.

    Arguments:
      planned: makes the plan that follows the constraints of some lines.
    """
    lines: dict[Source, list[Ignored]] = {}
    for i in ignored:
        lines.setdefault(i.source, []).append(i)
    return list(_each(list(lines.items()), plan, planned))


def _each(
    lines: Sequence[tuple[Source, Sequence[Ignored]]],
    plan: PlanData,
    planned: Callable[[Callable[[Source], bool]], PlanData],
) -> Iterator[str]:
    until = time.monotonic() + SECONDS
    for k, (source, asked) in enumerate(lines):
        if time.monotonic() > until:
            yield f"constraints of {len(lines) - k} more lines were left out, and not priced"
            return
        more = f" and {len(asked) - 1} more" if len(asked) > 1 else ""
        try:
            found = planned(partial(eq, source))
        except SbpError as e:
            yield f"left out: {asked[0]}{more}: it could not be followed: {e.problems[0].why}"
            continue
        seconds, overlapped, sent, memory = changes(figures_of(found), figures_of(plan))
        yield (
            f"left out: {asked[0]}{more}: to follow it, {seconds}, {overlapped} with overlap, {sent} sent, "
            f"{memory} at the peak"
        )
