"""The step of `benchmarks.embedding` in three ways: of one device, with the table gathered, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sbp.communication.keys import NO_KEY
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from sbp.runtime.embedding.stacks import lookup

DEVICES, RATE, ZIPF = 8, 0.05, 1.2
MOST_GATHERED = 1 << 18
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optax.sgd(RATE),
    "row-wise Adagrad": lambda: rowwise_adagrad(RATE),
}
# From table, state, places and rows to table and state.
HandUpdate = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Arguments:
      rows, width: of the table.
      batch: keys.
    """

    rows: int
    width: int
    batch: int

    @property
    def chunk(self) -> int:
        """Rows of one device."""
        return self.rows // DEVICES

    def batches(self) -> tuple[Any, Any]:
        """Ids and what is wanted of them, on the host."""
        rng = np.random.default_rng(0)
        weight = np.cumsum(np.arange(1, self.rows + 1, dtype=np.float64) ** -ZIPF)
        ranks = np.searchsorted(weight, rng.random(self.batch) * weight[-1])
        ids = rng.permutation(self.rows)[np.minimum(ranks, self.rows - 1)]
        return ids.astype(np.int32), rng.normal(size=(self.batch, 1)).astype(np.float32)

    def sharded(self, mesh: Any) -> tuple[NamedSharding, NamedSharding]:
        """Split along dim 0, and whole."""
        return NamedSharding(mesh, PartitionSpec(*mesh.axis_names)), NamedSharding(mesh, PartitionSpec())

    def start(self, tx: Any, mesh: Any) -> tuple[Any, Any]:
        """Parameters and the optimizer's state, on the devices."""
        split, whole = self.sharded(mesh)

        def init() -> Any:
            at = lax.broadcasted_iota(np.int32, (self.rows, self.width), 0)
            table = ((at + 7 * lax.broadcasted_iota(np.int32, at.shape, 1)) % 1013) / np.float32(1013) - 0.5
            params = {"table": table, "dense": jnp.full((self.width, 1), 0.1, np.float32)}
            return params, tx.init(table)

        states = jax.tree.map(lambda _: split, jax.eval_shape(init)[1])
        return jax.jit(init, out_shardings=({"table": split, "dense": whole}, states))()

    def ideal_bytes(self, ids: Any) -> float:
        """What a device must send on average: keys of rows that others own, and vectors there and back."""
        parts = [(d, np.unique(part)) for d, part in enumerate(np.split(ids, DEVICES))]
        away = sum(int(np.count_nonzero(keys // self.chunk != d)) for d, keys in parts)
        return away / DEVICES * (4 + 2 * 4 * self.width)

    def room(self, ids: Any) -> int:
        """The most keys that one device sends to one owner."""
        parts = [np.unique(part) // self.chunk for part in np.split(ids, DEVICES)]
        return max(int(np.bincount(p).max()) for p in parts)


def loss_of(rows: Any, dense: Any, wanted: Any) -> Any:
    """A dense layer and a sum of squares: a device's part adds up to the whole."""
    return jnp.square(rows @ dense - wanted).sum()


def make_step(tx: Any) -> Callable[..., Any]:
    """The step as one writes it for one device."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            rows = lookup(params["table"], batch[0])
            return loss_of(rows, params["dense"], batch[1]) / len(batch[0])

        value, grad = jax.value_and_grad(loss)(params)
        added, state = tx.update(grad["table"], state, params["table"])
        table = optax.apply_updates(params["table"], added)
        return {"table": table, "dense": params["dense"] - RATE * grad["dense"]}, state, value

    return step


def split_step(body: Callable[..., Any], tx: Any, mesh: Any) -> Any:
    """A step from the body of a shard_map: parameters, state, keys and what is wanted, of one device."""
    split, whole = PartitionSpec(*mesh.axis_names), PartitionSpec()
    params = {"table": split, "dense": whole}
    state = jax.tree.map(lambda _: split, jax.eval_shape(tx.init, jax.ShapeDtypeStruct((8, 1), np.float32)))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(params, state, split), out_specs=(params, state, whole), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def gathering(problem: Problem, tx: Any, axis: str) -> Callable[..., Any]:
    """The body that gathers the table; its gradient is a reduce-scatter."""

    def body(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            whole = lax.all_gather(params["table"], axis, tiled=True)
            return loss_of(whole[batch[0]], params["dense"], batch[1]) / problem.batch

        value, grad = jax.value_and_grad(loss)(params)
        value, dense = lax.psum((value, grad["dense"]), axis)
        added, state = tx.update(grad["table"], state, params["table"])
        return {"table": params["table"] + added, "dense": params["dense"] - RATE * dense}, state, value

    return body


def sgd_by_hand(table: Any, state: Any, at: Any, rows: Any) -> tuple[Any, Any]:
    """Rows with the same place add up by themselves."""
    return table.at[at].add(-RATE * rows, mode="drop", wrap_negative_indices=False), state


def adagrad_by_hand(table: Any, state: Any, at: Any, rows: Any) -> tuple[Any, Any]:
    """Sums by place, then the rows of table and state written once."""
    count = at.shape[0]
    at, order = lax.sort((at, lax.iota(np.int32, count)), num_keys=1)
    new = jnp.concatenate([jnp.ones(1, bool), at[1:] != at[:-1]])
    ranks = jnp.cumsum(new, dtype=np.int32) - 1
    sums = jax.ops.segment_sum(rows[order], ranks, count, indices_are_sorted=True)
    # Places of sums that are none lie behind the shard, all different.
    beyond = table.shape[0] + lax.iota(np.int32, count)
    once = beyond.at[ranks].set(jnp.where(at < table.shape[0], at, beyond))
    added, total = rowwise_adagrad(RATE).update(sums, state.at[once].get(mode="fill", fill_value=1))
    flags: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
    return table.at[once].add(added, **flags), state.at[once].set(total, **flags)


BY_HAND: dict[str, HandUpdate] = {"SGD": sgd_by_hand, "row-wise Adagrad": adagrad_by_hand}


def exchanging(problem: Problem, update: HandUpdate, room: int, axis: str) -> Callable[..., Any]:
    """The body with a sparse exchange by hand.

    Arguments:
      room: keys that a device can send to one owner; more are lost.
    """
    send = partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
    bounds = np.arange(DEVICES + 1, dtype=np.int32) * np.int32(problem.chunk)

    def body(params: Any, state: Any, batch: Any) -> Any:
        (ids, wanted), table = batch, params["table"]
        count = ids.shape[0]
        ordered, order = lax.sort((ids, lax.iota(np.int32, count)), num_keys=1)
        new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        ranks = jnp.cumsum(new, dtype=np.int32) - 1
        keys = jnp.full(count, NO_KEY).at[ranks].set(ordered, indices_are_sorted=True)
        starts = jnp.searchsorted(keys, bounds).astype(np.int32)
        window = starts[:-1, None] + lax.iota(np.int32, room)
        there = window < starts[1:, None]
        asked = send(jnp.where(there, keys.at[window].get(mode="clip"), NO_KEY)).reshape(-1)
        at = jnp.where(asked == NO_KEY, problem.chunk, asked - lax.axis_index(axis) * problem.chunk)
        served = table.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        back = send(served.reshape(DEVICES, room, -1)).reshape(DEVICES * room, -1)
        # Examples in the order of their keys: the loss is a sum, and needs no other.
        owner = ordered // problem.chunk
        rows = back[owner * room + ranks - starts[owner]]
        value, (grad, dense) = jax.value_and_grad(loss_of, (0, 1))(rows, params["dense"], wanted[order])
        sums = jax.ops.segment_sum(grad / problem.batch, ranks, count, indices_are_sorted=True)
        away = jnp.where(there[..., None], sums.at[window].get(mode="clip"), 0)
        came = send(away).reshape(DEVICES * room, -1)
        value, dense = lax.psum((value / problem.batch, dense / problem.batch), axis)
        table, state = update(table, state, at, came)
        return {"table": table, "dense": params["dense"] - RATE * dense}, state, value

    return body
