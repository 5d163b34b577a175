"""The plan of a pipeline as text, as files, and its schedule by search."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.__main__ import main
from sbp.passes.face import Plan
from sbp.passes.pipeline.plan import figures_of
from sbp.passes.render.files import WRITERS
from sbp.passes.render.stage_tables import send_rows, stage_rows
from sbp.passes.schedule.orders import make
from sbp.text.units import seconds_text
from tests.golden import two_stages
from tests.options import options_of

FILE = Path(two_stages.__file__)
STEP = f"{FILE}:step"


def planned(**options: object) -> Plan:
    program = sbp.compile(
        two_stages.step,
        two_stages.step_placement,
        in_sbp=two_stages.step_sbp,
        options=options_of(**options),
    )
    plan = program.plan(*two_stages.step_args())
    assert plan.stages
    return plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_text(plan: Plan) -> None:
    text = str(plan)
    assert text.startswith("step: 2 stages on 2 placements of cpu(stage=2 x data=2), 4 micro-batches")
    assert "schedule 1f1b" in text.split("\n")[0] and max(map(len, text.split("\n"))) <= 160
    # What is sent is called by its op and line, and stands once: among the sends.
    assert re.search(r"4  tanh +float32\[16, 32\] +0 to 1 +\[S\(0\)\] -> \[S\(0\)\] +4.10 kB", text)
    assert "received" not in text and "sent scan" not in text
    assert "placement 0: cpu(data=2), stage 0" in text and "stage 1" in text
    assert "2 (placement 0); 1 (placement 1) micro-batches" in text
    assert [p for p in plan.stages[1].in_paths if p.startswith("from ")] == [
        f"from stage 0: tanh, two_stages.py:{_line('jnp.tanh')}"
    ]


def _line(text: str) -> int:
    lines = FILE.read_text(encoding="utf-8").split("\n")
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_figures(plan: Plan) -> None:
    """By hand: a micro-batch has 16 rows, 8 on each of two devices; a row of 32 floats is 128 bytes."""
    first, last = plan.figures
    # Of tanh its result, or in older versions of JAX two tensors; x is read from the batch.
    assert first.residual_bytes in (8 * 128, 2 * 8 * 128)
    assert last.residual_bytes == 8 * 128 + 8 * 64  # what came from stage 0, and the difference
    assert first.weight_bytes == last.weight_bytes == 16 * 32 * 4
    assert all(s.forward_seconds > 0 and s.weight_seconds > 0 for s in plan.figures)
    assert first.input_seconds == 0 < last.input_seconds  # nobody waits for stage 0
    assert [c.wire_bytes for c in plan.sends] == [4 * 8 * 128] * 2 and {c.count for c in plan.sends} == {4}
    assert plan.wire_bytes == max(p.wire_bytes for p in plan.stages) + 4 * 8 * 128
    assert plan.timeline is not None and plan.seconds > plan.timeline.makespan


def test_without_microbatches() -> None:
    """One placement after the other, and what is sent in between."""

    def forward(weights, x):
        with sbp.on(two_stages.FIRST):
            h = x @ weights["up"]
        with sbp.on(two_stages.LAST):
            return h @ weights["down"]

    weights, x, _ = two_stages.step_args()
    plan = sbp.compile(forward, two_stages.step_placement, in_sbp=([sbp.B], [sbp.S(0)])).plan(weights, x)
    assert plan.stages and plan.schedule is None and plan.timeline is None
    (send,) = plan.sends
    assert (send.count, send.wire_bytes) == (1, 32 * 128)
    assert plan.seconds == pytest.approx(sum(p.seconds for p in plan.stages) + send.seconds)
    assert "one placement after the other" in str(plan) and "stages\n" not in str(plan)
    with pytest.raises(sbp.SbpError, match="without micro-batches"):
        plan.save("plan.trace.json")


def test_stages_are_timed_with_overlap() -> None:
    """On GPUs, where a piece is a program whose collectives run beside its kernels; not on CPUs."""
    devices = sbp.placement("h100", shape=(2, 4), axes=("stage", "data"))
    front, back = devices.split("stage")

    def step(weights, batch):
        def loss(weights, x, y):
            with sbp.on(front):
                h = jnp.tanh(jnp.tanh(x @ weights["up"]) @ weights["up"].T)
            with sbp.on(back):
                return jnp.mean((h @ weights["down"] - y) ** 2)

        return sbp.microbatch(jax.grad(loss), 4, batch_args=(1, 2))(weights, *batch)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    args = {"up": array(4096, 4096), "down": array(4096, 4096)}, (array(32768, 4096), array(32768, 4096))
    plan = sbp.compile(step, devices, in_sbp=([sbp.S(0)], [sbp.S(0)])).plan(*args)
    assert plan.stages and plan.timeline is not None
    assert plan.overlaps and plan.timeline.makespan < plan.step_seconds < plan.seconds
    assert plan.bound <= plan.seconds
    assert plan.exposed_seconds == max(p.exposed_seconds for p in plan.stages) > 0
    assert f"({seconds_text(plan.seconds)} without overlap)" in str(plan)
    assert all(c.exposed_seconds == 0 for c in plan.sends if c.count == 4)


def test_nothing_of_a_pipeline_overlaps_on_cpus(plan: Plan) -> None:
    assert plan.step_seconds == plan.seconds and not plan.overlaps
    assert "without overlap" not in str(plan)


def test_memory_grows_with_live_microbatches(plan: Plan) -> None:
    gpipe = planned(schedule="gpipe")
    assert gpipe.live == (4, 4) and plan.live == (2, 1)
    assert all(a >= b for a, b in zip(gpipe.memory, plan.memory, strict=True))
    assert gpipe.memory_bytes == max(gpipe.memory) >= gpipe.figures[1].residual_bytes * 4


def test_split_backwards_have_two_columns(plan: Plan) -> None:
    assert stage_rows(plan)[0][2:4] == ("F", "B")
    assert stage_rows(planned(schedule="zb-h1"))[0][2:5] == ("F", "I", "W")


def test_small_sends_are_one_row(plan: Plan) -> None:
    tiny = [replace(plan.sends[0], tensor=f"flag{i}", wire_bytes=4.0, count=1) for i in range(3)]
    more = replace(plan, collectives=(*plan.collectives, *tiny))
    rows = send_rows(more)
    assert len(rows) == len(send_rows(plan)) + 1
    assert rows[-1][:2] == ("3", "smaller ones") and rows[-1][5] == "12 B"


def test_json_round_trip(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = sbp.load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.stages
    assert (loaded.schedule, loaded.timeline, loaded.figures) == (plan.schedule, plan.timeline, plan.figures)
    assert str(loaded) == str(plan) and loaded.sends == plan.sends and loaded.live == plan.live
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    for suffix in (".dot", ".html", ".svg"):
        for name, p in (("before", plan), ("after", loaded)):
            p.save(tmp_path / f"{name}{suffix}", choices=0)  # those only a plan that was made here can find
        assert (tmp_path / f"before{suffix}").read_bytes() == (tmp_path / f"after{suffix}").read_bytes()


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [k for k, _ in attrs if k in ("src", "href", "srcset")]


@pytest.mark.parametrize("suffix", [s for s in WRITERS if s != ".py"])
def test_every_suffix(plan: Plan, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan{suffix}"
    plan.save(path)
    text = path.read_text(encoding="utf-8")
    if suffix == ".html":
        page = _Tags()
        page.feed(text)
        assert not page.outside
        data = json.loads(text.split('id="plan-data">')[1].split("</script>")[0])
        assert len(data["timelines"]) == 1 and len(data["stages"]["stage"]) == 2
        assert data["groups"]["kind"].count("place") == 2
        assert sum(data["rows"]["times"]) == sum(c.count for c in plan.collectives)
    elif suffix == ".svg":
        root = ET.fromstring(text)
        assert sum(child.tag.endswith("svg") for child in root) == 3
        assert float(root.attrib["height"]) == sum(
            float(c.attrib["height"]) for c in root if c.tag.endswith("svg")
        )
    elif suffix == ".trace.json":
        events = json.loads(text)["traceEvents"]
        assert sum(e["ph"] == "X" for e in events) == 2 * 2 * 4
    elif suffix == ".dot":
        assert text.count("{") == text.count("}") and text.count("subgraph cluster_p") == 2
        names = set(re.findall(r"^ *(\w+) \[label", text, re.M))
        ends = set(itertools.chain(*re.findall(r"^ *(\w+) -> (\w+)", text, re.M)))
        assert ends <= names and {"send0to1", "send1to0"} <= names


def test_notebook_form(plan: Plan) -> None:
    page = _Tags()
    page.feed(plan._repr_html_())
    assert page.tags.count("svg") == 3 and page.tags.count("details") == 2 and "script" not in page.tags


def test_a_plan_of_one_placement_has_no_trace(tmp_path: Path) -> None:
    one = sbp.compile(lambda x: x * 2, two_stages.FIRST).plan(two_stages.step_args()[1])
    with pytest.raises(sbp.SbpError, match=r"legal +\.json, \.html, \.dot, \.svg, \.py\n"):
        one.save(tmp_path / "plan.trace.json")


def test_auto_is_the_fastest_that_fits(plan: Plan) -> None:
    free = planned(schedule="auto")
    assert free.schedule is not None and free.schedule.name.startswith("auto (")
    assert free.timeline is not None and plan.timeline is not None
    assert free.timeline.makespan <= plan.timeline.makespan
    (note,) = free.notes
    assert (
        "taken" in note
        and "1f1b" in note
        and "not 2 per rank" in note
        and note in str(free).replace("\n    ", "\n")
    )
    # Between what the best one holds and what one micro-batch at a time does.
    most = max(free.memory)
    least = max(planned(schedule="1f1b").memory)
    if least < most:
        tight = planned(schedule="auto", memory_limit=(least + most) / 2)
        assert max(tight.memory) <= (least + most) / 2


def test_memory_limit(plan: Plan) -> None:
    for schedule in ("auto", "gpipe"):
        with pytest.raises(sbp.SbpError, match=r"at the peak|least") as e:
            planned(schedule=schedule, memory_limit=6.4e3)
        assert type(e.value).__name__ == "MemoryLimitError"
    assert planned(memory_limit=plan.memory_bytes).memory == plan.memory


def run(*argv: object) -> int:
    return main([str(a) for a in argv])


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert run("plan", STEP, "--out", a, "--out", tmp_path / "a.trace.json") == 0
    assert "2 stages on 2 placements of cpu(stage=2 x data=2)" in capsys.readouterr().out
    assert run("plan", STEP, "--schedule", "zb-h1", "--out", b) == 0
    assert "schedule zb-h1" in capsys.readouterr().out
    assert run("diff", a, b) == 0
    assert re.search(r"schedule +1f1b, bubble [\d.]+% -> zb-h1, bubble", capsys.readouterr().out)
    assert run("explain", STEP, "--at", "all-reduce") == 0
    assert "instead:" in capsys.readouterr().out
    assert run("explain", a, "--at", "send") == 0
    text = capsys.readouterr().out
    assert "stage 0 makes it, stage 1 needs it" in text and "alternatives" not in text


def test_figures_do_not_depend_on_the_schedule() -> None:
    program = sbp.compile(two_stages.step, two_stages.step_placement, in_sbp=two_stages.step_sbp)
    _, built = program._prepare(two_stages.step_args(), {})
    figures = figures_of(built.stages)
    assert figures.stages == built.plan.figures
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = make(name, (0, 1), 4)
        assert planned(schedule=name).memory == figures.memory(schedule)
