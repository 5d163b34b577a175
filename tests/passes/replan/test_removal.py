"""What a plan says of how to do without a collective is true: written into the program, it is gone."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from benchmarks import cases
from benchmarks.cases import Case
from models import gpt, llama, mlp, resnet
from sbp.passes.explain.choices import HeldTensor, Removal
from sbp.passes.explain.plan import Collective
from sbp.passes.face import Plan
from sbp.passes.render.diff_data import diff_data
from sbp.passes.render.web_page import data_of
from sbp.passes.replan.removal import NOT_WHOLE
from sbp.signature import format_sbp

ROW_SECONDS = 120.0
"""As long as a row may take on a busy machine: what is found does not depend on it."""


def planned(case: Case, shape: Sequence[int]) -> Plan:
    program = sbp.compile(
        case.step, sbp.placement("h100", shape=shape), in_sbp=case.in_sbp, donate_argnums=(0, 1)
    )
    return program.plan(*case.shapes())


def costliest(plan: Plan) -> tuple[Collective, Removal]:
    """The costliest row, and what to write to do without it."""
    row = max((c for c, _ in plan.merged_collectives()), key=lambda c: c.seconds)
    assert plan.replanner is not None
    ((found, choices),) = plan.replanner.rows_choices(plan, [row], 3, ROW_SECONDS)
    assert found == row and choices.removal is not None
    return row, choices.removal


def annotated(module: types.ModuleType, holds: Sequence[HeldTensor], name: str) -> types.ModuleType:
    """A module whose lines are annotated as said."""
    path = Path(str(module.__file__))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for held in holds:
        file, _, line = held.where.rpartition(":")
        assert file == path.name
        statement = next(
            s
            for s in ast.walk(ast.parse("".join(lines)))
            if isinstance(s, ast.Assign | ast.Return) and s.lineno <= int(line) <= (s.end_lineno or 0)
        )
        value = statement.value
        assert value is not None and value.end_lineno is not None and value.end_col_offset is not None
        last = lines[value.end_lineno - 1]
        end = f"), {format_sbp(held.signature)})"
        lines[value.end_lineno - 1] = last[: value.end_col_offset] + end + last[value.end_col_offset :]
        first = lines[value.lineno - 1]
        lines[value.lineno - 1] = first[: value.col_offset] + "_sbp.annotate((" + first[value.col_offset :]
    made = types.ModuleType(name)
    made.__file__ = str(path)
    vars(made).update(_sbp=sbp, S=sbp.S, B=sbp.B, P=sbp.P, __package__=module.__package__)
    sys.modules[name] = made
    code = compile("".join(lines), str(path), "exec")
    exec(code, vars(made))
    return made


def with_gradients(optimizer: Any, holds: Sequence[HeldTensor]) -> Any:
    """An optimizer that annotates the gradients as `jax.grad` has returned them."""
    patterns = [
        (re.escape(h.where.removeprefix("params")).replace(r"\[\*\]", r"\[\d+\]"), h.signature) for h in holds
    ]

    def held(path: Any, g: Any) -> Any:
        for pattern, nd in patterns:
            if re.fullmatch(pattern, jax.tree_util.keystr(path)):
                return sbp.annotate(g, list(nd))
        return g

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return optimizer.update(jax.tree_util.tree_map_with_path(held, grads), state, params)

    return optax.GradientTransformation(optimizer.init, update)


def written(case: Case, plan: Plan, removal: Removal, module: types.ModuleType, make: Any, name: str) -> Case:
    """The program as the page says to write it: lines and gradients annotated, arguments given otherwise."""
    assert {h.how for h in removal.holds} <= {"annotate", "gradient", "in_sbp"}
    lines = [h for h in removal.holds if h.how == "annotate"]
    gradients = [h for h in removal.holds if h.how == "gradient"]
    own = annotated(module, lines, name) if lines else module
    step = (
        make(own, lambda optimizer: with_gradients(optimizer, gradients)) if lines or gradients else case.step
    )
    assert plan.replanner is not None
    asked = list(plan.replanner.request.in_sbp)  # type: ignore[attr-defined]
    for held in removal.holds:
        if held.how == "in_sbp":
            target = plan.replanner._tensors(plan).find(held.where)  # type: ignore[attr-defined]
            for i in target.arguments:
                asked[i] = held.signature
    tree = jax.tree.structure(case.shapes())
    given = [sbp.AUTO if nd is None else list(nd) for nd in asked]
    return replace(case, step=step, in_sbp=jax.tree.unflatten(tree, given))


GPT_CONFIG = replace(cases.SMALL_GPT, layers=1)
LLAMA_CONFIG = replace(llama.PRESETS["tiny"], layers=1, scan=False, remat=False)


def llama_case(shape: Sequence[int]) -> Case:
    optimizer = optax.adamw(1e-3)
    tokens = jnp.zeros((16, LLAMA_CONFIG.sequence + 1), jnp.int32)
    return Case(
        llama.make_train_step(LLAMA_CONFIG, optimizer),
        lambda: cases.arguments(jax.jit(lambda key: llama.init(key, config=LLAMA_CONFIG)), optimizer, tokens),
        llama.signatures("fsdp", shape, LLAMA_CONFIG, optimizer),
    )


ADAM = optax.adamw(1e-3)
MODELS: dict[str, tuple[Callable[[], Case], tuple[int, ...], types.ModuleType, Callable[[Any, Any], Any]]] = {
    "mlp": (
        lambda: cases.mlp_case("2d", (2, 4), 2),
        (2, 4),
        mlp,
        lambda m, held: m.make_train_step(held(ADAM)),
    ),
    "gpt": (
        lambda: cases.gpt_case("2d", (2, 4), 1),
        (2, 4),
        gpt,
        lambda m, held: m.make_train_step(GPT_CONFIG, held(ADAM)),
    ),
    "llama": (
        lambda: llama_case((2, 4)),
        (2, 4),
        llama,
        lambda m, held: m.make_train_step(LLAMA_CONFIG, held(ADAM)),
    ),
    "resnet": (
        lambda: cases.resnet_case("data", (8,), 18),
        (8,),
        resnet,
        lambda m, held: m.make_train_step(held(optax.sgd(0.05, momentum=0.9))),
    ),
}


SLOW = "resnet", "llama"
NOT_FOUND = "llama", "gpt"
"""Where what was found nearby does not hold once all is planned again, and the page says so."""


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS]
)
def test_what_is_said_is_true(name: str) -> None:
    """The costliest collective is gone from the program that was written so, and from the diff."""
    make, shape, module, step = MODELS[name]
    case = make()
    before = planned(case, shape)
    row, removal = costliest(before)
    assert bool(removal.holds) != bool(removal.remark)
    if not removal.holds:
        assert name in NOT_FOUND and removal.remark == NOT_WHOLE
        return
    after = planned(written(case, before, removal, module, step, f"tests_annotated_{name}"), shape)
    diff = diff_data((before, data_of(before)), (after, data_of(after)), ("before", "after"))["diff"]
    rows = zip(*(diff["rows"][c] for c in ("change", "kind", "line")), strict=True)
    assert ("removed", row.kind, row.source) in rows, removal
    assert removal.whole and removal.figures is not None
    assert removal.figures.step_seconds == pytest.approx(after.step_seconds, rel=0.05)
