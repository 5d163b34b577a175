"""The train steps that are measured: each with its arguments and signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from models import classifier, gpt, mlp, parallel, resnet
from sbp import AUTO, B, S
from sbp.notation.resolve import to_partition_spec
from sbp.placement import Placement


@dataclass(frozen=True)
class Case:
    """A train step `(params, opt_state, batch, key) -> (params, opt_state, loss)` and its arguments.

    Arguments:
      make: gives fresh arguments, since the step donates its state.
      in_sbp: their signatures.
      peer_sbp: what the peer gets instead, where it cannot be told the same.
      peer_step: what the peer runs on a mesh instead, where it must be told more.
    """

    step: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    in_sbp: Any
    peer_sbp: Any = None
    peer_step: Callable[[Mesh, Placement], Callable[..., Any]] | None = None

    def shapes(self) -> tuple[Any, ...]:
        """The `ShapeDtypeStruct`s of the arguments; nothing is allocated."""
        shapes: tuple[Any, ...] = jax.eval_shape(self.make)
        return shapes


SMALL_GPT = gpt.Config(width=256, heads=8, vocabulary=1024, sequence=128, dropout=0.0)


def gpt_case(
    choice: str, shape: Sequence[int], layers: int, size: gpt.Config = SMALL_GPT, rows: int = 16
) -> Case:
    """A GPT with AdamW; by default the one of the table: width 256, vocabulary 1,024, batch 16 x 128."""
    # Tokens split along the sequence must divide, for the peer: 128 of them predict 127.
    length = size.sequence - (choice == "sequence")
    config = replace(size, layers=layers, sequence=length)
    optimizer = optax.adamw(1e-3)
    # ZeRO-2 adds that gradients are never whole. Here that follows; the peer must be told.
    annotation = {"zero2": "zero1"}.get(choice, choice)

    def constrained(mesh: Mesh, placement: Placement) -> Callable[..., Any]:
        return gpt.make_train_step(config, with_split_gradients(optimizer, mesh, placement))

    tokens = np.random.default_rng(0).integers(0, size.vocabulary, (rows, length + 1)).astype(np.int32)
    init = jax.jit(partial(gpt.init, config=config))
    return Case(
        gpt.make_train_step(config, optimizer),
        lambda: arguments(init, optimizer, tokens),
        gpt.signatures(annotation, shape, config, optimizer),
        # jit has no AUTO: what most would write.
        gpt.signatures("data", shape, config, optimizer) if choice == "auto" else None,
        constrained if choice == "zero2" else None,
    )


def with_split_gradients(
    optimizer: optax.GradientTransformation, mesh: Mesh, placement: Placement
) -> optax.GradientTransformation:
    """The optimizer, with its gradients constrained to lie as ZeRO's state does."""

    def split(g: Any) -> Any:
        nd = (parallel.where_it_divides(B, g.shape, placement.size),) * placement.ndim
        named = NamedSharding(mesh, to_partition_spec(nd, g.ndim, placement))
        return jax.lax.with_sharding_constraint(g, named)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return optimizer.update(jax.tree.map(split, grads), state, params)

    return optax.GradientTransformation(optimizer.init, update)


def mlp_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """An MLP on images of digits, two hidden layers of width 512, batch 128, AdamW."""
    optimizer = optax.adamw(1e-3)
    init = partial(mlp.init, width=512, layers=2)
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(128, 64)).astype(np.float32), rng.integers(0, 10, 128).astype(np.int32)
    params = jax.eval_shape(init, jax.random.key(0))
    return Case(
        mlp.make_train_step(optimizer),
        lambda: arguments(jax.jit(init), optimizer, batch),
        parallel.signatures(choice, shape, mlp.table(2), params, optimizer),
    )


def classifier_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """The head of 100,000 classes over 64 features, batch 64, SGD with momentum."""
    optimizer = optax.sgd(0.05, momentum=0.9)
    init = partial(classifier.init, inputs=32, width=64, classes=100_000)
    batch = classifier.Identities(100_000, 32).batch(64, (0,))
    params = jax.eval_shape(init, jax.random.key(0))
    return Case(
        classifier.make_train_step(optimizer),
        lambda: arguments(jax.jit(init), optimizer, batch),
        parallel.signatures(choice, shape, classifier.TABLE, params, optimizer),
    )


@dataclass(frozen=True)
class Net:
    """The sizes of a net of somebody else's library: inputs -> width -> width -> classes."""

    inputs: int = 64
    width: int = 256
    classes: int = 10
    rows: int = 128


