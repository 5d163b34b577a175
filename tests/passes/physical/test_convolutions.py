"""What cuDNN has laid out anew."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp.passes.physical.fusing import ShardSizes, op_of
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.layouts import copies

ONE = sbp.placement("h100", shape=(1,))
IMAGE, KERNEL = (8, 16, 16, 32), (3, 3, 32, 32)


def convolved(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def found(fn: Any) -> list[tuple[tuple[int, ...], float, int]]:
    """The shape of each copied tensor, how many times its size the copy has, and who reads that."""
    plan = sbp.compile(fn, ONE).plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (IMAGE, KERNEL)))
    p = plan.physical
    assert p is not None
    sizes, kept = ShardSizes(p), list(zip(p.graph.outputs, p.outputs, strict=True))
    held = list(zip(p.graph.inputs, p.inputs, strict=True))
    k = kernels([op_of(s, p) for s in p.steps], sizes, kept, held)  # type: ignore[arg-type]
    return [
        (sizes.shape(c.tensor.version[0]), c.bytes / c.tensor.bytes, len(c.users)) for c in copies(k, sizes)
    ]


def test_a_kernel_is_laid_out_anew_once() -> None:
    assert found(convolved) == [(KERNEL, 1.0, 1)]
    # Its gradient reads images; that of the image reads the kernel once more.
    loss = lambda x, w: jnp.square(convolved(jnp.tanh(x), w)).sum()  # noqa: E731
    assert found(jax.grad(loss, (0, 1))) == [(KERNEL, 1.0, 2)]


def test_uneven_padding_is_a_copy_of_the_image() -> None:
    images = [
        (shape, n, users) for shape, n, users in found(lambda x, w: convolved(x, w, 2)) if shape == IMAGE
    ]
    assert images == [(IMAGE, pytest.approx((17 / 16) ** 2), 1)]
    strided = found(jax.grad(lambda x, w: jnp.square(convolved(x, w, 2)).sum(), 1))
    assert [users for shape, _, users in strided if shape == IMAGE] == [2]


def test_other_ops_have_none() -> None:
    assert found(lambda x, w: x.sum() + w.sum()) == []
