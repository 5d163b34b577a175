"""Published layouts with stages, of a small Llama."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import layouts, pipelined
from benchmarks.published.kernels import fused_attention
from benchmarks.published.layout import Lying
from benchmarks.published.model import Stage
from benchmarks.published.program import StageProgram
from benchmarks.published.recompute import NOTHING, state_bytes, weights_of
from benchmarks.published.rows import Layout
from models import llama
from sbp.hardware.catalogue import hardware_for
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.cost import node_work
from sbp.passes.program.trace import trace
from sbp.placement import placement
from sbp.runtime.target.devices import cudnn_of
from sbp.signature import B

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
    assert [row.estimate is not None for row in rows] == [True] * 6
    whole, _, staged, wide, kept, _ = (row.estimate for row in rows)
    assert whole is not None and staged is not None and wide is not None and kept is not None
    assert whole.bubble == 0.0 < staged.bubble and kept.seconds < staged.seconds
    assert rows[2].memory_bytes < rows[4].memory_bytes
    assert wide.passes == staged.passes and rows[2].memory_bytes < rows[3].memory_bytes
    cells = rows[2].line(1e9, 1e15).split(" | ")
    assert cells[0] == "| Megatron, tensor 8 x pipeline 4: dp2 tp2 pp2, computes all again, sums in 16 bits"
    assert len(cells) == 6


def test_sums_in_float32_are_twice_the_bytes() -> None:
    """Of gradients, when they are sent and while they are held; new weights stay as they are."""
    sent, held = [], []
    for wide in (False, True):
        row = pipelined.step_of(SMALL, Layout(dp=8), 32, "full", wide_sums=wide)
        lying, hardware = Lying("h100", row.layout), hardware_for("h100")
        program = StageProgram(row, Stage(8, 0, True, True), lying, hardware, NOTHING)
        plan = program.update_plan(False)
        assert plan is not None
        sent.append({c.kind: c.wire_bytes for c in plan.collectives})
        held.append(state_bytes(row) / weights_of(row)[0])
    size = sent[0]["all_gather"]
    assert sent[0] == {"reduce_scatter": size, "all_gather": size} and size > 0
    assert sent[1] == {"reduce_scatter": 2 * size, "all_gather": size}
    assert held == [4 + 12 / 8, 6 + 12 / 8]


def attention_seconds(fn: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> float:
    """What the kernels of an attention compute on one H100, forward and backward."""
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found, one = 0.0, placement("h100", shape=(1,))
    with cudnn_of(one):
        graph = trace(lambda q, k, v, ct: jax.vjp(fn, q, k, v)[1](ct), args, {}).graph
    for n in (n for n in graph.walk() if "attention" in n.op):
        operands, results = (tuple((B,) for _ in xs) for xs in (n.inputs, n.outputs))
        lying = Strategy(operands, results, tuple(False for _ in operands), ())
        found += node_work(graph, n, lying, (1,)).arithmetic_seconds(hardware_for("h100"))
    return found


def test_attention_takes_the_same_in_both_tables() -> None:
    """One is the kernel that JAX calls, the other stands for that of any framework."""

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    b, s, k, g, e = 1, 8192, 2, 8, 128
    queries, keys = (b, s, k * g, e), (b, s, k, e)
    auto = attention_seconds(cudnn, queries, keys, keys, queries)
    queries, keys = (b, k, g, s, e), (b, k, s, e)
    hand = attention_seconds(fused_attention, queries, keys, keys, queries)
    assert auto > 0 and abs(auto / hand - 1) < 0.01


def test_what_does_not_fit_is_said() -> None:
    hardware = replace(hardware_for("h100"), memory_bytes=1e6)
    row = next(pipelined.rows(SMALL, 128, 1024, 4, hardware))
    assert row.estimate is None and row.line(1.0, 1.0).endswith("| does not fit |")


@pytest.mark.full
def test_a_scan_in_stages_stands_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO with stages is planned and priced as the others are."""
    monkeypatch.setattr(layouts, "CONFIG", replace(SMALL, attention=None))
    asked = next(row for row in layouts.layouts(64, 64) if row.stages)
    assert asked.text == "AUTO:4x2x8, 4 stages, 32 micro-batches, 100% kept"
    row = layouts.planned(asked, 1, layouts.arguments(64), 60.0)
    assert row.plan is not None and not row.trouble
    cells = layouts.line(row, 64, 1e12).split(" | ")
    assert cells[0] == f"| {asked.text}" and len(cells) == 8


def test_many_devices_hold_copies() -> None:
    """AUTO is asked for groups of hosts with a copy each where there are more than one of them."""
    assert [row.text for row in layouts.layouts(1024, 1024) if row.shape == (16, 64)] == [
        "AUTO:16x64, 1 micro-batches, 40% kept"
    ]
    assert all(row.shape != (2, 64) for row in layouts.layouts(128, 1024))


def test_the_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed around the rows, whose plans take minutes."""
    monkeypatch.setattr(pipelined, "rows", lambda *_: [pipelined.PipelinedRow("one", None, 1e9, "why")])
    layouts.main(["--devices", "128", "--tables", "stages"])
    assert capsys.readouterr().out.splitlines()[-1] == "| one | | | | 1.0 | why |"