def library_case(
    forward: Callable[..., Any], init: Callable[..., Any], choice: str, shape: Sequence[int], size: Net
) -> Case:
    """A model of somebody else's library, AdamW."""
    optimizer = optax.adamw(1e-3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size.rows, size.inputs)).astype(np.float32)
    batch = x, rng.integers(0, size.classes, size.rows).astype(np.int32)

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        x, y = batch

        def loss(p: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(forward(p, x), y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.eval_shape(init, jax.random.key(0))
    table = jax.tree.map(lambda _: B, params)
    return Case(
        step,
        lambda: arguments(jax.jit(init), optimizer, batch),
        parallel.signatures(choice, shape, table, params, optimizer),
        parallel.signatures("data", shape, table, params, optimizer) if choice == "auto" else None,
    )


def flax_case(choice: str, shape: Sequence[int], layers: int, size: Net = Net()) -> Case:
    """The net in flax linen, with a layer norm after its first layer."""
    from flax import linen

    first = [linen.Dense(size.width), linen.relu, linen.LayerNorm()]
    net = linen.Sequential([*first, linen.Dense(size.width), linen.relu, linen.Dense(size.classes)])

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((1, size.inputs)))

    return library_case(net.apply, init, choice, shape, size)


def equinox_case(choice: str, shape: Sequence[int], layers: int, size: Net = Net()) -> Case:
    """The net in equinox."""
    import equinox as eqx

    def whole(key: Any) -> Any:
        return eqx.nn.MLP(size.inputs, size.classes, size.width, 2, key=key)

    static = eqx.partition(eqx.filter_eval_shape(whole, jax.random.key(0)), _is_shape)[1]

    def forward(params: Any, x: Any) -> Any:
        return jax.vmap(eqx.combine(params, static))(x)

    return library_case(forward, lambda key: eqx.filter(whole(key), eqx.is_array), choice, shape, size)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class Images:
    """A batch for a ResNet, and the width of its first convolution."""

    rows: int = 32
    side: int = 64
    width: int = 16
    classes: int = 10


def resnet_case(choice: str, shape: Sequence[int], layers: int, size: Images = Images()) -> Case:
    """ResNet-18 or -50 (`layers` convolutions deep), by default of a quarter of the usual width."""
    base = resnet.DEPTHS[layers if layers in resnet.DEPTHS else 18]
    config = resnet.Config(base.blocks, base.bottleneck, size.width, size.classes)
    optimizer = optax.sgd(0.05, momentum=0.9)
    init = jax.jit(partial(resnet.init, config=config))

    def make() -> tuple[Any, ...]:
        key = jax.random.key(0)
        images = jax.random.normal(key, (size.rows, size.side, size.side, 3))
        return arguments(init, optimizer, (images, jax.random.randint(key, (size.rows,), 0, size.classes)))

    in_sbp = resnet.signatures(choice, shape, config, optimizer)
    data = resnet.signatures("data", shape, config, optimizer) if choice == "auto" else None
    return Case(resnet.make_train_step(optimizer), make, in_sbp, data)


def grouped_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """Grouped convolutions (`layers` of them) of 64 channels in 8 groups, split by channels; 16 images."""
    optimizer = optax.sgd(0.05)
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(16, 16, 16, 64)).astype(np.float32)
    kernels = [rng.normal(size=(3, 3, 8, 64)).astype(np.float32) / 8 for _ in range(layers)]

    def step(kernels: Any, state: Any, x: Any, key: Any) -> Any:
        def loss(kernels: Any) -> Any:
            y = x
            for k in kernels:
                dims = ("NHWC", "HWIO", "NHWC")
                y = jax.nn.relu(
                    jax.lax.conv_general_dilated(
                        y, k, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=8
                    )
                )
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(kernels)
        updates, state = optimizer.update(grads, state, kernels)
        return optax.apply_updates(kernels, updates), state, value

    whole = [B] * len(shape)
    return Case(
        step,
        lambda: (kernels, optimizer.init(kernels), batch, jax.random.key(0)),
        ([S(3)], AUTO, [S(0)], whole) if choice == "groups" else (whole, AUTO, [S(0)], whole),
    )


def scan_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """An MLP of `layers` blocks in one `lax.scan` over stacked weights, width 128, batch 128, SGD."""
    optimizer = optax.sgd(0.05, momentum=0.9)
    rng = np.random.default_rng(0)
    weights = {
        "up": rng.normal(size=(layers, 128, 512)).astype(np.float32) / 12,
        "down": rng.normal(size=(layers, 512, 128)).astype(np.float32) / 23,
    }
    batch = rng.normal(size=(128, 128)).astype(np.float32)

    def step(weights: Any, state: Any, x: Any, key: Any) -> Any:
        def loss(weights: Any) -> Any:
            def block(x: Any, w: Any) -> Any:
                return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

            return jnp.square(jax.lax.scan(block, x, weights)[0]).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    table = {"up": S(2), "down": S(1)}
    params = jax.eval_shape(lambda: weights)
    return Case(
        step,
        lambda: (weights, optimizer.init(weights), batch, jax.random.key(0)),
        parallel.signatures(choice, shape, table, params, optimizer),
    )


def embedding_case(choice: str, shape: Sequence[int], layers: int) -> Case:
    """A table of 8,192 rows x 64 and its dense gradient, 4,096 ids, SGD: a scatter-add of embeddings."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(8192, 64)).astype(np.float32)
    ids = rng.integers(0, 8192, 4096).astype(np.int32)

    def step(table: Any, state: Any, ids: Any, key: Any) -> Any:
        value, grad = jax.value_and_grad(lambda t: jnp.square(t[ids] - 1).mean())(table)
        return table - 0.1 * grad, state, value

    lying = {"rows": [S(0)], "columns": [S(1)], "data": [B]}[choice]
    return Case(step, lambda: (table, (), ids, jax.random.key(0)), (lying, None, [S(0)], [B]))


def arguments(init: Any, optimizer: optax.GradientTransformation, batch: Any) -> tuple[Any, ...]:
    """Parameters, the optimizer's state, the batch and a key."""
    params = init(jax.random.key(0))
    return params, jax.jit(optimizer.init)(params), batch, jax.random.key(1)


CASES: dict[str, Callable[[str, Sequence[int], int], Case]] = {
    "gpt": gpt_case,
    "mlp": mlp_case,
    "classifier": classifier_case,
    "flax": flax_case,
    "equinox": equinox_case,
    "resnet": resnet_case,
    "grouped": grouped_case,
    "scan": scan_case,
    "embedding": embedding_case,
}
