"""The logical graph as JAX runs it on one device, op by op: what distributed values are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sbp import compat
from sbp.passes.program.graph import Const, Node, Operand


def evaluate(nodes: Iterable[Node], known: Mapping[int, Any], wanted: Sequence[int]) -> list[Any]:
    """Some values of a graph, computed from others by the ops between them."""
    env = dict(known)
    for node in nodes:
        args = [value_of(x, env) for x in node.inputs]
        out = args[:1] if node.barrier >= 0 else compat.bind(node.primitive, args, dict(node.params))
        env.update(zip(node.outputs, out, strict=True))
    return [env[v] for v in wanted]


def value_of(x: Operand, known: Mapping[int, Any]) -> Any:
    """An operand: a scalar in its own type, or what is known of the value."""
    return np.asarray(x.value, x.dtype) if isinstance(x, Const) else known[x]
