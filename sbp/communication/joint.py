"""Bodies that send together: what several of them send at one time goes as one message.

Such a body is a generator. It yields what it sends, and is given what has come. Run by itself it sends each
message at once; run with others, its messages go with theirs, message by message. An example:
docs/communication.md.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from sbp.communication.protocol import Context


@dataclass(frozen=True)
class Message:
    """What a body sends.

    Arguments:
      ctx: the op's.
      content: "group ...", line i to the device at position i; a scalar for `agrees`.
      axes: the axis along which it goes, or the axes along which devices agree.
      agrees: whether every device gets the largest content of any, instead of the lines for it.
    """

    ctx: Context
    content: jax.Array
    axes: tuple[int, ...]
    agrees: bool = False


Result = TypeVar("Result")
Sending: TypeAlias = Generator[Message, jax.Array, Result]
"""A body, or a part of one, that yields each `Message`, and is given what comes to this device."""


def to_owners(ctx: Context, content: jax.Array, axis: int) -> Sending[jax.Array]:
    """Row i of `content` to the device at position i along `axis`, whose row for this one becomes row i."""
    return (yield Message(ctx, content, (axis,)))


def agreement(ctx: Context, number: jax.Array, axes: Sequence[int]) -> Sending[jax.Array]:
    """The largest number of any device along `axes`."""
    return (yield Message(ctx, number, tuple(axes), agrees=True))


def results_of(
    bodies: Sequence[Sending[Sequence[jax.Array]] | Sequence[jax.Array]],
) -> list[Sequence[jax.Array]]:
    """What the bodies of some ops have returned: those that send are run together."""
    found = iter(run_together([x for x in bodies if isinstance(x, Generator)]))
    return [next(found) if isinstance(x, Generator) else x for x in bodies]


def run_alone(body: Sending[Result]) -> Result:
    """The result of a body that sends by itself."""
    return run_together([body])[0]


def run_together(bodies: Sequence[Sending[Result]]) -> list[Result]:
    """The results of bodies whose messages go as one: the first of each, then the second of each."""
    results: dict[int, Result] = {}
    came: dict[int, jax.Array | None] = dict.fromkeys(range(len(bodies)))
    while came:
        waiting: dict[int, Message] = {}
        for i, content in came.items():
            try:
                waiting[i] = next(bodies[i]) if content is None else bodies[i].send(content)
            except StopIteration as e:
                results[i] = e.value
        came = dict(_sent(waiting))
    return [results[i] for i in range(len(bodies))]


def _sent(waiting: dict[int, Message]) -> list[tuple[int, jax.Array]]:
    """What comes for each of some messages; those of one type along the same axes go as one."""
    alike: dict[object, list[int]] = {}
    for i, m in waiting.items():
        alike.setdefault((m.agrees, m.axes, m.content.dtype), []).append(i)
    out: list[tuple[int, jax.Array]] = []
    for group in alike.values():
        messages = [waiting[i] for i in group]
        for m in messages[1:]:
            m.ctx.says("all_reduce" if m.agrees else "all_to_all", m.axes)
        out += zip(group, _agreed(messages) if messages[0].agrees else _exchanged(messages), strict=True)
    return out


def _exchanged(messages: Sequence[Message]) -> list[jax.Array]:
    """What comes for messages, which lie side by side in one."""
    ctx, (axis,) = messages[0].ctx, messages[0].axes
    if len(messages) == 1:
        return [ctx.all_to_all(messages[0].content, axis)]
    shapes = [m.content.shape for m in messages]
    ends = list(accumulate(prod(shape[1:]) for shape in shapes))
    lines = [m.content.reshape(m.content.shape[0], -1) for m in messages]
    came = ctx.all_to_all(jnp.concatenate(lines, axis=1), axis)
    parts = zip([0, *ends], ends, shapes, strict=False)
    return [came[:, start:end].reshape(shape) for start, end, shape in parts]


def _agreed(messages: Sequence[Message]) -> list[jax.Array]:
    """The largest of each number, of one vector of them."""
    ctx, axes = messages[0].ctx, messages[0].axes
    if len(messages) == 1:
        return [ctx.maximum(messages[0].content, axes)]
    return list(ctx.maximum(jnp.stack([m.content for m in messages]), axes))
