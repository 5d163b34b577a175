"""Parallelisms by name, as restrictions of a planning problem: where a search may begin that wants to see
structurally different plans.

A search that goes downhill from one plan stays near it. A seed leaves only the states that a parallelism
allows: which of them is cheapest, and everything that it says nothing of, is solved as ever. It says nothing
of what the user pinned, and nothing where no state would be left.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import Table
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Graph, Node
from sbp.signature import B, NdSbp, Split


@dataclass(frozen=True, slots=True)
class SeedUse:
    """What one placement axis is used for. Of each kind of tensor: whether it is split, None for either.

    Arguments:
      batch: inputs that are no state, by their rows (the first dim); False: whole.
      weights, moments: state that the model computes with, and the other state of the same shapes.
      gradients: how the gradient of a weight meets the optimizer.
      first: whether weights and moments that are split are split by the first dim that can be.
      stays: whether a weight is used as it lies, never gathered.
      gathered: whether a weight is used whole: no op of the model takes a part of it.
      whole_rows: whether no op of the model is split by the rows of the batch.
      layers: whether loops take weights in parts, and so gather those of one layer at a time.
    """

    name: str
    batch: bool | None = None
    weights: bool | None = None
    moments: bool | None = None
    gradients: bool | None = None
    first: bool = False
    stays: bool = False
    gathered: bool = False
    whole_rows: bool = False
    layers: bool = False


DATA = SeedUse("data", batch=True, weights=False, moments=False)
ZERO_1 = SeedUse("ZeRO-1", batch=True, weights=False, moments=True, gradients=False)
ZERO_2 = SeedUse("ZeRO-2", batch=True, weights=False, moments=True, gradients=True)
ZERO_3 = SeedUse("ZeRO-3", batch=True, weights=True, moments=True, first=True)
ZERO_3_GATHERED = replace(ZERO_3, name="ZeRO-3, weights gathered", gathered=True)
"""The cheapest plan of ZeRO-3 sends activations where that is less; gathers of weights wait for nothing."""
ZERO_3_ANY = SeedUse("ZeRO-3 by any dim", batch=True, weights=True, moments=True)
ZERO_3_LAYERS = replace(ZERO_3_ANY, name="ZeRO-3, layer by layer", layers=True)
TENSOR = SeedUse("tensor", batch=False, weights=True, moments=True, stays=True)
TENSOR_ROWS = SeedUse("tensor, rows whole", weights=True, moments=True, stays=True, whole_rows=True)
SEQUENCE = SeedUse("sequence", weights=False, whole_rows=True)
SEQUENCE_3 = SeedUse("sequence and ZeRO-3", weights=True, moments=True, whole_rows=True)

ALL_AXES = (
    *(DATA, ZERO_3, ZERO_3_LAYERS, ZERO_3_GATHERED, ZERO_3_ANY, ZERO_2),
    *(SEQUENCE_3, TENSOR, ZERO_1, SEQUENCE, TENSOR_ROWS),
)
"""For all axes alike, the ones that most often pay first."""
PAIRS = ((DATA, ZERO_3), (DATA, TENSOR), (ZERO_3, DATA), (ZERO_3, TENSOR), (TENSOR, DATA), (TENSOR, ZERO_3))
"""For the outer axes, and for the others."""


def seeds_for(axes: int, outer: int = 1, *, loops: bool = False) -> tuple[tuple[SeedUse, ...], ...]:
    """The parallelisms for a placement of so many axes, outer to inner.

    Arguments:
      outer: how many of them one of a pair is for.
      loops: whether the program has any.

    >>> [seed_name(seed) for seed in seeds_for(2)][:4]
    ['data', 'data x ZeRO-3', 'ZeRO-3', 'data x tensor']
    """
    alike = [(use,) * axes for use in ALL_AXES if loops or not use.layers]
    mixed = [(a,) * outer + (b,) * (axes - outer) for a, b in PAIRS] if axes > 1 else []
    found = (seed for pair in itertools.zip_longest(alike, mixed) for seed in pair if seed is not None)
    return tuple(found)


PLAIN = (DATA, ZERO_3, ZERO_1, ZERO_2, TENSOR, SEQUENCE_3)
"""For all axes alike, those that people write."""
PLAIN_PAIRS = ((DATA, ZERO_3), (DATA, TENSOR))


def plain_seeds(axes: int) -> tuple[tuple[SeedUse, ...], ...]:
    """Eight parallelisms that people write for a placement of so many axes.

    >>> [seed_name(seed) for seed in plain_seeds(2)][-3:]
    ['sequence and ZeRO-3', 'data x ZeRO-3', 'data x tensor']
    """
    alike = [(use,) * axes for use in PLAIN]
    if axes == 1:
        return (*alike, (SEQUENCE,), (ZERO_3_GATHERED,))
    return (*alike, *((a,) + (b,) * (axes - 1) for a, b in PLAIN_PAIRS))


def seed_name(seed: Sequence[SeedUse]) -> str:
    """What a reader calls it."""
    return " x ".join(use.name for use, _ in itertools.groupby(seed))


@dataclass(frozen=True)
class SeedTensors:
    """Which tensors of a program are what.

    Arguments:
      batch, moments: positions of inputs.
      weights: likewise; `alike`: the values that are one, as it is, cast or put into another form. Vectors,
      such
        as biases, are not among these: no product is split for their sake.
      gradients: values that the backward pass hands to the optimizer.
      rows: numbers of rows of the batch.
    """

    batch: frozenset[int]
    weights: frozenset[int]
    moments: frozenset[int]
    alike: frozenset[int] = field(repr=False)
    gradients: frozenset[int] = field(repr=False)
    rows: frozenset[int]


def tensors_of(graph: Graph, ties: Sequence[int | None]) -> SeedTensors:
    """What the tensors of a program are, by where they are used."""
    state = {t for t in ties if t is not None}
    at = {v: i for i, v in enumerate(graph.inputs)}
    shapes = [graph.values[v].shape for v in graph.inputs]
    nodes = list(graph.walk())
    used = {x for n in nodes if n.role.direction for x in n.inputs if not isinstance(x, Const)}
    # A program without a gradient, such as one that only decodes, has nothing to split but its batch.
    weights = {i for v, i in at.items() if i in state and v in used and shapes[i]}
    forms = {shapes[i] for i in weights}
    alike = {graph.inputs[i] for i in weights if len(shapes[i]) > 1}
    gradients, met = set[int](), set[int]()
    for n in nodes:
        if n.role.direction == "backward":
            gradients.update(v for v in n.outputs if graph.values[v].shape in forms)
        alike.update(_alike(graph, n, alike))
        if not n.role.direction:
            met.update(x for x in n.inputs if not isinstance(x, Const))
    batch = frozenset(i for i in at.values() if i not in state and shapes[i])
    return SeedTensors(
        batch,
        frozenset(weights),
        frozenset(i for i in state if i not in weights and shapes[i] in forms),
        frozenset(alike),
        frozenset(gradients & met),
        frozenset(shapes[i][0] for i in batch),
    )


def _alike(graph: Graph, node: Node, weights: set[int]) -> list[int]:
    """What an op of the model makes that is still a weight: a cast, another form, or what enters a loop."""
    entering = [x for x in node.inputs if not isinstance(x, Const)]
    if node.bodies:
        wired = ((p, node.inputs[p.operand]) for p in ports(node) if p.operand is not None)
        return [v for p, x in wired if x in weights for v in p.enters]
    if not node.role.direction or len(entering) != 1 or entering[0] not in weights or len(node.outputs) != 1:
        return []
    given, made = (np.prod(graph.values[v].shape) for v in (entering[0], node.outputs[0]))
    return [node.outputs[0]] if given == made else []


def restriction(model: Model, seed: Sequence[SeedUse], tensors: SeedTensors) -> tuple[Table, ...]:
    """The costs of all states of a built model, infinite for those that a seed excludes."""
    r, b = _Restriction(model, tuple(seed)), tensors
    for i, variable in enumerate(model.inputs):
        if i in b.batch:
            r.keep(variable, "batch", _batch_lies)
        elif i in b.weights:
            r.keep(variable, "weights", lambda s, use: use.weights in (None, _is_split(s)))
            r.keep_first(variable, "weights", lambda use: use.first and use.weights)
        elif i in b.moments:
            r.keep(variable, "moments", lambda s, use: use.moments in (None, _is_split(s)))
            r.keep_first(variable, "moments", lambda use: use.first and use.moments)
    for v in b.gradients & model.shares.keys():
        r.keep(model.shares[v], "gradients", lambda s, use: use.gradients in (None, _is_split(s)))
    for node in (n for n in model.graph.walk() if n.bodies):
        for port, variable in zip(ports(node), model.ports[node.id], strict=True):
            if port.operand is not None and node.inputs[port.operand] in b.alike:
                r.keep(variable, "layers", lambda s, use: not use.layers or _is_split(s))
    if any(use.stays or use.gathered or use.whole_rows for use in seed):
        for node in model.graph.walk():
            if node.role.direction and node.id in model.nodes:
                r.keep_node(node, b)
    return tuple(r.unary)


def _is_split(s: Any) -> bool:
    return isinstance(s, Split)


def _batch_lies(s: Any, use: SeedUse) -> bool:
    """By its rows if it is to be split, else whole."""
    return use.batch is None or (s == Split(0) if use.batch else not _is_split(s))


@dataclass
class _Restriction:
    """The costs of a model's states so far; states and costs that many variables share are looked at once."""

    model: Model
    seed: tuple[SeedUse, ...]

    def __post_init__(self) -> None:
        self.unary = list(self.model.unary)
        self.known: dict[Hashable, Table] = {}

    def keep(self, variable: int, kind: str, allowed: Callable[[Any, SeedUse], bool]) -> None:
        """Leaves the signatures that each axis allows."""

        def kept(nd: NdSbp) -> bool:
            return all(allowed(s, use) for s, use in zip(nd, self.seed, strict=True))

        self._keep(variable, kind, kept)

    def keep_first(self, variable: int, kind: str, wanted: Callable[[SeedUse], bool | None]) -> None:
        """Leaves the signatures by the first dim that all axes which want it can split."""
        axes = [a for a, use in enumerate(self.seed) if wanted(use)]
        finite = np.isfinite(self.unary[variable])
        left = [nd for nd, ok in zip(self.model.states[variable], finite, strict=True) if ok]
        dims = [
            nd[axes[0]].dim
            for nd in left
            if axes and len({nd[a] for a in axes}) == 1 and _is_split(nd[axes[0]])
        ]
        if dims:
            first = Split(min(dims))
            self._keep(variable, (kind, first), lambda nd: all(nd[a] == first for a in axes))

    def keep_node(self, node: Node, tensors: SeedTensors) -> None:
        """Leaves the strategies that take weights as they lie, or whole, or do not split rows."""
        values = self.model.graph.values
        taken = tuple(k for k, x in enumerate(node.inputs) if x in tensors.alike)
        made = tuple(
            k
            for k, v in enumerate(node.outputs)
            if len(values[v].shape) > 1 and values[v].shape[0] in tensors.rows
        )
        if not taken and not made:
            return

        def kept(s: Strategy) -> bool:
            uses = list(enumerate(self.seed))
            stay = all(s.operands[k][a].__class__ is Split for k in taken for a, use in uses if use.stays)
            whole = all(s.operands[k][a] == B for k in taken for a, use in uses if use.gathered)
            rows = any(s.results[k][a] == Split(0) for k in made for a, use in uses if use.whole_rows)
            return stay and whole and not rows

        self._keep(self.model.nodes[node.id], (taken, made), kept)

    def _keep(self, variable: int, kind: Hashable, kept: Callable[[Any], bool]) -> None:
        states, cost = self.model.states[variable], self.unary[variable]
        key = id(states), id(cost), kind
        if key not in self.known:
            wanted = np.array([kept(s) for s in states])
            possible = bool((wanted & np.isfinite(cost)).any())
            self.known[key] = np.where(wanted, cost, np.inf) if possible else cost
        self.unary[variable] = self.known[key]
