"""How much a run does in a second: steps, examples, tokens, and the share of what the devices could do."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from sbp.compat import core
from sbp.compat.untyped import PyTree
from sbp.passes.explain.plan import PlanData
from sbp.passes.program.control import trips
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.views import op_of

WINDOW_SECONDS = 30.0
"""Over which a rate is taken."""


@dataclass(frozen=True)
class BatchSize:
    """What is in a batch.

    Arguments:
      examples: rows of its first array; 0 where it has none.
      tokens: elements of its arrays, if all of them are integers "b s" of one shape; else 0.
    """

    examples: int
    tokens: int

    @classmethod
    def of(cls, batch: PyTree) -> BatchSize:
        """What is in a batch.

        >>> BatchSize.of((np.zeros((4, 16), np.int32), np.zeros((4, 16), np.int32)))
        BatchSize(examples=4, tokens=64)
        >>> BatchSize.of((np.zeros((4, 16), np.float32), np.zeros(4, np.int32)))
        BatchSize(examples=4, tokens=0)
        """
        arrays = [x for x in jax.tree.leaves(batch) if np.ndim(x) and not core.is_key(x.dtype)]
        if not arrays:
            return cls(0, 0)
        is_text = all(x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer) for x in arrays)
        same = len({x.shape for x in arrays}) == 1
        return cls(int(arrays[0].shape[0]), int(np.prod(arrays[0].shape)) if is_text and same else 0)


NO_BATCH = BatchSize(0, 0)


@dataclass
class Rate:
    """Steps in a second, over the last `WINDOW_SECONDS`."""

    _seen: collections.deque[tuple[float, int]] = field(default_factory=collections.deque)

    def add(self, step: int, now: float | None = None) -> None:
        """Notes that a step is done.

        Arguments:
          now: by the monotonic clock, seconds.
        """
        now = time.monotonic() if now is None else now
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()

    def clear(self) -> None:
        """Begins anew: the run went back."""
        self._seen.clear()

    @property
    def steps_per_second(self) -> float:
        """0.0 before two steps are done.

        >>> rate = Rate()
        >>> for step in range(5): rate.add(step, now=0.5 * step)
        >>> rate.steps_per_second
        2.0
        """
        if len(self._seen) < 2:
            return 0.0
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / max(ended - began, 1e-9)


@dataclass(frozen=True)
class StepWork:
    """What one step computes, and what the devices could in a second.

    Arguments:
      flops: of the matrix products of a step, all devices together.
      flops_per_second: what all devices could at the most; 0.0 where nobody has measured such a device.
    """

    flops: float
    flops_per_second: float

    def utilisation(self, steps_per_second: float) -> float | None:
        """The share of what the devices could (MFU, Chowdhery et al., 2022); None if it is not known.

        >>> StepWork(2e12, 1e13).utilisation(2.0)
        0.4
        """
        if not self.flops_per_second or not self.flops:
            return None
        return self.flops * steps_per_second / self.flops_per_second


NO_WORK = StepWork(0.0, 0.0)


def step_work(plan: PlanData) -> StepWork:
    """What a step of a plan computes; nothing of a plan that was loaded from a file."""
    graphs = [p.physical.graph for p in plan.parts if p.physical is not None]
    found = [product for g in graphs for product in _products(g, g.nodes, 1.0)]
    if not found or not plan.hardware.chip:
        return StepWork(sum(flops for flops, _ in found), 0.0)
    devices = len({rank for p in plan.parts for rank in p.placement.ranks})
    seconds = sum(flops / _peak(plan, itemsize) for flops, itemsize in found)
    total = sum(flops for flops, _ in found)
    return StepWork(total, devices * total / seconds)


# -- inside


def _peak(plan: PlanData, itemsize: float) -> float:
    rates = sorted(plan.hardware.flops_per_second)
    return next((rate for size, rate in rates if size >= itemsize), rates[-1][1])


def _products(graph: Graph, nodes: Sequence[Node], times: float) -> list[tuple[float, float]]:
    """FLOPs of the products of whole matrices, with the bytes of an element; loops as often as they run."""
    found = list[tuple[float, float]]()
    for node in nodes:
        if node.bodies:
            inner = [_products(graph, b.nodes, times * trips(node)) for b in node.bodies]
            total = [sum(flops for flops, _ in body) for body in inner]
            branches = [inner[total.index(max(total))]] if node.op == "cond" else inner
            found += [x for body in branches for x in body]
        elif node.rule is not None and node.rule.matmul is not None:
            operands = [graph.operand(x).shape for x in node.inputs]
            results = [graph.values[v].shape for v in node.outputs]
            product = node.rule.matmul(op_of(graph, node, operands, results, 1))
            if product is not None:
                found.append((times * product.flops, max(map(core.itemsize, product.dtypes))))
    return found
