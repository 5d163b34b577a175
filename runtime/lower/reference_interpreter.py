"""Runs the logical graph op by op on one device: the reference for distributed values."""

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
    """The values of a graph that are asked for, computed from others by the ops between them."""
    env = dict(known)
    for node in nodes:
        args = [value_of(x, env) for x in node.inputs]
        out = args[:1] if node.barrier >= 0 else core.bind(node.primitive, args, dict(node.params))
        env.update(zip(node.outputs, out, strict=True))
    return [env[v] for v in wanted]


def value_of(x: Operand, known: Mapping[int, Tensor]) -> Tensor:
    """The value of an operand: a scalar in its own dtype, or a known value."""
    return np.asarray(x.value, x.dtype) if isinstance(x, Const) else known[x]
