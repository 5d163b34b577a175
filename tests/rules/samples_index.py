"""Applications of gather and scatter, as indexing and its gradients produce them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.claims import Sample, sample, whole

TABLE = whole((7, 3))
WILD = np.array([[6, 0, 3], [-1, 8, 2], [-9, 7, 1], [5, 5, 0], [100, -100, 4]], np.int32)
MILD = np.array([[6, 0, 3], [1, 4, 2], [0, 6, 1], [5, 5, 0], [2, 3, 4]], np.int32)
ROWS, COLUMNS = np.array([6, 0, 9, -8, 3], np.int32), np.array([0, 2, 1, 5, -3], np.int32)
UPDATES = whole((5, 3, 3), seed=2)
THREE: Any = {"groups": (3,)}
ROWS_OF = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
INTO_ROWS = lax.ScatterDimensionNumbers(
    update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


def look_up(table: Any, index: Any, mode: str, label: str = "", fill: Any = None, **options: Any) -> Sample:
    """Rows of a table by raw index, nothing wrapped around."""

    def run(table: Any, index: Any) -> Any:
        sizes = (1, table.shape[1])
        return lax.gather(table, index[..., None], ROWS_OF, sizes, mode=mode, fill_value=fill)

    return sample("gather", run, table, index, label=f"{mode}{label}", **options)


def index_of(fn: Any, *args: Any, label: str, **options: Any) -> Sample:
    """A gather by way of `jax.numpy`."""
    return sample("gather", fn, *args, label=label, **options)


def put(
    name: str, table: Any, index: Any, updates: Any, mode: str, label: str = "", **options: Any
) -> Sample:
    """Rows into a table by raw index."""
    call = getattr(lax, name.replace("-", "_"))

    def run(table: Any, index: Any, updates: Any) -> Any:
        return call(table, index[..., None], updates, INTO_ROWS, mode=mode)

    return sample(name, run, table, index, updates, label=f"{mode}{label}", **options)


def embedding_gradient(table: Any, ids: Any) -> Any:
    """The gradient of a look-up."""
    return jax.grad(lambda t: jnp.sum(t[ids] * jnp.arange(ids.size * t.shape[1]).reshape(*ids.shape, -1)))(
        table
    )


BATCHED = (whole((5, 7, 3)), np.array([[6, 0], [1, 9], [-1, 2], [3, 3], [0, 5]], np.int32))

SAMPLES = [
    look_up(TABLE, WILD, "fill", pairs=4),
    look_up(TABLE, WILD, "fill", "-zero", fill=0, **THREE),
    look_up(TABLE, WILD, "fill", "-seven", fill=7),
    look_up(TABLE.astype(np.int32), WILD, "fill", "-int", **THREE),
    look_up(whole((7, 3), np.uint8, 5, 9), WILD, "fill", "-uint8", groups=(3,)),
    look_up(whole((7, 3), bool), WILD, "fill", "-bool", groups=(3,)),
    look_up(TABLE, WILD, "clip", pairs=2),
    look_up(TABLE, abs(WILD).astype(np.uint32), "clip", "-uint32", groups=(3,)),
    look_up(
        TABLE,
        np.where(WILD < 0, 2**32 - 3, WILD.astype(np.int64)).astype(np.uint32),
        "clip",
        "-huge",
        groups=(3,),
    ),
    look_up(whole((200, 3)), WILD.astype(np.int8), "fill", "-int8", groups=(3,)),
    look_up(whole((300, 3)), abs(WILD).astype(np.uint8), "clip", "-uint8", groups=(3,)),
    look_up(TABLE, MILD, "promise_in_bounds"),
    look_up(TABLE, MILD.astype(np.uint32), "promise_in_bounds", "-uint32", groups=(3,)),
    look_up(np.full((7, 3), np.nan, np.float32), MILD, "fill", "-nan", groups=(3,)),
    index_of(lambda x, i: x[i], TABLE, ROWS, label="rows"),
    index_of(lambda x, i: x[:, i], TABLE, COLUMNS, label="columns", **THREE),
    index_of(lambda x, i, j: x[i, j], TABLE, ROWS, COLUMNS, label="pairs", pairs=4),
    index_of(lambda x, i: x[i, :, 1:2], whole((7, 4, 3)), ROWS, label="part", **THREE),
    index_of(lambda x, i: jnp.take(x, i, axis=0, mode="fill"), TABLE, np.int32(9), label="one", **THREE),
    index_of(lambda x, i: jnp.take(x, i, axis=0), TABLE, WILD, label="take", **THREE),
    index_of(lambda x, i: x[i], TABLE > 0, ROWS, label="mask", **THREE),
    index_of(lambda x, i: jnp.take(x, i, axis=1, mode="clip"), TABLE, COLUMNS, label="take1", **THREE),
    index_of(lambda x, i: jnp.take_along_axis(x, i, axis=1), TABLE, whole((7, 2), np.int32), label="along1"),
    index_of(
        lambda x, i: jnp.take_along_axis(x, i, axis=0), TABLE, whole((4, 3), np.int32, -9, 9), label="along0"
    ),
    index_of(lambda x, i: x[jnp.arange(5), i], whole((5, 3)), COLUMNS, label="labels", **THREE),
    index_of(jax.vmap(lambda x, i: x[i]), *BATCHED, label="batched", pairs=2),
    index_of(jax.vmap(lambda x, i: x[i], (None, 0)), TABLE, WILD, label="batched_index", **THREE),
    index_of(jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,))), whole((5, 7)), ROWS, label="windows"),
    put("scatter-add", TABLE, WILD, UPDATES, "fill", pairs=4),
    put("scatter-add", TABLE, WILD, UPDATES, "clip", pairs=2),
    put("scatter-add", TABLE, MILD, UPDATES, "promise_in_bounds", **THREE),
    put("scatter-add", TABLE, abs(WILD).astype(np.uint32), UPDATES, "clip", "-uint32", groups=(3,)),
    put("scatter-add", whole((200, 3)), WILD.astype(np.int8), UPDATES, "fill", "-int8", groups=(3,)),
    put("scatter-add", TABLE.astype(np.int32), WILD, UPDATES.astype(np.int32), "fill", "-int", **THREE),
    sample("scatter-add", embedding_gradient, TABLE, MILD, label="embedding"),
    sample("scatter-add", lambda x, i, u: x.at[:, i].add(u), TABLE, COLUMNS, whole((7, 5)), label="columns"),
    sample(
        "scatter-add",
        lambda x, i, j, u: x.at[i, j].add(u),
        TABLE,
        ROWS,
        COLUMNS,
        whole((5,)),
        label="pairs",
        pairs=3,
    ),
    sample(
        "scatter-add",
        jax.vmap(lambda x, i, u: x.at[i].add(u)),
        *BATCHED,
        whole((5, 2, 3)),
        label="batched",
        pairs=3,
    ),
    sample(
        "scatter-add",
        lambda x, u: jax.ops.segment_sum(u, x, 7),
        ROWS,
        whole((5, 3)),
        label="segments",
        **THREE,
    ),
    sample(
        "scatter",
        lambda x, i, u: x.at[i].set(u, unique_indices=True),
        TABLE,
        ROWS,
        whole((5, 3), seed=1),
        label="unique",
    ),
    sample(
        "scatter", lambda x, i, u: x.at[1, i].set(u), TABLE, np.int32(2), np.float32(9), label="one", **THREE
    ),
    sample("scatter", lambda x, u: x.at[1:4].set(u), TABLE, whole((3, 3)), label="slice", **THREE),
    sample(
        "scatter",
        jax.vmap(lambda x, i, u: x.at[i].set(u)),
        *BATCHED,
        whole((5, 2, 3)),
        label="batched",
        **THREE,
    ),
    sample("scatter", lambda x, i: x.at[i].set(0.0), TABLE, WILD, label="zeros"),
    put("scatter-mul", TABLE, WILD, UPDATES, "fill", pairs=2),
    put("scatter-max", TABLE, WILD, UPDATES, "fill", pairs=2),
    put("scatter-min", TABLE, WILD, UPDATES, "clip", pairs=2),
    put("scatter-max", TABLE.astype(np.int32), WILD, UPDATES.astype(np.int32), "fill", "-int", **THREE),
    put("scatter-sub", TABLE, WILD, UPDATES, "fill", **THREE),
]
