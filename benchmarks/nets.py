"""Train steps of kinds that models/ does not have: experts, an encoder and a decoder, a U-Net, a diffusion
transformer, state spaces, LSTMs; shapes only.

Nothing is annotated and nothing runs: the planner is timed on them (`python -m benchmarks.planner`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from benchmarks.cases import Case, arguments

WIDTH, HEADS, LENGTH, WORDS = 1024, 16, 1024, 32_000
EXPERTS, CHOSEN, CAPACITY = 8, 2, 1.25


def _case(init: Callable[[Any], Any], loss: Callable[[Any, Any], Any], batch: Any) -> Case:
    """The step of a loss with AdamW."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return Case(step, lambda: arguments(jax.jit(init), optimizer, batch()), (sbp.AUTO,) * 4)


def _norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def _attention(p: Any, x: Any, y: Any, causal: bool) -> Any:
    """Of `x [b, t, d]` on `y [b, s, d]`, by heads."""
    q = jnp.einsum("btd,dhe->bhte", x, p["q"])
    k, v = (jnp.einsum("bsd,dhe->bhse", y, p[name]) for name in ("k", "v"))
    scores = jnp.einsum("bhte,bhse->bhts", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhte,hed->btd", jnp.einsum("bhts,bhse->bhte", jax.nn.softmax(scores), v), p["out"])


def _attention_weights(keys: Any) -> Any:
    heads = dict.fromkeys(("q", "k", "v"), (WIDTH, HEADS, WIDTH // HEADS))
    shapes = heads | {"out": (HEADS, WIDTH // HEADS, WIDTH)}
    return {name: jax.random.normal(next(keys), shape) / 32 for name, shape in shapes.items()}


def _mlp_weights(keys: Any, *leading: int) -> Any:
    shapes = {"up": (*leading, WIDTH, 4 * WIDTH), "down": (*leading, 4 * WIDTH, WIDTH)}
    return {name: jax.random.normal(next(keys), shape) / 32 for name, shape in shapes.items()}


def _mlp(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def experts(p: Any, x: Any) -> Any:
    """A mixture of experts on `x [b, t, d]`: each token to the best two, as far as these have room."""
    room = int(CAPACITY * CHOSEN * x.shape[1] / EXPERTS)
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["gate"]), CHOSEN)
    to = jax.nn.one_hot(chosen, EXPERTS)  # [b, t, k, e]
    place = (jnp.cumsum(to.reshape(x.shape[0], -1, EXPERTS), axis=1) - 1).reshape(to.shape)
    slot = jax.nn.one_hot(jnp.sum(place * to, axis=-1).astype(jnp.int32), room)  # full ones are left out
    combine = jnp.einsum("btk,btke,btkc->btec", gates, to, slot)
    sent = jnp.einsum("btec,btd->becd", (combine > 0).astype(x.dtype), x)
    made = jax.nn.gelu(jnp.einsum("becd,edf->becf", sent, p["up"]))
    return jnp.einsum("btec,becd->btd", combine, jnp.einsum("becf,efd->becd", made, p["down"]))


def _tokens(shape: Sequence[int]) -> Callable[[], Any]:
    return lambda: jnp.zeros((8 * math.prod(shape), LENGTH + 1), jnp.int32)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def sorted_experts(p: Any, x: Any) -> Any:
    """The same, each token to its best expert: tokens are sorted by these, for one ragged product."""
    rows = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(rows @ p["gate"])
    best = jnp.argmax(gates, axis=-1)
    order = jnp.argsort(best)
    sizes = jnp.bincount(best, length=EXPERTS).astype(jnp.int32)
    made = jax.nn.gelu(jax.lax.ragged_dot(rows[order], p["up"], sizes))
    back = jnp.zeros_like(rows).at[order].set(jax.lax.ragged_dot(made, p["down"], sizes))
    return (back * jnp.max(gates, axis=-1, keepdims=True)).reshape(x.shape)


def mixture_case(inside: Callable[[Any, Any], Any], choice: str, shape: Sequence[int], layers: int) -> Case:
    """A causal transformer with eight experts in each layer, of which a token has some."""

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 8 * layers + 2))
        layer = [
            {
                "attention": _attention_weights(keys),
                "experts": _mlp_weights(keys, EXPERTS)
                | {"gate": jax.random.normal(next(keys), (WIDTH, EXPERTS))},
                "scales": jnp.ones((2, WIDTH)),
            }
            for _ in range(layers)
        ]
        return {"words": jax.random.normal(next(keys), (WORDS, WIDTH)), "layers": layer}

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens[:, :-1]]
        for p in params["layers"]:
            y = _norm(x, p["scales"][0])
            x = x + _attention(p["attention"], y, y, causal=True)
            x = x + inside(p["experts"], _norm(x, p["scales"][1]))
        return _cross_entropy(x @ params["words"].T, tokens[:, 1:])

    return _case(init, loss, _tokens(shape))


def translation_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """An encoder, and a decoder that looks at what it made, of as many layers each."""

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 24 * layers + 2))

        def layer(attentions: int) -> Any:
            attention = [_attention_weights(keys) for _ in range(attentions)]
            return {"attention": attention, "mlp": _mlp_weights(keys), "scales": jnp.ones((3, WIDTH))}

        return {
            "words": jax.random.normal(next(keys), (WORDS, WIDTH)),
            "encoder": [layer(1) for _ in range(layers)],
            "decoder": [layer(2) for _ in range(layers)],
        }

    def loss(params: Any, tokens: Any) -> Any:
        seen, x = params["words"][tokens[:, 1:]], params["words"][tokens[:, :-1]]
        for p in params["encoder"]:
            y = _norm(seen, p["scales"][0])
            seen = seen + _attention(p["attention"][0], y, y, causal=False)
            seen = seen + _mlp(p["mlp"], _norm(seen, p["scales"][1]))
        for p in params["decoder"]:
            y = _norm(x, p["scales"][0])
            x = x + _attention(p["attention"][0], y, y, causal=True)
            x = x + _attention(p["attention"][1], _norm(x, p["scales"][1]), seen, causal=False)
            x = x + _mlp(p["mlp"], _norm(x, p["scales"][2]))
        return _cross_entropy(x @ params["words"].T, tokens[:, 1:])

    return _case(init, loss, _tokens(shape))


