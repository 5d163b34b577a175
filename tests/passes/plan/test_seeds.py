"""Seeds: what a parallelism by name leaves of a planning problem."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.plan.model import Boundary, Model
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.seeds import (
    DATA,
    TENSOR,
    ZERO_1,
    ZERO_3,
    ZERO_3_GATHERED,
    ZERO_3_LAYERS,
    SeedUse,
    restriction,
    seed_name,
    seeds_for,
    tensors_of,
)
from sbp.passes.plan.solve import solve
from sbp.passes.program.control import ports
from sbp.passes.program.trace import trace
from sbp.placement import Placement, placement
from sbp.signature import B, Split
from tests.passes.search.test_explore import HARDWARE

TIES = (0, 1, None)


def step(w: Any, m: Any, x: Any) -> Any:
    """A train step with momentum."""
    loss, grad = jax.value_and_grad(lambda w: jnp.square(x @ w).sum())(w)
    m = 0.9 * m + grad
    return w - 0.1 * m, m, loss


def model_of(place: Placement, first: Any = None) -> tuple[Model, CostNetwork]:
    xs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 16), (16, 16), (32, 16))]
    graph = trace(step, tuple(xs), {}).graph
    free = (None,) * 3
    asked = Boundary((first, None, None), free, TIES)
    model = Model(enumerate_candidates(graph, place, {}), asked, Boxings(Network(place, HARDWARE)))
    return model, model.build()


def inputs_under(seed: tuple[SeedUse, ...], place: Placement, first: Any = None) -> tuple[Any, ...]:
    model, network = model_of(place, first)
    unary = restriction(model, seed, tensors_of(model.graph, TIES))
    states = solve(CostNetwork(unary, network.edges)).states
    return model.chosen_signatures(states, 0.0, 0.0).inputs


def test_tensors() -> None:
    """Weights are the state that the model computes with; a moment has the shape of one."""
    model, _ = model_of(placement("cpu", shape=(4,)))
    found = tensors_of(model.graph, TIES)
    assert (found.weights, found.moments, found.batch) == ({0}, {1}, {2})
    assert found.rows == {32} and found.gradients


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (DATA, (B, B, Split(0))),
        (ZERO_1, (B, Split, Split(0))),
        (ZERO_3, (Split(0), Split(0), Split(0))),
        (TENSOR, (Split, Split, B)),
    ],
)
def test_arguments_lie_as_the_seed_says(seed: SeedUse, expected: tuple[Any, ...]) -> None:
    """On one axis, and on the outer one of two while the inner has data."""
    line, grid = placement("cpu", shape=(4,)), placement("cpu", shape=(2, 2))
    for found in (inputs_under((seed,), line), inputs_under((seed, DATA), grid)):
        for nd, wanted in zip(found, expected, strict=True):
            assert nd[0] == wanted or (wanted is Split and isinstance(nd[0], Split))


def test_pins_of_the_user_stay() -> None:
    """A seed says nothing of what is fixed."""
    assert inputs_under((DATA,), placement("cpu", shape=(4,)), (Split(1),))[0] == (Split(1),)


def test_at_least_eight_on_any_placement() -> None:
    """Two axes have those of one, and both ways of two parallelisms."""
    for axes in (1, 2, 3):
        names = [seed_name(seed) for seed in seeds_for(axes)]
        assert len(names) == len(set(names)) >= 8 + 6 * (axes > 1)
        assert all(len(seed) == axes for seed in seeds_for(axes))
    assert {"data x tensor", "tensor x data"} <= set(map(seed_name, seeds_for(2)))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_loops_take_weights_in_parts(shape: tuple[int, ...]) -> None:
    """A stack of weights is split by another dim than that of its layers, and gathered in the body."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.square(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]).sum()

        return w - jax.grad(loss)(w)

    place = placement("cpu", shape=shape)
    xs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16, 16), (32, 16))]
    graph = trace(step, tuple(xs), {}).graph
    asked = Boundary((None, None), (None,), (0,))
    model = Model(enumerate_candidates(graph, place, {}), asked, Boxings(Network(place, HARDWARE)))
    network = model.build()
    unary = restriction(model, (ZERO_3_LAYERS,) * place.ndim, tensors_of(graph, (0,)))
    chosen = model.chosen_signatures(solve(CostNetwork(unary, network.edges)).states, 0.0, 0.0)
    loops = [n for n in graph.nodes if n.bodies]
    taken = [
        nd
        for loop in loops
        for p, nd in zip(ports(loop), chosen.ports[loop.id], strict=True)
        if p.operand is not None and loop.inputs[p.operand] == graph.inputs[0]
    ]
    assert len(taken) == len(loops) == 2 and all(isinstance(s, Split) for nd in taken for s in nd)
    assert all(isinstance(s, Split) and s.dim for s in chosen.inputs[0])


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_gathered_weights_are_used_whole(shape: tuple[int, ...]) -> None:
    """No product takes a part of a weight, though the weight lies split and rows are short."""
    place = placement("cpu", shape=shape)
    model, network = model_of(place)
    unary = restriction(model, (ZERO_3_GATHERED,) * place.ndim, tensors_of(model.graph, TIES))
    states = solve(CostNetwork(unary, network.edges)).states
    chosen = model.chosen_signatures(states, 0.0, 0.0)
    assert all(isinstance(s, Split) for s in chosen.inputs[0])
    products = [n for n in model.graph.walk() if n.op == "dot_general"]
    weight = model.graph.inputs[0]
    used = [
        nd
        for n in products
        for x, nd in zip(n.inputs, chosen.strategies[n.id].operands, strict=True)
        if x == weight
    ]
    assert used and all(nd == (B,) * place.ndim for nd in used)
