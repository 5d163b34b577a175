"""A `shard_map` of the user's inside the program: the same numbers, on any placement."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import sbp
from sbp import S
from sbp.errors import AnnotationError

X = np.random.default_rng(0).integers(-4, 5, (64, 8)).astype(np.float32)
W = np.random.default_rng(1).integers(-4, 5, (8, 3)).astype(np.float32)
P = PartitionSpec


def mapped(body: Callable[..., Any], ins: Any, outs: Any, **options: Any) -> Callable[..., Any]:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, **options)


def everything(x: Any, w: Any) -> Any:
    """Every collective."""
    moved = lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)]) + lax.axis_index("b")
    return (
        lax.psum(x @ w, "b"),
        lax.pmean(lax.all_gather(x, "a", axis=0, tiled=True).sum(0), ("a", "b")),
        moved,
        lax.psum_scatter(x, "a", scatter_dimension=0, tiled=True),
        lax.pmax(x, ("a", "b")),
        lax.all_to_all(x, "a", 0, 0, tiled=True),
        lax.pmin(x.sum(), ("a", "b")),
    )


OUT = (P("a"), P(), P("a", "b"), P("a", "b"), P(), P("a", "b"), P())
twice = mapped(lambda x: lax.psum(x, "a") * 2, P(("a", "b")), P("b"))
CASES = {
    "everything": (mapped(everything, (P("a", "b"), P("b")), OUT, check_vma=False), (X, W)),
    "checked": (twice, (X,)),
    "gradient": (jax.grad(lambda x: jnp.sum(twice(x) ** 2)), (X,)),
    "no operand": (lambda x: x.sum() + mapped(lambda: lax.axis_index("a")[None] * 3, (), P("a"))(), (X,)),
    "a call inside": (mapped(lambda x: jax.jit(lambda y: lax.psum(y * y, "b"))(x), P("b"), P()), (X,)),
    "a loop inside": (
        mapped(
            lambda x: lax.fori_loop(0, 3, lambda i, c: lax.psum(c, "b") * 0.25, x),
            P("a", "b"),
            P("a", "b"),
            check_vma=False,
        ),
        (X,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_the_same(name: str) -> None:
    fn, args = CASES[name]
    place = sbp.placement("cpu", shape=(2, 2, 2))
    program = sbp.compile(fn, place, in_sbp=([S(1), S(0), S(0)], *[sbp.AUTO] * (len(args) - 1)))
    for got, want in zip(jax.tree.leaves(program(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert name == "a loop inside" or not any("no rule" in n for n in program.plan(*args).notes)


def test_a_checked_loop_is_refused() -> None:
    say = getattr(lax, "pcast", None)

    def body(x: Any) -> Any:
        again = (lambda y: say(y, "b", to="varying")) if say else (lambda y: lax.pvary(y, "b"))
        return lax.fori_loop(0, 3, lambda i, c: again(lax.psum(c, "b")), x)

    with pytest.raises(AnnotationError) as caught:
        sbp.compile(mapped(body, P("a", "b"), P("a", "b")), sbp.placement("cpu", shape=(8,))).plan(X)
    assert str(caught.value).splitlines() == [
        "scan inside jax.shard_map",
        "  got    a loop or a branch whose collectives are checked for the axes that values vary along",
        "  legal  loops in shard_map(..., check_vma=False), or outside of it",
        "  why    a shard_map inside a program is read as a program for one device, where no value varies",
        "  try    jax.shard_map(..., check_vma=False)",
    ]
