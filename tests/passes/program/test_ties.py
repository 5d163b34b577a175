"""State that comes back: which result keeps the signature of which argument."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sbp.passes.program.ties import ties
from sbp.passes.program.trace import trace
from sbp.signature import B, NdSbp, S


class Pair(NamedTuple):
    w: Any
    b: Any


class Trained(NamedTuple):
    params: Any
    ema: Any


def shape(*sizes: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


KEYS = ("ema", "params")
M, V = shape(8, 8), shape(8)
TREE = {"w": M, "b": V}
GIVEN: NdSbp = (S(0),)


def tied(fn: Any, *args: Any, outs: Any = None, ins: Any = None, **kwargs: Any) -> Any:
    """The ties of a function of shapes."""
    traced = trace(fn, args, kwargs)
    out = jax.tree.unflatten(traced.out_tree, [traced.graph.operand(x) for x in traced.graph.outputs])
    outs = outs or [None] * len(traced.out_paths)
    return ties(traced, args, kwargs, out, ins or [None] * len(traced.in_paths), outs)


def of(fn: Any, *args: Any, **options: Any) -> tuple[int | None, ...]:
    return tied(fn, *args, **options).arguments  # type: ignore[no-any-return]


def halved(tree: Any) -> Any:
    return jax.tree.map(lambda x: x / 2, tree)


def averaged(old: Any, new: Any) -> Any:
    """As an exponential average is made."""
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)


def stepped(params: Any, x: Any) -> Any:
    grads = jax.grad(lambda p: jnp.tanh(x @ p["w"] + p["b"]).sum())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_state_is_tied_to_the_argument_that_it_was() -> None:
    state = (TREE, Pair(M, V), M)
    assert of(lambda a, b, c: (halved(a), halved(b), c), *state) == (0, 1, 2, 3, 4)
    assert of(lambda a, b, c: (halved(b), 1.0, halved(a)), *state) == (2, 3, None, 0, 1)
    # A named tuple is one result, not a tuple of results.
    assert of(lambda a, b: halved(a), Pair(M, V), M) == (0, 1)
    assert of(halved, M) == (0,)


def test_each_argument_is_taken_once_and_only_by_its_equal() -> None:
    assert of(lambda a, b: (a, b, a), M, M) == (0, 1, None)
    assert of(lambda a, b: (a[:4], b.astype(int)), M, V) == (None, None)
    assert of(lambda a: {"v": a["w"]}, {"w": M}) == (None,)
    assert of(lambda: ()) == ()
    assert of(lambda a, b: (a, halved(b)), {}, M) == (0,)


def test_a_given_signature_unties_its_leaf_alone() -> None:
    assert of(halved, TREE, outs=[None, GIVEN]) == (0, None)
    # A result whose leaves are all given takes nobody's argument.
    assert of(lambda a: (a, halved(a)), M, outs=[GIVEN, None]) == (None, 0)


SWAPS = {
    "in order": (lambda p, e: (halved(p), halved(e)), (0, 1, 2, 3)),
    "as they are": (lambda p, e: (e, p), (2, 3, 0, 1)),
    "updated": (lambda p, e: (halved(e), halved(p)), (2, 3, 0, 1)),
    "an average, in order": (lambda p, e: (halved(p), averaged(e, halved(p))), (0, 1, 2, 3)),
    "an average, first": (lambda p, e: (averaged(e, halved(p)), halved(p)), (2, 3, 0, 1)),
    "each needs the other": (lambda p, e: (averaged(e, p), stepped(averaged(p, e), e["w"])), (0, 1, 2, 3)),
    "gradients first": (lambda p, e: (stepped(p, e["w"]), stepped(e, p["w"])), (0, 1, 2, 3)),
    "inside loops": (
        lambda p, e: lax.scan(lambda c, _: ((halved(c[0]), halved(c[1])), None), (p, e), length=2)[0][::-1],
        (2, 3, 0, 1),
    ),
    "only the second": (lambda p, e: averaged(e, halved(p)), (2, 3)),
    "made anew": (lambda p, e: jax.tree.map(jnp.zeros_like, (p, e)), (0, 1, 2, 3)),
}


@pytest.mark.parametrize("name", SWAPS)
def test_alike_arguments_are_told_apart_by_what_is_returned(name: str) -> None:
    fn, expected = SWAPS[name]
    assert of(fn, TREE, TREE) == expected


def test_gradients_do_not_take_the_place_of_parameters() -> None:
    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.tanh(x @ p["w"] + p["b"]).sum())(params)
        return grads, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    assert of(step, TREE, shape(16, 8)) == (None, None, 0, 1)


def test_momentum_and_parameters() -> None:
    def step(params: Any, momentum: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.tanh(x @ p["w"] + p["b"]).sum())(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return momentum, jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), 0.0

    assert of(step, TREE, TREE, shape(16, 8)) == (2, 3, 0, 1, None)


def test_names_decide_what_the_graph_leaves_open() -> None:
    def mixed(params: Any, ema: Any) -> Any:
        return jax.tree.map(jnp.add, params, ema), jax.tree.map(jnp.subtract, params, ema)

    assert of(mixed, TREE, TREE) == (0, 1, 2, 3)
    # Leaves of a dict come in the order of its keys: "ema" first.
    named = of(lambda params, ema: dict(zip(KEYS, mixed(params, ema), strict=True)), TREE, TREE)
    assert named == (2, 3, 0, 1)
    assert of(lambda ema, params: Trained(*mixed(params, ema)), TREE, TREE) == (2, 3, 0, 1)


def test_results_in_containers() -> None:
    assert of(lambda p, x: ((halved(p), 1.0), {"loss": x.sum()}), TREE, M) == (0, 1, None, None)
    # An array in a dict is state only by its name: the others are metrics.
    assert of(lambda x, y: {"logits": x @ y, "y": y}, M, M) == (None, 1)


def test_keyword_arguments_are_state_too() -> None:
    assert of(lambda x, *, params: (halved(params), x.sum()), M, params=TREE) == (1, 2, None)


def test_doubts_are_noted() -> None:
    def mixed(a: Any, b: Any) -> Any:
        return a + b, a - b

    assert tied(mixed, M, M, ins=[GIVEN, (B,)]).notes == (
        "result[0] keeps the signature of a, not that of b, by their order, since nothing else tells them "
        "apart; out_sbp fixes it",
    )
    assert len(tied(lambda a, b: a + b, M, M, ins=[GIVEN, (B,)]).notes) == 1
    assert tied(mixed, M, M, ins=[GIVEN, GIVEN]).notes == ()
    assert tied(lambda a, b: (b, a), M, M, ins=[GIVEN, (B,)]).notes == ()
