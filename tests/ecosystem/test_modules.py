"""Modules passed as they are: what would be lost is refused, what is returned or only computes is taken."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp.errors import ArgumentError

LINE = sbp.placement("cpu", shape=(8,))
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.zeros((16, 4), np.float32)


@pytest.fixture
def nnx() -> Any:
    return pytest.importorskip("flax.nnx")


def made(nnx: Any) -> tuple[Any, Any]:
    module = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    return module, nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)


def train(nnx: Any) -> Any:
    def step(module: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(module)
        optimizer.update(module, grads)
        return loss

    return step


def expected(nnx: Any) -> list[float]:
    step, state = nnx.jit(train(nnx)), made(nnx)
    return [float(step(*state, X, Y)) for _ in range(3)]


def test_a_change_that_would_be_lost_is_refused(nnx: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        sbp.compile(train(nnx), LINE)(*made(nnx), X, Y)
    names = [p.where for p in caught.value.problems]
    assert names == ["module.bias.value", "module.kernel.value", "optimizer.step.value"]
    (problem, *_) = caught.value.problems
    assert problem.got == "a variable of an nnx module that the function changes in place and does not return"
    assert "nnx.split" in problem.fix and "nnx.merge" in problem.fix


def test_statistics_and_random_state_are_changes_too(nnx: Any) -> None:
    layer = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=r"layer\.mean\.value"):
        sbp.compile(lambda layer, x: layer(x), LINE).plan(layer, X)
    layer.eval()
    sbp.compile(lambda layer, x: layer(x), LINE).plan(layer, X)


def test_modules_are_found_wherever_they_are(nnx: Any) -> None:
    """In containers, beside static arguments, as keywords; a variable that is added is lost too."""

    def nested(modules: Any, x: Any) -> Any:
        modules["a"][0].kernel[...] *= 2
        return modules["a"][0](x)

    def scaled(n: int, module: Any, *, x: Any) -> Any:
        module.kernel[...] *= n
        return module(x)

    def records(module: Any, x: Any) -> Any:
        module.mean = nnx.Intermediate(x.mean())
        return module(x)

    module, _ = made(nnx)
    for call, name in (
        (lambda: sbp.compile(nested, LINE).plan({"a": [module]}, X), r"modules\['a'\]\[0\]\.kernel"),
        (lambda: sbp.compile(scaled, LINE, static_argnums=0).plan(3, module, x=X), r"module\.kernel"),
        (lambda: sbp.compile(records, LINE).plan(module, X), r"module\.mean"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()


def test_a_module_that_is_returned_trains(nnx: Any) -> None:
    def step(module: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = train(nnx)(module, optimizer, x, y)
        return module, optimizer, loss

    program, state, losses = sbp.compile(step, LINE), made(nnx), []
    for _ in range(3):
        *state, loss = program(*state, X, Y)
        losses.append(float(loss))
    assert losses == pytest.approx(expected(nnx), rel=1e-5)


def test_the_way_that_the_error_names_trains(nnx: Any) -> None:
    graph, state = nnx.split(made(nnx))

    def step(state: Any, x: Any, y: Any) -> Any:
        module, optimizer = nnx.merge(graph, state)
        loss = train(nnx)(module, optimizer, x, y)
        return nnx.state((module, optimizer)), loss

    program, losses = sbp.compile(step, LINE), []
    for _ in range(3):
        state, loss = program(state, X, Y)
        losses.append(float(loss))
    assert losses == pytest.approx(expected(nnx), rel=1e-5)


@pytest.mark.parametrize("how", ("jit", "remat"))
def test_calls_that_only_pass_a_module_through_change_nothing(nnx: Any, how: str) -> None:
    """They replace every variable by itself."""

    def step(module: Any, x: Any, y: Any) -> Any:
        called = getattr(nnx, how)(lambda m, x: m(x))
        return nnx.value_and_grad(lambda m: jnp.mean((called(m, x) - y) ** 2))(module)

    sbp.compile(step, LINE).plan(made(nnx)[0], X, Y)


def test_an_equinox_module_names_partition() -> None:
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(8, 4, 8, 1, key=jax.random.key(0))
    with pytest.raises(ArgumentError) as caught:
        sbp.compile(lambda net, x, f: jax.vmap(net)(x), LINE).plan(net, X, "text")
    of_net, of_text = caught.value.problems[:-1], caught.value.problems[-1]
    assert {p.where for p in of_net} == {"net.activation", "net.final_activation"}
    assert all("eqx.partition" in p.fix and "eqx.combine" in p.fix for p in of_net)
    assert "eqx" not in of_text.fix
