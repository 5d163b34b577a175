"""A scan over layers run as stages: what one device gives, with every stacked leaf one array outside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sbp
from sbp import B, S
from sbp.options import PipelineOptions
from sbp.passes.pipeline.op_placement import loop_of
from sbp.runtime.pipeline.program import CompiledPipeline
from tests.passes.pipeline.scanned import LAYERS, arguments, step_of

GRID = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))


def program(on: Any = GRID, stages: int = 2, **given: Any) -> Any:
    asked = {"scan_kept": given.pop("scan_kept", 0.0)}
    options = sbp.Options(pipeline=PipelineOptions(stages=stages), **asked)
    return sbp.compile(step_of(), on, options=options, **given)


def after(steps: int, step: Any, *args: Any) -> Any:
    """What some steps give."""
    params, speed, x = args
    for _ in range(steps):
        params, speed, value = step(params, speed, x)
    return params, speed, value


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-6)


@pytest.mark.some(1)
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_two_stages_of_a_scan_equal_one_device(kept: float) -> None:
    wanted = after(3, jax.jit(step_of()), *arguments())
    assert_same(after(3, program(donate_argnums=(0, 1), scan_kept=kept), *arguments()), wanted)


@pytest.mark.full
def test_weights_that_layers_cast_are_cast_once_per_step() -> None:
    """Stages read a stack in the type in which it is used; sums are of the wide one."""

    def train_step(stack: Any, x: Any) -> Any:
        def loss(stack: Any, x: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

            return jnp.mean(jax.lax.scan(layer, x.astype(jnp.bfloat16), stack)[0].astype(jnp.float32) ** 2)

        value, grads = sbp.microbatch(jax.value_and_grad(loss), 4, batch_args=1)(stack, x)
        return stack - 0.5 * grads, value

    args = (
        jax.random.normal(jax.random.key(0), (4, 16, 16)) / 4,
        jax.random.normal(jax.random.key(1), (32, 16)),
    )
    options = sbp.Options(pipeline=PipelineOptions(stages=2), check=True)
    step = sbp.compile(train_step, GRID, donate_argnums=0, options=options)
    for stage in step.plan(*args).stages:
        loop = loop_of(stage.physical.graph)
        assert loop is not None
        scans = [n for n in loop.bodies[0].nodes if n.op == "scan"]
        casts = [n.op for scan in scans for n in scan.bodies[0].nodes].count("convert_element_type")
        assert len(scans) == 2 and casts == 1  # of gradients
    wanted = jax.jit(train_step)(*args)
    found = step(*args)
    assert found[0].dtype == jnp.float32
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=2e-3)


@pytest.mark.full
def test_a_stage_for_every_layer() -> None:
    line = sbp.placement("cpu", shape=(LAYERS,), axes=("stage",))
    assert_same(after(2, program(line, LAYERS), *arguments()), after(2, jax.jit(step_of()), *arguments()))


def test_a_stack_lies_split_by_layers_along_the_stages() -> None:
    params, speed, _ = program()(*arguments())
    for x in (*params["layers"].values(), *speed["layers"].values()):
        assert x.shape[0] == LAYERS and x.sharding.mesh == GRID.mesh
        assert x.sharding.spec[0] == "stage"
    assert len(params["first"].sharding.device_set) == 2


def test_signatures_of_a_stack_hold_for_its_parts() -> None:
    """An axis may split the layers of a stage once more, and another dim."""
    asked = {"first": [B], "layers": {"up": [S(0)], "down": [S(1)]}, "last": [B]}
    step = program(in_sbp=(asked, asked, [S(0)]))
    found = after(2, step, *arguments())
    assert_same(found, after(2, jax.jit(step_of()), *arguments()))
    assert found[0]["layers"]["up"].sharding.spec == PartitionSpec(("stage", "data"))
    assert found[0]["layers"]["down"].sharding.spec == PartitionSpec("stage", "data")


@pytest.mark.full
def test_arguments_are_placed_once() -> None:
    step, args = program(), arguments()
    placed = step.place(*args)
    assert placed[0]["layers"]["up"].sharding.spec[0] == "stage"
    assert_same(step(*placed), jax.jit(step_of())(*args))


def test_stages_that_are_planned_otherwise_give_one_array() -> None:
    """A part that another stage has otherwise is moved to where the first one has it."""
    step = program()
    step.plan(*arguments())
    (built,) = step._built.values()
    assert isinstance(built, CompiledPipeline) and built.stacked_leaves is not None
    first, last = (p.mesh for p in GRID.split("stage"))
    parts = [
        jax.device_put(np.full((2, 4), i, np.float32), jax.NamedSharding(mesh, PartitionSpec(*spec)))
        for i, (mesh, spec) in enumerate(((first, (None, "data")), (last, ("data",))))
    ]
    whole = built.stacked_leaves._stack(parts)
    assert whole.sharding.spec == PartitionSpec("stage", "data")
    np.testing.assert_array_equal(whole[:, 0], [0, 0, 1, 1])
