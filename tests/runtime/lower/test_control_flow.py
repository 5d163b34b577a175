"""Loops and branches, planned inside: equal to one device, and their collectives counted once per trip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.hardware.catalogue import Hardware, Link
from sbp.runtime.hlo.meter import read_compiled
from sbp.signature import AUTO, B, S
from tests.annotated import annotated

# Arithmetic so slow and latency so low that the planner splits everything it can, inside loops too.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e6, 1e-9),), 1.0)
OPTIONS = sbp.Options(check=True, hardware=SPLITTING)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


W = {"a": normal(0, 4, 16, 24), "b": normal(1, 4, 24, 16)}
X = normal(2, 12, 16)


def layers(w: Any, x: Any) -> Any:
    """Stacked layers: carried activations, scanned weights, stacked statistics."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w["a"]) @ w["b"] + h, (h**2).mean(-1)

    return jax.lax.scan(layer, x, w)


def reverse(w: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h @ w["a"] @ w["b"], h.sum(0)

    return jax.lax.scan(layer, x, w, reverse=True)


def training(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        h, s = layers(w, x)
        return (h**2).mean() + s.mean()

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def checkpointed(w: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w["a"]) @ w["b"] + h, None

    return jax.grad(lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).sum())(w)


def nested(w: Any, x: Any) -> Any:
    def outer(h: Any, w: Any) -> Any:
        def inner(i: Any, g: Any) -> Any:
            return jnp.sin(g @ w["a"] @ w["b"] + i)

        return jax.lax.fori_loop(0, 2, inner, h), h[0]

    return jax.lax.scan(outer, x, w)


def accumulation(w: Any, x: Any) -> Any:
    """Gradients summed over micro-batches in the carry."""

    def micro(total: Any, rows: Any) -> Any:
        g = jax.grad(lambda w: jnp.square(jnp.tanh(rows @ w["a"][0]) @ w["b"][0]).sum())(w)
        return jax.tree.map(jnp.add, total, g), None

    zeros = jax.tree.map(jnp.zeros_like, w)
    return jax.lax.scan(micro, zeros, x.reshape(3, 4, 16))[0]


def whiles(w: Any, x: Any) -> Any:
    """A loop whose length depends on the data, with constants in test and body."""
    return jax.lax.while_loop(
        lambda c: (c[0] < 6) & (jnp.abs(c[1]).sum() > w["a"][0, 0, 0]),
        lambda c: (c[0] + 1, c[1] @ w["a"][0] @ w["b"][0] * 0.5),
        (jnp.int32(0), x),
    )


def branches(w: Any, x: Any) -> Any:
    yes = jax.lax.cond(x.sum() > 0, lambda h: h @ w["a"][0] @ w["b"][0], lambda h: h - 1, x)
    pick = jax.lax.switch(
        jnp.int32(x[0, 0] * 10), [lambda h: h, lambda h: h * 2, lambda h: jnp.zeros_like(h)], x
    )
    return yes, pick


def empty(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, r: (h + r, h), x, jnp.zeros((0, 12, 16)))


def mapped(w: Any, x: Any) -> Any:
    return jax.lax.map(lambda row: row @ w["a"][1], x)


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        layers, reverse, training, checkpointed, nested, accumulation, whiles, branches, empty, mapped,
    )
}  # fmt: skip
SIGNATURES = {
    "data": ((8,), ([B], [S(0)])),
    "tensor": ((2, 4), ({"a": [B, S(2)], "b": [B, S(1)]}, [S(0), B])),
    "auto": ((2, 3), AUTO),
}


@pytest.mark.some(10)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("how", SIGNATURES)
def test_equals_one_device(name: str, how: str) -> None:
    """Every program under every signature; 12 rows over 8 devices and 16 columns over 3 are uneven."""
    shape, in_sbp = SIGNATURES[how]
    on = sbp.placement("cpu", shape=shape)
    program = sbp.compile(annotated(PROGRAMS[name], on, in_sbp), on, in_sbp=in_sbp, options=OPTIONS)
    sbp.verify(program, W, X)
    plan = program.plan(W, X)
    assert not any(note.startswith("no rule") for note in plan.notes)


@pytest.mark.parametrize("name", ("layers", "training"))
def test_collectives_in_a_loop_count_per_trip(name: str) -> None:
    """The plan's bytes equal the compiled program's, with the trips of its loops.

    XLA may move a collective of something that does not change out of the loop, so it may send a little less.
    """
    shape, in_sbp = SIGNATURES["tensor"]
    program = sbp.compile(PROGRAMS[name], sbp.placement("cpu", shape=shape), in_sbp=in_sbp, options=OPTIONS)
    plan = program.plan(W, X)
    meter = read_compiled(program.lower(W, X).compile())
    assert 0.98 * plan.wire_bytes <= meter.wire_bytes <= plan.wire_bytes
    assert any(c.count == 4 for c in plan.collectives)


def test_a_scan_plans_like_the_unrolled_model() -> None:
    """Tensor-parallel layers in a loop send no more than the same layers written out."""

    def unrolled(w: Any, x: Any) -> Any:
        for i in range(4):
            x = jnp.tanh(x @ w["a"][i]) @ w["b"][i] + x
        return x

    def looped(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["a"]) @ w["b"] + h, None), x, w)[0]

    placement = sbp.placement("cpu", shape=(8,))
    in_sbp = ({"a": [S(2)], "b": [S(1)]}, [B])
    out = [sbp.compile(f, placement, in_sbp=in_sbp, options=OPTIONS).plan(W, X) for f in (looped, unrolled)]
    assert out[0].wire_bytes <= out[1].wire_bytes
    assert out[0].gap == out[1].gap == 0.0
