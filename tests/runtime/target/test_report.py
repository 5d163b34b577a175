"""Plan against compiled program: on CPU devices, which need no plugin, and from texts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.errors import ArgumentError
from sbp.rates.chips import CHIPS
from sbp.runtime.report.contents import contents_text
from sbp.runtime.report.program_contents import percent
from sbp.runtime.report.report import ProgramReport, report_of, simulated_step
from sbp.runtime.target.collective_sites import CompiledCollective
from sbp.runtime.target.comparison import MemoryUse, compare

GRID = sbp.placement("cpu", shape=(2, 4))


def loss(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    up, down = params
    return jnp.square(jnp.tanh(x @ up) @ down).mean()


def step(params: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, x)
    return tuple(p - 0.1 * g for p, g in zip(params, grads, strict=True)), value


ARGS = (
    (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)),
    jax.ShapeDtypeStruct((128, 64), jnp.float32),
)


@pytest.fixture(scope="module")
def program() -> sbp.Program:  # type: ignore[type-arg]
    params = ([B, S(1)], [B, S(0)])
    return sbp.compile(step, GRID, in_sbp=(params, [S(0), B]), donate_argnums=0)


@pytest.fixture(scope="module")
def report(program: sbp.Program) -> ProgramReport:  # type: ignore[type-arg]
    return program.report(*ARGS)


def test_every_row_has_its_instructions(report: ProgramReport) -> None:
    assert report.collectives and report.unexplained_differences == ()
    assert abs(report.byte_error) < 1e-6
    named = {c.instruction for c in report.collectives}
    assert [r.row for r in report.rows] == [c.name for c in report.plan.collectives]
    for row in report.rows:
        assert row.instructions and set(row.instructions) <= named and row.explained
    assert {row for c in report.collectives for row in c.rows} == {r.row for r in report.rows}


def test_what_a_cpu_has_no_word_on(report: ProgramReport) -> None:
    assert report.simulation is None and report.memory is not None
    assert not any(c.asynchronous for c in report.collectives)
    assert report.memory.peak == report.memory.arguments + report.memory.temporary + (
        report.memory.results - report.memory.aliased
    )
    assert report.memory.aliased > 0  # the parameters are donated


def test_text_says_what_is_asked_first(report: ProgramReport) -> None:
    lines = str(report).splitlines()
    assert lines[0] == "step on cpu(data=2 x model=4), compiled by XLA for cpu"
    figures = [line.split("  ")[0] for line in lines[1:6]]
    assert figures == ["sent per device", "memory per device", "collectives", "step", "unexplained"]
    assert "not simulated" in lines[4] and lines[5].endswith("nothing")
    assert any("all-reduce over" in line and "row" in line for line in lines)
    assert max(map(len, contents_text(report.contents, 60).splitlines())) <= 60
    assert repr(report).startswith("<ProgramReport step on cpu(data=2 x model=4): ")


def test_files(report: ProgramReport, tmp_path: Path) -> None:
    for suffix in (".json", ".html", ".txt"):
        report.save(tmp_path / f"report{suffix}")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["format"] == "sbp-report" and data["unexplained"] == []
    assert data["wire_bytes"]["compiled"] == report.wire_bytes
    assert [r["row"] for r in data["rows"]] == [r.row for r in report.rows]
    page = (tmp_path / "report.html").read_text()
    data = json.loads(page.split('id="plan-data">')[1].split("</script>")[0])
    assert [t["title"] for t in data["tables"]][:2] == ["Compiled for cpu", "Compiled collectives"]
    assert len(data["tables"][1]["rows"]) > 1
    assert "Compiled" not in (report._repr_html_()) and "<table" in report._repr_html_()
    with pytest.raises(ArgumentError, match=r"\.json, \.html, \.txt"):
        report.save(tmp_path / "report.trace.json")
    with pytest.raises(ArgumentError, match="suffix"):
        report.save(tmp_path / "report.pdf")


class Made:
    """An executable that is a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> None:
        return None


def test_what_is_not_as_planned(program: sbp.Program) -> None:  # type: ignore[type-arg]
    """A program without some of the plan's rows, with one of another size, and with one of nobody's."""
    text = program.lower(*ARGS).compile().as_text()
    assert text is not None
    plan = program.plan(*ARGS)
    first, last = plan.collectives[0].name, plan.collectives[-1].name
    lost = re.sub(rf"sbp\.{last}\b", "elsewhere", text)
    found = compare(plan, Made(lost), None, lambda: f"sbp.{last}/psum")
    fate = {r.row: r for r in found.rows}
    assert fate[last].removed and fate[last].explained and "XLA knows the value" in fate[last].remark
    nobody = [c for c in found.collectives if not c.rows]
    assert len(nobody) == 1 and nobody[0].instruction in found.unexplained_differences[0]
    unread = compare(plan, Made(lost), None, lambda: "")
    assert {r.row: r for r in unread.rows}[last].remark == "removed: nothing reads it"
    cheaper = replace(
        plan,
        collectives=tuple(
            replace(c, wire_bytes=c.wire_bytes / 2) if c.name == first else c for c in plan.collectives
        ),
    )
    wrong = compare(cheaper, Made(text), None, lambda: "")
    assert any(x.startswith(f"{first}: ") and "planned" in x for x in wrong.unexplained_differences)
    assert wrong.memory is None and wrong.fits


