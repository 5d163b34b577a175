"""The source of a program with stages runs as its pipeline does: the same pieces, on the same schedule."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from models import gpt
from models.pipeline import Pipeline
from sbp import S
from sbp.errors import ArgumentError
from sbp.options import PipelineOptions
from sbp.passes.render.program_source import ProgramSource
from sbp.runtime.source.line_wrapping import WIDTH
from tests.golden import two_stages
from tests.passes.pipeline.scanned import arguments, step_of
from tests.runtime.pipeline.programs import CASES
from tests.runtime.pipeline.test_training import marked
from tests.runtime.source.equal import checked

# Arguments that are static are no leaves of a call.
PAIRS = [(name, s) for name, make in CASES.items() if not (case := make()).static for s in case.schedules]
QUICK = {"interleaved": ("interleaved",), "V of 2": ("zb-v",)}


def staged(schedule: str) -> ProgramSource:
    """That of two stages and four micro-batches."""
    options = sbp.Options(pipeline=PipelineOptions(schedule=schedule))
    found: ProgramSource = checked(
        two_stages.step,
        two_stages.values(),
        two_stages.step_placement,
        in_sbp=two_stages.step_sbp,
        options=options,
    )
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        ("1f1b", ["F0:0 F0:1 B0:0 F0:2 B0:1 F0:3 B0:2 B0:3", "F1:0 B1:0 F1:1 B1:1 F1:2 B1:2 F1:3 B1:3"]),
        ("gpipe", ["F0:0 F0:1 F0:2 F0:3 B0:0 B0:1 B0:2 B0:3", "F1:0 F1:1 F1:2 F1:3 B1:0 B1:1 B1:2 B1:3"]),
    ],
)
def test_pieces_sends_and_the_schedule_are_tables(schedule: str, rows: list[str]) -> None:
    source = staged(schedule)
    lines = source.text.splitlines()
    for line in (
        '    "before_on_0": Piece(0, before_on_0, ("x",), ("sum_of_grad_up", "x_2")),',
        '        ("h[i]", 1, "h[i]"),',
        '        ("grad_h[i]", 0, "grad_h[i]"),',
        "    ((1, \"down\"),),  # weights['down']",
        "    (0, \"new_up\"),  # result[0]['up']",
        "    return jax.device_put(x, NamedSharding(MESHES[place], LIES[place][name]))",
        *(f'    "{row}",' for row in rows),
    ):
        assert line in lines
    # What tanh keeps for its backward pass is called otherwise in JAX 0.10.
    assert re.search(r'"F0": Piece\(\s*0,\s+forward_0,\s+\("x_2", "up"\),\s+\("h\[i\]", ', source.text)
    assert len(lines) <= 310 and max(map(len, lines)) <= WIDTH
    assert source.given == {} and source.constants == ()


def test_halves_of_a_backward_pass() -> None:
    source = staged("zb-h1")
    for name in ("forward_0", "weights_backward_0", "forward_1", "backward_1", "weights_backward_1"):
        assert source.text.count(f"def {name}(") == 1
    assert re.search(r'^    "F1:0 I1:0 .*W1:', source.text, re.MULTILINE)


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "schedule"), marked(PAIRS, QUICK))
def test_of_every_kind_of_pipeline(name: str, schedule: str) -> None:
    case = CASES[name]()
    options = sbp.Options(pipeline=PipelineOptions(schedule=schedule))
    donated: dict[str, Any] = {"donate_argnums": (0,) if case.donate else ()}
    asked = {"in_sbp": case.signatures, "options": options, **donated}
    source = checked(case.step, case.args, case.whole, close=1e-5, **asked)
    assert schedule in source.text


@pytest.mark.full
def test_a_gpt_in_two_stages_is_of_a_reader_s_length() -> None:
    """Embeds in the first stage, scores in the last one: the table of words is read by both."""
    config = gpt.Config(layers=2, width=16, heads=2, vocabulary=32, sequence=8, dropout=0.0)
    whole = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
    pipeline = Pipeline(tuple(whole.split("stage")), 4)
    optimizer = optax.adam(0.01)
    params = gpt.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (16, 9), 0, 32)
    args = params, optimizer.init(params), tokens, jax.random.key(2)
    step = gpt.make_train_step(config, optimizer, pipeline)
    options = sbp.Options(pipeline=PipelineOptions(schedule="1f1b"))
    source = checked(step, args, whole, options=options, close=1e-5)
    lines = source.text.splitlines()
    assert len(lines) <= 1310 and max(map(len, lines)) <= WIDTH
    assert re.search(r"FETCHED = \{\n", source.text)
    # What goes to the other stage has a name, and no line in it.
    assert "grad_embedding_part" in source.text and not re.search(r"_py_\d", source.text)


def test_stages_without_micro_batches() -> None:
    first, last = two_stages.FIRST, two_stages.LAST

    def fn(x: Any, w: Any) -> Any:
        with sbp.on(first):
            h = jnp.tanh(x @ w)
        with sbp.on(last):
            return h * 2.0, jnp.float32(3.0)

    source = checked(fn, (jnp.ones((8, 4)), jnp.ones((4, 4))), two_stages.step_placement)
    assert "SCHEDULE" not in source.text and "FETCHED = {\n" in source.text


def test_what_a_program_closes_over() -> None:
    table = jnp.arange(2048.0).reshape(64, 32)

    def step(weights: Any, x: Any, y: Any) -> Any:
        return two_stages.step(weights, x, y)[1] + table.sum()

    source = checked(step, two_stages.values(), two_stages.step_placement, in_sbp=two_stages.step_sbp)
    assert len(source.constants) == 1 and "  # constant 0" in source.text


@pytest.mark.full
def test_the_module_runs_from_a_file(tmp_path: Path) -> None:
    source = staged("1f1b")
    source.save(tmp_path / "step.py")
    module: dict[str, Any] = {"__name__": "step"}
    exec((tmp_path / "step.py").read_text(), module)
    got, want = module["step"](*jax.tree.leaves(two_stages.values())), source.load()(*two_stages.values())
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


def test_each_stage_has_one_of_its_own() -> None:
    program = sbp.compile(two_stages.step, two_stages.step_placement, in_sbp=two_stages.step_sbp)
    plan = program.plan(*two_stages.step_args())
    assert "from_stage_0_tanh" in plan.stages[1].source().text


def test_a_plan_that_was_asked_otherwise_has_one() -> None:
    program = sbp.compile(two_stages.step, two_stages.step_placement, in_sbp=two_stages.step_sbp)
    other = program.plan(*two_stages.step_args()).what_if("weights['up']", [S(1)])
    assert '"up": PartitionSpec(None, "data"),' in other.source().text
    assert "shard_map" in other.stages[0].source().text


def test_stages_of_a_scan_have_theirs() -> None:
    whole = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
    options = sbp.Options(pipeline=PipelineOptions(stages=2))
    plan = sbp.compile(step_of(), whole, options=options).plan(*arguments())
    with pytest.raises(
        ArgumentError, match=r"try    plan\.stages\[0\]\.source\(\), and print\(plan\.schedule\)"
    ):
        plan.source()
    assert "shard_map" in plan.stages[0].source().text
