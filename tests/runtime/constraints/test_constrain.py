"""Plain `jax.jit` follows a plan, given the constraints inside: equal numbers, and the plan's bytes."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import sbp
from models import gpt, llama, resnet, train
from models.pipeline import Pipeline
from sbp import B, S
from sbp.errors import ArgumentError
from sbp.runtime.hlo.meter import read_compiled, text_of
from sbp.runtime.hlo.parser import Computation, Module, parse
from sbp.runtime.hlo.shapes import shape_bytes

OPTIMIZER = optax.sgd(0.1)
GRIDS = {"8": (8,), "2x4": (2, 4)}


def gpt_case(shape: Sequence[int]) -> tuple[Any, Any, Any]:
    config = gpt.Config(layers=2, width=64, heads=8, vocabulary=256, sequence=32, dropout=0.0)
    params = gpt.init(jax.random.key(0), config)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33)).astype(np.int32)
    signs = gpt.signatures("2d" if len(shape) > 1 else "tensor", shape, config, OPTIMIZER)
    args = params, OPTIMIZER.init(params), tokens, jax.random.key(1)
    return gpt.make_train_step(config, OPTIMIZER), args, signs


def accumulated_case(shape: Sequence[int]) -> tuple[Any, Any, Any]:
    """The GPT in four micro-batches, whose gradients are carried as sums."""
    _, args, _ = gpt_case(shape)
    config = gpt.Config(layers=2, width=64, heads=8, vocabulary=256, sequence=32, dropout=0.0)
    loss = partial(gpt.loss, config=config)
    signs = gpt.signatures("2d" if len(shape) > 1 else "zero", shape, config, OPTIMIZER)
    return train.gradient_step(loss, OPTIMIZER, Pipeline(microbatches=4)), args, signs


def llama_case(shape: Sequence[int]) -> tuple[Any, Any, Any]:
    config = llama.Config(layers=2, width=64, heads=8, kv_heads=8, hidden=128, vocabulary=256, sequence=32)
    params = llama.init(jax.random.key(0), config)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33)).astype(np.int32)
    signs = llama.signatures("fsdp" if len(shape) > 1 else "zero", shape, config, OPTIMIZER)
    return (
        llama.make_train_step(config, OPTIMIZER),
        (params, OPTIMIZER.init(params), tokens, jax.random.key(1)),
        signs,
    )


def resnet_case(shape: Sequence[int]) -> tuple[Any, Any, Any]:
    config = resnet.Config(resnet.DEPTHS[18].blocks, False, 8, 10)
    params = resnet.init(jax.random.key(0), config)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(16, 16, 16, 3)).astype(np.float32), rng.integers(0, 10, 16).astype(np.int32)
    signs = resnet.signatures("data", shape, config, OPTIMIZER)
    args = params, OPTIMIZER.init(params), images, jax.random.key(1)
    return resnet.make_train_step(OPTIMIZER), args, signs


CASES = {"gpt": gpt_case, "accumulated": accumulated_case, "llama": llama_case, "resnet": resnet_case}


def scattered_share(module: Module, name: str) -> float:
    """Of an all-reduce, the share of bytes of which nothing but slices is read: for GPUs XLA makes a
    reduce-scatter of them, and for CPUs it has none."""
    home = next(c for c in module.computations.values() if name in c.instructions)
    users = [u for u in home.instructions.values() if u.operands[:1] == [name]]
    parts = [u for u in users if u.opcode == "get-tuple-element"]
    each = [(shape_bytes(u.shape), all(sliced(module, home, u.name))) for u in parts]
    if not parts:
        each = [(1, all(sliced(module, home, name)))]
    return sum(n for n, yes in each if yes) / sum(n for n, _ in each)


def sliced(module: Module, computation: Computation, name: str) -> Iterator[bool]:
    """Per use of a value, whether it is a slice."""
    if computation.root == name:
        yield False
    for user in computation.instructions.values():
        if name not in user.operands:
            continue
        if user.opcode in ("get-tuple-element", "bitcast", "copy", "convert", "reshape"):
            yield from sliced(module, computation, user.name)
        elif user.opcode == "fusion":
            inner = module.computations[user.called_computations("calls")[0]]
            at = user.operands.index(name)
            for p in inner.instructions.values():
                if p.opcode == "parameter" and p.arguments == [str(at)]:
                    yield from sliced(module, inner, p.name)
        else:
            yield user.opcode == "dynamic-slice"


def as_on_gpu(exe: Any) -> float:
    """Wire bytes, with all-reduces that are sliced as the reduce-scatters that XLA makes of them for GPUs."""
    module, total = parse(text_of(exe)), 0.0
    for c in read_compiled(exe).collectives:
        share = scattered_share(module, c.instruction) if c.kind == "all_reduce" else 0.0
        total += c.wire_bytes * (1 - share / 2)
    return total


# On automatic axes no sum waits: what the plan sends in two steps, sums over one axis after the other, XLA
# adds up over both at once, and gradients in each of four micro-batches.
EXPLAINED = {("llama", "2x4"): 1.35, ("accumulated", "8"): 5, ("accumulated", "2x4"): 5}


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(0, "accumulated-2x4-Explicit")
def test_jit_follows_the_plan(name: str, grid: str, types: AxisType) -> None:
    placement = sbp.placement("cpu", shape=GRIDS[grid], axis_types=types)
    step, args, signs = CASES[name](placement.shape)
    program = sbp.compile(step, placement, in_sbp=signs)
    plan, expected = program.plan(*args), program(*args)
    with jax.set_mesh(placement.mesh):
        ins, outs = program.in_shardings, program.out_shardings
        fn = jax.jit(sbp.constrain(step, plan), in_shardings=ins, out_shardings=outs)
        given = jax.device_put(args, ins)
        exe = fn.lower(*given).compile()
        got = exe(*given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    share = as_on_gpu(exe) / plan.wire_bytes
    if types is AxisType.Auto and (name, grid) in EXPLAINED:
        assert "sums that wait" in {u.what for u in plan.constraint_gaps}
        assert 1.15 < share < EXPLAINED[name, grid]
    else:
        assert share <= 1.15


PLAIN = sbp.placement("cpu", shape=(2, 4))
X, W = np.ones((8, 16), np.float32), np.ones((16, 32), np.float32)


def layer(x: Any, w: Any, *, scale: float = 1.0) -> Any:
    return {"y": jnp.tanh(x @ w) * scale, "sum": (x @ w).sum(0)}


def planned() -> Any:
    return sbp.compile(layer, PLAIN, in_sbp=([S(0), S(1)], [B, S(0)]), static_argnames="scale").plan(
        X, W, scale=2.0
    )


def test_it_is_called_as_the_function_is(tmp_path: Path) -> None:
    plan, expected = planned(), layer(X, W, scale=2.0)
    plan.save(tmp_path / "plan.json")
    for held in (plan, sbp.load_plan(tmp_path / "plan.json")):
        got = jax.jit(partial(sbp.constrain(layer, held), scale=2.0))(X, W)
        assert got.keys() == expected.keys()
        np.testing.assert_allclose(got["y"], expected["y"], rtol=1e-6)
        np.testing.assert_allclose(got["sum"], expected["sum"], rtol=1e-6)


def test_another_mesh_with_the_axes_will_do() -> None:
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), PLAIN.axes)
    got = jax.jit(partial(sbp.constrain(layer, planned(), mesh=mesh), scale=2.0))(X, W)
    assert got["y"].sharding.mesh.devices[0, 0] == jax.devices()[-1]


def test_a_plan_says_where_its_ends_lie(tmp_path: Path) -> None:
    plan = planned()
    assert plan.shardings["x"] == jax.P("data", "model")
    assert plan.shardings["w"] == jax.P("model")
    plan.save(tmp_path / "shardings.py")
    text = (tmp_path / "shardings.py").read_text(encoding="utf-8")
    held: dict[str, Any] = {}
    exec(compile(text, "shardings.py", "exec"), held)
    assert {**held["ARGUMENTS"], **held["RESULTS"]} == plan.shardings
    assert held["MESH"].shape == {"data": 2, "model": 4}
    lines = {line for line, _, _ in held["INSIDE"]}
    assert all(line.startswith("test_constrain.py:") for line in lines)


def test_what_cannot_be_said_has_a_price(tmp_path: Path) -> None:
    step, args, signs = gpt_case((2, 4))
    plan = sbp.compile(step, PLAIN, in_sbp=signs).plan(*args)
    sums, together = map(str, plan.constraint_gaps)
    assert sums.startswith("sums that wait: reduce_sum:float32[64] at gpt.py:")
    assert sums.endswith("kB more per tensor")
    assert together.startswith("collectives in buckets: ")
    plan.save(tmp_path / "shardings.py")
    assert f"It cannot be said: {sums}." in (tmp_path / "shardings.py").read_text(encoding="utf-8")
    assert not sbp.compile(jnp.sin, PLAIN).plan(X).constraint_gaps


def test_splits_that_do_not_divide() -> None:
    x, w = np.ones((5, 8), np.float32), np.ones((8, 7), np.float32)

    def uneven(x: Any, w: Any) -> Any:
        return sbp.annotate(jnp.tanh(x @ w), [S(0), S(1)]).sum()

    for types in AxisType.Auto, AxisType.Explicit:
        placement = sbp.placement("cpu", shape=(2, 4), axis_types=types)
        plan = sbp.compile(uneven, placement).plan(x, w)
        assert "splits that do not divide: " in str([str(u) for u in plan.constraint_gaps])
        with jax.set_mesh(placement.mesh):
            np.testing.assert_allclose(jax.jit(sbp.constrain(uneven, plan))(x, w), uneven(x, w), rtol=1e-5)


def test_a_plan_with_stages_is_refused() -> None:
    first, second = PLAIN.split("data")

    def staged(x: Any) -> Any:
        with sbp.on(first):
            y = jnp.tanh(x)
        with sbp.on(second):
            return y * 2

    with pytest.raises(ArgumentError, match=r"each stage is a program of its own"):
        sbp.constrain(staged, sbp.compile(staged, PLAIN).plan(X))
