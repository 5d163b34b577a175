"""The logical graph as JAX runs it on one device, op by op: what distributed values are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from sbp.compat import core
from sbp.passes.program.graph import Const, Node, Operand

Tensor: TypeAlias = jax.Array | NDArray[Any]
"""A value of a graph: an array of JAX, traced or not, or one of the host."""


def evaluate(nodes: Iterable[Node], known: Mapping[int, Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """Some values of a graph, computed from others by the ops between them."""
    env = dict(known)
    for node in nodes:
        args = [value_of(x, env) for x in node.inputs]
        out = args[:1] if node.barrier >= 0 else core.bind(node.primitive, args, dict(node.params))
        env.update(zip(node.outputs, out, strict=True))
    return [env[v] for v in wanted]


def value_of(x: Operand, known: Mapping[int, Tensor]) -> Tensor:
    """An operand: a scalar in its own type, or what is known of the value."""
    return np.asarray(x.value, x.dtype) if isinstance(x, Const) else known[x]
