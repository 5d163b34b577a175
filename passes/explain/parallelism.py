"""What each axis of a placement is used for, in the field's words: data, ZeRO, tensor, sequence."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby

from sbp.compat import core
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Compute, Physical
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.views import op_of
from sbp.signature import Split, format_sbp

MAIN_SHARE = 0.2
"""Of the arithmetic of all layers: what less of it does is not said."""


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What one axis does.

    Arguments:
      devices: along it.
      products: what it splits of products of a layer's input with its weights, the most of them first:
        "data" (rows of the batch), "sequence" (another dim of the input), "tensor" (the weight); () if all
        its devices compute the same.
      state: "ZeRO-3" if it splits weights at rest beside that, "ZeRO-1" if only the optimizer's state.
    """

    devices: int
    products: tuple[str, ...]
    state: str

    def what(self) -> tuple[tuple[str, ...], str]:
        """All but the number of its devices."""
        return self.products, self.state

    def merge(self, other: AxisUse) -> AxisUse:
        """Two axes of the same use as one."""
        return replace(self, devices=self.devices * other.devices)

    def __str__(self) -> str:
        words = " and ".join(self.products) or "copies"
        return f"{self.devices} {words}{' + ' * bool(self.state)}{self.state}"


def parallelism_text(plan: PlanData, state: Collection[str]) -> str:
    """What a plan does, axis by axis, such as "16 data + ZeRO-1, 8 tensor".

    Of a program without layers it says how the largest argument lies.

    Arguments:
      plan: one that was just made, of one placement.
      state: the names of those arguments that results are the next values of.
    """
    uses = axis_uses(plan, state)
    if uses:
        merged = (reduce(AxisUse.merge, alike) for _, alike in groupby(uses, key=AxisUse.what))
        return ", ".join(str(use) for use in merged if use.devices > 1) or "alone"
    if plan.physical is None or not plan.in_paths:
        return "no arguments"
    sizes = [_bytes(plan.physical.graph, v) for v in plan.physical.graph.inputs[: len(plan.in_paths)]]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return f"{plan.in_paths[largest]} {format_sbp(plan.in_sbp[largest])}"


def axis_uses(plan: PlanData, state: Collection[str]) -> tuple[AxisUse, ...]:
    """What every axis does; () for a program without products of a batch with weights.

    Arguments: those of `parallelism_text`.
    """
    physical = plan.physical
    if physical is None:
        return ()
    layers = _Layers(physical, plan.in_paths, state)
    work: list[dict[str, float]] = [{} for _ in plan.placement.shape]
    for step, _ in physical.walk():
        if isinstance(step, Compute) and step.node.id in layers.weight_at:
            at, batch_at, flops = layers.weight_at[step.node.id]
            for axis, row in enumerate(step.strategy.rows):
                lies, weight = row.operands[batch_at], row.operands[at]
                word = (
                    "tensor"
                    if isinstance(weight, Split)
                    else ("sequence" if lies.dim else "data")
                    if isinstance(lies, Split)
                    else ""
                )
                work[axis][word] = work[axis].get(word, 0.0) + flops
    if not layers.weight_at:
        return ()
    return tuple(_use(plan, axis, layers.weights, done, state) for axis, done in enumerate(work))


def _use(
    plan: PlanData, axis: int, weights: Collection[int], work: Mapping[str, float], state: Collection[str]
) -> AxisUse:
    total = sum(work.values())
    most = sorted(work, key=lambda word: -work[word])
    words = tuple(word for word in most if word and work[word] >= MAIN_SHARE * total)
    kept = [i for i, path in enumerate(plan.in_paths) if path in state]
    of_weights = _split_share(plan, axis, [i for i in kept if i in weights])
    of_others = _split_share(plan, axis, [i for i in kept if i not in weights])
    zero = ""
    if "tensor" not in words:
        zero = "ZeRO-3" if of_weights > 0.5 else "ZeRO-1" if of_others > 0.5 else ""
    return AxisUse(plan.placement.shape[axis], words, zero)


def _split_share(plan: PlanData, axis: int, leaves: Sequence[int]) -> float:
    """How much of some arguments is split along an axis, by bytes."""
    assert plan.physical is not None
    graph = plan.physical.graph
    sizes = [_bytes(graph, graph.inputs[i]) for i in leaves]
    split = (n for i, n in zip(leaves, sizes, strict=True) if isinstance(plan.in_sbp[i][axis], Split))
    return sum(split) / sum(sizes) if sum(sizes) else 0.0


def _bytes(graph: Graph, v: int) -> float:
    return float(math.prod(graph.values[v].shape) * core.itemsize(graph.values[v].dtype))


@dataclass
class _Layers:
    """The products of a batch with weights in the forward pass, found by walking through the program once.

    Arguments:
      physical: the program.
      paths: names of its arguments.
      state: those of them that are state.
      weight_at: per op, the positions of the weight and of the other operand, and its arithmetic in FLOP.
      weights: positions of the arguments that are such weights.
    """

    physical: Physical
    paths: Sequence[str]
    state: Collection[str]
    weight_at: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)
    _batch: set[int] = field(default_factory=set)
    _origin: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.physical.graph
        for i, (v, path) in enumerate(zip(graph.inputs, self.paths, strict=False)):
            if path in self.state:
                self._origin[v] = i
            else:
                self._batch.add(v)
        self._walk(graph.nodes)

    def _walk(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.bodies:
                self._through(node)
                continue
            reads = [x for x in node.inputs if isinstance(x, int)]
            if self._batch.intersection(reads):
                self._batch.update(node.outputs)
                self._product(node)
            elif len(reads) == 1 and reads[0] in self._origin:
                # A weight stays one while it is cast, laid out otherwise, or cut into layers.
                self._origin.update(dict.fromkeys(node.outputs, self._origin[reads[0]]))

    def _through(self, node: Node) -> None:
        """Into the bodies of a loop or a branch, and out again."""
        for _ in range(2):  # what one trip leaves is what the next one begins with
            for port in ports(node):
                given = node.inputs[port.operand] if port.operand is not None else None
                if given in self._batch or self._batch.intersection(
                    x for x in port.leaves if isinstance(x, int)
                ):
                    self._batch.update(port.enters)
                elif given in self._origin and isinstance(given, int):
                    self._origin.update(dict.fromkeys(port.enters, self._origin[given]))
            for body in node.bodies:
                self._walk(body.nodes)
        for port in ports(node):
            left = {x for x in port.leaves if isinstance(x, int)}
            if port.result is not None and self._batch & left:
                self._batch.add(node.outputs[port.result])

    def _product(self, node: Node) -> None:
        if node.role.direction == "backward" or node.rule is None or node.rule.matmul is None:
            return
        at = [i for i, x in enumerate(node.inputs) if isinstance(x, int) and x in self._origin]
        others = [i for i, x in enumerate(node.inputs) if isinstance(x, int) and x in self._batch]
        if len(at) != 1 or not others:
            return
        graph, weight = self.physical.graph, node.inputs[at[0]]
        shapes = [graph.operand(x).shape for x in node.inputs], [graph.values[v].shape for v in node.outputs]
        p = node.rule.matmul(op_of(graph, node, *shapes, 1))
        self.weight_at[node.id] = at[0], others[0], 2.0 * p.batch * p.m * p.n * p.k
        assert isinstance(weight, int)
        self.weights.add(self._origin[weight])


def named_state(paths: Sequence[str], ties: Sequence[int | None]) -> Iterator[str]:
    """The names of arguments that results are the next values of; `ties` as of `Request`."""
    return (paths[i] for i in ties if i is not None)
