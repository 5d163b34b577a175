"""What a program says in JAX's own words of how its tensors lie is followed, or left out and priced."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp import B, P, S
from sbp.errors import AnnotationError

GRID = sbp.placement("cpu", shape=(2, 4))
AXES = (2, 4), ("data", "model")
EXPLICIT = jax.make_mesh(*AXES)
AUTO = jax.make_mesh(*AXES, axis_types=(AxisType.Auto,) * 2)
MIXED = jax.make_mesh(*AXES, axis_types=(AxisType.Auto, AxisType.Explicit))
ALONE = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES[1])
OTHER = jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
# Computing is dear, so that what is not asked is split in both ways, and nothing is sent.
LAYOUT = ([S(0), B], [B, S(1)])


def on(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, Spec(*spec))


def summed(fn: Any) -> Any:
    return lambda w: jnp.sum(jnp.tanh(fn(w)))


def of(fn: Any, mesh: Any = None, options: Any = None) -> Any:
    """The plan of a function under a mesh."""
    program = sbp.compile(fn, GRID, in_sbp=LAYOUT, options=options)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        return program.plan(X, W)


def kept(plan: Any) -> set[Any]:
    """How annotated tensors lie."""
    return {n.params["pin"].nd or n.params["pin"].levels for n in annotated(plan)}


def annotated(plan: Any) -> list[Any]:
    return [n for n in plan.physical.graph.walk() if n.op == "sbp_annotate"]


# Each asks for [S(0), B] of the product of X and W, which lies as [S(0), S(1)] if nobody asks.
ROWS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "out_sharding": (EXPLICIT, lambda x, w: jnp.tanh(jnp.dot(x, w, out_sharding=Spec("data")))),
    "einsum": (
        EXPLICIT,
        lambda x, w: jnp.tanh(jnp.einsum("ij,jk->ik", x, w, out_sharding=Spec("data", None))),
    ),
    "reshard": (EXPLICIT, lambda x, w: jnp.tanh(jax.reshard(x @ w, Spec("data")))),
    "reshard with a mesh": (
        None,
        lambda x, w: jnp.tanh(jax.reshard(x @ w, on(EXPLICIT, "data"))),
    ),
    "constraint": (AUTO, lambda x, w: jnp.tanh(constrain(x @ w, Spec("data", None)))),
    "constraint with a mesh": (
        None,
        lambda x, w: jnp.tanh(constrain(x @ w, on(AUTO, "data"))),
    ),
    "device_put": (None, lambda x, w: jnp.tanh(jax.device_put(x @ w, on(AUTO, "data")))),
    "auto_axes": (
        EXPLICIT,
        lambda x, w: jnp.tanh(jax.sharding.auto_axes(lambda x, w: x @ w)(x, w, out_sharding=Spec("data"))),
    ),
    "explicit_axes": (
        AUTO,
        lambda x, w: jax.sharding.explicit_axes(lambda y: jnp.tanh(jax.reshard(y, Spec("data"))))(
            x @ w, in_sharding=Spec("data", "model")
        ),
    ),
    "a spec": (None, lambda x, w: jnp.tanh(sbp.annotate(x @ w, Spec("data")))),
    "in a loop": (
        EXPLICIT,
        lambda x, w: jax.lax.scan(
            lambda c, _: (c, jnp.tanh(jax.reshard(c @ w, Spec("data")))), x, None, length=2
        ),
    ),
    "under grad": (AUTO, lambda x, w: jax.grad(summed(lambda w: constrain(x @ w, Spec("data", None))))(w)),
    "under vmap": (
        EXPLICIT,
        lambda x, w: jax.vmap(lambda s: jnp.tanh(jax.reshard(s * x @ w, Spec("data"))))(jnp.ones(2)),
    ),
    "in a checkpoint": (
        EXPLICIT,
        lambda x, w: jax.grad(jax.checkpoint(summed(lambda w: jax.reshard(x @ w, Spec("data")))))(w),
    ),
    "in a shard_map over another axis": (
        EXPLICIT,
        lambda x, w: jax.shard_map(
            lambda y: jnp.tanh(jax.reshard(y, Spec("data"))),
            in_specs=Spec(None, None),
            out_specs=Spec(),
            axis_names={"model"},
            check_vma=False,
        )(jax.reshard(x @ w, Spec())),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_is_an_annotation(name: str) -> None:
    mesh, fn = ROWS[name]
    plan = of(fn, mesh)
    asked = {tuple(nd) for nd in kept(plan)}
    rows = (S(1), B) if name == "under vmap" else (S(0), B)
    assert rows in {tuple(s or B for s in nd) for nd in asked}


def test_numbers_are_those_of_jit() -> None:
    for name, (mesh, fn) in ROWS.items():
        around: AbstractContextManager[Any] = nullcontext() if mesh is None else jax.set_mesh(mesh)
        with around:
            got = sbp.compile(fn, GRID, in_sbp=LAYOUT)(X, W)
        expected = jax.jit(PLAIN.get(name, lambda x, w: jnp.tanh(x @ w)))(X, W)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5, err_msg=name)


PLAIN: dict[str, Callable[..., Any]] = {
    "in a loop": lambda x, w: (x, jnp.tile(jnp.tanh(x @ w), (2, 1, 1))),
    "under grad": lambda x, w: jax.grad(summed(lambda w: x @ w))(w),
    "under vmap": lambda x, w: jnp.tile(jnp.tanh(x @ w), (2, 1, 1)),
    "in a checkpoint": lambda x, w: jax.grad(summed(lambda w: x @ w))(w),
}


@pytest.mark.parametrize("name", ["out_sharding", "reshard", "constraint", "device_put"])
def test_left_out_it_is_priced(name: str) -> None:
    mesh, fn = ROWS[name]
    plan = of(fn, mesh, sbp.Options(constraints="ignore"))
    assert not annotated(plan)
    (note,) = plan.notes
    words = {"constraint": "with_sharding_constraint"}.get(name, name)
    assert note.startswith(f"left out: {words} at test_jax_words.py:")
    assert "(data -): to follow it, +" in note
    assert of(fn, mesh).step_seconds > plan.step_seconds


def test_what_could_not_be_followed_is_left_out_too() -> None:
    ignoring = sbp.Options(constraints="ignore")
    (note,) = of(lambda x, w: constrain(x @ w, on(OTHER, "z")), options=ignoring).notes
    assert note.endswith("it could not be followed: no axis of the placement is called 'z'")


def test_of_one_device_it_says_nothing() -> None:
    def fn(x: Any, w: Any) -> Any:
        for _ in range(6):
            x = constrain(x * 2, on(ALONE, "data", "model"))
        return jax.device_put(x, jax.devices()[0]) @ w

    plan = of(fn)
    assert not annotated(plan)
    (note,) = plan.notes
    assert note.startswith(
        "constraints of a mesh of one device say nothing, and were left out: test_jax_words.py:"
    )


def test_dims_and_axes_may_be_left_open() -> None:
    """Of `UNCONSTRAINED` dims, and of automatic axes among explicit ones."""
    free = of(lambda x, w: jnp.tanh(constrain(x @ w, Spec(Spec.UNCONSTRAINED, "model"))), AUTO)
    assert kept(free) == {(None, S(1))}
    assert not free.collectives
    mixed = of(lambda x, w: jnp.tanh(jax.reshard(x @ w, Spec(None, "model"))), MIXED)
    assert kept(mixed) == {(None, S(1))}
    assert not mixed.collectives


def test_what_jax_infers_binds_nobody() -> None:
    """The cotangents of resharded weights, zeros that are made like them, and what `jnp.where` reshards."""

    def step(x: Any, w: Any) -> Any:
        whole = jax.reshard(w, Spec())
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(whole) + jnp.zeros_like(whole)

    plan = of(step, EXPLICIT)
    assert kept(plan) == {(B, B)}
    assert len(annotated(plan)) == 1

    def chosen(x: Any, w: Any) -> Any:
        columns = jax.reshard(x @ w, Spec("data", "model"))
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, columns.shape, 1) < 3, columns, 0)

    assert kept(of(chosen, EXPLICIT)) == {(S(0), S(1))}
    assert len(annotated(of(chosen, EXPLICIT))) == 1


def test_unreduced_axes_are_partial_sums() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = sbp.annotate(x, Spec("data", "model")) @ sbp.annotate(w, Spec("model", None))
        return jnp.tanh(sbp.annotate(y, Spec("data", None, unreduced={"model"})))

    assert (S(0), P) in kept(of(fn))

    def explicit(x: Any, w: Any) -> Any:
        x, w = jax.reshard(x, Spec("data", "model")), jax.reshard(w, Spec("model", None))
        return jax.reshard(jnp.dot(x, w, out_sharding=Spec("data", None, unreduced={"model"})), Spec("data"))

    assert (S(0), P) in kept(of(explicit, EXPLICIT))


def test_a_cotangent_may_be_named_too() -> None:
    def held(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(sbp.annotate(x @ w, Spec("data"), grad=Spec("data"))))(w)

    (cotangent,) = annotated(of(held))
    assert cotangent.role.direction == "backward"
    assert cotangent.params["pin"].nd == (S(0), B)


def test_all_that_cannot_be_followed_is_said_at_once() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = constrain(x @ w, on(OTHER, "z"))
        return constrain(jnp.tanh(y), on(OTHER, None, "z"))

    with pytest.raises(AnnotationError) as caught:
        of(fn)
    assert [p.got for p in caught.value.problems] == ["(z -)", "(- z)"]
