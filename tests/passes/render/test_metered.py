"""Every collective is on the page and in the text: counts and bytes are those of the compiled program."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

import sbp
from benchmarks import cases
from sbp.passes.face import Plan
from sbp.passes.render.text import Shown, plan_text
from sbp.passes.render.web_page import plan_page
from sbp.runtime.hlo.meter import Meter, read_hlo

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
DIGITS = 0.006
"""Relative: of figures with three digits."""


@dataclass(frozen=True)
class Metered:
    """What a program sends, read off the program.

    Arguments:
      names: those of all that is sent, as it is handed to XLA.
      compiled: where some of it is sent as one.
    """

    names: set[str]
    compiled: Meter

    def check(self, rows: Iterable[tuple[str, int, float]], digits: float) -> None:
        """Rows of kinds, counts and bytes say what is sent: to the byte, and as many as there are names."""
        found: dict[str, tuple[int, float]] = {}
        for kind, n, size in rows:
            before = found.get(kind, (0, 0.0))
            found[kind] = before[0] + n, before[1] + size
        compiled = self.compiled.by_kind()
        sizes = {kind: wire_bytes for kind, (_, wire_bytes) in compiled.items()}
        assert {kind: size for kind, (_, size) in found.items()} == pytest.approx(sizes, rel=digits)
        # XLA sends some as one: never more than are named.
        assert all(compiled[kind][0] <= n for kind, (n, _) in found.items())
        assert sum(n for n, _ in found.values()) >= len(self.names)


Made = tuple[Plan, Metered]


def small_gpt(choice: str, shape: tuple[int, ...]) -> Made:
    return of_case(cases.gpt_case(choice, shape, 1), shape)


def of_case(case: cases.Case, shape: tuple[int, ...]) -> Made:
    args = case.make()
    program = sbp.compile(
        case.step, sbp.placement("cpu", shape=shape), in_sbp=case.in_sbp, donate_argnums=(0, 1)
    )
    return program.plan(*args), metered(program.lower(*args))


def metered(lowered: Any) -> Metered:
    """What the program sends by the names that it hands to XLA, and what XLA has compiled."""
    text = lowered.as_text(debug_info=True)
    named = re.findall(r"sbp\.((?:row\d+\+?)+)", text)
    names = {row for rows in named for row in rows.strip("+").split("+")}
    return Metered(names, read_hlo(lowered.compile().as_text()))


PROGRAMS: dict[str, Callable[[], Made]] = {
    "GPT on 2 x 4": lambda: small_gpt("2d", (2, 4)),
    "ZeRO": lambda: small_gpt("zero", (8,)),
    "a table by rows": lambda: of_case(cases.embedding_case("rows", (8,), 1), (8,)),
    "a scan": lambda: of_case(cases.scan_case("zero", (8,), 3), (8,)),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def made(request: pytest.FixtureRequest) -> Made:
    return PROGRAMS[request.param]()


@pytest.mark.some(1)
def test_the_page_has_all_that_is_sent(made: Made) -> None:
    plan, meter = made
    data = json.loads(plan_page(plan).split('id="plan-data">')[1].split("</script>")[0])
    rows, sent = data["rows"], data["sent"]
    assert {name for names in rows["names"] for name in names.split("+")} == meter.names
    assert sum(rows["times"]) == sum(c.count for c in plan.collectives)
    meter.check(zip(rows["kind"], rows["times"], rows["bytes"], strict=True), 1e-4)
    meter.check(zip(sent["kind"], sent["count"], sent["bytes"], strict=True), 1e-4)  # in the graph
    meter.check(data["figures"]["kinds"], 1e-4)  # on the first screen
    assert data["figures"]["wire_bytes"] == pytest.approx(meter.compiled.wire_bytes, rel=1e-4)
    drawn = {r for t in data["timelines"] for rows in t["spans"]["rows"] for r in rows}
    assert drawn == set(range(len(rows["kind"])))


def test_the_text_has_all_that_is_sent(made: Made) -> None:
    """In its sums, and row by row: of a text so narrow that each row is a list."""
    plan, meter = made
    text = plan_text(plan, 60, Shown(rows=math.inf))
    (line,) = re.findall(r"^collectives +(.*(?:\n {2,}.*)*)", text, re.MULTILINE)
    sums = re.findall(r"(\d+)\s+([a-z-]+)\s+([\d.]+)\s+(B|kB|MB|GB)", line)
    listed = [
        re.sub(r"\s+", " ", row) for row in re.split(r"\n(?=  \S)", text[: text.index("\ncollectives")])
    ]
    rows = [
        re.match(r" ?(?:(\d+) x )?([a-z-]+) of .*? ([\d.]+) (B|kB|MB|GB) sent,", row) for row in listed[1:]
    ]
    for said in (sums, [row.groups("1") for row in rows if row is not None]):
        figures = [(k.replace("-", "_"), int(n), float(size) * UNITS[unit]) for n, k, size, unit in said]
        meter.check(figures, DIGITS)
        assert sum(n for _, n, _ in figures) == sum(c.count for c in plan.collectives)
