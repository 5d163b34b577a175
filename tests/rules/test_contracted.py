"""In which order products contract their dims on a device."""

import re

import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.rules.contract import in_their_order


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        ("bqhe,hed->bqd", "[2, 3] x [0, 1]"),  # jnp.einsum contracts in the order of the alphabet: e, then h
        ("bqeh,hed->bqd", "[2, 3] x [1, 0]"),  # one of both is turned over in any case
    ],
)
def test_dims_are_contracted_as_they_lie(spec: str, dims: str) -> None:
    args = jnp.ones((8, 4, 3, 3)), jnp.ones((3, 3, 6))
    on = sbp.placement("cpu", shape=(2,))
    program = sbp.compile(lambda x, w: jnp.einsum(spec, x, w), on, in_sbp=([S(0)], [B]))
    found = re.findall(r"contracting_dims = (\[.*?\] x \[.*?\])", program.lower(*args).as_text())
    assert found == [dims]


@pytest.mark.parametrize("dims", [((), ()), ((1,), (0,)), ((2, 1), (0, 1)), ((1, 2), (3, 0))])
def test_an_order_that_no_other_is_better_than_stays(dims: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert in_their_order(*dims) == dims