def unet_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """A U-Net of 3 x 3 convolutions: 64 channels, `layers` times halved and twice as many, and up again."""
    widths = [64 * 2**i for i in range(layers + 1)]

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 3 * layers + 3))

        def kernel(i: int, o: int) -> Any:
            return jax.random.normal(next(keys), (3, 3, i, o)) / math.sqrt(9 * i)

        down = [kernel(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True)]
        up = [kernel(widths[k + 1] + widths[k], widths[k]) for k in reversed(range(layers))]
        return {"down": down, "up": up, "last": kernel(widths[0], 3)}

    def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dims)

    def loss(params: Any, images: Any) -> Any:
        x, kept = images, []
        for i, kernel in enumerate(params["down"]):
            x = jax.nn.relu(conv(x, kernel, 1 if i == 0 else 2))
            kept.append(x)
        for kernel, beside in zip(params["up"], reversed(kept[:-1]), strict=True):
            b, h, w, c = x.shape
            x = jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)
            x = jax.nn.relu(conv(jnp.concatenate([x, beside], axis=-1), kernel))
        return jnp.mean(jnp.square(conv(x, params["last"]) - images))

    side = 32 * 2**layers // 4
    return _case(init, loss, lambda: jnp.zeros((8 * math.prod(shape), side, side, 3), np.float32))


