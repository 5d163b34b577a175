"""Rows of tables and of their optimizer's state as bytes, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sbp.runtime import embedding as em
from sbp.runtime.embedding.tiers.row_codec import RowCodec


def test_a_row_is_what_every_array_by_row_has_of_it() -> None:
    """Vectors in 16 bits, moments in 32; counts and dense weights are no part of it."""
    users = em.TableConfig("users", 40, 6, dtype=jnp.dtype(jnp.bfloat16))
    items = em.TableConfig("items", 24, 8)
    tables = em.Collection((em.FeatureConfig("user", users), em.FeatureConfig("item", items)), multiple=8)
    params = tables.init(jax.random.key(0))
    tree = {"params": params, "state": optax.adam(0.1).init(params), "dense": jnp.ones((40, 2))}
    tree = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), tree)
    for table, width in (("users", 40), ("items", 96)):
        stack = tables.stack_of(table)
        codec = RowCodec.of(tree, tables.row_maps, stack)
        assert codec.width == width and [f.path.count("mu") for f in codec.fields] == [0, 1, 0]
        ids = np.array([3, 20, 7])
        lines = [np.asarray(x) for x in jax.tree.leaves(tables.read(tree, table, ids))]
        rows = codec.rows(lines)
        assert rows.shape == (3, width) and rows.dtype == np.uint8
        for a, b in zip(lines, codec.lines(rows), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert "bfloat16[6]" in RowCodec.of(tree, tables.row_maps, tables.stack_of("users")).layout


def test_an_empty_batch_has_no_rows() -> None:
    tables = em.Collection((em.FeatureConfig("item", em.TableConfig("items", 24, 8)),), multiple=8)
    codec = RowCodec.of(tables.init(jax.random.key(0)), tables.row_maps, tables.stack_of("items"))
    rows = codec.rows([np.zeros((0, 8), np.float32)])
    assert rows.shape == (0, 32) and codec.lines(rows)[0].shape == (0, 8)
