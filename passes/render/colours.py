"""The colours of everything that shows a plan: pages, pictures, timelines, tables, terminals.

Dark text stands on every fill, on light and on dark paper; borders are read on both. Readers who see no red
or no green tell the fills of collectives apart (`tests/passes/render/test_colours.py` simulates them); the
second cue, where there is no room for the name, is a code of a few letters.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sbp.passes.explain.words import kind_text
from sbp.passes.program.names import PHASES
from sbp.passes.schedule.actions import Kind


class Mark(NamedTuple):
    """How something is coloured.

    Arguments:
      fill, border: as #rrggbb.
      code: its name in a few letters.
    """

    fill: str
    border: str
    code: str = ""


COLLECTIVES: Mapping[str, Mark] = {
    "all_reduce": Mark("#df8f79", "#b35c45", "AR"),
    "all_gather": Mark("#62aaf9", "#0b78c4", "AG"),
    "reduce_scatter": Mark("#e9d475", "#837503", "RS"),
    "all_to_all": Mark("#e36d94", "#cc3e75", "A2A"),
    "ragged_all_to_all": Mark("#e36d94", "#cc3e75", "RA2A"),
    "permute": Mark("#abf7bc", "#258547", "PM"),
    "send": Mark("#83d2ff", "#097da8", "SD"),
}
"""By kind."""

OPS = Mark("#ffffff", "#9aa5b1")
"""What computes."""

KERNELS: Mapping[str, Mark] = dict(
    zip(
        (*PHASES, "loop", "kernel"),
        (
            Mark("#cfd8e1", "#66727f", "F"),
            Mark("#aebccb", "#66727f", "B"),
            Mark("#e1e6eb", "#7b8794", "U"),
            Mark("#bfcad5", "#66727f", "L"),
            Mark("#cfd8e1", "#66727f", "K"),
        ),
        strict=True,
    )
)
"""By phase: greys, so that what has a colour is sent."""

ACTIONS: Mapping[Kind, Mark] = {
    Kind.F: Mark("#9fcdfb", "#0b78c4", "F"),
    Kind.B: Mark("#eda892", "#b35c45", "B"),
    Kind.I: Mark("#f6e48f", "#837503", "I"),
    Kind.W: Mark("#c9fbd4", "#258547", "W"),
    Kind.SEND_F: Mark("#62aaf9", "#097da8"),
    Kind.SEND_B: Mark("#e36d94", "#cc3e75"),
}
"""Of the actions of a schedule."""


def mark_of(kind: str) -> Mark:
    """That of a collective, or of "ops"."""
    return COLLECTIVES.get(kind, OPS)


def every_mark() -> dict[str, dict[str, Any]]:
    """All of them as a page is given them, by the names that its data has for them."""
    words = {kind: kind_text(kind) for kind in COLLECTIVES}
    named = {**COLLECTIVES, **KERNELS, **{kind.value: mark for kind, mark in ACTIONS.items()}}
    return {name: {**mark._asdict(), "word": words.get(name, name)} for name, mark in named.items()}


def marks_css() -> str:
    """A rule for each."""
    return "\n".join(
        f".{name}{{--fill:{mark['fill']};--border:{mark['border']}}}" for name, mark in every_mark().items()
    )
