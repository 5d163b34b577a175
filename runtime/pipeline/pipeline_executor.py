"""A pipeline that runs: its stations, driven in the order of a schedule.

Arrays go to the placements that want them as soon as they are made. One driver issues everything in one
global order, and devices overlap as far as JAX dispatches without waiting; or each rank has a thread of its
own, which waits for what others send.

Words: docs/glossary.md.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from sbp.compat import setting
from sbp.passes.pipeline.slots import Cut, Slot, SlotKind
from sbp.passes.pipeline.stages import Stages
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule import actions
from sbp.passes.schedule.actions import Action, Schedule
from sbp.passes.schedule.communication import issue_order
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.spans import Span
from sbp.runtime.cache.cache_folder import Cache
from sbp.runtime.lower.lowering import Title
from sbp.runtime.nan_checks.probe import Lookout
from sbp.runtime.pipeline.shared_executables import Executables
from sbp.runtime.pipeline.stage_executor import OUTSIDE, Seen, Shelf, Station, make_station
from sbp.runtime.pipeline.stage_programs import Runnable
from sbp.runtime.pipeline.step_record import Record
from sbp.runtime.pipeline.transfer_engine import Cargo, Ways
from sbp.untyped import block_until_ready

PHASES = {
    actions.Kind.F: (Phase.FORWARD,),
    actions.Kind.B: (Phase.INPUT, Phase.WEIGHT),
    actions.Kind.I: (Phase.INPUT,),
    actions.Kind.W: (Phase.WEIGHT,),
}


@dataclass(frozen=True)
class Sends:
    """What a piece sends, in one go.

    Arguments:
      positions: of the arrays, among those that the piece writes.
      to: per array, the placement and the slot that it is for.
      peer: the nearest stage that lives on one of these placements.
      cargos: per array, how it lies here and there.
    """

    positions: tuple[int, ...]
    to: tuple[tuple[int, Slot], ...]
    cargos: tuple[Cargo, ...]
    peer: int

    @functools.cached_property
    def is_own(self) -> bool:
        """Whether all of it is a matter of this process alone."""
        return all(c.is_own for c in self.cargos)


@dataclass(frozen=True)
class Machine:
    """A program of several placements on its devices.

    Arguments:
      receivers: per placement and slot, the placements and slots that an array is sent to.
      sources: per placement and slot of what it is sent once, where that comes from.
      executables: what has been compiled.
      ways: how arrays come from placement to placement.
    """

    stages: Stages
    schedule: Schedule | None
    edges: tuple[Edge, ...]
    stations: tuple[Station, ...]
    receivers: Mapping[tuple[int, Slot], tuple[tuple[int, Slot], ...]]
    sources: Mapping[tuple[int, Slot], tuple[int, Slot]]
    executables: Executables
    ways: Ways

    def run(
        self,
        placed: Sequence[Mapping[Slot, jax.Array]],
        threads: bool = False,
        record: Record | None = None,
        seen: list[Seen] | None = None,
    ) -> list[jax.Array]:
        """Runs one step; the results' leaves.

        Arguments:
          placed: per placement, its arguments and closed-over arrays.
          seen: takes what pieces have looked at.
        """
        shelves = self.begin(placed)
        if self.schedule is not None:
            (self.threaded if threads else self.driven)(shelves, record)
        out = self.end(shelves)
        if seen is not None:
            seen += [s for shelf in shelves for s in shelf.seen]
        return out

    def begin(self, placed: Sequence[Mapping[Slot, jax.Array]]) -> list[Shelf]:
        """Runs what comes before the loop; everything that the loop needs is on its way then."""
        shelves = [Shelf() for _ in self.stations]
        for shelf, arrays in zip(shelves, placed, strict=True):
            shelf.put({(slot, OUTSIDE): x for slot, x in arrays.items()})
        self.once(shelves, Phase.BEFORE)
        if self.schedule is not None:
            self.fetch(shelves)
        return shelves

    def end(self, shelves: Sequence[Shelf]) -> list[jax.Array]:
        """Runs what comes after the loop; the results' leaves."""
        self.once(shelves, Phase.AFTER)
        out: dict[int, jax.Array] = {}
        for s, shelf in zip(self.stations, shelves, strict=True):
            for i, slot in zip(s.cut.share.results, s.cut.results, strict=True):
                out[i] = shelf.get(slot) if s.is_here else s.slots.absent(slot)
        return [out[i] for i in range(len(out))]

    def once(self, shelves: Sequence[Shelf], phase: Phase) -> None:
        """Runs what comes before or after the loop, level by level."""
        todo = [(r.piece.part.at, p, r) for p, s in enumerate(self.stations) for r in s.outside(phase)]
        for _, p, r in sorted(todo, key=lambda x: x[:2]):
            for read in r.piece.reads:
                self.bring(shelves, p, read.slot)
            station, shelf = self.stations[p], shelves[p]
            if station.is_here:
                station.run(shelf, r, OUTSIDE, station.given(shelf, r, OUTSIDE))

    def bring(self, shelves: Sequence[Shelf], place: int, slot: Slot) -> None:
        """Makes sure that what is sent once has come."""
        source = self.sources.get((place, slot))
        if source is None or (slot, OUTSIDE) in shelves[place].come:
            return
        p, at = source
        shelves[place].come.add((slot, OUTSIDE))
        x = shelves[p].get(at) if self.stations[p].is_here else None
        moved = self.ways.send(x, self.cargo(p, at, place, slot))
        if moved is not None:
            shelves[place].put({(slot, OUTSIDE): moved})

    def cargo(self, p: int, slot: Slot, q: int, at: Slot) -> Cargo:
        """What goes from one placement's slot to another's."""
        out = self.stations[p].slots.struct(slot)
        return Cargo(
            out.shape, out.dtype, self.stations[p].slots.sharding(slot), self.stations[q].slots.sharding(at)
        )

    def cargos(self) -> Iterator[Cargo]:
        """All that goes from placement to placement in a step, in one order in all processes."""
        for works in self.works.values():
            yield from (cargo for _, sends in works[1] for cargo in sends.cargos)
        for (place, slot), (p, at) in self.sources.items():
            yield self.cargo(p, at, place, slot)

    def fetch(self, shelves: Sequence[Shelf]) -> None:
        """Brings what the loop reads of what was sent before it."""
        for p, s in enumerate(self.stations):
            for slot in {
                read.slot for r in s.inside() for read in r.piece.reads if read.slot.kind is SlotKind.ONCE
            }:
                self.bring(shelves, p, slot)

    @functools.cached_property
    def works(self) -> Mapping[tuple[actions.Kind, int], tuple[int, list[tuple[Runnable, Sends]]]]:
        """Per kind of action and stage, the placement, what it runs there, and what is sent then.

        A stage may have nothing to do for an action, as the first one for the gradient of its inputs.
        """
        return {
            (kind, stage): (place, list(self._works(kind, stage, place)))
            for kind in PHASES
            for stage, place in enumerate(self.stages.stages)
        }

    def _works(self, kind: actions.Kind, stage: int, place: int) -> Iterator[tuple[Runnable, Sends]]:
        runnables = self.stations[place].runnables
        for phase in PHASES[kind]:
            if (run := runnables.get(Part(phase, stage))) is not None:
                found = [
                    (i, to)
                    for i, w in enumerate(run.piece.writes)
                    for to in self.receivers.get((place, w.slot), ())
                ]
                writes = run.piece.writes
                cargos = tuple(self.cargo(place, writes[i].slot, *to) for i, to in found)
                ways = tuple(i for i, _ in found), tuple(to for _, to in found)
                yield run, Sends(*ways, cargos, self._peer(stage, phase, {q for q, _ in ways[1]}))

    def _peer(self, stage: int, phase: Phase, places: Collection[int]) -> int:
        """The next stage on some placements: after a forward a later one, else an earlier one."""
        there = [t for t, q in enumerate(self.stages.stages) if q in places]
        ahead = [t for t in there if (t > stage) == (phase is Phase.FORWARD) and t != stage]
        return min(ahead or there, key=lambda t: abs(t - stage), default=stage)

    def act(self, shelves: Sequence[Shelf], action: Action, record: Record | None, patient: bool) -> None:
        """Runs one action, and sends what it makes."""
        self.work(shelves, action, record, patient)
        if record is not None:
            # What the work had at hand is let go of by now.
            self.count(shelves, action, record)

    def work(self, shelves: Sequence[Shelf], action: Action, record: Record | None, patient: bool) -> None:
        """What an action runs and sends."""
        place, works = self.works[action.kind, action.stage]
        station, shelf, microbatch = self.stations[place], shelves[place], action.microbatch
        began, waited = 0.0, 0.0
        for run, sends in works:
            if not station.is_here:
                self.cross(shelves, sends, microbatch, None)
                continue
            given = station.given(shelf, run, microbatch, patient)
            if record is not None:
                block_until_ready(given)
                began = began or time.perf_counter()
            made = station.run(shelf, run, microbatch, given)
            if record is not None:
                block_until_ready(made)
            if sends.to and not sends.is_own:
                self.cross(shelves, sends, microbatch, made)
            elif sends.to:
                left = time.perf_counter()
                moved = _put([made[i] for i in sends.positions], [c.comes for c in sends.cargos])
                for (q, slot), x in zip(sends.to, moved, strict=True):
                    shelves[q].put({(slot, microbatch): x})
                if record is not None and not patient:
                    block_until_ready(moved)
                    waited += record.way(place, action, sends.peer, left)
        if record is not None and works:
            ended = time.perf_counter() - waited
            record.spans[place].append(Span(place, action, began or ended, ended))

    def cross(
        self, shelves: Sequence[Shelf], sends: Sends, microbatch: int, made: Sequence[jax.Array] | None
    ) -> None:
        """Sends what a piece has made between processes.

        Arguments:
          made: None where other processes have run the piece.
        """
        for i, (q, slot), cargo in zip(sends.positions, sends.to, sends.cargos, strict=True):
            x = self.ways.send(None if made is None else made[i], cargo)
            if x is not None:
                shelves[q].put({(slot, microbatch): x})

    def count(self, shelves: Sequence[Shelf], action: Action, record: Record) -> None:
        """Notes what is kept."""
        place = self.stages.stages[action.stage]
        shelf = shelves[place]
        station, stage, microbatch = self.stations[place], action.stage, action.microbatch
        own = station.residuals(stage)
        others = {slot for s in station.stages - {stage} for slot in station.residuals(s)}
        left = own if action.kind is actions.Kind.F else ()
        shared = own & others if action.kind in (actions.Kind.B, actions.Kind.W) else ()
        record.count(place, action, shelf.there(left, microbatch), shelf.there(shared, microbatch))
        record.live_bytes[place] = max(record.live_bytes[place], sum(map(_device_bytes, shelf.kept)))

    def driven(self, shelves: Sequence[Shelf], record: Record | None) -> None:
        """The loop, by one driver."""
        assert self.schedule is not None
        for action in self.order:
            self.act(shelves, action, record, False)

    @functools.cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions in one order."""
        assert self.schedule is not None
        return issue_order(self.schedule, self.edges)

    def when(self, part: Part, microbatch: int) -> tuple[int, ...]:
        """When a piece runs in a step, to be compared with others'; the same in all processes."""
        if part.phase in (Phase.BEFORE, Phase.AFTER):
            return (0 if part.phase is Phase.BEFORE else 2), part.at
        return 1, self.turns[part, microbatch]

    @functools.cached_property
    def turns(self) -> Mapping[tuple[Part, int], int]:
        """The place of every piece in the one order of all actions."""
        return {
            (Part(phase, a.stage), a.microbatch): 2 * i + k
            for i, a in enumerate(self.order)
            for k, phase in enumerate(PHASES[a.kind])
        }

    def threaded(self, shelves: Sequence[Shelf], record: Record | None) -> None:
        """The loop, by a thread per rank."""
        assert self.schedule is not None
        failures: list[BaseException] = []
        # A thread does not inherit it from `with jax.enable_x64(...)`, and would halve what it sends.
        x64 = setting("jax_enable_x64")

        def work(order: Sequence[Action]) -> None:
            try:
                with jax.enable_x64(x64):
                    for action in order:
                        self.act(shelves, action, record, True)
            except BaseException as e:
                failures.append(e)
                for shelf in shelves:
                    shelf.fail(e)

        workers = [threading.Thread(target=work, args=(order,)) for order in self.schedule.orders]
        for w in workers:
            w.start()
        try:
            for w in workers:
                w.join()
        except BaseException as e:
            # An interrupt: nobody waits for what no longer comes.
            for shelf in shelves:
                shelf.fail(e)
            raise
        if failures:
            raise failures[0]

    def new_record(self) -> Record:
        """An empty record."""
        n = len(self.stations)
        return Record([[] for _ in range(n)], [0] * n, [0] * n, [{} for _ in range(n)])


