"""A program in sections, one after the other, where only an order that takes little memory keeps a limit.

XLA:GPU orders kernels itself, and leaves what would free much to the end, such as products for the
gradients of weights. Where memory is short the program is lowered in sections: all that one makes, and all
that the next one reads, goes through one barrier. So whatever order XLA takes within a section, they run in
the order that was planned (order.py), and what that holds is what the plan says.

- What is merged into kernels is no kernel by itself, and is computed anew in each section that reads it.
- A kernel that writes over its operand, and reads it through a barrier, often cannot: what a product makes
  has other dims for XLA than for the program, and the barrier keeps the change between them
  (`HeapSimulator` asks who uses a buffer at once). So sections end where little is going to be written over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from sbp.passes.physical.fusion import ShardSizes
from sbp.passes.physical.kernels import Kernels, program_kernels
from sbp.passes.physical.latency_hiding import by_place
from sbp.passes.physical.order import known_places
from sbp.passes.physical.program import Physical, Step, Version, lowering_group, prerequisites, writes
from sbp.passes.physical.schedule_nodes import sent_together

SECTION_UNITS = 12
"""Kernels in a section, about: what XLA defers within one is little, and what it may hide is much."""

Made: TypeAlias = tuple[Version, int]
"""A version, and the position of the step that makes it; -1 for an argument."""


@dataclass(frozen=True)
class Section:
    """Steps that run together.

    Arguments:
      steps: in order, what they merge included.
      barrier_versions: what goes to later sections through one barrier.
    """

    steps: tuple[Step, ...]
    barrier_versions: tuple[Version, ...]


@dataclass
class _Unit:
    """Steps that are lowered as one: a kernel, what is sent as one, or a barrier.

    Arguments:
      members: their positions.
      merged: positions of steps that are merged into them.
      needs: what they read of other units, and of arguments.
      waits: units that run before, for whatever reason.
    """

    members: list[int]
    merged: dict[int, None] = field(default_factory=dict)
    needs: dict[Made, None] = field(default_factory=dict)
    waits: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Sections:
    """A program in sections.

    Arguments:
      numbers: per position of a step that is not merged, which of them it is of.
    """

    units: _Units = field(compare=False, repr=False)
    orders: Sequence[Sequence[int]] = field(repr=False)
    numbers: Mapping[int, int]

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections, in order: who only asks for times needs their numbers alone."""
        return self.units.sections(self.orders)


def sections_of(physical: Physical, hastens: bool, known: Kernels | None = None) -> Sections:
    """The sections of a program.

    Arguments:
      hastens: whether what frees memory runs as soon as it can.
      known: its kernels, if they are.
    """
    k = program_kernels(ShardSizes(physical)) if known is None else known
    ends = {*k.ends.values()}
    elsewhere = {t for t in k.tensors if t.maker < 0 or t in ends}
    together = sent_together(k)
    units = _Units(physical, k)
    order = units.order_by_place(known_places(k, elsewhere, together, hastens))
    orders = [order[a:b] for a, b in itertools.pairwise(units.cuts(order, together))]
    numbers = {i: p for p, some in enumerate(orders) for u in some for i in units.units[u].members}
    return Sections(units, orders, numbers)


