"""What each op is to fusion: every rule says it, or the table does."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp.communication.protocol import COLLECTIVES
from sbp.passes.physical.fusion import COSTLY, IN_PLACE, KINDS, MOVES, PARTIAL, Fusing, ShardSizes, op_of
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.layouts import Places, copies, places
from sbp.passes.physical.order import turns
from sbp.rules import REGISTRY


@pytest.mark.parametrize("name", sorted({*KINDS, *PARTIAL, *COSTLY, *IN_PLACE}))
def test_the_tables_are_of_ops_that_there_are(name: str) -> None:
    assert name in REGISTRY


def test_a_rule_that_says_it_is_element_wise_has_no_entry() -> None:
    """So that both cannot say something else; a slice in place of an element is what the table adds."""
    said = {n for n in KINDS if REGISTRY[n].pointwise or REGISTRY[n].identity}
    assert not said


def test_collectives_are_calls() -> None:
    assert not set(MOVES) & set(COLLECTIVES)
    assert set(MOVES.values()) == {Fusing.VIEW, Fusing.LOOP}


IMAGE = (16, 32, 32, 64)
BYTES = 4 * 16 * 32 * 32 * 64


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def waiting(x: Any) -> Any:
    """A mean over the batch behind the pool is a collective."""
    y = pooled(jnp.tanh(x))
    return jnp.square(y - y.mean(0)).sum()


def found(fn: Any, devices: int, hides: bool) -> list[Places]:
    """What is found where a collective is as long as a kernel, or nothing hides it."""
    program = sbp.compile(fn, sbp.placement("h100", shape=(devices,)), in_sbp=[sbp.S(0)])
    p = program.plan(jax.ShapeDtypeStruct(IMAGE, jnp.float32)).physical
    assert p is not None
    sizes, held = ShardSizes(p), list(zip(p.graph.inputs, p.inputs, strict=True))
    kept: Any = list(zip(p.graph.outputs, p.outputs, strict=True))
    k = kernels([op_of(s, p) for s in p.steps], sizes, kept, held)
    there = {t for t in k.tensors if t.maker < 0}
    return list(places(k, sizes, turns(k, there, (lambda op: 1.0) if hides else None)))


def test_a_number_per_dim_and_maximum() -> None:
    [one] = found(jax.grad(lambda x: jnp.square(pooled(jnp.tanh(x))).sum()), 1, hides=True)
    # Four dims; a quarter of the numbers are maxima.
    assert one.places_bytes == BYTES
    # They are found as early as they can be, and the gradient takes the space of the zeros.
    assert one.first < one.last and one.zeros_bytes == 0


def test_they_are_early_beside_collectives() -> None:
    [early] = found(jax.grad(waiting), 8, hides=True)
    [late] = found(jax.grad(waiting), 8, hides=False)
    assert early.first < early.last and late.first < late.last
    assert early.zeros_bytes == BYTES / 8 and late.zeros_bytes == 0


def test_other_pools_have_none() -> None:
    assert found(pooled, 1, hides=True) == []
    mean = jax.grad(
        lambda x: jnp.square(lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")).sum()
    )
    assert found(mean, 1, hides=True) == []


ONE = sbp.placement("h100", shape=(1,))
CONVOLVED, KERNEL = (8, 16, 16, 32), (3, 3, 32, 32)


def convolved(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def copied(fn: Any) -> list[tuple[tuple[int, ...], float, int]]:
    """The shape of each copied tensor, how many times its size the copy has, and who reads that."""
    plan = sbp.compile(fn, ONE).plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (CONVOLVED, KERNEL)))
    p = plan.physical
    assert p is not None
    sizes, kept = ShardSizes(p), list(zip(p.graph.outputs, p.outputs, strict=True))
    held = list(zip(p.graph.inputs, p.inputs, strict=True))
    k = kernels([op_of(s, p) for s in p.steps], sizes, kept, held)  # type: ignore[arg-type]
    return [
        (sizes.shape(c.tensor.version[0]), c.bytes / c.tensor.bytes, len(c.users)) for c in copies(k, sizes)
    ]


def test_a_kernel_is_laid_out_anew_once() -> None:
    assert copied(convolved) == [(KERNEL, 1.0, 1)]
    # Its gradient reads images; that of the image reads the kernel once more.
    loss = lambda x, w: jnp.square(convolved(jnp.tanh(x), w)).sum()  # noqa: E731
    assert copied(jax.grad(loss, (0, 1))) == [(KERNEL, 1.0, 2)]


def test_uneven_padding_is_a_copy_of_the_image() -> None:
    images = [
        (shape, n, users) for shape, n, users in copied(lambda x, w: convolved(x, w, 2)) if shape == CONVOLVED
    ]
    assert images == [(CONVOLVED, pytest.approx((17 / 16) ** 2), 1)]
    strided = copied(jax.grad(lambda x, w: jnp.square(convolved(x, w, 2)).sum(), 1))
    assert [users for shape, _, users in strided if shape == CONVOLVED] == [2]


def test_other_ops_have_none() -> None:
    assert copied(lambda x, w: x.sum() + w.sum()) == []
