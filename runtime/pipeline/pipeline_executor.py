"""Runs a pipeline: its stage executors, driven in the order of a schedule.

Arrays go to the placements that want them as soon as they are made. Either one driver issues everything in
one global order, and devices overlap as far as JAX dispatches without waiting; or each rank has a thread of
its own, which waits for the arrays of the others.

Words: docs/glossary.md.
"""

import functools
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from sbp.compat.core import setting
from sbp.compat.untyped import block_until_ready
from sbp.passes.pipeline.slots import Slot, SlotKind
from sbp.passes.pipeline.stages import Stages
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule import actions
from sbp.passes.schedule.actions import Action, Schedule
from sbp.passes.schedule.communication import issue_order
from sbp.passes.schedule.dataflow import Edge
from sbp.passes.schedule.spans import Span
from sbp.runtime.cache.cache_folder import Cache
from sbp.runtime.lower.lowering import ProgramName
from sbp.runtime.nan_checks.probe import NanProbe
from sbp.runtime.pipeline.shared_executables import Executables
from sbp.runtime.pipeline.stage_executor import (
    OUTSIDE,
    BufferStore,
    StageExecutor,
    StageRecord,
    make_stage_executor,
)
from sbp.runtime.pipeline.stage_programs import Runnable
from sbp.runtime.pipeline.step_record import Record
from sbp.runtime.pipeline.transfer_engine import (
    PlacedSlot,
    SendBuffers,
    StageTransfer,
    TransferEngine,
    routes,
)

PHASES = {
    actions.Kind.F: (Phase.FORWARD,),
    actions.Kind.B: (Phase.INPUT, Phase.WEIGHT),
    actions.Kind.I: (Phase.INPUT,),
    actions.Kind.W: (Phase.WEIGHT,),
}


