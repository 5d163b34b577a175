"""Every op under `vmap`: the dims and sizes that JAX makes can be read by the rules."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.passes.program.expand import plain
from sbp.passes.program.graph import Graph
from sbp.passes.program.trace import trace
from sbp.passes.program.views import op_of
from sbp.rules import REGISTRY, lookup
from sbp.rules.registry import valid_rows
from sbp.signature import Split
from tests.rules.claims import Sample
from tests.rules.test_claims import SAMPLES

LINE = sbp.placement("cpu", shape=(8,))
ROWS = 3
# Ops that JAX itself cannot batch: it says so.
UNBATCHED = {"rng_uniform", "sbp_sum_rows", "sbp_update_rows"}


def batched(one: Sample, axis: int) -> Graph | None:
    """The graph of a sample over `ROWS` rows along `axis` of every argument; None if JAX cannot batch it."""

    def rows(x: Any) -> Any:
        return jnp.stack([jnp.asarray(x)] * ROWS, axis if np.ndim(x) else 0)

    args = jax.tree.map(rows, one.args)
    fn = jax.vmap(one.fn, in_axes=jax.tree.map(lambda x: axis if np.ndim(x) else 0, one.args))
    try:
        jax.eval_shape(fn, *args)
    except NotImplementedError:
        return None
    return trace(fn, args, {}).graph


def numpy_integers(x: Any) -> Iterator[Any]:
    """Those inside a parameter."""
    if isinstance(x, np.integer):
        yield x
    elif isinstance(x, tuple | list):
        for v in x:
            yield from numpy_integers(v)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for f in dataclasses.fields(x):
            yield from numpy_integers(getattr(x, f.name))


@pytest.mark.full
@pytest.mark.parametrize("axis", (0, -1))
def test_every_sample_under_vmap_has_rows_in_python_integers(axis: int) -> None:
    """No rule refuses what `vmap` makes, and no dim or size is a NumPy integer."""
    seen, unbatched = set(), set()
    for one in SAMPLES:
        if not one.args or (one.name == "bitcast_convert_type" and axis):  # it reads its last dim as bytes
            continue
        graph = batched(one, axis)
        if graph is None:
            unbatched.add(one.name)
            continue
        for node in graph.walk():
            assert not list(numpy_integers(tuple(node.params.values()))), (str(one), node.op)
            if node.bodies:
                continue
            shapes = [graph.operand(x).shape for x in node.inputs]
            op = op_of(graph, node, shapes, [graph.values[v].shape for v in node.outputs], 2)
            seen.add(node.op)
            for row in valid_rows(lookup(node.op), op):
                for s in (*row.operands, *row.results):
                    assert not isinstance(s, Split) or type(s.dim) is int, (str(one), node.op)
    assert unbatched <= UNBATCHED | {"ragged_dot_general"}
    assert len(seen & set(REGISTRY)) > 150


@pytest.mark.parametrize("fn", (jnp.argmax, jnp.argmin, jnp.nanargmax), ids=lambda f: f.__name__)
def test_positions_of_extrema_of_rows(fn: Any) -> None:
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    program = sbp.compile(jax.vmap(fn), LINE, in_sbp=([sbp.S(0)],))
    assert program.plan(x).wire_bytes == 0
    np.testing.assert_array_equal(program(x), jax.vmap(fn)(x))


def test_samples_of_rows() -> None:
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 16)
    program = sbp.compile(jax.vmap(jax.random.categorical), LINE)
    np.testing.assert_array_equal(program(keys, x), jax.vmap(jax.random.categorical)(keys, x))


def test_what_a_plain_parameter_is() -> None:
    dims = jax.lax.GatherDimensionNumbers((np.int64(1),), (), (0,), ())
    out = plain((np.int32(3), [np.int64(2), "text"], dims, np.arange(2), np.True_))
    assert out[:2] == (3, [2, "text"]) and type(out[0]) is int and type(out[1][0]) is int
    assert isinstance(out[2], jax.lax.GatherDimensionNumbers) and type(out[2].offset_dims[0]) is int
    assert isinstance(out[3], np.ndarray) and out[4] is True
    ragged = jax.lax.RaggedDotDimensionNumbers((((np.int64(1),), (1,)), ((), ())), (0,), (np.int64(0),))
    new = plain(ragged)
    assert isinstance(new, jax.lax.RaggedDotDimensionNumbers)
    assert type(new.rhs_group_dimensions[0]) is int
    same = ((1, 2), "text", None)
    assert plain(same) is same
