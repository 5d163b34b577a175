"""A compiled pipeline as `Program` has it: planned, built on its first call, run on every later one.

Chooses how the placements of a pipeline are driven: by one driver, or by a thread each.

One driver overlaps stages as far as JAX starts work without waiting for it. Where JAX waits (for the host, or
for devices that are a part of it), a thread per placement overlaps them; elsewhere threads only cost time.
The results are equal bit for bit, so the first steps are run both ways and timed.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from sbp.compat.core import itemsize
from sbp.compat.untyped import Leaf, PyTree, block_until_ready, partition_spec
from sbp.errors import Problem, raise_all
from sbp.passes.face import Plan
from sbp.passes.pipeline.edges import edges_of
from sbp.passes.pipeline.slots import Slot
from sbp.passes.pipeline.stages import Stages
from sbp.passes.program.role import Phase
from sbp.passes.program.trace import TracedProgram
from sbp.passes.schedule.actions import Schedule
from sbp.placement import Placement
from sbp.runtime.cache.cache_folder import Cache
from sbp.runtime.call.arguments import weaken
from sbp.runtime.call.donation import Owners, layouts_of, own_copy
from sbp.runtime.execute.build_cache import locked_property
from sbp.runtime.execute.compile_log import log_activity
from sbp.runtime.execute.host_input_check import HostInputCheck
from sbp.runtime.execute.program_check import begin_together, check_same_pipeline, note_call
from sbp.runtime.nan_checks import findings
from sbp.runtime.nan_checks.probe import NanProbe
from sbp.runtime.pipeline.pipeline_executor import PipelineExecutor, make_executor
from sbp.runtime.pipeline.stacked_arguments import StackedLeaves
from sbp.runtime.pipeline.stage_executor import StageRecord
from sbp.runtime.pipeline.stage_programs import reads_given
from sbp.runtime.pipeline.transfer_engine import StageTransfer, TransferEngine
from sbp.runtime.processes.addressable import takes_part
from sbp.runtime.processes.flight_recorder import SharedProgram
from sbp.runtime.processes.process_group import process_group

T = TypeVar("T")

# Steps that are timed of either kind, by turns; the first one is slower than others, and does not count.
STEPS = 3
# Of one driver's time, what a step with threads must stay below: timings are noisy.
BETTER = 0.9


def may_help(placements: Sequence[Placement], scheduled: bool) -> bool:
    """Whether a thread per placement can be faster than one driver.

    XLA's CPU client runs one program of several devices at a time, whichever thread starts it.

    Arguments:
      scheduled: whether there are micro-batches.
    """
    on_cpu = any(p.platform == "cpu" for p in placements)
    return scheduled and len(placements) > 1 and not (on_cpu and any(len(p.ranks) > 1 for p in placements))


@dataclass
class Drivers:
    """The drivers of a program.

    Arguments:
      threads: whether each placement has a thread of its own; None while both are timed.
      seconds: the times of steps, with threads and with one driver.
    """

    threads: bool | None
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def run(self, step: Callable[[bool], T], given: Sequence[jax.Array]) -> T:
        """Runs one step: `step` runs it, with threads or with one driver."""
        if self.threads is not None:
            return step(self.threads)
        threads = len(self.seconds[True]) <= len(self.seconds[False])
        block_until_ready(given)
        began = time.perf_counter()
        out = block_until_ready(step(threads))
        self.note(threads, time.perf_counter() - began)
        return out

    def note(self, threads: bool, seconds: float) -> None:
        """Takes the time of a step, and decides after the last one."""
        self.seconds[threads].append(seconds)
        many, one = self.seconds[True], self.seconds[False]
        if min(len(many), len(one)) >= STEPS:
            self.threads = min(many[1:]) < BETTER * min(one[1:])


@dataclass
class CompiledPipeline:
    """One abstract signature of a program with stages.

    Arguments:
      stages, schedule: what was planned.
      donate: positions of the leaves that are gone after a call.
      weak: per result, whether it is weakly typed.
      drivers: whether each placement has a thread of its own.
      stacked_leaves: how leaves are parts of those of the function, where its scan over layers was cut.
      function: the function as it was traced; None if the stages are of just that.
      results: which of them come to all processes.
      cache: the folder of what earlier processes have compiled; None for none.
      watch: what looks at what ops make; None for nothing.
      alike: which arguments were compared with those of other processes.
      shared_program: what all processes call in one order; None where no other one takes part, or nothing is
        built.
    """

    stages: Stages
    schedule: Schedule | None
    plan: Plan
    donate: tuple[int, ...]
    weak: tuple[bool, ...]
    drivers: Drivers
    stacked_leaves: StackedLeaves | None = None
    function: TracedProgram | None = None
    results: Results = field(default_factory=lambda: Results())
    cache: Cache | None = None
    watch: NanProbe | None = None
    moved_leaves: dict[str, str] = field(default_factory=dict)
    lacks_samples: bool = False
    key_counts: None = None
    has_run: bool = False
    shared_program: SharedProgram | None = None
    alike: HostInputCheck = field(default_factory=HostInputCheck, repr=False)
    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock, repr=False)

    @functools.cached_property
    def owners(self) -> Owners:
        """Who has the memory of what is donated."""
        return Owners(self.donate)

    @property
    def traced(self) -> TracedProgram:
        """The whole function."""
        return self.stages.traced if self.function is None else self.function

    @locked_property
    def executor(self) -> PipelineExecutor:
        """The pipeline on its devices."""
        merged = self.schedule is None or not self.schedule.splits
        donate = (
            self.donate if self.stacked_leaves is None else self.stacked_leaves.donated_parts(self.donate)
        )
        cuts = self.stages.cuts(merged)
        self.shared_program = check_same_pipeline(self.plan, self.stages.traced.graph, cuts)
        with log_activity("compiled", self.plan.name) as words:
            made = self.stages, self.schedule, edges_of(cuts), merged, donate, self.cache, self.watch
            executor = make_executor(*made)
            for transfer in self._cargos(executor):
                if not transfer.is_own and transfer.is_ours:
                    executor.engine.compile(transfer)
            words.append(executor.executables)
        return executor

    def _cargos(self, executor: PipelineExecutor) -> Iterator[StageTransfer]:
        """All that goes from placement to placement in a call whose state lies as results do: in the step,
        arguments that several placements read, and results that come to all."""
        yield from executor.transfers()
        ins, outs = self._own_ends(executor)
        for s in executor.executors:
            for i, slot in zip(s.cut.subgraph.arguments, s.cut.arguments, strict=True):
                x, to = ins[i], s.slots.sharding(slot)
                if x.sharding != to:
                    yield StageTransfer(x.shape, x.dtype, x.sharding, to)
        results = [outs[i] for i in sorted(outs)]
        if self.stacked_leaves is not None:
            results = self.stacked_leaves.ends([ins[i] for i in sorted(ins)], results)[1]
        yield from self.results.transfers(results)

    @locked_property
    def closed_arrays(self) -> list[dict[Slot, jax.Array]]:
        """The closed-over arrays, per placement."""
        graph = self.stages.traced.graph
        n = len(self.stages.traced.in_paths)
        return [
            {
                slot: own_copy(
                    graph.consts[i - n], s.slots.sharding(slot), graph.values[graph.inputs[i]].name
                )
                for i, slot in zip(s.cut.subgraph.closure, s.cut.closure, strict=True)
                if s.is_here
            }
            for s in self.executor.executors
        ]

    def run(self, leaves: Sequence[Leaf]) -> PyTree:
        """Runs one step on the leaves of a call.

        Raises:
          DonationError: if the memory of a donated one is also that of another one.
        """
        raise_all(self.owners.check(leaves, layouts_of(leaves), lambda: self.traced.in_paths))
        assert self.executor is not None  # once all processes have the same program
        note_call(self.shared_program)
        placed = self.arguments(
            leaves if self.stacked_leaves is None else self.stacked_leaves.cut_leaves(leaves)
        )
        given = [x for arrays in placed for x in arrays.values()]
        if not self.has_run:
            begin_together(self.plan, lambda: self.executor)
            self.has_run = True
        seen = None if self.watch is None else list[StageRecord]()
        out = self.drivers.run(lambda threads: self.executor.run(placed, threads, seen=seen), given)
        out = self.results.share(
            out if self.stacked_leaves is None else self.stacked_leaves.join(out), self.executor.engine
        )
        gone = [x for i in self.donate if isinstance(x := leaves[i], jax.Array)]
        # An argument that is a result too lives on as that.
        out = [jnp.copy(x) if takes_part(x.sharding) and any(x is y for y in gone) else x for x in out]
        weak = [w and takes_part(x.sharding) for x, w in zip(out, self.weak, strict=True)]
        out = [weaken(x) if w else x for x, w in zip(out, weak, strict=True)]
        for x in gone:
            if not x.is_deleted():
                x.delete()
        if self.watch is not None:
            self._look(out, seen or ())
        return jax.tree.unflatten(self.traced.out_tree, out)

    def _look(self, out: Sequence[jax.Array], seen: Sequence[StageRecord]) -> None:
        """Raises if a result has what is refused: the first that any piece in any process has seen."""
        assert self.watch is not None
        found = list[findings.Finding]()
        for path, x in zip(self.traced.out_paths, out, strict=True):
            bad = findings.kinds_in(x) & self.watch.refused_kinds if takes_part(x.sharding) else None
            if bad:
                found.append(findings.unmade(path, bad))
        for s in seen if found or jax.process_count() > 1 else ():
            assert s.run.watch is not None
            at = self.executor.when(s.run.piece.part, s.microbatch)
            rows = findings.rows_of(s.flags)
            came = self._words_of_given(s)
            found += filter(None, [findings.finding_of(rows, s.run.watch, s.cut.physical, (came, ()), at)])
        findings.raise_first(found, self.plan.name, self.watch.legal)

    def _words_of_given(self, seen: StageRecord) -> list[str]:
        """The arguments and closed-over arrays that a piece reads, in its order, each with who reads it."""
        traced, piece, subgraph = self.stages.traced, seen.run.piece, seen.cut.subgraph
        names = [
            *(traced.in_paths[i] for i in subgraph.arguments),
            *(traced.graph.values[traced.graph.inputs[i]].name for i in subgraph.closure),
        ]
        path = dict(zip(seen.cut.given_slots, names, strict=True))
        inside = piece.part.phase not in (Phase.BEFORE, Phase.AFTER)
        there = [s for s, place in enumerate(self.stages.stages) if place == subgraph.place]
        reader = findings.reader_of([piece.part.at] if inside else there, seen.cut.physical.placement)
        return [f"{path[r.slot]}, {reader}" for r in reads_given(piece, seen.cut.given_slots)]

    @property
    def ends(self) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """Arguments and results: shapes, types, and how they lie; on the first of several placements."""
        found = self._own_ends(self.executor)
        ins, outs = ([x[i] for i in sorted(x)] for x in found)
        return (ins, outs) if self.stacked_leaves is None else self.stacked_leaves.ends(ins, outs)

    def _own_ends(
        self, executor: PipelineExecutor
    ) -> tuple[dict[int, jax.ShapeDtypeStruct], dict[int, jax.ShapeDtypeStruct]]:
        """The same of the stages' own function, by position."""
        given: dict[int, jax.ShapeDtypeStruct] = {}
        made: dict[int, jax.ShapeDtypeStruct] = {}
        for s in reversed(executor.executors):
            given.update(
                (i, s.slots.struct(x)) for i, x in zip(s.cut.subgraph.arguments, s.cut.arguments, strict=True)
            )
            made.update(
                (i, s.slots.struct(x)) for i, x in zip(s.cut.subgraph.results, s.cut.results, strict=True)
            )
        return given, made

    def arguments(self, leaves: Sequence[Leaf]) -> list[Mapping[Slot, jax.Array]]:
        """The leaves where each placement wants them."""
        self._compare(leaves)
        placed: list[Mapping[Slot, jax.Array]] = []
        for s, closed in zip(self.executor.executors, self.closed_arrays, strict=True):
            wanted = list(zip(s.cut.subgraph.arguments, s.cut.arguments, strict=True))
            given, shardings = [leaves[i] for i, _ in wanted], [s.slots.sharding(slot) for _, slot in wanted]
            arrays = self.executor.engine.bring_all(given, shardings)
            here = {slot: x for (_, slot), x in zip(wanted, arrays, strict=True) if x is not None}
            placed.append({**here, **closed})
        return placed

    def _compare(self, leaves: Sequence[Leaf]) -> None:
        """Compares host arrays with those of other processes, of which stages of several have parts."""
        if self.alike.lacks(range(len(leaves))):
            here = {
                i
                for s in self.executor.executors
                for i, slot in zip(s.cut.subgraph.arguments, s.cut.arguments, strict=True)
                if takes_part(s.slots.sharding(slot))
            }
            given = [(x, i in here) for i, x in enumerate(leaves)]
            self.alike.check(process_group(), self.plan.name, self.stages.traced.in_paths, given)

    def place(self, leaves: Sequence[Leaf]) -> list[jax.Array]:
        """The leaves where their first placement wants them."""
        parts = leaves if self.stacked_leaves is None else self.stacked_leaves.cut_leaves(leaves)
        self._compare(parts)
        out = list(parts)
        for s in reversed(self.executor.executors):
            for i, slot in zip(s.cut.subgraph.arguments, s.cut.arguments, strict=True):
                x = self.executor.engine.bring(parts[i], s.slots.sharding(slot))
                out[i] = s.slots.absent(slot) if x is None else x
        return out if self.stacked_leaves is None else self.stacked_leaves.join_placed(out)