def diffusion_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """A diffusion transformer: `layers` layers in a scan, scaled and shifted by what the time step says."""
    patches, channels = 256, 64

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 10))
        layer = {
            "attention": {k: jnp.stack([v] * layers) for k, v in _attention_weights(keys).items()},
            "mlp": _mlp_weights(keys, layers),
            "condition": jax.random.normal(next(keys), (layers, WIDTH, 6 * WIDTH)) / 32,
        }
        ends = {"enter": (channels, WIDTH), "time": (1, WIDTH), "leave": (WIDTH, channels)}
        return {"layers": layer} | {name: jax.random.normal(next(keys), s) for name, s in ends.items()}

    def loss(params: Any, batch: Any) -> Any:
        image, noise, time = batch
        seen = jax.nn.silu(time[:, None] @ params["time"])

        def layer(x: Any, p: Any) -> Any:
            scale, shift, gate, *other = jnp.split((seen @ p["condition"])[:, None], 6, axis=-1)
            y = _norm(x, 1 + scale) + shift
            x = x + gate * _attention(p["attention"], y, y, causal=False)
            return x + other[2] * _mlp(p["mlp"], _norm(x, 1 + other[0]) + other[1]), None

        x = (image + time[:, None, None] * noise) @ params["enter"]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jnp.mean(jnp.square(x @ params["leave"] - noise))

    rows = 8 * math.prod(shape)
    images = jnp.zeros((rows, patches, channels))
    return _case(init, loss, lambda: (images, images, jnp.ones(rows)))


def state_space_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """Selective state spaces (Mamba): what a token adds to its state, and keeps of it, depends on the token;
    states are found by `lax.associative_scan`."""
    inner, states = 2 * WIDTH, 16

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 8 * layers + 2))
        sizes = {"enter": (WIDTH, 2 * inner), "step": (inner, inner), "given": (inner, 2 * states)}
        sizes |= {"leave": (inner, WIDTH), "decay": (inner, states)}
        layer = [{k: jax.random.normal(next(keys), s) / 32 for k, s in sizes.items()} for _ in range(layers)]
        return {
            "words": jax.random.normal(next(keys), (WORDS, WIDTH)),
            "layers": [p | {"scale": jnp.ones(WIDTH)} for p in layer],
        }

    def mixed(p: Any, x: Any) -> Any:
        x, gate = jnp.split(x @ p["enter"], 2, axis=-1)
        step = jax.nn.softplus(x @ p["step"])
        enters, leaves = jnp.split(x @ p["given"], 2, axis=-1)
        keep = jnp.exp(-step[..., None] * jnp.exp(p["decay"]))
        add = (step * x)[..., None] * enters[..., None, :]

        def after(one: Any, two: Any) -> Any:
            return one[0] * two[0], two[0] * one[1] + two[1]

        _, state = jax.lax.associative_scan(after, (keep, add), axis=1)
        return (jnp.einsum("btdn,btn->btd", state, leaves) * jax.nn.silu(gate)) @ p["leave"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + mixed(p, _norm(x, p["scale"]))
        return _cross_entropy(x @ params["words"].T, tokens[:, 1:])

    return _case(init, loss, lambda: jnp.zeros((2 * math.prod(shape), 257), jnp.int32))


def lstm_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """A language model of `layers` LSTMs, each a scan over tokens."""

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 2 * layers + 1))
        layer = [jax.random.normal(next(keys), (2 * WIDTH, 4 * WIDTH)) / 32 for _ in range(layers)]
        return {"words": jax.random.normal(next(keys), (WORDS, WIDTH)), "layers": layer}

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens[:, :-1]].swapaxes(0, 1)
        for weights in params["layers"]:

            def cell(at: Any, x: Any, weights: Any = weights) -> Any:
                h, c = at
                i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=-1) @ weights, 4, axis=-1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            x = jax.lax.scan(cell, (jnp.zeros_like(x[0]),) * 2, x)[1]
        return _cross_entropy(x.swapaxes(0, 1) @ params["words"].T, tokens[:, 1:])

    return _case(init, loss, lambda: jnp.zeros((16 * math.prod(shape), 129), jnp.int32))


NETS: Mapping[str, Callable[[str, Sequence[int], int], Case]] = {
    "mixture": partial(mixture_case, experts),
    "translation": translation_case,
    "unet": unet_case,
    "ragged": partial(mixture_case, sorted_experts),
    "diffusion": diffusion_case,
    "state-space": state_space_case,
    "lstm": lstm_case,
}