def test_what_is_sent_again_to_save_memory(program: sbp.Program) -> None:  # type: ignore[type-arg]
    text = program.lower(*ARGS).compile().as_text()
    assert text is not None
    line = next(x for x in text.splitlines() if " all-reduce(" in x and "f32[" in x)
    (name,) = re.findall(r"(%[\w.-]+) = ", line)
    twice = text.replace(line, f"{line.replace('ROOT ', '')}\n{line.replace(name, name + '.remat')}")
    found = compare(program.plan(*ARGS), Made(twice), None, lambda: "")
    assert found.byte_error > 0.01 and not found.unexplained_differences
    remarks = [r.remark for r in found.rows if name[1:] in r.instructions]
    assert remarks and all("sends it again" in remark for remark in remarks)


def test_twins_are_sent_once(program: sbp.Program) -> None:  # type: ignore[type-arg]
    """Two rows that move the same tensor alike: XLA keeps one of them."""
    plan = program.plan(*ARGS)
    physical = plan.physical
    assert physical is not None
    boxes = [i for i, s in enumerate(physical.steps) if type(s).__name__ == "Box" and s.rows]
    twin = physical.steps[boxes[0]]
    doubled = (*physical.steps, twin)
    extra = replace(plan.collectives[0], name=f"row{len(plan.collectives)}")
    two = replace(plan, collectives=(*plan.collectives, extra), physical=replace(physical, steps=doubled))
    compiled = program.lower(*ARGS).compile()
    found = compare(two, compiled, None, lambda: f"sbp.{extra.name}")
    fate = found.rows[-1]
    assert fate.removed and fate.explained
    assert fate.remark == f"removed: equal to {plan.collectives[0].name}, which XLA sends once for both"
    assert fate.instructions == found.rows[0].instructions


def test_a_type_that_xla_does_not_send() -> None:
    """XLA on CPUs adds up 16 bits as 32: other bytes, and the reason is known."""
    line = sbp.placement("cpu", shape=(4,))
    product = sbp.compile(jnp.matmul, line, in_sbp=([S(1)], [S(0)]), out_sbp=[B])
    x = jax.ShapeDtypeStruct((64, 64), "bfloat16")
    report = product.report(x, x)
    assert report.byte_error == pytest.approx(1.0) and report.unexplained_differences == ()
    (fate,) = report.rows
    assert fate.changed and fate.remark == "XLA sends f32 for bfloat16, and converts before or after"
    assert "sent otherwise" in str(report)


def test_percent_and_memory() -> None:
    assert percent(-0.051) == "-5.1 %"
    assert MemoryUse(10, 8, 5, 8).peak == 15
    c = CompiledCollective("all-reduce.1", "all_reduce", 8, 1, 10.0, True, ("f32",), (), "")
    assert c.seconds is None and c.kernels_beside == ()


def test_equal_branches_share_their_code() -> None:
    """A branch that stands in two conds is one function of the lowered program, with the names of one row."""

    def flip(x: jax.Array) -> jax.Array:
        return jnp.flip(x, 0)

    def twice(x: jax.Array, yes: jax.Array) -> jax.Array:
        once = jax.lax.cond(yes, flip, lambda a: 2 - a, x)
        return jax.lax.cond(yes, flip, lambda a: 3 - a, jnp.sin(once))

    line = sbp.placement("cpu", shape=(4,))
    report = sbp.compile(twice, line, in_sbp=([S(0)], [B]), out_sbp=[S(0)]).report(
        jax.ShapeDtypeStruct((4096, 256), "float32"), jax.ShapeDtypeStruct((), "bool")
    )
    assert len(report.rows) == 2 and report.unexplained_differences == ()
    assert not any(r.removed for r in report.rows)


def test_the_page_has_the_simulated_step(program: sbp.Program, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """Its parts are the simulated step, its rows those of the plan, and it stands beside the estimates.

    The text of a CPU's program is simulated as if it were a GPU's.
    """
    lowered = program.lower(*ARGS)
    compiled = lowered.compile()
    report = report_of(program.plan(*ARGS), compiled, CHIPS["h100"], lambda: lowered.as_text(debug_info=True))
    step = simulated_step(report)
    assert step is not None and report.simulation is not None
    parts = step.kernel_seconds + step.exposed_seconds + step.waiting_seconds + step.unclaimed_seconds
    assert parts == pytest.approx(report.simulation.seconds)
    assert [c.name for c in step.collectives if c.name] == [c.name for c in report.plan.collectives]
    assert all(c.seconds or c.remark for c in step.collectives)
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="plan-data">')[1].split("</script>")[0])
    assert data["beside"]["word"] == "simulated" and "measured" in data["rows"]
    _, drawn = data["timelines"]  # the first one is the plan's
    assert "simulated for NVIDIA H100" in drawn["name"] and set(drawn["spans"]["lane"]) == {0, 1}