MOST_SHARED_BYTES = 1 << 16
"""Of a result that comes to all processes: a loss, a metric, a count."""


@dataclass(frozen=True)
class Results:
    """What comes to all processes of what some have computed.

    Arguments:
      whole: the placement of all stages; None where there is one process.
      free: per result, whether no argument becomes it: state stays with its stage.
    """

    whole: Placement | None = None
    free: tuple[bool, ...] = ()

    def share(self, out: Sequence[jax.Array], engine: TransferEngine) -> list[jax.Array]:
        """The results, small ones that are no state copied to all devices: every process may want to read
        them."""
        if self.copy_sharding is None:
            return list(out)
        pairs = zip(out, self._wanted(out), strict=True)
        found = [engine.bring(x, self.copy_sharding) if wanted else None for x, wanted in pairs]
        return [x if y is None else y for x, y in zip(out, found, strict=True)]

    def transfers(self, out: Sequence[jax.ShapeDtypeStruct]) -> Iterator[StageTransfer]:
        """How they come there, as results lie."""
        for x, wanted in zip(out, self._wanted(out), strict=True):
            if wanted and self.copy_sharding is not None and x.sharding != self.copy_sharding:
                yield StageTransfer(x.shape, x.dtype, x.sharding, self.copy_sharding)

    @property
    def copy_sharding(self) -> NamedSharding | None:
        """How they lie on all devices; None where there is one process."""
        if self.whole is None or jax.process_count() == 1:
            return None
        return NamedSharding(self.whole.mesh, partition_spec())

    def _wanted(self, out: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[bool]:
        return [free and bytes_of(x) <= MOST_SHARED_BYTES for x, free in zip(out, self.free, strict=True)]


def bytes_of(x: jax.Array | jax.ShapeDtypeStruct) -> float:
    """The bytes of an array."""
    return math.prod(x.shape) * itemsize(x.dtype)


def many_programs(program: object, what: str) -> Problem:
    """What is wrong with asking for one program where there are several.

    Arguments:
      what: the method that was called.
    """
    return Problem(
        "argument",
        f"{program}.{what}(...)",
        "a program with stages",
        "a program of one placement",
        "each piece of a stage is a program of its own",
        "Program.plan(...) says what they do, Program.report(...) what XLA makes of them",
    )
