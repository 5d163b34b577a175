"""What XLA makes of the pieces of a pipeline, beside its plan: on CPU devices, which are here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.errors import ArgumentError
from sbp.options import PipelineOptions
from sbp.runtime.pipeline.memory import MemoryWalk, PieceNeeds
from sbp.runtime.pipeline.stage_programs import Slots
from sbp.runtime.report.contents import contents_text
from sbp.runtime.report.report import PipelineReport
from tests.errors.messages import check_message

DEEP, WIDTH, ROWS, MICRO = 4, 128, 1024, 4


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tower(places: Any, ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        with sbp.on(places[i * len(places) // len(ws)]):
            x = jnp.tanh(x @ w)
    with sbp.on(places[-1]):
        return jnp.square(x).mean()


def trained(kind: str, schedule: str = "1f1b", width: int = WIDTH, rows: int = ROWS) -> Any:
    """A pipeline of two stages on 2 x 2 devices each, and what it is called with."""
    whole = sbp.placement(kind, shape=(2, 2, 2), axes=("stage", "data", "model"))

    def step(ws: Any, x: Any) -> Any:
        loss = partial(tower, whole.split("stage"))
        value, grads = sbp.microbatch(jax.value_and_grad(loss), MICRO, batch_args=1)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    options = sbp.Options(pipeline=PipelineOptions(schedule=schedule))
    signatures = [B, S(1)], [S(0), B]
    program = sbp.compile(step, whole, in_sbp=signatures, donate_argnums=0, options=options)
    return program, ([floats(width, width)] * DEEP, floats(rows, width))


@pytest.fixture(scope="module")
def report() -> PipelineReport:
    program, args = trained("cpu")
    found = program.report(*args)
    assert isinstance(found, PipelineReport)
    return found


def test_what_stages_send_is_as_planned(report: PipelineReport) -> None:
    assert [p.stages for p in report.places] == [(0,), (1,)]
    for place in report.places:
        assert place.wire_bytes == pytest.approx(place.plan.wire_bytes, rel=1e-6) and place.wire_bytes > 0
    assert abs(report.byte_error) < 1e-6


def test_pieces_are_those_of_the_schedule(report: PipelineReport) -> None:
    names = [[c.name for c in p.pieces] for p in report.places]
    assert names == [["F0", "B0", "before", "after"], ["F1", "B1", "before", "after"]]
    assert [c.times for c in report.places[0].pieces] == [MICRO, MICRO, 1, 1]
    split, args = trained("cpu", "zb-h1")
    assert [c.name for c in split.report(*args).places[1].pieces] == ["F1", "I1", "W1", "before", "after"]


def test_memory_is_what_lies_there_and_what_runs(report: PipelineReport) -> None:
    """At the peak of the first stage two micro-batches are held, those that 1f1b keeps of it."""
    first, last = report.places
    weights = DEEP // 2 * WIDTH * WIDTH / 2 * 4
    each = ROWS / MICRO / 2 * WIDTH * 4
    assert first.peak is not None and last.peak is not None and first.peak.part.phase == "I"
    kept = 2 * 2 * each  # two activations of each of two micro-batches, at the least
    assert first.peak.slot_bytes >= weights + kept + 2 * weights  # gathered weights, too
    assert first.peak.bytes == first.peak.slot_bytes + first.peak.needs.temporary + first.peak.needs.fresh
    assert report.fits and abs(report.memory_error) < 0.5


def test_what_crosses_is_compiled_once_per_way_and_kind(report: PipelineReport) -> None:
    assert [(w.source, w.target, w.times, w.inside) for w in report.ways] == [
        (0, 1, MICRO, True),
        (1, 0, MICRO, True),
    ]
    assert [w.shard_bytes * w.times for w in report.ways] == [c.wire_bytes for c in report.plan.sends]
    assert len({w.program for w in report.ways}) == 1  # the same shards, the other way


def test_a_walk_counts_what_is_there(report: PipelineReport) -> None:
    """Without what pieces take, the peak of the last stage is what lies in its slots."""
    apart = report.plan.program_stages
    assert apart is not None and report.plan.schedule is not None
    cuts = apart.cuts(True)
    slots = [Slots(c.physical, c.physical.placement.mesh) for c in cuts]
    nothing = {(k, p.part): PieceNeeds(0, 0) for k, c in enumerate(cuts) for p in c.pieces}
    orders = report.plan.schedule.orders
    one_by_one = [a for actions in zip(*orders, strict=True) for a in actions]
    walk = MemoryWalk(cuts, slots, apart.stages, one_by_one, MICRO, nothing)
    held = [p.bytes for p in walk.peaks() if p is not None]
    larger = {k: PieceNeeds(7, 5) if k[0] == 0 else n for k, n in nothing.items()}
    more = [p.bytes for p in MemoryWalk(cuts, slots, apart.stages, one_by_one, MICRO, larger).peaks() if p]
    assert more == [held[0] + 12, held[1]] and min(held) > 0


def test_text_and_files(report: PipelineReport, tmp_path: Path) -> None:
    text = str(report)
    assert text.splitlines()[0].endswith("2 stages, 4 micro-batches, schedule 1f1b, compiled by XLA for cpu")
    assert "not simulated" in text and "0 to 1" in text and "B0" in text
    assert max(map(len, contents_text(report.contents, 60).splitlines())) <= 60
    assert repr(report).startswith("<PipelineReport step on cpu(stage=2 x data=2 x model=2): 2 placements")
    for suffix in (".json", ".html", ".txt"):
        report.save(tmp_path / f"report{suffix}")
    data = json.loads((tmp_path / "report.json").read_text())
    assert [p["wire_bytes"]["compiled"] for p in data["places"]] == [p.wire_bytes for p in report.places]
    page = (tmp_path / "report.html").read_text()
    tables = json.loads(page.split('id="plan-data">')[1].split("</script>")[0])["tables"]
    assert [t["title"] for t in tables][:2] == ["Compiled for cpu", "Compiled: placements"]
    assert "Compiled" not in report._repr_html_() and "<table" in report._repr_html_()
    with pytest.raises(ArgumentError, match=r"\.json, \.html, \.txt"):
        report.save(tmp_path / "report.trace.json")


def test_there_is_no_single_program() -> None:
    program, args = trained("cpu")
    for what, call in {
        "lower": lambda: program.lower(*args),
        "report_of": lambda: program.report_of(None, *args),
    }.items():
        check_message(
            call,
            ArgumentError,
            f"<Program step on cpu(stage=2 x data=2 x model=2)>.{what}(...)",
            "a program with stages",
            "a program of one placement",
            "each piece of a stage is a program of its own",
            "Program.plan(...) says what they do, Program.report(...) what XLA makes of them",
        )
