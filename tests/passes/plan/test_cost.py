"""The time of an op on one device, by what its rule says of its work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import sbp
from sbp import B
from sbp.hardware.catalogue import CATALOGUE
from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from sbp.rules import Matmul

H100 = CATALOGUE["h100"]
ONE = sbp.placement("h100", shape=(1,))
N = 4096


pytestmark = pytest.mark.usefixtures("forgotten")


def seconds(fn: Any, *args: Any) -> float:
    plan = sbp.compile(fn, ONE).plan(*args)
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(ONE, H100)).seconds()


def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize(
    ("dtype", "result"), [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, None)]
)
def test_a_product_is_rated_by_its_operands(dtype: Any, result: Any) -> None:
    """Tensor cores add up bfloat16 in float32: the type of the result does not slow them down."""
    found = seconds(
        lambda a, b: jnp.matmul(a, b, preferred_element_type=result), shape(dtype, N, N), shape(dtype, N, N)
    )
    assert found == pytest.approx(2 * N**3 / H100.flops(np.dtype(dtype).itemsize), rel=0.2)


def kernel(x: Any, w: Any, out: Any) -> None:
    out[...] = x[...] @ w[...]


def product(x: Any, w: Any) -> Any:
    made = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=made, interpret=True, name="product")(x, w)


def test_a_kernel_of_the_user_s_is_rated_by_what_it_says() -> None:
    args = shape(jnp.bfloat16, N, N), shape(jnp.bfloat16, N, N)

    def work(op: Any) -> Matmul:
        (m, k), (_, n) = op.shapes
        return Matmul(1, m, n, k, op.dtypes)

    letters, reduced = "m k, k n -> m n", {"k": "sum"}
    sbp.register_rule(
        "pallas_call[product]", letters, reduced=reduced, linear=(0, 1), flops=lambda _: 2 * N**3
    )
    slow = seconds(product, *args)
    sbp.register_rule(
        "pallas_call[product]", letters, reduced=reduced, linear=(0, 1), matmul=work, replace=True
    )
    fast = seconds(product, *args)
    assert fast == pytest.approx(seconds(jnp.matmul, *args)) and slow > 10 * fast


@pytest.mark.parametrize(
    ("fn", "shapes", "work"),
    [
        (lambda a, b: jnp.einsum("bik,bkj->bij", a, b), ((3, 4, 5), (3, 5, 6)), (3, 4, 6, 5)),
        (lambda a, b: jnp.tensordot(a, b, 2), ((4, 5, 6), (5, 6, 7)), (1, 4, 7, 30)),
        (
            lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"),
            ((2, 3, 8, 8), (16, 3, 3, 3)),
            (1, 2 * 8 * 8, 16, 3 * 3 * 3),
        ),
        (lambda a, b: a @ b, ((5, 0), (0, 6)), (1, 5, 6, 0)),
    ],
)
def test_the_sizes_of_a_product(fn: Any, shapes: Any, work: tuple[int, ...]) -> None:
    plan = sbp.compile(fn, ONE, in_sbp=([B], [B])).plan(*(np.ones(s, np.float32) for s in shapes))
    assert plan.physical is not None
    graph = plan.physical.graph
    (node,) = (n for n in graph.nodes if n.rule is not None and n.rule.matmul is not None)
    from sbp.passes.program.views import op_of

    sizes = [graph.operand(x).shape for x in node.inputs], [graph.values[v].shape for v in node.outputs]
    assert node.rule is not None and node.rule.matmul is not None
    found = node.rule.matmul(op_of(graph, node, *sizes, 1))
    assert (found.batch, found.m, found.n, found.k) == work
    assert found.flops == 2 * np.prod(work)