@dataclass(frozen=True)
class PipelineExecutor:
    """A program of several placements on its devices.

    Arguments:
      receivers: per placement and slot, the placements and slots that an array is sent to.
      sources: per placement and slot that receives an array once, where it comes from.
      executables: the compiled programs.
      ways: the transfers between placements.
    """

    stages: Stages
    schedule: Schedule | None
    edges: tuple[Edge, ...]
    executors: tuple[StageExecutor, ...]
    receivers: Mapping[PlacedSlot, tuple[PlacedSlot, ...]]
    sources: Mapping[PlacedSlot, PlacedSlot]
    executables: Executables
    engine: TransferEngine

    def run(
        self,
        placed: Sequence[Mapping[Slot, jax.Array]],
        threads: bool = False,
        record: Record | None = None,
        seen: list[StageRecord] | None = None,
    ) -> list[jax.Array]:
        """Runs one step; gives the leaves of the results.

        Arguments:
          placed: per placement, its arguments and closed-over arrays.
          seen: collects the NaN checks of the pieces.
        """
        stores = self.begin(placed)
        if self.schedule is not None:
            (self.run_with_threads if threads else self.run_with_driver)(stores, record)
        out = self.end(stores)
        if seen is not None:
            seen += [s for store in stores for s in store.records]
        return out

    def begin(self, placed: Sequence[Mapping[Slot, jax.Array]]) -> list[BufferStore]:
        """Runs the pieces before the loop, and starts all transfers that the loop needs."""
        stores = [BufferStore() for _ in self.executors]
        for store, arrays in zip(stores, placed, strict=True):
            store.put({(slot, OUTSIDE): x for slot, x in arrays.items()})
        self.run_once(stores, Phase.BEFORE)
        if self.schedule is not None:
            self.fetch(stores)
        return stores

    def end(self, stores: Sequence[BufferStore]) -> list[jax.Array]:
        """Runs the pieces after the loop; gives the leaves of the results."""
        self.run_once(stores, Phase.AFTER)
        out: dict[int, jax.Array] = {}
        for s, store in zip(self.executors, stores, strict=True):
            for i, slot in zip(s.cut.subgraph.results, s.cut.results, strict=True):
                out[i] = store.get(slot) if s.is_here else s.slots.absent(slot)
        return [out[i] for i in range(len(out))]

    def run_once(self, stores: Sequence[BufferStore], phase: Phase) -> None:
        """Runs the pieces before or after the loop, level by level."""
        todo = [(r.piece.part.at, p, r) for p, s in enumerate(self.executors) for r in s.pieces_once(phase)]
        for _, p, r in sorted(todo, key=lambda x: x[:2]):
            for read in r.piece.reads:
                self.bring(stores, p, read.slot)
            executor, store = self.executors[p], stores[p]
            if executor.is_here:
                executor.run(store, r, OUTSIDE, executor.read_arrays(store, r, OUTSIDE))

    def bring(self, stores: Sequence[BufferStore], place: int, slot: Slot) -> None:
        """Receives the arrays of some slots that are sent once, unless they have arrived."""
        source = self.sources.get((place, slot))
        if source is None or (slot, OUTSIDE) in stores[place].come:
            return
        p, at = source
        stores[place].come.add((slot, OUTSIDE))
        x = stores[p].get(at) if self.executors[p].is_here else None
        moved = self.engine.send(x, self.transfer(p, at, place, slot))
        if moved is not None:
            stores[place].put({(slot, OUTSIDE): moved})

    def transfer(self, p: int, slot: Slot, q: int, at: Slot) -> StageTransfer:
        """The transfer from one placement's slot to another's."""
        out = self.executors[p].slots.struct(slot)
        return StageTransfer(
            out.shape, out.dtype, self.executors[p].slots.sharding(slot), self.executors[q].slots.sharding(at)
        )

    def transfers(self) -> Iterator[StageTransfer]:
        """All transfers of a step, in one order that all processes share."""
        for works in self.works.values():
            yield from (transfer for _, sends in works[1] for transfer in sends.transfers)
        for (place, slot), (p, at) in self.sources.items():
            yield self.transfer(p, at, place, slot)

    def fetch(self, stores: Sequence[BufferStore]) -> None:
        """Receives the arrays that the loop reads and that were sent before it."""
        for p, s in enumerate(self.executors):
            for slot in {
                read.slot
                for r in s.pieces_in_loop()
                for read in r.piece.reads
                if read.slot.kind is SlotKind.ONCE
            }:
                self.bring(stores, p, slot)

    @functools.cached_property
    def works(self) -> Mapping[tuple[actions.Kind, int], tuple[int, list[tuple[Runnable, SendBuffers]]]]:
        """Per kind of action and stage: the placement, its pieces, and what is sent after each.

        A stage may have no piece for an action, such as the first stage for the gradient of its inputs.
        """
        return {
            (kind, stage): (place, list(self._works(kind, stage, place)))
            for kind in PHASES
            for stage, place in enumerate(self.stages.stages)
        }

    def _works(self, kind: actions.Kind, stage: int, place: int) -> Iterator[tuple[Runnable, SendBuffers]]:
        runnables = self.executors[place].runnables
        for phase in PHASES[kind]:
            if (run := runnables.get(Part(phase, stage))) is not None:
                found = [
                    (i, to)
                    for i, w in enumerate(run.piece.writes)
                    for to in self.receivers.get((place, w.slot), ())
                ]
                writes = run.piece.writes
                transfers = tuple(self.transfer(place, writes[i].slot, *to) for i, to in found)
                positions, to = tuple(i for i, _ in found), tuple(to for _, to in found)
                yield run, SendBuffers(positions, to, transfers, self._peer(stage, phase, {q for q, _ in to}))

    def _peer(self, stage: int, phase: Phase, places: Collection[int]) -> int:
        """The next stage on some placements: a later one after a forward pass, else an earlier one."""
        there = [t for t, q in enumerate(self.stages.stages) if q in places]
        ahead = [t for t in there if (t > stage) == (phase is Phase.FORWARD) and t != stage]
        return min(ahead or there, key=lambda t: abs(t - stage), default=stage)

    def act(
        self, stores: Sequence[BufferStore], action: Action, record: Record | None, blocking: bool
    ) -> None:
        """Runs one action, and sends its results."""
        self.work(stores, action, record, blocking)
        if record is not None:
            # What the work had at hand is let go of by now.
            self.count(stores, action, record)

    def work(
        self, stores: Sequence[BufferStore], action: Action, record: Record | None, blocking: bool
    ) -> None:
        """Runs the pieces of an action, and sends their results."""
        place, works = self.works[action.kind, action.stage]
        executor, store, microbatch = self.executors[place], stores[place], action.microbatch
        began, waited = 0.0, 0.0
        for run, sends in works:
            if not executor.is_here:
                self.cross(stores, sends, microbatch, None)
                continue
            given = executor.read_arrays(store, run, microbatch, blocking)
            if record is not None:
                block_until_ready(given)
                began = began or time.perf_counter()
            made = executor.run(store, run, microbatch, given)
            if record is not None:
                block_until_ready(made)
            if sends.to and not sends.is_own:
                self.cross(stores, sends, microbatch, made)
            elif sends.to:
                left = time.perf_counter()
                moved = _put([made[i] for i in sends.positions], [c.comes for c in sends.transfers])
                for (q, slot), x in zip(sends.to, moved, strict=True):
                    stores[q].put({(slot, microbatch): x})
                if record is not None and not blocking:
                    block_until_ready(moved)
                    waited += record.way(place, action, sends.peer, left)
        if record is not None and works:
            ended = time.perf_counter() - waited
            record.spans[place].append(Span(place, action, began or ended, ended))

    def cross(
        self,
        stores: Sequence[BufferStore],
        sends: SendBuffers,
        microbatch: int,
        made: Sequence[jax.Array] | None,
    ) -> None:
        """Sends the results of a piece between processes.

        Arguments:
          made: None if other processes have run the piece.
        """
        for i, (q, slot), transfer in zip(sends.positions, sends.to, sends.transfers, strict=True):
            x = self.engine.send(None if made is None else made[i], transfer)
            if x is not None:
                stores[q].put({(slot, microbatch): x})

    def count(self, stores: Sequence[BufferStore], action: Action, record: Record) -> None:
        """Records the arrays that are kept."""
        place = self.stages.stages[action.stage]
        store = stores[place]
        executor, stage, microbatch = self.executors[place], action.stage, action.microbatch
        own = executor.residuals(stage)
        others = {slot for s in executor.stages - {stage} for slot in executor.residuals(s)}
        left = own if action.kind is actions.Kind.F else ()
        shared = own & others if action.kind in (actions.Kind.B, actions.Kind.W) else ()
        record.count(place, action, store.arrays_of(left, microbatch), store.arrays_of(shared, microbatch))
        record.live_bytes[place] = max(
            record.live_bytes[place], sum(map(_device_bytes, store.microbatch_arrays))
        )

    def run_with_driver(self, stores: Sequence[BufferStore], record: Record | None) -> None:
        """The loop with one driver."""
        assert self.schedule is not None
        for action in self.order:
            self.act(stores, action, record, False)

    @functools.cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions in one order."""
        assert self.schedule is not None
        return issue_order(self.schedule, self.edges)

    def when(self, part: Part, microbatch: int) -> tuple[int, ...]:
        """The place of a piece in a step, by which pieces of all processes can be ordered."""
        if part.phase in (Phase.BEFORE, Phase.AFTER):
            return (0 if part.phase is Phase.BEFORE else 2), part.at
        return 1, self.turns[part, microbatch]

    @functools.cached_property
    def turns(self) -> Mapping[tuple[Part, int], int]:
        """The position of every piece in the one order of all actions."""
        return {
            (Part(phase, a.stage), a.microbatch): 2 * i + k
            for i, a in enumerate(self.order)
            for k, phase in enumerate(PHASES[a.kind])
        }

    def run_with_threads(self, stores: Sequence[BufferStore], record: Record | None) -> None:
        """The loop with a thread per rank."""
        assert self.schedule is not None
        failures: list[BaseException] = []
        # A thread does not inherit it from `with jax.enable_x64(...)`, and would halve what it sends.
        x64 = setting("jax_enable_x64")

        def work(order: Sequence[Action]) -> None:
            try:
                with jax.enable_x64(x64):
                    for action in order:
                        self.act(stores, action, record, True)
            except BaseException as e:
                failures.append(e)
                for store in stores:
                    store.fail(e)

        workers = [threading.Thread(target=work, args=(order,)) for order in self.schedule.orders]
        for w in workers:
            w.start()
        try:
            for w in workers:
                w.join()
        except BaseException as e:
            # An interrupt: nobody waits for what no longer comes.
            for store in stores:
                store.fail(e)
            raise
        if failures:
            raise failures[0]

    def new_record(self) -> Record:
        """An empty record."""
        n = len(self.executors)
        return Record([[] for _ in range(n)], [0] * n, [0] * n, [{} for _ in range(n)])


def _put(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> Sequence[jax.Array]:
    """Arrays on other devices; a single one needs no pytree, which saves nine tenths of the time."""
    if len(arrays) == 1:
        return (jax.device_put(arrays[0], shardings[0]),)
    moved: Sequence[jax.Array] = jax.device_put(list(arrays), list(shardings))
    return moved


def _device_bytes(x: jax.Array) -> int:
    """The bytes of an array on one device."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def make_executor(
    stages: Stages,
    schedule: Schedule | None,
    edges: tuple[Edge, ...],
    merged: bool,
    donate: Collection[int] = (),
    cache: Cache | None = None,
    watch: NanProbe | None = None,
) -> PipelineExecutor:
    """The executor of a program whose devices are there.

    Arguments:
      merged: whether a backward pass is one piece.
      donate: positions of arguments whose memory the results may take.
      cache: the folder of programs that earlier processes have compiled.
      watch: the NaN probe.
    """
    cuts = stages.cuts(merged)
    executables = Executables(cache)
    title = ProgramName(stages.name, stages.traced.source)
    executors = tuple(
        make_stage_executor(c, stages.microbatches, title, executables, donate, watch) for c in cuts
    )
    receivers, sources = routes(cuts)
    return PipelineExecutor(
        stages, schedule, edges, executors, receivers, sources, executables, TransferEngine(executables)
    )
