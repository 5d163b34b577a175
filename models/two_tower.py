"""Two towers: one net for users, one for items; what a user takes is near to them among all items.

    python -m models.two_tower --placement cpu:8
    python -m sbp plan models/two_tower.py:train_step --placement h100:8

Every other item of a batch is a negative for each user: the batch is split over the devices, so the vectors
of its items are gathered, and no device has all scores. Frequent items are negatives more often than rare
ones; the logarithm of how often corrects their scores. Retrieval is exact: the vectors of all items stay
split, each device finds the best of its own, and the best of these are the result.

Source: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", 2019.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import sbp
from models import train
from models.recommender.layers import linear, net, through
from sbp import B, S
from sbp.placement import Placement
from sbp.runtime.embedding import NO_ID, Collection, FeatureConfig, TableConfig
from sbp.runtime.embedding.optimizers import rowwise_adagrad

PyTree: TypeAlias = Any

HISTORY = 8
"""Items that a user took before."""
TEMPERATURE = 0.1
EVALUATED = 2048


class Views(NamedTuple):
    """A batch: who took what.

    Arguments:
      user: `[b]`.
      history: items that the user took before, `[b, HISTORY]`.
      item: that was taken, `[b]`.
      log_q: the logarithm of the share of the item among all that are taken, `[b]`.
    """

    user: Any
    history: Any
    item: Any
    log_q: Any


@dataclass(frozen=True, slots=True)
class Towers:
    """The shape of both nets.

    Arguments:
      tables: of users and items.
      hidden: units of the hidden layer of each tower.
      width: of the vectors that are compared.
    """

    tables: Collection
    hidden: int = 64
    width: int = 32

    def dense(self, key: jax.Array) -> PyTree:
        """What is learned beside the tables."""
        user, item = jax.random.split(key)
        inputs = self.tables.tables[0].embedding_dim
        return {
            "user": [*net(user, (2 * inputs, self.hidden)), linear(user, self.hidden, self.width)],
            "item": [*net(item, (inputs, self.hidden)), linear(item, self.hidden, self.width)],
        }

    def init(self, key: jax.Array) -> PyTree:
        """All that is learned: `{"tables": ..., "dense": ...}`."""
        return {"tables": self.tables.init(key), "dense": self.dense(key)}

    def vectors(self, params: PyTree, batch: Views) -> tuple[jax.Array, jax.Array]:
        """Of users and of the items that they took, `[b, width]` each, of length 1."""
        found = self.tables(
            params["tables"], {"user": batch.user, "history": batch.history, "item": batch.item}
        )
        users = jnp.concatenate([found["user"], found["history"]], axis=1)
        return tower(params["dense"]["user"], users), tower(params["dense"]["item"], found["item"])

    def loss(self, params: PyTree, batch: Views) -> jax.Array:
        """The cross-entropy of the item that was taken among those of the batch, in nats."""
        users, items = self.vectors(params, batch)
        scores = users @ items.T / TEMPERATURE - batch.log_q
        # An item that two users took is no negative of either.
        position = jnp.arange(batch.item.shape[0])
        twice = (batch.item[:, None] == batch.item) & (position[:, None] != position)
        scores = jnp.where(twice, -jnp.inf, scores)
        taken = (users * items).sum(axis=1) / TEMPERATURE - batch.log_q
        return (jax.nn.logsumexp(scores, axis=1) - taken).mean()

    def items(self, params: PyTree) -> jax.Array:
        """The vectors of all items, `[items, width]`."""
        (table,) = {f.table for f in self.tables.features if f.name == "item"}
        ids = jnp.arange(table.vocabulary_size, dtype=jnp.int32)
        nobody = jnp.full(ids.shape, NO_ID, np.int32)
        inputs = {"user": nobody, "history": nobody[:, None], "item": ids}
        return tower(params["dense"]["item"], self.tables(params["tables"], inputs)["item"])

    def retrieve(
        self, params: PyTree, corpus: jax.Array, batch: Views, k: int
    ) -> tuple[jax.Array, jax.Array]:
        """The best `k` of all items for each user, with their scores, `[b, k]` each.

        Arguments:
          corpus: the vectors of all items.
        """
        users, _ = self.vectors(params, batch)
        return jax.lax.top_k(users @ corpus.T, k)


def tower(layers: PyTree, x: jax.Array) -> jax.Array:
    """A net, whose results have length 1."""
    x = through(layers[:-1], x) @ layers[-1]["weight"] + layers[-1]["bias"]
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=1, keepdims=True) + 1e-12)


def towers(users: int, items: int, width: int, devices: int) -> Towers:
    """Towers over tables of so many rows; both are in one stack, so that a batch has one exchange."""
    initial = jax.nn.initializers.normal(width**-0.5)
    of_users = TableConfig("users", users, width, initializer=initial)
    of_items = TableConfig("items", items, width, initializer=initial)
    features = (
        FeatureConfig("user", of_users),
        FeatureConfig("history", of_items),
        FeatureConfig("item", of_items),
    )
    return Towers(Collection(features, multiple=np.lcm(256, devices).item()))


@dataclass(frozen=True, slots=True)
class Market:
    """Synthetic users and items: a user likes two groups of items, and takes popular ones of these.

    Arguments:
      share: of each item among all that are taken, `[items]`.
      likes: the groups of each user, `[users, 2]`.
      groups: how many.
      seed: of what is drawn.
    """

    share: NDArray[np.float64]
    likes: NDArray[np.int64]
    groups: int
    seed: int

    @staticmethod
    def make(users: int, items: int, seed: int) -> Market:
        """A random one; equal arguments give equal markets."""
        random, groups = np.random.default_rng((seed, 1)), max(2, items // 100)
        likes = random.integers(0, groups, (users, 2))
        popularity = 1.0 / (1 + np.arange(-(-items // groups)))
        weight = np.bincount(likes.reshape(-1), minlength=groups)[np.arange(items) % groups]
        share = weight * popularity[np.arange(items) // groups] + 1e-9
        return Market(share / share.sum(), likes, groups, seed)

    def batch(self, size: int, step: int) -> Views:
        """A random batch; equal steps give equal ones."""
        random, items = np.random.default_rng((self.seed, 2, step)), len(self.share)
        user = random.integers(0, len(self.likes), size)
        group = self.likes[user][np.arange(size)[:, None], random.integers(0, 2, (size, HISTORY + 1))]
        each = -(-items // self.groups)
        popularity = np.cumsum(1.0 / (1 + np.arange(each)))
        rank = np.searchsorted(popularity, random.random((size, HISTORY + 1)) * popularity[-1])
        taken = np.minimum(rank * self.groups + group, items - 1).astype(np.int32)
        log_q = np.log(self.share[taken[:, 0]]).astype(np.float32)
        return Views(user.astype(np.int32), taken[:, 1:], taken[:, 0], log_q)


def optimizer(lr: float) -> optax.GradientTransformation:
    """Row-wise Adagrad for the rows of tables, Adam for the nets."""
    each = {"tables": sbp.rows(rowwise_adagrad(10 * lr, initial=1e-8)), "dense": optax.adam(lr)}
    made: optax.GradientTransformation = optax.multi_transform(each, {"tables": "tables", "dense": "dense"})
    return made


def make_train_step(model: Towers, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """`(params, state, batch) -> (params, state, loss)`, for one device."""

    def train_step(params: PyTree, state: PyTree, batch: Views) -> tuple[PyTree, PyTree, jax.Array]:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, loss

    return train_step


def in_sbp(model: Towers, placement: Placement, tx: optax.GradientTransformation) -> tuple[PyTree, ...]:
    """The signatures of a train step: tables and batch are split over all axes."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = jax.eval_shape(tx.init, params)
    lies = [model.tables.in_sbp(placement, like=tree) for tree in (params, state)]
    return (*lies, [S(0)] * placement.ndim)