class _Units:
    """The units of a program, and what goes from one to another."""

    def __init__(self, physical: Physical, k: Kernels) -> None:
        self.steps, self.k = physical.steps, k
        self.units = list[_Unit]()
        self.unit_of = [-1] * len(self.steps)
        for i in range(len(self.steps)):
            if i and self._is_one(i):
                self.units[-1].members.append(i)
            elif k.runs(i) or lowering_group(self.steps[i]) is not None:
                self.units.append(_Unit([i]))
            else:
                continue
            self.unit_of[i] = len(self.units) - 1
        self.last: dict[Version, int] = {}
        self.sources = list[list[Made]]()
        remade = list[tuple[Made, int]]()
        for i, step in enumerate(self.steps):
            self.sources.append([(v, self.last.get(v, -1)) for v in prerequisites(step)])
            remade += [((v, self.last[v]), i) for v in writes(step) if v in self.last]
            self.last.update(dict.fromkeys(writes(step), i))
        self._link(remade)

    def _is_one(self, i: int) -> bool:
        group = lowering_group(self.steps[i])
        return group is not None and group == lowering_group(self.steps[i - 1])

    def _link(self, remade: Sequence[tuple[Made, int]]) -> None:
        readers: dict[Made, list[int]] = {}
        for u, unit in enumerate(self.units):
            for i in unit.members:
                self._look_through(i, unit)
            for made in unit.needs:
                readers.setdefault(made, []).append(u)
            unit.waits.update(self.unit_of[m] for _, m in unit.needs if m >= 0)
        for made, i in remade:
            # What is made again takes the name of what was there before: who reads that runs first. Those
            # behind, which read it through what is merged into them, may read either: it is the same tensor.
            if (again := self.unit_of[i]) >= 0:
                self.units[again].waits.update(u for u in readers.get(made, ()) if u < again)
        for u, unit in enumerate(self.units):
            unit.waits.discard(u)

    def _look_through(self, i: int, unit: _Unit) -> None:
        """Adds what a step reads, through what is merged into it."""
        stack = [(i, False)]
        while stack:
            at, is_done = stack.pop()
            if is_done:
                unit.merged[at] = None
                continue
            stack += [(at, True)] if at != i else []
            for v, m in reversed(self.sources[at]):
                if m < 0 or self.unit_of[m] >= 0:
                    unit.needs[v, m] = None
                elif m not in unit.merged:
                    stack.append((m, False))

    def order_by_place(self, places: Sequence[float]) -> list[int]:
        """The units by the places of their steps, each after those that it waits for."""
        place = [max(places[i] for i in unit.members) for unit in self.units]
        return by_place(place, [unit.waits for unit in self.units])

    def cuts(self, order: Sequence[int], together: Sequence[tuple[int, ...]]) -> list[int]:
        """Where sections begin, and the end.

        Arguments:
          together: steps that are sent as one, which are of one section.
        """
        over, found = self._written_over(order, together), [0]
        while len(order) - found[-1] > 2 * SECTION_UNITS:
            near = range(found[-1] + SECTION_UNITS // 2, found[-1] + 3 * SECTION_UNITS // 2)
            found.append(min(near, key=lambda at: (over[at], abs(at - found[-1] - SECTION_UNITS))))
        return [*found, len(order)]

    def _written_over(self, order: Sequence[int], together: Sequence[tuple[int, ...]]) -> list[float]:
        """Per position, the bytes of what is made before it, and written over or sent as one after it."""
        at = {i: p for p, u in enumerate(order) for i in self.units[u].members}
        change = [0.0] * (len(order) + 1)
        for members in together:
            sent = sum(t.bytes for i in members for t in self.k.writes[i])
            change[min(at[i] for i in members) + 1] += sent
            change[max(at[i] for i in members) + 1] -= sent
        for i, p in at.items():
            for y in self.k.reads[i]:
                over = y.readers[i] and any(t.bytes == y.bytes for t in self.k.writes[i])
                if over and y.maker in at and all(at.get(r, p) <= p for r in y.readers):
                    change[at[y.maker] + 1] += y.bytes
                    change[p + 1] -= y.bytes
        return list(itertools.accumulate(change))

    def sections(self, orders: Sequence[Sequence[int]]) -> tuple[Section, ...]:
        """The sections, each of some units."""
        section_of = {u: p for p, order in enumerate(orders) for u in order}
        kept = {*self.k.ends} | {v for unit in self.units for v, _ in unit.needs}
        held: list[dict[Version, None]] = [{} for _ in orders]
        for p, order in enumerate(orders):
            for unit in (self.units[u] for u in order):
                own = [v for i in unit.members for v in writes(self.steps[i]) if v in kept]
                held[p].update(dict.fromkeys(own))
                if p:
                    made = [(v, section_of[self.unit_of[m]] if m >= 0 else -1) for v, m in unit.needs]
                    before = [v for v, at in made if 0 <= at < p]
                    # What reads arguments alone would run at any time.
                    alone = all(at < 0 for _, at in made)
                    held[p - 1].update(dict.fromkeys([v for v, _ in made] if alone else before))
        found = [[self.steps[i] for i in self._steps_of(order)] for order in orders]
        found[-1] += [self.steps[i] for i in self._last_steps()]
        held[-1].clear()
        return tuple(Section(tuple(steps), tuple(h)) for steps, h in zip(found, held, strict=True))

    def _steps_of(self, order: Sequence[int]) -> Iterator[int]:
        """The positions of the steps of some units, with what is merged into them, each once."""
        units = (self.units[u] for u in order)
        return iter(dict.fromkeys(i for x in units for i in (*x.merged, *x.members)))

    def _last_steps(self) -> Iterator[int]:
        """What is merged into no kernel, and makes results."""
        rest = _Unit([])
        for v in self.k.ends:
            i = self.last.get(v, -1)
            if i >= 0 and self.unit_of[i] < 0:
                self._look_through(i, rest)
                rest.merged[i] = None
        return iter(rest.merged)
