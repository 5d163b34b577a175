"""Checks what a rule declares of a collective: its kind, its bytes, and the place in its reason."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from string import Formatter

from sbp.errors import Problem

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
"""The collectives between the devices of one placement."""


@cache
def unknown_places(reason: str) -> tuple[str, ...]:
    """The places of a reason that nothing fills in; only `{axes}` is known.

    >>> unknown_places("needs {rows} of {axes}")
    ('{rows}',)
    """
    try:
        places = [name for _, name, _, _ in Formatter().parse(reason) if name is not None]
    except ValueError:
        return ("a brace that is not closed",)
    return tuple(dict.fromkeys(f"{{{name}}}" for name in places if name != "axes"))


def reason_problem(where: str, reason: str) -> Iterator[Problem]:
    """The problem of the places of a reason, if there is one."""
    if unknown := unknown_places(reason):
        why = f"nothing fills in {' and '.join(unknown)}: a plan knows the names of the axes alone"
        fix = "write numbers into the text (an f-string with {{axes}}), and braces of its own twice"
        yield Problem("rule", where, repr(reason), "{axes}, or no place", why, fix)


def communication_problems(kind: str, wire_bytes: float, reason: str) -> Iterator[Problem]:
    """The problems of a `Communication`, by its fields."""
    if kind not in COLLECTIVES:
        legal, why = ", ".join(COLLECTIVES), "the plan lists it among the collectives of these kinds"
        plain = str(kind).lower().replace("-", "").replace("_", "")
        close = next((k for k in COLLECTIVES if k.replace("_", "") == plain), "")
        other = "'all_reduce' for a sum, 'permute' to a neighbour"
        fix = f"did you mean {close!r}?" if close else other
        yield Problem("rule", "Communication(kind=...)", repr(kind), legal, why, fix)
    if not wire_bytes >= 0:
        why, fix = "it is what one device sends", "0 for nothing: the plan then leaves it out"
        yield Problem("rule", "Communication(wire_bytes=...)", str(wire_bytes), "0 or more bytes", why, fix)
    yield from reason_problem("Communication(reason=...)", reason)
