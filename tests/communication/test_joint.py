"""Bodies that send together get what each gets alone, in fewer messages."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sbp.communication.joint import Sending, agreement, run_alone, run_together, to_owners
from sbp.communication.protocol import Context
from sbp.layout import Layout
from sbp.signature import S

DEVICES = 4


def three_messages(ctx: Context, x: jax.Array) -> Sending[jax.Array]:
    """There, an agreement, and back, with another shape."""
    there = yield from to_owners(ctx, x, 0)
    most = yield from agreement(ctx, jnp.max(there), (0,))
    back = yield from to_owners(ctx, jnp.stack([there, there + most], axis=-1), 0)
    return back.sum()


def one_message(ctx: Context, x: jax.Array) -> Sending[jax.Array]:
    return (yield from to_owners(ctx, x * 2, 0)).sum()


def no_message(ctx: Context, x: jax.Array) -> Sending[jax.Array]:
    yield from ()
    return x.sum()


def messages(run: Callable[..., Any], *args: Any) -> Counter[str]:
    """How many collectives there are of each kind."""

    def names(jaxpr: Any) -> Iterator[str]:
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                yield from names(p) if hasattr(p, "eqns") else ()

    found = Counter(names(jax.make_jaxpr(run)(*args).jaxpr))
    return Counter({k: n for k, n in found.items() if k in ("all_to_all", "pmax")})


def on_devices(join: Callable[[Sequence[Any]], Sequence[Any]], said: list[Any]) -> Callable[..., Any]:
    """All bodies on four devices, of which each has a part of every operand."""
    bodies = (three_messages, one_message, no_message, three_messages, three_messages)

    def device(*xs: jax.Array) -> Any:
        layout = Layout((DEVICES,), (S(0),), (DEVICES,))
        said[:] = [[] for _ in xs]
        ctxs = [Context(None, {}, (layout,), (), (lax.axis_index("d"),), ("d",), (), None, x) for x in said]
        started = [body(ctx, x) for body, ctx, x in zip(bodies, ctxs, xs, strict=True)]
        return [jnp.asarray(x)[None] for x in join(started)]

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    split = PartitionSpec("d")
    return jax.shard_map(device, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)


def test_together_as_alone_in_fewer_messages() -> None:
    """Of five bodies, one has another dtype, one sends once and one not at all."""
    rng = np.random.default_rng(0)
    shapes = [(16, 3), (16, 2, 2), (16,), (16, 5), (16, 3)]
    xs = [rng.integers(0, 99, s).astype(np.int32) for s in shapes[:-1]]
    xs.append(rng.integers(0, 99, shapes[-1]).astype(np.float32))
    by_itself, with_others = list[Any](), list[Any]()
    apart = on_devices(lambda bodies: [run_alone(b) for b in bodies], by_itself)
    joint = on_devices(run_together, with_others)
    for a, b in zip(jax.jit(apart)(*xs), jax.jit(joint)(*xs), strict=True):
        np.testing.assert_array_equal(a, b)
    assert messages(apart, *xs) == {"all_to_all": 7, "pmax": 3}
    assert messages(joint, *xs) == {"all_to_all": 4, "pmax": 2}
    assert by_itself == with_others, "an op is noted to send what it sends alone"
