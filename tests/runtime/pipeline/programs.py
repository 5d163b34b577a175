"""Small training programs in stages: the plain function itself says what is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import sbp
from sbp import AUTO, B, S
from sbp.placement import Placement

LOOP = ("gpipe", "1f1b", "zb-h1")
TWICE = ("gpipe", "interleaved")
VEE = ("gpipe", "zb-v", "dualpipe-v")
ANY = ("gpipe",)


@dataclass(frozen=True)
class Case:
    """A training program.

    Arguments:
      step: from state and batch to the new state and what is watched.
      args: state, then the batch.
      whole: the program's placement.
      schedules: those that suit its stages.
      stages: where they live.
      signatures: of arguments.
      donate: whether the state is donated.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    whole: Placement
    schedules: tuple[str, ...]
    stages: tuple[int, ...]
    signatures: Any = AUTO
    donate: bool = True
    static: tuple[int, ...] = ()


@dataclass
class Keys:
    """Random arrays, one after the other."""

    seed: int = 0
    made: int = field(default=0)

    def normal(self, *shape: int, scale: float = 1.0) -> Any:
        self.made += 1
        rng = np.random.default_rng((self.seed, self.made))
        return jnp.asarray(rng.normal(size=shape) * scale, dtype=jnp.result_type(float))

    def ids(self, most: int, *shape: int) -> Any:
        self.made += 1
        return jnp.asarray(np.random.default_rng((self.seed, self.made)).integers(0, most, shape), jnp.int32)


def parts(shape: Sequence[int], axes: Sequence[str]) -> tuple[Placement, list[Placement]]:
    """A placement, and its stages: the first axis."""
    whole = sbp.placement("cpu", shape=tuple(shape), axes=tuple(axes))
    return whole, list(whole.split(axes[0]))


def training(
    loss: Callable[..., Any], n: int, batch: int, reduce: Any = "mean", aux: bool = False, tx: Any = None
) -> Callable[..., Any]:
    """A train step of `(weights, state), *batch`: the loss's batch arguments are those after the weights."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)) if tx is None else tx
    grad = jax.value_and_grad(loss, has_aux=aux)

    def step(state: Any, *rest: Any) -> Any:
        w, s = state
        at = tuple(range(1, 1 + batch))
        out, g = sbp.microbatch(grad, n, batch_args=at, reduce=reduce)(w, *rest)
        u, s = tx.update(g, s, w)
        return (optax.apply_updates(w, u), s), out

    step.tx = tx  # type: ignore[attr-defined]
    return step


def started(step: Any, w: Any) -> Any:
    return w, step.tx.init(w)


def chain_of(where: Sequence[Placement], width: int = 8) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A loss over dense layers, one per entry of `where`, and its weights."""
    keys = Keys(1)
    w = {
        f"l{i}": {"k": keys.normal(width, width, scale=0.5), "b": jnp.zeros(width)} for i in range(len(where))
    }

    def loss(w: Any, x: Any, y: Any) -> Any:
        for i, place in enumerate(where):
            with sbp.on(place):
                x = jnp.tanh(x @ w[f"l{i}"]["k"] + w[f"l{i}"]["b"])
        with sbp.on(where[-1]):
            return jnp.mean((x - y) ** 2)

    return loss, w


