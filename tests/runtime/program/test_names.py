"""The compiled program is the user's: its name, scopes and lines, and each collective's row of the plan."""

import glob
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from models import gpt
from sbp import B, S
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.passes.explain.plan import Collective, merged_collective
from sbp.passes.face import Plan
from sbp.runtime.hlo.meter import read_compiled
from sbp.runtime.hlo.origins import Origin, origins_of, rows_of

MODELS = str(Path(gpt.__file__).parent)
HERE = Path(__file__).name
LINE, GRID = sbp.placement("cpu", shape=(8,)), sbp.placement("cpu", shape=(2, 4))
# What the clause on lines leaves out: they compute nothing.
PLAIN = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy"}
CHOICES = {"data": LINE, "tensor": LINE, "2d": GRID, "zero": LINE}
each_choice = pytest.mark.parametrize(
    "choice", ["2d", *(pytest.param(c, marks=pytest.mark.full) for c in ("data", "tensor", "zero"))]
)


@dataclass(frozen=True)
class Case:
    """A program, its plan, and what its compiled form says."""

    program: Any
    args: tuple[Any, ...]
    plan: Plan
    origins: dict[str, Origin]
    rows: dict[str, tuple[Collective, ...]]
    sent: float
    text: str

    def reached(self) -> set[str]:
        return {c.name for rows in self.rows.values() for c in rows}


def case(program: Any, *args: Any) -> Case:
    plan, compiled = program.plan(*args), program.lower(*args).compile()
    origins, rows = origins_of(compiled), rows_of(compiled, plan)
    return Case(program, args, plan, origins, rows, read_compiled(compiled).wire_bytes, compiled.as_text())


