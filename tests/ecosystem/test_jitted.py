"""Steps that are jitted already: taken as what they wrap, or the error has the line to write."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from sbp.errors import ArgumentError
from sbp.signature import S

LINE = sbp.placement("cpu", shape=(4,))
X = jnp.arange(32.0).reshape(8, 4)


@pytest.mark.parametrize("library", ["jax", "equinox", "flax.nnx"])
def test_a_pure_step_is_taken_as_what_it_wraps(library: str) -> None:
    wrap = getattr(pytest.importorskip(library), "filter_jit" if library == "equinox" else "jit")
    step = wrap(lambda w, x: (x * w).sum(0))
    program = sbp.compile(step, LINE, in_sbp=([S(0)], [S(0)]))
    assert program(X + 1, X).tolist() == ((X + 1) * X).sum(0).tolist()
    assert program.plan(X + 1, X).collectives  # of the ops inside, which are planned


def test_a_module_of_equinox_with_functions() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    with pytest.raises(ArgumentError, match=r"params, static = eqx\.partition\(model, eqx\.is_array\)"):
        sbp.compile(eqx.filter_jit(lambda m, x: jax.vmap(m)(x)), LINE)(model, X)


def test_a_module_of_nnx_that_changes() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    with pytest.raises(ArgumentError, match=r"graph, state = nnx\.split\(\(model, optimizer\)\)"):
        sbp.compile(nnx.jit(step), LINE)(model, optimizer, X)
