"""A pipeline that runs: its stations, driven in the order of a schedule.

Arrays go to the placements that want them as soon as they are made. One driver issues everything in one
global order, and devices overlap as far as JAX dispatches without waiting; or each rank has a thread of its
own, which waits for what others send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from sbp.passes.pipeline.chain import Stages
from sbp.passes.pipeline.order import Part, Phase
from sbp.passes.pipeline.slots import Kind, Slot
from sbp.passes.schedule import actions
from sbp.passes.schedule.actions import Action, Schedule
from sbp.passes.schedule.communication import issue_order
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.spans import Span, Timeline
from sbp.runtime.pipeline.pieces import Runnable
from sbp.runtime.pipeline.station import OUTSIDE, Shelf, Station, make_station

PHASES = {
    actions.Kind.F: Phase.FORWARD,
    actions.Kind.B: Phase.INPUT,
    actions.Kind.I: Phase.INPUT,
    actions.Kind.W: Phase.WEIGHT,
}


@dataclass
class Record:
    """What was measured of one step.

    Arguments:
      spans: per rank, when each action ran, in seconds; each was waited for.
      live: per rank, the most micro-batches of a stage whose forward had run and whose backward had not.
      live_bytes: per rank, the most bytes that were kept for micro-batches after an action, all devices.
    """

    spans: list[list[Span]]
    live: list[int]
    live_bytes: list[int]
    now: list[int] = field(default_factory=list)

    def timeline(self, name: str) -> Timeline:
        """The step as a timeline."""
        return Timeline(name, tuple(map(tuple, self.spans)))


@dataclass(frozen=True)
class Machine:
    """A program of several placements on its devices.

    Arguments:
      receivers: per placement and slot, the placements and slots that an array is sent to.
      sources: per placement and slot of what it is sent once, where that comes from.
    """

    stages: Stages
    schedule: Schedule | None
    edges: tuple[Edge, ...]
    stations: tuple[Station, ...]
    receivers: Mapping[tuple[int, Slot], tuple[tuple[int, Slot], ...]]
    sources: Mapping[tuple[int, Slot], tuple[int, Slot]]

    def run(
        self, placed: Sequence[Mapping[Slot, Any]], threads: bool = False, record: Record | None = None
    ) -> list[Any]:
        """Runs one step; the results' leaves.

        Arguments:
          placed: per placement, its arguments and closed-over arrays.
        """
        shelves = [Shelf() for _ in self.stations]
        for shelf, arrays in zip(shelves, placed, strict=True):
            for slot, x in arrays.items():
                shelf.put(slot, OUTSIDE, x)
        self.once(shelves, Phase.BEFORE)
        if self.schedule is not None:
            self.fetch(shelves)
            (self.threaded if threads else self.driven)(shelves, record)
        self.once(shelves, Phase.AFTER)
        count = sum(len(s.cut.share.results) for s in self.stations)
        out: list[Any] = [None] * count
        for s, shelf in zip(self.stations, shelves, strict=True):
            for i, slot in zip(s.cut.share.results, s.cut.results, strict=True):
                out[i] = shelf.get(slot, OUTSIDE, False)
        return out

    def once(self, shelves: Sequence[Shelf], phase: Phase) -> None:
        """Runs what comes before or after the loop, level by level."""
        todo = [(r.piece.part.at, p, r) for p, s in enumerate(self.stations) for r in s.outside(phase)]
        for _, p, r in sorted(todo, key=lambda x: x[:2]):
            for read in r.piece.reads:
                self.bring(shelves, p, read.slot)
            self.stations[p].run(shelves[p], r, OUTSIDE)

    def bring(self, shelves: Sequence[Shelf], place: int, slot: Slot) -> None:
        """Makes sure that what is sent once has come."""
        source = self.sources.get((place, slot))
        if source is None or (slot, OUTSIDE) in shelves[place].arrays:
            return
        p, at = source
        moved = jax.device_put(shelves[p].get(at, OUTSIDE, False), self.stations[place].slots.sharding(slot))
        shelves[place].put(slot, OUTSIDE, moved)

    def fetch(self, shelves: Sequence[Shelf]) -> None:
        """Brings what the loop reads of what was sent before it."""
        for p, s in enumerate(self.stations):
            for slot in {
                read.slot for r in s.inside() for read in r.piece.reads if read.slot.kind is Kind.ONCE
            }:
                self.bring(shelves, p, slot)

    def piece(self, action: Action) -> tuple[int, Runnable | None]:
        """The placement of an action, and what it runs; a stage may have nothing to do for it."""
        place = self.stages.stages[action.stage]
        return place, self.stations[place].runnables.get(Part(PHASES[action.kind], action.stage))

    def act(self, shelves: Sequence[Shelf], action: Action, record: Record | None, patient: bool) -> None:
        """Runs one action, and sends what it makes."""
        place, run = self.piece(action)
        began = time.perf_counter()
        if run is not None:
            written = self.stations[place].run(shelves[place], run, action.microbatch, patient)
            if record is not None:
                jax.block_until_ready([x for _, x in written])
            for slot, x in written:
                for q, at in self.receivers.get((place, slot), ()):
                    moved = jax.device_put(x, self.stations[q].slots.sharding(at))
                    shelves[q].put(at, action.microbatch, moved)
        if record is not None:
            record.spans[place].append(Span(place, action, began, time.perf_counter()))
            self.count(shelves[place], place, action, record)

    def count(self, shelf: Shelf, place: int, action: Action, record: Record) -> None:
        """Notes what is kept."""
        record.now[place] += {actions.Kind.F: 1, actions.Kind.B: -1, actions.Kind.W: -1}.get(action.kind, 0)
        record.live[place] = max(record.live[place], record.now[place])
        record.live_bytes[place] = max(record.live_bytes[place], sum(int(x.nbytes) for x in shelf.kept))

    def driven(self, shelves: Sequence[Shelf], record: Record | None) -> None:
        """The loop, by one driver."""
        assert self.schedule is not None
        for action in self.order:
            self.act(shelves, action, record, False)

    @property
    def order(self) -> tuple[Action, ...]:
        """All actions in one order."""
        assert self.schedule is not None
        return issue_order(self.schedule, self.edges)

    def threaded(self, shelves: Sequence[Shelf], record: Record | None) -> None:
        """The loop, by a thread per rank."""
        assert self.schedule is not None
        failures: list[BaseException] = []

        def work(order: Sequence[Action]) -> None:
            try:
                for action in order:
                    self.act(shelves, action, record, True)
            except BaseException as e:
                failures.append(e)
                for shelf in shelves:
                    shelf.fail(e)

        workers = [threading.Thread(target=work, args=(order,)) for order in self.schedule.orders]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        if failures:
            raise failures[0]

    def new_record(self) -> Record:
        """An empty record."""
        n = len(self.stations)
        return Record([[] for _ in range(n)], [0] * n, [0] * n, [0] * n)


def make_machine(stages: Stages, schedule: Schedule | None, edges: tuple[Edge, ...], merged: bool) -> Machine:
    """The machine of a program whose devices are there."""
    cuts = stages.cuts(merged)
    stations = tuple(make_station(c, stages.microbatches) for c in cuts)
    receivers: dict[tuple[int, Slot], list[tuple[int, Slot]]] = {}
    sources: dict[tuple[int, Slot], tuple[int, Slot]] = {}
    for q, c in enumerate(cuts):
        for v, slot in c.fed.items():
            p = next(p for p, other in enumerate(cuts) if v in other.passed)
            receivers.setdefault((p, cuts[p].passed[v]), []).append((q, slot))
        for v, slot in c.received.items():
            p = next(p for p, other in enumerate(cuts) if v in other.sent)
            sources[q, slot] = p, cuts[p].sent[v]
    return Machine(stages, schedule, edges, stations, {k: tuple(v) for k, v in receivers.items()}, sources)