# What `python -m sbp plan` plans: the job as it is without options.
USERS, ITEMS, WIDTH, BATCH, RATE = 20_000, 10_000, 32, 1024, 1e-2
MODEL, OPTIMIZER = towers(USERS, ITEMS, WIDTH, 1), optimizer(RATE)
train_step = make_train_step(MODEL, OPTIMIZER)


def train_step_args() -> tuple[PyTree, ...]:
    """The shapes of the arguments."""
    params = jax.eval_shape(MODEL.init, jax.eval_shape(jax.random.key, 0))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((BATCH,), (BATCH, HISTORY), (BATCH,))]
    batch = Views(ints[0], ints[1], ints[2], jax.ShapeDtypeStruct((BATCH,), jnp.float32))
    return params, jax.eval_shape(OPTIMIZER.init, params), batch


def train_step_sbp(placement: Placement) -> PyTree:
    """As `in_sbp`."""
    return in_sbp(MODEL, placement, OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves.

    Arguments:
      losses: of the steps.
      recall: the share of users whose item is among the best `k`.
      popular: the same if everybody gets the most popular items.
      difference: to one device.
    """

    losses: list[float]
    recall: float
    popular: float
    difference: train.Difference | None


def parser() -> argparse.ArgumentParser:
    """The options of `python -m models.two_tower`."""
    about = "Train two towers on synthetic users and items, distributed."
    options = train.parser("models.two_tower", about, parallel=("data",), steps=200, batch=BATCH, lr=RATE)
    options.set_defaults(placement="cpu:8")
    options.add_argument("--users", type=int, default=USERS, help="rows of their table")
    options.add_argument("--items", type=int, default=ITEMS, help="rows of their table")
    options.add_argument("--width", type=int, default=WIDTH, help="of a row")
    options.add_argument("--k", type=int, default=100, help="items that are retrieved for each user")
    return options


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains both towers, retrieves, and compares with one device."""
    args = parser().parse_args(argv)
    placement, say = train.prepare(args), train.speaker()
    model, tx = towers(args.users, args.items, args.width, placement.size), optimizer(args.lr)
    market = Market.make(args.users, args.items, args.seed)
    say(f"two towers, {args.users:,} users and {args.items:,} items\non {placement}\n")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with jax.enable_x64(args.x64):
        return _run(args, placement, model, tx, market, say)


def _run(
    args: argparse.Namespace,
    placement: Placement,
    model: Towers,
    tx: optax.GradientTransformation,
    market: Market,
    say: Callable[..., None],
) -> Result:
    lies = in_sbp(model, placement, tx)
    step = sbp.compile(make_train_step(model, tx), placement, in_sbp=lies, donate_argnums=(0, 1))
    batches, key = partial(market.batch, args.batch), jax.random.key(args.seed)
    dense = jax.jit(model.dense)(key)
    params = {"tables": model.tables.init(key, placement), "dense": dense}
    state = jax.eval_shape(tx.init, params)
    start = params, jax.jit(tx.init, out_shardings=model.tables.shardings(placement, like=state))(params)
    plan = step.plan(*start, batches(0))
    if jax.process_index() == 0:
        plan.save(str(Path(args.out) / "plan.html"))
    say(plan, end="\n\n")
    make = partial(sbp.Checkpoints, tables=model.tables)
    done = sbp.fit(
        step,
        start,
        batches,
        steps=args.steps,
        checkpoint=train.checkpoints(args, make),
        save_every=args.save_every,
        log=train.logs(args),
    )
    losses = [row["loss"] for row in done.history]
    if not done.is_done or not losses:
        say(f"step {done.step}: --resume goes on")
        return Result(losses, 0.0, 0.0, None)
    say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    recall, popular = recall_shares(args, placement, model, done.state[0], market)
    say(f"{recall:.1%} of the items taken are among the best {args.k}; of the most popular {popular:.1%}")
    difference = None
    if args.check:
        first = jax.jit(model.init)(key)
        alone, every = (first, jax.jit(tx.init)(first)), list[float]()
        once = jax.jit(make_train_step(model, tx), donate_argnums=(0, 1))
        for i in range(done.step):
            *alone, loss = once(*alone, batches(i))
            every.append(float(loss))
        host = sbp.to_host(done.state[0]), jax.device_get(alone[0])
        difference = train.compare(host[0], losses, host[1], every[done.step - len(losses) :])
        say(f"largest difference to one device: {difference}")
    return Result(losses, recall, popular, difference)


def recall_shares(
    args: argparse.Namespace, placement: Placement, model: Towers, params: PyTree, market: Market
) -> tuple[float, float]:
    """The share of held-out items that retrieval finds, and that the most popular items have."""
    whole, split = [B] * placement.ndim, [S(0)] * placement.ndim
    of_params = model.tables.in_sbp(placement, like=params)
    items = sbp.compile(model.items, placement, in_sbp=(of_params,), out_sbp=split)
    retrieve = sbp.compile(
        partial(model.retrieve, k=args.k), placement, in_sbp=(of_params, split, whole), out_sbp=(whole, whole)
    )
    held_out = market.batch(EVALUATED, 1 << 30)
    _, found = retrieve(params, items(params), held_out)
    best = np.argsort(-market.share)[: args.k]
    hits = (np.asarray(found) == held_out.item[:, None]).any(axis=1)
    return float(hits.mean()), float(np.isin(held_out.item, best).mean())


if __name__ == "__main__":
    main()