def _put(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> Sequence[jax.Array]:
    """Arrays on other devices; one alone needs no pytree, which is a tenth of the time."""
    if len(arrays) == 1:
        return (jax.device_put(arrays[0], shardings[0]),)
    moved: Sequence[jax.Array] = jax.device_put(list(arrays), list(shardings))
    return moved


def _device_bytes(x: jax.Array) -> int:
    """What one device has of an array."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def make_machine(
    stages: Stages,
    schedule: Schedule | None,
    edges: tuple[Edge, ...],
    merged: bool,
    donate: Collection[int] = (),
    cache: Cache | None = None,
    watch: Lookout | None = None,
) -> Machine:
    """The machine of a program whose devices are there.

    Arguments:
      merged: whether a backward pass is one piece.
      donate: positions of arguments whose memory the results may take.
      cache: the folder of what earlier processes have compiled.
      watch: what looks at what ops make.
    """
    cuts = stages.cuts(merged)
    executables = Executables(cache)
    title = Title(stages.name, stages.traced.source)
    stations = tuple(make_station(c, stages.microbatches, title, executables, donate, watch) for c in cuts)
    receivers, sources = routes(cuts)
    return Machine(stages, schedule, edges, stations, receivers, sources, executables, Ways(executables))


def routes(
    cuts: Sequence[Cut],
) -> tuple[
    Mapping[tuple[int, Slot], tuple[tuple[int, Slot], ...]], Mapping[tuple[int, Slot], tuple[int, Slot]]
]:
    """Where what is sent for every micro-batch goes, and where what is sent once comes from; as `Machine` has
    it."""
    receivers: dict[tuple[int, Slot], list[tuple[int, Slot]]] = {}
    sources: dict[tuple[int, Slot], tuple[int, Slot]] = {}
    for q, c in enumerate(cuts):
        for v, slot in c.fed.items():
            p = next(p for p, other in enumerate(cuts) if v in other.passed)
            receivers.setdefault((p, cuts[p].passed[v]), []).append((q, slot))
        for v, slot in c.received.items():
            p = next(p for p, other in enumerate(cuts) if v in other.sent)
            sources[q, slot] = p, cuts[p].sent[v]
    return {k: tuple(v) for k, v in receivers.items()}, sources
