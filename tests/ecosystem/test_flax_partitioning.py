"""flax's names of dims become annotations: logical constraints, and metadata of partitioned parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import sbp
from sbp import B, S

nn = pytest.importorskip("flax.linen")

GRID = sbp.placement("cpu", shape=(2, 4))
RULES = (("batch", "data"), ("hidden", "model"), ("features", None))
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Net(nn.Module):  # type: ignore[name-defined, misc]
    """Two layers, whose hidden units and rows have names."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("features", "hidden"))
        x = nn.Dense(32, kernel_init=kernel)(x)
        x = nn.with_logical_constraint(jnp.tanh(x), ("batch", "hidden"))
        return nn.Dense(8)(x)


def annotated(plan: Any) -> set[Any]:
    return {n.params["pin"].nd for n in plan.physical.graph.walk() if n.op == "sbp_annotate"}


def test_logical_names_are_annotations() -> None:
    net = Net()
    boxed = net.init(jax.random.key(0), X)
    params = nn.unbox(boxed)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), RULES)
    program = sbp.compile(net.apply, GRID, in_sbp=(specs, [S(0), B]))
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        plan = program.plan(params, X)
        got = program(params, X)
    assert annotated(plan) == {(S(0), S(1))}
    np.testing.assert_allclose(got, net.apply(params, X), rtol=1e-5, atol=1e-6)
    assert plan.shardings["variables['params']['Dense_0']['kernel']"] == jax.P(None, "model")
