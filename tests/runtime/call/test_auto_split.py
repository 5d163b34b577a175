"""`S(AUTO)`: a split of which the planner chooses the dim, for a whole tree at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import sbp
from sbp import AUTO, B, S
from sbp.layout import allowed_at_rest, is_even, rest_signatures
from sbp.placement import Placement
from sbp.signature import NdSbp, Split

LINE, GRID = sbp.placement("cpu", shape=(8,)), sbp.placement("cpu", shape=(2, 4))
OPTIMIZER = optax.adam(1e-2)
SHAPES = {"up": (16, 32), "up_bias": (32,), "down": (32, 6), "down_bias": (6,), "scale": ()}


def step(params: Any, state: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        h = jnp.tanh(x @ p["up"] + p["up_bias"])
        return ((p["scale"] * (h @ p["down"] + p["down_bias"])) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    params = {k: jnp.asarray(random.normal(size=shape), jnp.float32) for k, shape in SHAPES.items()}
    return params, OPTIMIZER.init(params), jnp.asarray(random.normal(size=(24, 16)), jnp.float32)


@pytest.mark.parametrize(
    ("on", "nd", "held"),
    [
        (LINE, S(AUTO), {"up": 8, "up_bias": 8, "down": 8, "down_bias": 1}),
        (GRID, [S(AUTO), S(AUTO)], {"up": 8, "up_bias": 8, "down": 8, "down_bias": 2}),
        (GRID, [B, S(AUTO)], {"up": 4, "up_bias": 4, "down": 4, "down_bias": 1}),
        (GRID, [S(0), S(AUTO)], {"up": 8, "up_bias": 8, "down": 8, "down_bias": 2}),
    ],
)
def test_a_whole_tree_is_split_by_one_signature(on: Placement, nd: Any, held: dict[str, int]) -> None:
    """FSDP: each tensor lies in as many parts as divide one of its dims, and the step is the same."""
    params, state, x = arguments()
    program = sbp.compile(step, on, in_sbp=(nd, AUTO, AUTO))
    found = program(params, state, x)
    assert all(isinstance(w.sharding, NamedSharding) for w in found[0].values())
    parts = {k: w.size // w.addressable_shards[0].data.size for k, w in found[0].items()}
    assert parts == held | {"scale": 1}
    for ours, plain in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(params, state, x)), strict=True
    ):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=1e-6)
    notes = program.plan(params, state, x).notes
    left = [k for k, n in held.items() if n < max(held.values())]
    assert [n for n in notes if n.startswith("S(AUTO)")] == [
        f"S(AUTO) leaves whole what has no dim that divides: {', '.join(f'params[{k!r}]' for k in left)}"
    ]
    assert any("leaves scalars B" in n for n in notes)


def test_it_is_as_cheap_as_the_best_dim() -> None:
    w, x = jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((256, 512), jnp.float32)
    on = sbp.placement("h100", shape=(8,))

    def planned(nd: Any) -> sbp.Plan:
        return sbp.compile(lambda w, x: x @ w, on, in_sbp=(nd, S(0)), out_sbp=S(0)).plan(w, x)

    assert planned(S(AUTO)).seconds == min(planned(S(d)).seconds for d in (0, 1))


def test_results_and_plans_that_are_given() -> None:
    params, state, x = arguments()
    program = sbp.compile(step, GRID, in_sbp=([B, S(AUTO)], AUTO, AUTO), out_sbp=(AUTO, AUTO, [B, S(AUTO)]))
    plan = program.plan(params, state, x)
    result = sbp.compile(lambda x: x * 2, LINE, out_sbp=S(AUTO)).plan(jnp.ones((3, 16)))
    assert result.out_sbp == ((S(1),),) and not result.notes
    whole = sbp.compile(lambda x: x * 2, LINE, out_sbp=S(AUTO)).plan(jnp.ones((3, 5)))
    assert whole.notes == ("S(AUTO) leaves whole what has no dim that divides: result",)
    again = sbp.compile(
        step, GRID, in_sbp=([B, S(AUTO)], AUTO, AUTO), out_sbp=(AUTO, AUTO, [B, S(AUTO)]),
        options=sbp.Options(plan=plan),
    )  # fmt: skip
    assert again.plan(params, state, x).in_sbp == plan.in_sbp
    assert again.plan(params, state, x).choice == plan.choice
    other = sbp.compile(step, GRID, in_sbp=([S(AUTO), B], AUTO, AUTO), options=sbp.Options(plan=plan))
    assert all(nd[1] == B for nd in other.plan(params, state, x).in_sbp[: len(SHAPES)])


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3),
    st.lists(st.sampled_from([S(AUTO), B, None]), min_size=2, max_size=2),
)
def test_as_many_axes_split_as_can(shape: list[int], asked: list[Any]) -> None:
    """Against all signatures that arrays of this shape can have."""
    kept = tuple(B if s is None else s for s in asked)
    found = allowed_at_rest(kept, shape, np.dtype(np.float32), GRID)
    free = rest_signatures(shape, np.dtype(np.float32), GRID)
    assert all(is_even(shape, nd, GRID.shape) for nd in free)

    def splits(nd: NdSbp) -> int:
        return sum(isinstance(s, Split) for s in nd)

    fits = [nd for nd in free if all(w == S(AUTO) or s == B for w, s in zip(kept, nd, strict=True))]
    assert set(found) == {nd for nd in fits if splits(nd) == max(map(splits, fits))}
    assert len(set(found)) == len(found)


def test_stages_split_their_own_weights() -> None:
    first, second = sbp.placement("cpu", ranks=range(4)), sbp.placement("cpu", ranks=range(4, 8))

    def two(ws: Any, x: Any) -> Any:
        with sbp.on(first):
            h = jnp.tanh(x @ ws[0])
        with sbp.on(second):
            return (h @ ws[1]).sum()

    ws, x = [jnp.ones((8, 6)), jnp.ones((6, 8))], jnp.ones((4, 8))
    program = sbp.compile(two, LINE, in_sbp=(S(AUTO), B))
    np.testing.assert_allclose(program(ws, x), two(ws, x), rtol=1e-6)
    assert program.plan(ws, x).in_sbp[:2] == ((S(0),), (S(1),))
