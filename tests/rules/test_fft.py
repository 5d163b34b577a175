"""Transforms beside collectives: XLA on CPUs refuses some layouts that it chooses itself."""

import jax.numpy as jnp
import numpy as np

import sbp
from sbp import B, S

X = np.random.default_rng(0).normal(size=(3, 8, 6)).astype(np.complex64)


def test_a_result_split_by_an_inner_batch_dim_can_be_gathered() -> None:
    program = sbp.compile(jnp.fft.fft, sbp.placement("cpu", shape=(4,)), in_sbp=[S(1)], out_sbp=[B])
    assert [(c.kind, c.before) for c in program.plan(X).collectives] == [("all_gather", (S(1),))]
    sbp.verify(program, X)