def dense_case(order: Sequence[int], ranks: int, n: int, schedules: tuple[str, ...]) -> Case:
    keys = Keys(2)
    whole, p = parts((ranks, 8 // ranks), ("stage", "data"))
    loss, w = chain_of([p[i] for i in order])
    step = training(loss, n, 2)
    batch = keys.normal(n * (8 // ranks), 8), keys.normal(n * (8 // ranks), 8)
    return Case(step, (started(step, w), *batch), whole, schedules, tuple(order))


def loop4() -> Case:
    """Four stages; the micro-batches are no multiple of them."""
    return dense_case((0, 1, 2, 3), 4, 6, LOOP)


def interleaved() -> Case:
    return dense_case((0, 1, 0, 1), 2, 4, TWICE)


def vee() -> Case:
    return dense_case((0, 1, 1, 0), 2, 4, VEE)


def vee4() -> Case:
    return dense_case((0, 1, 2, 3, 3, 2, 1, 0), 4, 8, VEE)


def convolution() -> Case:
    """A residual net with batch normalisation: moving averages come back as an auxiliary result."""
    keys = Keys(3)
    whole, p = parts((2, 4), ("stage", "data"))
    w = {
        "stem": keys.normal(3, 3, 2, 4, scale=0.3),
        "a": keys.normal(3, 3, 4, 4, scale=0.3),
        "down": keys.normal(1, 1, 4, 6, scale=0.3),
        "b": keys.normal(3, 3, 4, 6, scale=0.3),
        "head": keys.normal(6, 3, scale=0.3),
        "gamma": [jnp.ones(4), jnp.ones(6)],
        "beta": [jnp.zeros(4), jnp.zeros(6)],
    }

    def conv(x: Any, k: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(
            x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x: Any, gamma: Any, beta: Any) -> Any:
        mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * gamma + beta, (mean, var)

    def loss(w: Any, x: Any, y: Any) -> Any:
        with sbp.on(p[0]):
            x = jax.nn.relu(conv(x, w["stem"]))
            h, first = norm(conv(x, w["a"]), w["gamma"][0], w["beta"][0])
            x = jax.nn.relu(x + h)
        with sbp.on(p[1]):
            h, second = norm(conv(x, w["b"], 2), w["gamma"][1], w["beta"][1])
            x = jax.nn.relu(conv(x, w["down"], 2) + h)
            logits = jnp.mean(x, (1, 2)) @ w["head"]
            nll = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))
        return nll, (first, second)

    step = training(loss, 2, 2, aux=True)
    batch = keys.normal(8, 6, 6, 2), keys.ids(3, 8)
    return Case(step, (started(step, w), *batch), whole, LOOP, (0, 1))


def transformer() -> Case:
    """Stages x data x tensor = 2 x 2 x 2: a tied embedding, scans over layers, checkpoints, weights."""
    keys = Keys(4)
    whole, p = parts((2, 2, 2), ("stage", "data", "model"))
    d, heads, vocabulary, length = 8, 2, 16, 4

    def layers(n: int) -> Any:
        return {
            "qkv": keys.normal(n, d, 3, heads, d // heads, scale=0.3),
            "out": keys.normal(n, heads, d // heads, d, scale=0.3),
            "up": keys.normal(n, d, 2 * d, scale=0.3),
            "down": keys.normal(n, 2 * d, d, scale=0.3),
            "scale": jnp.ones((n, 2, d)),
        }

    w = {
        "embed": keys.normal(vocabulary, d, scale=0.3),
        "place": keys.normal(length, d, scale=0.3),
        "layers": [layers(2), layers(2)],
    }

    def norm(x: Any, scale: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", norm(x, w["scale"][0]), w["qkv"]), 2, 0)
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / (d // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        x = x + jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores), v, w["out"])
        x = x + jax.nn.gelu(norm(x, w["scale"][1]) @ w["up"]) @ w["down"]
        return x, None

    def loss(w: Any, ids: Any, counts: Any) -> Any:
        with sbp.on(p[0]):
            x = w["embed"][ids] + w["place"]
            x, _ = lax.scan(jax.checkpoint(layer), x, w["layers"][0])
        with sbp.on(p[1]):
            x, _ = lax.scan(layer, x, w["layers"][1])
            logits = jax.nn.log_softmax(x[:, :-1] @ w["embed"].T)
            nll = -jnp.take_along_axis(logits, ids[:, 1:, None], 2)[..., 0]
            return jnp.sum(nll * counts[:, 1:]) / jnp.sum(counts[:, 1:])

    def tokens(w: Any, ids: Any, counts: Any) -> Any:
        return jnp.sum(counts[:, 1:])

    step = training(loss, 2, 2, reduce=tokens)
    counts = jnp.asarray(np.random.default_rng(0).integers(1, 3, (8, length)), jnp.result_type(float))
    batch = keys.ids(vocabulary, 8, length), counts
    sharded = {"qkv": [B, S(3)], "out": [B, S(1)], "up": [B, S(2)], "down": [B, S(1)], "scale": [B, B]}
    weights = {"embed": [B, S(0)], "place": [B, B], "layers": [sharded, sharded]}
    return Case(
        step,
        (started(step, w), *batch),
        whole,
        LOOP,
        (0, 1),
        signatures=((weights, AUTO), [S(0), B], [S(0), B]),
    )


def skips(order: tuple[int, ...], schedules: tuple[str, ...]) -> Case:
    """A U-Net: what goes down is used again on the way up, over stages that have nothing to do with it."""
    keys = Keys(5)
    whole, p = parts((4, 2), ("stage", "data"))
    depth = len(order) // 2
    at = [p[i] for i in order]
    w = {
        "down": [keys.normal(8, 8, scale=0.5) for _ in range(depth)],
        "side": [keys.normal(8, 8, scale=0.5) for _ in range(depth)],
        "up": [keys.normal(8, 8, scale=0.5) for _ in range(depth)],
    }

    def loss(w: Any, x: Any, y: Any) -> Any:
        kept = []
        for i in range(depth):
            with sbp.on(at[i]):
                x = jnp.tanh(x @ w["down"][i])
                # The side branch of a stage stands where nobody waits for it.
                kept.append(jnp.sin(x @ w["side"][i]))
        for i in range(depth):
            with sbp.on(at[depth + i]):
                x = jnp.tanh(x @ w["up"][i]) + kept[depth - 1 - i]
        with sbp.on(at[-1]):
            return jnp.mean((x - y) ** 2)

    step = training(loss, 8, 2, tx=optax.sgd(0.1, momentum=0.9))
    batch = keys.normal(16, 8), keys.normal(16, 8)
    return Case(step, (started(step, w), *batch), whole, schedules, order)


def uneven() -> Case:
    """Stages of other widths, on other numbers of devices, of another hierarchy."""
    keys = Keys(6)
    whole = sbp.placement("cpu", shape=(8,), axes=("all",))
    p = [
        sbp.placement("cpu", [0, 1, 2, 3], shape=(2, 2), axes=("data", "model")),
        sbp.placement("cpu", [4], shape=(1,), axes=("data",)),
        sbp.placement("cpu", [5, 6, 7], shape=(3,), axes=("data",)),
    ]
    w = [keys.normal(6, 10, scale=0.4), keys.normal(10, 5, scale=0.4), keys.normal(5, 7, scale=0.4)]

    def loss(w: Any, x: Any, y: Any) -> Any:
        for place, k in zip(p, w, strict=True):
            with sbp.on(place):
                x = jnp.tanh(x @ k)
        with sbp.on(p[-1]):
            return jnp.mean((x - y) ** 2)

    step = training(loss, 5, 2)
    batch = keys.normal(20, 6), keys.normal(20, 7)
    return Case(step, (started(step, w), *batch), whole, LOOP, (0, 1, 2))


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.05, 0.05),))


def mixed() -> Case:
    """What programs are made of: dropout, bf16, custom gradients, gradient penalties, several results."""
    keys = Keys(7)
    whole, p = parts((2, 4), ("stage", "data"))
    table = np.asarray(keys.normal(8, 8))
    w = {"a": keys.normal(8, 8, scale=0.5), "b": keys.normal(8, 8, scale=0.5), "unused": keys.normal(3)}

    def loss(w: Any, x: Any, y: Any, key: Any) -> Any:
        with sbp.on(p[0]):
            x = (x.astype(jnp.bfloat16) @ w["a"].astype(jnp.bfloat16)).astype(x.dtype) + x @ table
            keep = jax.random.bernoulli(key, 0.8, x.shape)
            x = _clipped(jnp.where(keep, x / 0.8, 0.0))
            slope = jax.grad(lambda v: jnp.sum(jnp.tanh(v @ w["a"])))(x)
        with sbp.on(p[1]):
            h = jax.checkpoint(lambda h: jnp.tanh(h @ w["b"]))(x)
            keep = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.8, h.shape)
            h = jnp.where(keep, h / 0.8, 0.0)
            per = jnp.mean((h - y) ** 2, 1)
        total = jnp.mean(per) + 0.01 * jnp.mean(slope**2)
        return total, {"rows": per, "count": 1, "sum": jnp.sum(x), "mean": jnp.mean(x)}

    reduce = (("mean", {"rows": "rows", "count": "sum", "sum": "sum", "mean": "mean"}), "mean")
    inner = training(loss, 4, 3, reduce=reduce, aux=True)

    def step(state: Any, x: Any, y: Any, key: Any, scale: float, *, shift: Any = 0.5) -> Any:
        new, out = inner(state, x * scale, y + shift, key)
        return new, (out, y, 3, jnp.float32(2), x.shape[0])

    step.tx = inner.tx  # type: ignore[attr-defined]
    batch = keys.normal(16, 8), keys.normal(16, 8), jax.random.key(3), 2.0
    signatures = (AUTO, [S(0)], [S(0)], [B])
    return Case(step, (started(step, w), *batch), whole, LOOP, (0, 1), signatures=signatures, static=(4,))


CASES: dict[str, Callable[[], Case]] = {
    "four stages": loop4,
    "interleaved": interleaved,
    "V of 2": vee,
    "V of 4": vee4,
    "convolution": convolution,
    "transformer": transformer,
    "U-Net": lambda: skips((0, 1, 2, 3), LOOP),
    "U-Net in a V": lambda: skips((0, 1, 2, 3, 3, 2, 1, 0), VEE),
    "uneven": uneven,
    "mixed": mixed,
}