@cache
def of_gpt(choice: str) -> Case:
    """A train step of the GPT, with one layer."""
    config = gpt.Config(layers=1, width=64, heads=8, vocabulary=64, sequence=32, dropout=0.1)
    optimizer, place = optax.adamw(1e-2), CHOICES[choice]
    params = jax.eval_shape(partial(gpt.init, config=config), jax.random.key(0))
    step = gpt.make_train_step(config, optimizer)
    program = sbp.compile(step, place, in_sbp=gpt.signatures(choice, place.shape, config, optimizer))
    tokens = jax.ShapeDtypeStruct((16, config.sequence + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return case(program, params, jax.eval_shape(optimizer.init, params), tokens, key)


def check_rows(c: Case) -> None:
    """Every collective leads to rows, every row is reached, and rows say what is sent and where."""
    assert c.plan.collectives and all(c.rows.values())
    assert c.reached() == {x.name for x in c.plan.collectives}
    assert [x.name for x in c.plan.collectives] == [f"row{i}" for i in range(len(c.plan.collectives))]
    for name, rows in c.rows.items():
        assert {x.source for x in rows} >= {c.origins[name].source}


@pytest.mark.some(1)
@each_choice
def test_collectives_of_the_gpt_lead_to_their_rows(choice: str) -> None:
    c = of_gpt(choice)
    check_rows(c)
    # No row is claimed by two instructions: together they send what the plan says, and nothing twice.
    assert sum(len(rows) for rows in c.rows.values()) == len(c.plan.collectives)
    assert sum(x.wire_bytes for rows in c.rows.values() for x in rows) == pytest.approx(c.sent, rel=1e-3)


@pytest.mark.full
def test_what_xla_combined_leads_to_all_rows() -> None:
    c = of_gpt("data")
    name, rows = max(c.rows.items(), key=lambda item: len(item[1]))
    assert len(rows) > 5 and c.origins[name].opcode == "all-reduce"
    assert re.search(rf"%{re.escape(name)} = \(.* all-reduce\(", c.text)


@each_choice
def test_instructions_of_the_gpt_carry_a_line_or_a_row(choice: str) -> None:
    """The line is one of the model's: that of the call does not count."""
    c = of_gpt(choice)
    count = [o for o in c.origins.values() if o.opcode not in PLAIN]
    known = [o for o in count if o.rows or o.file.startswith(MODELS)]
    assert len(count) > 1000 and len(known) >= 0.95 * len(count)


def test_the_program_has_the_users_name_scopes_and_lines() -> None:
    c = of_gpt("2d")
    assert c.text.startswith("HloModule jit_train_step")
    paths = {o.path for o in c.origins.values()}
    assert any(p.startswith("jit(train_step)/") and "jvp(layer0)" in p for p in paths)
    assert any("transpose(jvp(layer0))" in p for p in paths)
    assert any("jit(_bernoulli)" in p for p in paths)
    assert not any("jit(run)" in p for p in paths)
    own = [f for f in re.findall(r'^\d+ "(.*)"$', c.text, re.MULTILINE) if re.search(r"/sbp/\w+", f)]
    assert own == []
    lines = Path(gpt.__file__).read_text().splitlines()
    down = next(i for i, line in enumerate(lines, 1) if '@ layer["down"]' in line)
    assert f"gpt.py:{down}" in {o.source for o in c.origins.values() if o.path.endswith("dot_general")}


def layers(weights: Any, x: jax.Array) -> jax.Array:
    def one(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        with jax.named_scope("block"):
            return jnp.tanh(h @ w[0]) @ w[1], None

    return jnp.square(jax.lax.scan(one, x, weights)[0]).mean()


def scanned(weights: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(layers)(weights, x)
    return jax.tree.map(lambda w, g: w - g, weights, grads), value


def embedded(table: jax.Array, ids: jax.Array) -> Any:
    value, grad = jax.value_and_grad(lambda t: jnp.square(t[ids].sum(1)).mean())(table)
    return table - grad, value


def branches(x: jax.Array, w: jax.Array) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda x: (x @ w).sum(0), lambda x: x.max(0) @ w, x)


def windows(k: jax.Array, x: jax.Array) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")

    def loss(k: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.square(y).mean()

    return jax.grad(loss)(k)


def weak(x: jax.Array) -> Any:
    return 2.0, x.sum()


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


WEIGHTS, WIDE = (f32(4, 32, 64), f32(4, 64, 32)), (f32(4, 128, 256), f32(4, 256, 128))
IDS = jax.ShapeDtypeStruct((512, 4), jnp.int32)
Others = dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]]
OTHERS: Others = {
    "a scan, with moves in its body": (scanned, (WIDE, f32(16, 128)), (([S(2)], [S(1)]), [B])),
    "a scan over split layers": (scanned, (WEIGHTS, f32(256, 32)), (([S(1)], [S(1)]), [S(0)])),
    "an exchange of rows of a table": (embedded, (f32(50_000, 32), IDS), ([S(0)], [S(0)])),
    "branches": (branches, (f32(512, 64), f32(64, 64)), ([S(0)], [B])),
    "halos": (windows, (f32(3, 3, 8, 8), f32(2, 64, 64, 8)), ([B], [S(1)])),
    "a result that is weakly typed": (weak, (f32(64, 64),), ([S(0)],)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_collectives_of_other_programs_lead_to_their_rows(name: str) -> None:
    fn, args, signatures = OTHERS[name]
    c = case(sbp.compile(fn, LINE, in_sbp=signatures), *args)
    check_rows(c)
    assert c.text.startswith(f"HloModule jit_{fn.__name__}")
    assert {c.origins[name].source.split(":")[0] for name in c.rows} == {HERE}


def test_names_inside_a_loop_are_those_of_the_loop_and_of_its_body() -> None:
    fn, args, signatures = OTHERS["a scan, with moves in its body"]
    c = case(sbp.compile(fn, LINE, in_sbp=signatures), *args)
    inside = [o.path for n, o in c.origins.items() if n in c.rows and "while" in o.path]
    assert inside and all(re.search(r"^jit\(scanned\)/.*while/body/.*block/sbp\.row\d+", p) for p in inside)


def test_what_jax_traces_once_has_the_line_of_each_use() -> None:
    """The operand and both sums are padded by one function of JAX's, on shards of one shape."""

    def sums(x: jax.Array) -> Any:
        x = sbp.annotate(x, S(0))
        first = sbp.annotate(jnp.cumsum(x * 2, 0), S(0))
        return first, sbp.annotate(jnp.cumsum(x * 3, 0), S(0))

    program = sbp.compile(sums, LINE)
    origins = origins_of(program.lower(f32(10, 4)).compile())
    start = sums.__code__.co_firstlineno
    found = {o.line - start for o in origins.values() if "jit(_pad)" in o.path and o.opcode == "pad"}
    assert found == {1, 2, 3}


@pytest.mark.full
def test_what_an_op_sends_is_told_apart_by_size() -> None:
    fn, args, signatures = OTHERS["an exchange of rows of a table"]
    # Under `BYTES_ONLY`: so few rows are else looked up by their owners, and added up.
    c = case(sbp.compile(fn, LINE, in_sbp=signatures, options=sbp.Options(hardware=BYTES_ONLY)), *args)
    kinds = [(x.kind, x.reason.split()[1]) for rows in c.rows.values() if len(rows) == 1 for x in rows]
    assert {("all_to_all", "keys"), ("all_to_all", "rows")} <= set(kinds)


@pytest.mark.full
def test_a_profile_leads_to_every_row(tmp_path: Path) -> None:
    """The events of a profile are called as the instructions are."""
    c = of_gpt("2d")
    zeros = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), x) for x in c.args[:3]]
    out = c.program(*zeros, jax.random.key(0))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(c.program(*out[:2], zeros[2], jax.random.key(0)))
    (path,) = glob.glob(f"{tmp_path}/**/*.trace.json.gz", recursive=True)
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    seen = {e["args"]["hlo_op"] for e in events if e.get("args", {}).get("hlo_module") == "jit_train_step"}
    assert seen <= set(c.origins)
    assert {x.name for name in seen for x in c.rows.get(name, ())} == {x.name for x in c.plan.collectives}


@pytest.mark.full
def test_stages_are_called_by_function_and_phase_and_keep_their_rows() -> None:
    """Programs of a stage that has been compiled lead to the plan of each placement that loads them."""
    place = sbp.placement("cpu", shape=(4, 2))
    stages = place.split(0)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for stage, w in zip(stages, weights, strict=True):
            with sbp.on(stage):
                x = jnp.tanh(x @ w)
        with sbp.on(stages[-1]):
            return jnp.square(x).mean()

    def train(weights: Any, x: jax.Array) -> Any:
        value, grads = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=1)(weights, x)
        return [w - g for w, g in zip(weights, grads, strict=True)], value

    args = [jnp.eye(32)] * 4, jnp.ones((64, 32))
    program = sbp.compile(train, place, in_sbp=([[S(0)]] * 4, sbp.AUTO))
    program(*args)
    built, plan = program._prepare(args, {})[1], program.plan(*args)
    assert built.executor.executables.loaded_count > 0
    for executor, own in zip(built.executor.executors, plan.stages, strict=True):
        reached = set()
        for part, runnable in executor.runnables.items():
            assert runnable.run.as_text().startswith(f"HloModule jit_train_{part.phase}")
            found = rows_of(runnable.run, own)
            assert all(found.values())
            reached |= {c.name for rows in found.values() for c in rows}
        assert own.collectives and reached == {c.name for c in own.collectives}
    assert all(c.name == "" for c in plan.sends)


def test_a_row_of_several_has_all_names() -> None:
    rows = of_gpt("2d").plan.collectives[:2]
    assert merged_collective(rows).name == "row0+row1"
    assert merged_collective([replace(c, name="") for c in rows]).name == ""
