"""The choice of a layout for each table, by the plans of a training step under each."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import TypeAlias

import jax

from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.hardware.catalogue import BYTES_ONLY, Hardware, hardware_for
from sbp.lazy import Optimizer
from sbp.options import bytes_of
from sbp.passes.explain.words import kind_text
from sbp.passes.face import Plan
from sbp.placement import Placement, as_placement
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.costs import (
    KINDS,
    LAYOUTS,
    ROUNDED,
    Estimate,
    Estimates,
    TableStep,
    cheapest,
    collection_of,
    possible,
)
from sbp.runtime.embedding.keys import problem
from sbp.runtime.embedding.tables import FeatureConfig, TableConfig, unique_tables
from sbp.text.units import bytes_text, seconds_text

TableLayouts: TypeAlias = tuple[str, ...]
"""The layout of each table."""

CLOSER = 0.01
"""By how much of the limit less is asked for, at least, where tables did not pack as well as hoped."""


@dataclass(frozen=True, slots=True)
class TableChoice:
    """What was chosen for one table.

    Arguments:
      table: as it was given.
      layout: one of `LAYOUTS`.
      estimates: of this table under each layout that is possible.
      reason: one sentence.
    """

    table: TableConfig
    layout: str
    estimates: Estimates
    reason: str


@dataclass(frozen=True, repr=False)
class Choice:
    """A layout for each table, and why; `print` shows it, `repr` is one line.

    Arguments:
      features: with the chosen placements.
      batch: examples in a step, over all devices.
      placement, hardware: where it runs and what it was planned for.
      memory_limit: bytes per device for tables and optimizer state.
      tables: one entry for each table.
      plan: of one step of all tables together.
      total: its cost.
      uniform: the same of one layout for all tables, whether or not it fits; without those that are not
        possible.
    """

    features: tuple[FeatureConfig, ...]
    batch: int
    placement: Placement
    hardware: Hardware
    memory_limit: float
    tables: tuple[TableChoice, ...]
    plan: Plan
    total: Estimate
    uniform: Estimates

    def collection(self) -> Collection:
        """The collection with the chosen placements."""
        return collection_of(self.features, self.placement.size, ROUNDED)

    def __repr__(self) -> str:
        layouts = ", ".join(f"{t.table.name} {t.layout}" for t in self.tables)
        return f"<Choice for {len(self.tables)} tables on {self.placement}: {layouts}>"

    def __str__(self) -> str:
        bytes_only = self.hardware == BYTES_ONLY
        names = [n for n in LAYOUTS if any(n in t.estimates for t in self.tables)]
        lines = [("table", "rows x width", "layout", "sent", *names, "memory", "why")]
        for t in self.tables:
            own, size = t.estimates[t.layout], f"{t.table.vocabulary_size:,} x {t.table.embedding_dim}"
            costs = [_cost_text(t.estimates.get(n), bytes_only) for n in names]
            figures = bytes_text(own.wire_bytes), *costs, bytes_text(own.memory_bytes)
            lines.append((t.table.name, size, t.layout, *figures, t.reason))
        totals = [("all tables", "sent", "time", "memory", "")]
        for name, one in (("as chosen", self.total), *self.uniform.items()):
            time = "-" if bytes_only else seconds_text(one.seconds)
            over = "" if one.memory_bytes <= self.memory_limit else "does not fit"
            totals.append((name, bytes_text(one.wire_bytes), time, bytes_text(one.memory_bytes), over))
        limit = f", of {bytes_text(self.memory_limit)}" if math.isfinite(self.memory_limit) else ""
        head = [
            f"{len(self.tables)} tables, batch {self.batch:,}, on {self.placement}, planned for "
            + self.hardware.name,
            f"under each layout: {'bytes' if bytes_only else 'time'} of a step, a table's share of a stack "
            "of its like",
            f"memory: tables and optimizer state on one device{limit}",
        ]
        return "\n".join([*head, "", _aligned(lines), "", _aligned(totals)])


def _cost_text(one: Estimate | None, bytes_only: bool) -> str:
    if one is None:
        return "-"
    return bytes_text(one.wire_bytes) if bytes_only else seconds_text(one.seconds)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(f"{x:<{w}}" for x, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(rows)


def choose(
    features: Sequence[FeatureConfig],
    batch: int,
    placement: Placement | jax.sharding.Mesh,
    *,
    optimizer: Optimizer,
    hardware: Hardware | None = None,
    memory_limit: float | str | None = None,
) -> Choice:
    """Chooses rows, columns, whole tables or copies for every table; needs no devices.

    A step of each table is planned under each layout. For every subset of the layouts the cheapest that fits
    is found; these are planned with all tables together, as stacks share exchanges and whole tables wait for
    each other, and the best is taken. So it costs no more than any one layout for all tables that fits. The
    placements of the given tables do not matter.

    Arguments:
      features: each with an input shape, as the cost depends on how many ids an example has.
      batch: examples in a step, over all devices.
      placement: the devices, a `Mesh` being taken too; tables are split over all axes.
      optimizer: of all tables, such as `sbp.rows(optax.adagrad(0.05))`.
      hardware: what is planned for; default: the placement's kind. Under `BYTES_ONLY` the bytes on the wire
        are made small, otherwise the seconds of the plan.
      memory_limit: per device for tables and optimizer state, in bytes or as a text such as "80GB"; default:
        the memory of a device.

    Raises:
      EmbeddingError: if a shape is open or another one, or if nothing fits.
    """
    features, placement = tuple(features), as_placement(placement, "choose(..., placement)")
    tables = unique_tables(features)
    _check(features, batch)
    hardware = hardware or hardware_for(placement.kind)
    asked = bytes_of(memory_limit, "choose(..., memory_limit=...)")
    limit = hardware.memory_bytes if asked is None else asked
    step = TableStep(batch, placement, hardware, optimizer)
    estimates = _estimates(step, tables, features)
    search = _Search(step, features, tables, estimates, limit)
    plans = {a: step.plan(search.collection(a)) for a in dict.fromkeys(search.assignments())}
    fitting = {a: p for a, p in plans.items() if p[1].memory_bytes <= limit}
    if not fitting:
        raise EmbeddingError(search.too_large())
    chosen = min(fitting, key=lambda a: step.cost(fitting[a][1]))
    plan, total = fitting[chosen]
    entries = tuple(
        TableChoice(t, layout, found, search.reason(found, layout, set(chosen)))
        for t, layout, found in zip(tables, chosen, estimates, strict=True)
    )
    uniform = {a[0]: p[1] for a, p in plans.items() if len(set(a)) == 1}
    uniform = {name: uniform[name] for name in LAYOUTS if name in uniform}
    return Choice(
        search.place_features(chosen),
        batch,
        placement,
        hardware,
        limit,
        entries,
        plan,
        total,
        MappingProxyType(uniform),
    )


def _check(features: Sequence[FeatureConfig], batch: int) -> None:
    """Refuses features whose ids cannot be counted.

    Raises:
      EmbeddingError: if a shape is open, or another one than the batch's.
    """
    found: list[Problem] = []
    for f in features:
        shape = f.input_shape
        if shape is None or None in shape[1:]:
            why = "the cost of a lookup depends on how many ids an example has"
            fix = "the largest hotness, as PaddedBags have it; (None,) for one id"
            got, legal = f"input_shape={shape}", "(None,) or (None, hotness)"
            found.append(problem(f"choose(...), feature {f.name!r}", got, legal, why, fix))
        elif batch < 1 or shape[0] not in (None, batch):
            why, fix = "the examples of one step are counted over all devices", "the batch of the features"
            got, legal = f"batch={batch}", "1 or more" if batch < 1 else f"{shape[0]}, as the feature has"
            found.append(problem(f"choose(...), feature {f.name!r}", got, legal, why, fix))
    raise_all(found)


def _estimates(
    step: TableStep, tables: Sequence[TableConfig], features: Sequence[FeatureConfig]
) -> tuple[Estimates, ...]:
    """The costs of each table alone; tables that are alike are planned once."""
    planned: dict[Hashable, Estimates] = {}
    out = []
    for table in tables:
        own = [f for f in features if f.table == table]
        shapes = tuple((f.input_shape or ())[1:] for f in own)
        kind = replace(table, name="", placement=KINDS["rows"].make(1), optimizer=None), shapes
        if kind not in planned:
            names = [n for n in LAYOUTS if possible(table, n, step.placement.size)]
            planned[kind] = MappingProxyType({n: step.table_cost(own, n) for n in names})
        out.append(planned[kind])
    return tuple(out)


@dataclass(frozen=True)
class _Search:
    """What is chosen from.

    Arguments:
      step: what is planned.
      features, tables: all of them.
      estimates: of each table.
      limit: bytes per device.
    """

    step: TableStep
    features: tuple[FeatureConfig, ...]
    tables: tuple[TableConfig, ...]
    estimates: tuple[Estimates, ...]
    limit: float

    def place_features(self, assignment: TableLayouts) -> tuple[FeatureConfig, ...]:
        """The features, their tables placed."""
        devices = self.step.placement.size
        tables = {
            t.name: replace(t, placement=KINDS[layout].make(devices))
            for t, layout in zip(self.tables, assignment, strict=True)
        }
        return tuple(replace(f, table=tables[f.table.name]) for f in self.features)

    def collection(self, assignment: TableLayouts) -> Collection:
        """All tables, placed."""
        return collection_of(self.place_features(assignment), self.step.placement.size, ROUNDED)

    def best(self, names: Sequence[str], limit: float, most: int) -> TableLayouts | None:
        """The least sum of costs that fits, with some of the layouts and so many whole tables at most."""
        some = [{n: e for n, e in found.items() if n in names} for found in self.estimates]
        if not all(some):
            return None
        costs = [{n: self.step.cost(e) for n, e in found.items()} for found in some]
        memory = [{n: e.memory_bytes for n, e in found.items()} for found in some]
        kinds = [(t.embedding_dim, t.dtype, t.optimizer) for t in self.tables]
        stacks = [kinds.index(k) for k in kinds]
        return cheapest(costs, memory, stacks, self.step.placement.size, limit, most)

    def cheapest_fit(self, names: Sequence[str], most: int) -> TableLayouts | None:
        """The cheapest that fits once its tables are packed and its stacks rounded up."""
        limit = math.inf
        while (found := self.best(names, limit, most)) is not None:
            over = self.step.held_bytes(self.collection(found)) - self.limit
            if over <= 0:
                return found
            limit = self.limit if math.isinf(limit) else limit - max(over, CLOSER * self.limit)
        return None

    def assignments(self) -> Iterator[TableLayouts]:
        """One layout for all tables, where that is possible, and the best of every subset that fits.

        Whole tables are tried in any number, and at most one on each device: a device with more tables than
        others makes all wait.
        """
        every = len(self.tables)
        for name in LAYOUTS:
            if all(name in found for found in self.estimates):
                yield (name,) * every
        for size in range(len(LAYOUTS), 1, -1):
            for names in combinations(LAYOUTS, size):
                for most in (every, self.step.placement.size) if "whole" in names else (every,):
                    found = self.cheapest_fit(names, most)
                    if found is not None:
                        yield found
        yield self.smallest()

    def smallest(self) -> TableLayouts:
        """What takes the least memory however tables are packed."""
        return tuple(
            min((n for n in found if n != "whole"), key=lambda n: found[n].memory_bytes)
            for found in self.estimates
        )

    def reason(self, found: Estimates, layout: str, used: set[str]) -> str:
        """Why a table has a layout, in one sentence.

        Arguments:
          used: the layouts that some table has.
        """
        own = found[layout]
        sent = "sends nothing"
        if own.largest:
            kind, wire_bytes = own.largest
            sent = f"sends {bytes_text(wire_bytes)} by {kind_text(kind)}"
        order = sorted(found, key=lambda n: self.step.cost(found[n]))
        best = order[0]
        if best == layout:
            than = self.runner_up(found, order)
        elif best == "whole" and best in used:
            than = "whole costs less by itself, but one more table on a device costs more or does not fit"
        elif best in used:
            memory = bytes_text(found[best].memory_bytes)
            than = f"{best} costs less, but not all tables fit so: {memory} on a device for this one"
        else:
            than = f"{best} costs less alone, but a stack of its own costs more with the others"
        return f"{KINDS[layout].holds}, a step {sent}; {than}"

    def runner_up(self, found: Estimates, order: Sequence[str]) -> str:
        """How much more the second best costs."""
        if len(order) == 1:
            return "nothing else is possible"
        least, second = (self.step.cost(found[name]) for name in order[:2])
        ratio = second / least if least else 1.0 if not second else math.inf
        return f"{order[1]} costs " + (f"{ratio:.3g} times as much" if ratio >= 1.005 else "about the same")

    def too_large(self) -> Problem:
        """Nothing fits."""
        need = self.step.held_bytes(self.collection(self.smallest()))
        devices = self.step.placement.size
        return problem(
            "choose(...)",
            f"memory_limit={bytes_text(self.limit)} on each of {devices} devices",
            f"{math.ceil(need):,} bytes or more",
            "this is what the tables and their optimizer's state need if they are split evenly",
            "more devices, compression=QuotientRemainder(buckets), or an optimizer of less state",
        )
