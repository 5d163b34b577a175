"""Published layouts with stages, of a small Llama."""

from dataclasses import replace

import pytest

from benchmarks import layouts, pipelined
from models import llama
from sbp.hardware import hardware_for

SMALL = replace(
    llama.PRESETS["70b"], layers=8, width=256, heads=16, kv_heads=8, hidden=512, vocabulary=1024, sequence=256
)


def test_layouts_use_all_devices() -> None:
    assert all(ways.gpus == 1024 for _, ways in pipelined.layouts(1024))
    assert [ways.dp for _, ways in pipelined.layouts(1024)] == [1, 32, 32, 8]


@pytest.mark.slow
def test_stages_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = tuple(
        (name, replace(ways, tp=min(ways.tp, 2), pp=min(ways.pp, 2), vp=1, cp=1))
        for name, ways in pipelined.HAND_WAYS
    )
    monkeypatch.setattr(pipelined, "HAND_WAYS", ways[:2])
    rows = list(pipelined.rows(SMALL, 8, 32, 2, hardware_for("h100")))
    assert [row.estimate is not None for row in rows] == [True] * 4
    whole, _, staged, kept = (row.estimate for row in rows)
    assert whole is not None and staged is not None and kept is not None
    assert whole.bubble == 0.0 < staged.bubble and kept.seconds < staged.seconds
    assert rows[2].memory_bytes < rows[3].memory_bytes
    cells = rows[2].line(1e9, 1e15).split(" | ")
    assert (
        cells[0] == "| Megatron, tensor 8 x pipeline 4: dp2 tp2 pp2, computes all again" and len(cells) == 6
    )


def test_what_does_not_fit_is_said() -> None:
    hardware = replace(hardware_for("h100"), memory_bytes=1e6)
    row = next(pipelined.rows(SMALL, 128, 1024, 4, hardware))
    assert row.estimate is None and row.line(1.0, 1.0).endswith("| does not fit |")


def test_a_scan_in_stages_stands_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO with stages is planned and priced as the others are."""
    monkeypatch.setattr(layouts, "CONFIG", replace(SMALL, fused=None))
    asked = next(row for row in layouts.layouts(64, 64) if row.stages)
    assert asked.text == "AUTO:4x2x8, 4 stages, 32 micro-batches, 100% kept"
    row = layouts.planned(asked, 1, layouts.arguments(64), 60.0)
    assert row.plan is not None and not row.trouble
    cells = layouts.line(row, 64, 1e12).split(" | ")
    assert cells[0] == f"| {asked.text}" and len(cells) == 8


def test_many_devices_hold_copies() -> None:
    """AUTO is asked for groups of hosts with a copy each where there are more than one of them."""
    assert [row.text for row in layouts.layouts(1024, 1024) if row.shape == (8, 128)] == [
        "AUTO:8x128, 1 micro-batches, 40% kept"
    ]
    assert all(row.shape != (1, 128) for row in layouts.layouts(128, 1024))


def test_the_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed around the rows, whose plans take minutes."""
    monkeypatch.setattr(pipelined, "rows", lambda *_: [pipelined.PipelinedRow("one", None, 1e9, "why")])
    layouts.main(["--devices", "128", "--tables", "stages"])
    assert capsys.readouterr().out.splitlines()[-1] == "| one | | | | 1.0 | why |"
