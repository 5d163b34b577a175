"""A fault is shown again by a program of its own, and whatever entry has it, it is an error of ours."""

import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import AUTO, B, S
from sbp.errors import ArgumentError, InternalError, reproduce
from sbp.rules.registry import REGISTRY
from sbp.runtime.checkpoint import checkpoints
from sbp.runtime.lower import lowering
from sbp.runtime.program import program as programs
from sbp.runtime.training import fit as fitting

GRID = sbp.placement("cpu", shape=(2, 4), axes=("data", "model"))
TABLE = np.arange(12.0, dtype=np.float32).reshape(3, 4)


def train(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = sbp.annotate(jnp.tanh(x @ params["up"]), [S(0), S(1)])
        out, _ = jax.lax.scan(lambda h, w: (sbp.annotate(h @ w, [S(0), B]), None), hidden, params["layers"])
        return jnp.square(out[:, :4] - TABLE[:1]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"up": np.ones((8, 16), np.float32), "layers": np.ones((3, 16, 16), np.float32)}
X = np.ones((32, 8), np.float32)


def program(**options: Any) -> Any:
    return sbp.compile(
        train, GRID, in_sbp=(AUTO, [S(0), B]), donate_argnums=0, options=sbp.Options(cache=False, **options)
    )


def run(text: str) -> dict[str, Any]:
    """The module of a reproduction; the devices are there already."""
    lines = [line for line in text.splitlines() if "jax_num_cpu_devices" not in line]
    module: dict[str, Any] = {}
    exec("\n".join(lines), module)
    return module


def test_it_is_the_same_program() -> None:
    given = program(memory_limit="1GB", check=True)
    expected = given.plan(PARAMS, X)
    text = given._reproduction("plan", "what was said\n  got    x")
    assert text.startswith("# what was said\n#   got    x\n# jax")
    assert "memory_limit='1GB'" in text and "check=True" in text
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert sum("= sbp.annotate(" in line for line in code) == 2
    assert "donate_argnums=(0, 1)" in text
    module = run(text)
    plan = module["program"].plan(*module["ARGUMENTS"])
    assert plan.wire_bytes == expected.wire_bytes
    assert [c.kind for c in plan.collectives] == [c.kind for c in expected.collectives]
    leaves = PARAMS["layers"], PARAMS["up"], X, TABLE[:1]
    for got, wanted in zip(module["train"](*leaves), jax.tree.leaves(train(PARAMS, X)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_stages_are_kept(microbatches: int) -> None:
    first, last = GRID.split("data")

    def loss(params: Any, x: Any) -> Any:
        with sbp.on(first):
            hidden = jnp.tanh(x @ params["up"])
        with sbp.on(last):
            return jnp.square(hidden @ params["up"].T).mean()

    def step(params: Any, x: Any) -> Any:
        gradient: Any = jax.value_and_grad(loss)
        if microbatches > 1:
            gradient = sbp.microbatch(gradient, microbatches, batch_args=1)
        value, grads = gradient(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    given, params = sbp.compile(step, GRID), {"up": PARAMS["up"]}
    expected = given.plan(params, X)
    module = run(given._reproduction("plan", ""))
    plan = module["program"].plan(*module["ARGUMENTS"])
    assert [s.placement for s in plan.stages] == [s.placement for s in expected.stages]
    assert plan.wire_bytes == expected.wire_bytes
    assert str(plan).splitlines()[0] == str(expected).splitlines()[0]


def test_it_shows_the_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = replace(REGISTRY["tanh"], rows=partial(operator.getitem, {}))  # type: ignore[arg-type]
    monkeypatch.setitem(REGISTRY, "tanh", broken)
    with pytest.raises(InternalError) as seen:
        program()(PARAMS, X)
    reproduce(tmp_path / "fault.py", seen.value)
    text = (tmp_path / "fault.py").read_text()
    assert text.startswith("# pass 'candidates' at tanh, test_reproduction.py:")
    with pytest.raises(InternalError, match="pass 'candidates' at tanh"):
        run(text)


def test_without_a_fault_there_is_nothing_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    with pytest.raises(ArgumentError) as refused:
        reproduce("fault.py")
    assert str(refused.value).splitlines() == [
        "reproduce('fault.py')",
        "  got    no error",
        "  legal  an InternalError of a program: of its plan, its lowering or its call",
        "  why    only then is there a program to write",
        "  try    call it where that error was caught, or in the session that shows it",
    ]
    with pytest.raises(ArgumentError, match="got    ValueError"):
        reproduce("fault.py", ValueError())
    with pytest.raises(ArgumentError, match="an InternalError without a program"):
        reproduce("fault.py", InternalError())


def small(state: Any, x: Any) -> Any:
    return state * 2, x.sum()


ENTRIES: dict[str, tuple[Any, str, Callable[[Path], Any]]] = {
    "Program.lower": (programs, "lowered_for", lambda _: sbp.compile(small, GRID).lower(TABLE, X)),
    "Program.__call__": (lowering, "device_function", lambda _: sbp.compile(small, GRID)(TABLE, X)),
    "Checkpoints.save": (
        checkpoints,
        "leaves_of",
        lambda folder: sbp.save(folder, {"x": jnp.ones(3)}, step=1),
    ),
    "fit": (
        fitting,
        "Trainer",
        lambda _: sbp.fit(sbp.compile(small, GRID), (jnp.ones(3),), [(X,)], steps=1, progress=False),
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_fault_of_an_entry_is_an_error_of_ours(
    entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, name, use = ENTRIES[entry]
    fault = partial(
        operator.getitem, {}
    )  # a KeyError without a frame of this file, which would be the user's
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(InternalError) as seen:
        use(tmp_path)
    assert str(seen.value).startswith(entry)
    if entry.startswith("Program"):
        reproduce(tmp_path / "fault.py", seen.value)
        last = (tmp_path / "fault.py").read_text().splitlines()[-1]
        assert last == f"program.{'lower' if 'lower' in entry else 'plan'}(*ARGUMENTS)"


def test_what_a_callback_of_the_users_raises_is_theirs() -> None:
    def evaluate(state: Any) -> Any:
        raise LookupError("of the user")

    with pytest.raises(LookupError, match="of the user"):
        sbp.fit(
            sbp.compile(lambda s, x: (s, x.sum()), GRID),
            (jnp.ones(3),),
            [X],
            steps=1,
            evaluate=evaluate,
            evaluate_every=1,
            progress=False,
        )


def test_a_split_of_any_dim_is_written_as_it_was_given() -> None:
    given = sbp.compile(lambda w, x: x @ w, GRID, in_sbp=([B, S(AUTO)], None))
    expected = given.plan(jnp.ones((6, 8)), jnp.ones((4, 6)))
    text = given._reproduction("plan", "")
    assert "[B, S(AUTO)]" in text
    module = run(text)
    assert module["program"].plan(*module["ARGUMENTS"]).in_sbp == expected.in_sbp
