"""What a training step of tables costs under a layout, and the cheapest layouts that fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from sbp.compat import core
from sbp.compat.untyped import PyTree, TreeDef
from sbp.hardware.catalogue import BYTES_ONLY, Hardware
from sbp.layout import local_shape
from sbp.lazy import Optimizer
from sbp.options import Options
from sbp.passes.face import Plan
from sbp.placement import Placement
from sbp.rules.lookups import MOST_ROWS
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.tables import (
    ColumnWise,
    FeatureConfig,
    Replicated,
    RowWise,
    TableConfig,
    TableLayout,
    TableWise,
    Uncompressed,
)
from sbp.runtime.program.compile import compile
from sbp.runtime.program.program import Program
from sbp.signature import Signature, Split

Stacks: TypeAlias = dict[str, jax.Array]
"""Stack -> its array."""
Structs: TypeAlias = dict[str, jax.ShapeDtypeStruct]
"""Stack -> the shape and type of its array."""

ROUNDED = 256
"""Rows of a stack are rounded up to a multiple of this, so that the same stacks fit many placements."""


@dataclass(frozen=True, slots=True)
class LayoutKind:
    """A layout.

    Arguments:
      make: gives it for a number of devices.
      holds: which part of a table a device has.
    """

    make: Callable[[int], TableLayout]
    holds: str


KINDS: Mapping[str, LayoutKind] = MappingProxyType(
    {
        "rows": LayoutKind(lambda devices: RowWise(), "each device has some of the rows"),
        "columns": LayoutKind(lambda devices: ColumnWise(), "each device has some of the columns"),
        "whole": LayoutKind(TableWise, "one device has it"),
        "replicated": LayoutKind(lambda devices: Replicated(), "every device has it"),
    }
)
LAYOUTS = tuple(KINDS)
"""The names of the layouts."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one training step costs, on each device.

    Arguments:
      wire_bytes: sent.
      seconds: of the plan.
      memory_bytes: of tables and optimizer state at rest.
      largest: the kind of the collectives that send most, and what they send; None if nothing is sent.
    """

    wire_bytes: float
    seconds: float
    memory_bytes: float
    largest: tuple[str, float] | None


Estimates: TypeAlias = Mapping[str, Estimate]
"""Layout -> its cost, for those that are possible."""


def collection_of(features: Sequence[FeatureConfig], devices: int, rounded: int) -> Collection:
    """A collection whose stacks of rows divide.

    Arguments:
      rounded: rows are rounded up to a multiple of this, and of the devices.
    """
    return Collection(tuple(features), multiple=math.lcm(rounded, devices))


@dataclass(frozen=True)
class TableStep:
    """One training step of tables alone.

    Arguments:
      batch: examples.
      placement, hardware: what it is planned for.
      optimizer: of the tables.
    """

    batch: int
    placement: Placement
    hardware: Hardware
    optimizer: Optimizer

    def cost(self, one: Estimate) -> float:
        """What is to be small."""
        return one.wire_bytes if self.hardware == BYTES_ONLY else one.seconds

    def plan(self, collection: Collection) -> tuple[Plan, Estimate]:
        """The plan of a step, and what it costs."""
        program, args = self.program(collection)
        plan = program.plan(*args)
        sent = {kind: wire_bytes for kind, (_, wire_bytes) in plan.by_kind().items()}
        largest = max(sent.items(), key=lambda item: item[1], default=None)
        return plan, Estimate(plan.wire_bytes, plan.seconds, self.held_bytes(collection), largest)

    def program(self, collection: Collection) -> tuple[Program[..., Any], tuple[PyTree, ...]]:
        """Lookup, pooling and update, and the shapes of its arguments; vectors leave, and gradients come,
        split by batch."""
        tables, state, lying = self._stored(collection)
        inputs = {f.name: self._ids(f) for f in collection.features}
        params = _structs(collection)
        slopes = jax.eval_shape(lambda *args: collection(*args), params, inputs)

        def step(
            params: Stacks, state: PyTree, inputs: Mapping[str, jax.Array], slopes: PyTree
        ) -> tuple[PyTree, Stacks, PyTree]:
            vectors, back = jax.vjp(lambda p: collection(p, inputs), params)
            rows, grads = _by_row(params), _by_row(back(slopes)[0])
            done = {n: self.optimizer.update(grads[n], state[n], rows[n]) for n in rows}
            after = {n: (rows[n] + added.astype(rows[n].dtype)) for n, (added, _) in done.items()}
            back_in_place = {n: x.reshape(params[n].shape) for n, x in after.items()}
            return vectors, back_in_place, {n: s for n, (_, s) in done.items()}

        split = [Split(0)] * self.placement.ndim
        program = compile(
            step,
            self.placement,
            in_sbp=(tables, lying, split, split),
            out_sbp=(split, tables, lying),
            # What fits is decided by who asks.
            options=Options(hardware=self.hardware, memory_limit=math.inf),
        )
        return program, (params, state, inputs, slopes)

    def held_bytes(self, collection: Collection) -> float:
        """Bytes of tables and optimizer state on one device."""
        tables, state, lying = self._stored(collection)
        pairs = [(x, tables[n]) for n, x in _structs(collection).items()]
        tree: TreeDef = jax.tree.structure(state)
        pairs += zip(jax.tree.leaves(state), tree.flatten_up_to(lying), strict=True)
        shape = self.placement.shape
        return sum(math.prod(local_shape(x.shape, nd, shape)) * core.itemsize(x.dtype) for x, nd in pairs)

    def _stored(self, collection: Collection) -> tuple[dict[str, list[Signature]], dict[str, PyTree], PyTree]:
        """How the tables lie, the state of their optimizer, and how it lies."""
        rows = jax.eval_shape(_by_row, _structs(collection))
        state = {n: jax.eval_shape(self.optimizer.init, x) for n, x in rows.items()}
        return collection.in_sbp(self.placement), state, collection.in_sbp(self.placement, like=state)

    def _ids(self, feature: FeatureConfig) -> jax.ShapeDtypeStruct:
        hotness = (n for n in (feature.input_shape or ())[1:] if n is not None)
        return core.struct((self.batch, *hotness), np.dtype(np.int32))

    def table_cost(self, features: Sequence[FeatureConfig], layout: str) -> Estimate:
        """The cost of one table under one layout, its features given.

        A stack of as many equal tables as there are devices is planned, and divided by their number: so whole
        tables fill all devices, and no layout is charged more latency than another.
        """
        devices, table = self.placement.size, features[0].table
        most = (MOST_ROWS - devices) // sum(table.compression.parts(table.vocabulary_size).values())
        count = devices if layout == "whole" else max(1, min(devices, most))
        made = KINDS[layout].make(devices)
        copies = [replace(table, name=str(i), placement=made) for i in range(count)]
        own = tuple(replace(f, name=f"{t.name} {f.name}", table=t) for t in copies for f in features)
        _, one = self.plan(collection_of(own, devices, 1))
        largest = one.largest and (one.largest[0], one.largest[1] / count)
        return Estimate(one.wire_bytes / count, one.seconds / count, one.memory_bytes / count, largest)


def _by_row(stacks: Mapping[str, jax.Array]) -> Stacks:
    """Stacks as one row after the other: a row is what an optimizer treats by itself."""
    return {n: x if x.ndim == 2 else x.reshape(-1, x.shape[-1]) for n, x in stacks.items()}


def _structs(collection: Collection) -> Structs:
    """The arrays of a collection."""
    return {n: core.struct(s.shape, s.tables[0].dtype) for n, s in collection.stacks.items()}


def possible(table: TableConfig, layout: str, devices: int) -> bool:
    """Whether a table can lie so."""
    if layout == "columns":
        return table.embedding_dim % devices == 0
    return layout != "whole" or (table.combiner is not None and table.compression == Uncompressed())


def cheapest(
    costs: Sequence[Mapping[str, float]],
    memory: Sequence[Mapping[str, float]],
    stacks: Sequence[int],
    devices: int,
    limit: float,
    most: int,
) -> tuple[str, ...] | None:
    """The layout of each table with the least sum of costs that fits; None if nothing does.

    Whole tables of a stack take what the fullest device has, and no less than the largest of them: arrays
    have one shape on all devices. Solved exactly, as an integer program, by HiGHS.

    Arguments:
      costs: of each table, per layout.
      memory: bytes per device, likewise; of whole tables on average.
      stacks: the stack that each table would be in.
      limit: bytes per device; may be infinite.
      most: how many whole tables there may be.
    """
    if math.isinf(limit) and most >= len(costs):
        return tuple(min(c, key=c.__getitem__) for c in costs)
    pairs = [(t, layout) for t, c in enumerate(costs) for layout in c]
    whole = [i for i, (_, layout) in enumerate(pairs) if layout == "whole"]
    share = [memory[t][layout] / limit for t, layout in pairs]
    heights = {stack: len(pairs) + h for h, stack in enumerate(sorted({stacks[pairs[i][0]] for i in whole}))}
    size = len(pairs) + len(heights)

    # Each line is the factors of some variables, and the least and the most that they may add up to.
    lines: list[tuple[dict[int, float], float, float]] = []
    for t in range(len(costs)):
        lines.append(({i: 1.0 for i, pair in enumerate(pairs) if pair[0] == t}, 1.0, 1.0))
    for stack, height in heights.items():
        own = [i for i in whole if stacks[pairs[i][0]] == stack]
        lines += [
            ({height: 1.0, **{i: -share[i] for i in own}}, 0.0, math.inf),
            *(({height: 1.0, i: -share[i] * devices}, 0.0, math.inf) for i in own),
        ]
    others = {i: share[i] for i in range(len(pairs)) if i not in whole}
    lines += [
        (others | dict.fromkeys(heights.values(), 1.0), 0.0, 1.0),
        (dict.fromkeys(whole, 1.0), 0.0, most),
    ]

    matrix = np.zeros((len(lines), size))
    for row, (factors, _, _) in zip(matrix, lines, strict=True):
        row[list(factors)] = list(factors.values())
    largest = max(costs[t][layout] for t, layout in pairs) or 1.0
    found = milp(
        [1e4 * costs[t][layout] / largest for t, layout in pairs] + [0.0] * len(heights),
        integrality=[1] * len(pairs) + [0] * len(heights),
        bounds=Bounds(0, [1.0] * len(pairs) + [math.inf] * len(heights)),
        constraints=LinearConstraint(matrix, *zip(*((low, high) for _, low, high in lines), strict=True)),
        options={"mip_rel_gap": 0},
    )
    if found.x is None:
        return None
    return tuple(layout for i, (_, layout) in enumerate(pairs) if found.x[i] > 0.5)
