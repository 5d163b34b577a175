"""What the tests of messages share: one that is whole, and the kinds of all problems of a call."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from sbp.errors import SbpError

Call = Callable[[], Any]
# name -> (the call, its error, where, got, legal, why, try)
Messages = dict[str, tuple[Call, type[SbpError], str, str, str, str, str]]
# What a text leaves open: a line of a test, a time of the cost model.
PLACES = {
    "{hex}": r"[0-9a-f]{32}",
    "{line}": r"(?:test_\w+|rule_authors)\.py:\d+",
    "{choices}": r".+",
    "{cost}": r"[\d.]+ [mun]?s",
}


def pattern(text: str) -> str:
    """A text as a regular expression, with its places open."""
    out = re.escape(text)
    for place, form in PLACES.items():
        out = out.replace(re.escape(place), form)
    return out


def check_message(call: Call, error: type[SbpError], *texts: str) -> None:
    """Asserts that a call fails with one problem, and compares every row of its message."""
    with pytest.raises(SbpError) as caught:
        call()
    assert type(caught.value) is error
    lines = str(caught.value).splitlines()
    heads = ("", "  got    ", "  legal  ", "  why    ", "  try    ")
    assert len(lines) == len(heads)
    for line, head, text in zip(lines, heads, texts, strict=True):
        assert re.fullmatch(re.escape(head) + pattern(text), line), line


def kinds(call: Call) -> list[tuple[str, str]]:
    """(kind, beginning of where) of every problem of a call."""
    with pytest.raises(SbpError) as caught:
        call()
    return [(p.kind, p.where.split(":")[0]) for p in caught.value.problems]
