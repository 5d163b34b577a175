"""Loops and branches on one device: each becomes its `jax.lax` counterpart over local shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax import lax

from sbp.passes.program.graph import Node, Operand
from sbp.passes.program.wiring import Port
from sbp.signature import NdSbp

Tensors: TypeAlias = tuple[jax.Array, ...]
Leaving: TypeAlias = Sequence[tuple[Operand, NdSbp]]
"""What a body hands back, and as what."""


@dataclass(frozen=True)
class Region:
    """One loop or branch, with what enters it.

    Arguments:
      node: the op.
      ports, inside: its ports and the signature of each inside.
      outer: the local tensor of each port that has an operand.
      body: runs the body of a number on tensors that enter, by port.
    """

    node: Node
    ports: tuple[Port, ...]
    inside: tuple[NdSbp, ...]
    outer: Mapping[int, jax.Array]
    body: Callable[[int, Mapping[int, jax.Array], Leaving], list[jax.Array]]

    def where(self, holds: Callable[[Port], bool]) -> list[int]:
        """The ports for which something holds."""
        return [i for i, p in enumerate(self.ports) if holds(p)]

    def take(self, at: Sequence[int]) -> Tensors:
        """The tensors that enter through some ports."""
        return tuple(self.outer[i] for i in at)

    def without(self, at: Sequence[int]) -> dict[int, jax.Array]:
        """The tensors that enter through the other ports."""
        return {i: x for i, x in self.outer.items() if i not in at}

    def leaving(self, at: Sequence[int], k: int = 0) -> Leaving:
        """What leaves through some ports: the end number `k` of each."""
        return [(self.ports[i].leaves[k], self.inside[i]) for i in at]


def scan(r: Region) -> list[jax.Array]:
    """A scan over local slices; what it only reads is closed over."""
    carried = r.where(lambda p: p.operand is not None and p.result is not None)
    sliced = r.where(lambda p: p.operand is not None and p.stacked)
    stacked = r.where(lambda p: p.operand is None)
    fixed, leaving = r.without([*carried, *sliced]), r.leaving([*carried, *stacked])

    def trip(carry: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        entering = {**fixed, **dict(zip(carried, carry, strict=True)), **dict(zip(sliced, xs, strict=True))}
        out = r.body(0, entering, leaving)
        return tuple(out[: len(carried)]), tuple(out[len(carried) :])

    how = {name: r.node.params[name] for name in ("length", "reverse", "unroll")}
    last, ys = lax.scan(trip, r.take(carried), r.take(sliced), **how)
    return [*last, *ys]


def while_loop(r: Region) -> list[jax.Array]:
    """A while loop; its predicate is whole, so that all devices leave it together."""
    carried = r.where(lambda p: p.result is not None)
    fixed, leaving = r.without(carried), r.leaving(carried)
    test = r.leaving(r.where(lambda p: p.whole))

    def entering(carry: Tensors) -> dict[int, jax.Array]:
        return {**fixed, **dict(zip(carried, carry, strict=True))}

    out = lax.while_loop(
        lambda carry: r.body(0, entering(carry), test)[0],
        lambda carry: tuple(r.body(1, entering(carry), leaving)),
        r.take(carried),
    )
    return list(out)


def cond(r: Region) -> list[jax.Array]:
    """A branch; its index is whole, so that all devices take the same one."""
    (index,) = r.where(lambda p: p.whole)
    results = r.where(lambda p: p.result is not None)

    def branch(k: int) -> Callable[[], Tensors]:
        return lambda: tuple(r.body(k, r.without([index]), r.leaving(results, k)))

    return list(lax.switch(r.outer[index], [branch(k) for k in range(len(r.node.bodies))]))


CONTROL: dict[str, Callable[[Region], list[jax.Array]]] = {"scan": scan, "while": while_loop, "cond": cond}
