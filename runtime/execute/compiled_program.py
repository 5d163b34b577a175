"""One compiled signature of a program, and how it runs.

Tells XLA:GPU's scheduler the limit on memory that the plan was made for.

The scheduler hides collectives at the cost of memory while there is some, and it knows only the memory of the
device. The plan's limit may be smaller: then the scheduler must know it. It may be larger too, since XLA
leaves a fifth of the device alone: beyond that it hides nothing, and computes and sends things again to save
memory (rematerialization), though the plan fits.
"""

import functools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import is_

import jax
from jax.sharding import NamedSharding

from sbp.compat.cache import CacheRequests
from sbp.compat.untyped import Leaf, PyTree, block_until_ready, struct
from sbp.errors import raise_all
from sbp.hardware.catalogue import Hardware
from sbp.passes.boxing.links import Network
from sbp.passes.face import Plan
from sbp.passes.physical.evaluate import Evaluator, donations
from sbp.passes.physical.exchanges import ReadAhead, find_read_ahead
from sbp.passes.physical.fusion import ShardSizes
from sbp.passes.physical.program import Physical
from sbp.passes.program.graph import Const
from sbp.passes.program.trace import TracedProgram
from sbp.passes.request import Request
from sbp.rates.chips import CHIPS
from sbp.runtime.cache.cache_folder import Cache, cache_context
from sbp.runtime.call.donation import LeafSharding, Owners, distinct, layouts_of, own_copy
from sbp.runtime.execute.build_cache import locked_property
from sbp.runtime.execute.compile_log import log_activity
from sbp.runtime.execute.exchange_replan import replan
from sbp.runtime.execute.host_input_check import HostInputCheck
from sbp.runtime.execute.keys_ahead import KeysAhead, key_program, read_ahead_structs
from sbp.runtime.execute.program_check import begin_together, check_same, note_call
from sbp.runtime.lower.key_counts import KeyCounts
from sbp.runtime.lower.lowering import NO_MARKS, DeviceMesh, JittedFunction, ProgramName, lower, shardings
from sbp.runtime.nan_checks import findings
from sbp.runtime.nan_checks.probe import NanProbe
from sbp.runtime.processes.addressable import moved_to, takes_part
from sbp.runtime.processes.flight_recorder import SharedProgram
from sbp.runtime.processes.process_group import process_group
from sbp.text.user_warnings import warn_user

SCHEDULED_SHARE = 0.8
"""Of a device's memory, for a program (`GetSchedulerMemoryLimit`, gpu_hlo_schedule.cc); of what arguments and
results leave of that, `xla_gpu_memory_limit_slop_factor` hundredths are the scheduler's."""
USUAL_HUNDREDTHS = 95
"""As XLA has it."""
SPARE = 1.05
"""Of what a plan needs, XLA has so much, if there is as much. Given all that there is it takes that, and a
little more for holes: a step of Llama 3 70B that is planned with 73 GB then needs 81."""


def compiler_options(
    physical: Physical, hardware: Hardware, donated: Collection[int], needed_bytes: float
) -> Mapping[str, int]:
    """The options for XLA if the memory limit differs from XLA's own; none except on GPUs.

    Arguments:
      donated: positions of the inputs whose memory the results may take.
      needed_bytes: per device, by the plan.
    """
    limit = min(hardware.scheduled_bytes, hardware.memory_bytes)
    if hardware.platform != "gpu" or not math.isfinite(limit):
        return {}
    held = _held_bytes(physical, donated)
    device = CHIPS[hardware.chip].memory_bytes if hardware.chip in CHIPS else hardware.memory_bytes
    own = max(SCHEDULED_SHARE * device - held, 1.0)
    wanted = max(held + USUAL_HUNDREDTHS / 100 * own, SPARE * needed_bytes)
    hundredths = max(round(100 * (min(limit, wanted) - held) / own), 1)
    return {} if hundredths == USUAL_HUNDREDTHS else {"xla_gpu_memory_limit_slop_factor": hundredths}


def _held_bytes(p: Physical, donated: Collection[int]) -> float:
    """Bytes of arguments and results, which live through the whole step."""
    sizes, taken = ShardSizes(p), donations(p, donated)
    results = ((x, nd) for x, nd in zip(p.graph.outputs, p.outputs, strict=True) if not isinstance(x, Const))
    held = sum(map(sizes.bytes, zip(p.graph.inputs, p.inputs, strict=True)))
    return held + sum(sizes.bytes(v) for v in dict.fromkeys(results) if v not in taken)


@dataclass
class CompiledProgram:
    """One compiled signature of a program: compiled on its first call, run on every later one."""

    traced: TracedProgram
    plan: Plan
    donate: tuple[int, ...]
    weak: tuple[bool, ...]
    lacks_samples: bool = False
    key_counts: KeyCounts | None = None
    request: Request | None = None
    moved_leaves: dict[str, str] = field(default_factory=dict)
    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock, repr=False)
    watch: NanProbe | None = None
    cache: Cache | None = None
    loaded: bool = False
    kept_donations: tuple[int, ...] | None = None
    shared_program: SharedProgram | None = None
    alike: HostInputCheck = field(default_factory=HostInputCheck, repr=False)
    settled_layouts: list[LeafSharding] = field(default_factory=list)
    reads_ahead: bool = False

    @functools.cached_property
    def owners(self) -> Owners:
        """The owners of the memory of donated arguments."""
        return Owners(self.donate)

    def jit(
        self,
        mesh: DeviceMesh,
        counting: KeyCounts | None = None,
        marks: Mapping[int, str] = NO_MARKS,
        checked: bool = False,
        ahead: ReadAhead | None = None,
    ) -> JittedFunction:
        """The program over a mesh: flat arguments in, flat results out, and the counts of its exchanges.

        Arguments:
          marks: names of steps by their ids, which become names of instructions.
          checked: whether it checks the results of its ops for NaN, if that was asked for.
          ahead: what it does of the next batch.
        """
        physical = self.plan.physical
        assert physical is not None
        title = ProgramName(self.plan.name, self.traced.source)
        options = compiler_options(physical, self.plan.hardware, self.donate, self.plan.memory_bytes)
        takes = Evaluator(physical, Network(self.plan.placement, self.plan.hardware), self.donate)
        sections = () if takes.sections is None else takes.sections.sections
        looks = None if self.watch is None or not checked else self.watch.device
        return lower(
            physical, mesh, self.donate, counting, title, self.weak, options, sections, marks, looks, ahead
        )

    @property
    def read_ahead(self) -> ReadAhead | None:
        """What a step does of the next batch; None for nothing."""
        physical = self.plan.physical
        assert physical is not None
        return find_read_ahead(physical, len(self.traced.in_paths), self.donate) if self.reads_ahead else None

    @locked_property
    def keys_ahead(self) -> KeysAhead | None:
        """The keys of the next batch; None if none are sent ahead."""
        physical, ahead = self.plan.physical, self.read_ahead
        assert physical is not None
        _, ins, consts = self.executable
        if ahead is None:
            return None
        program = key_program(physical, physical.placement.mesh, ahead)
        return KeysAhead(ahead, program, [ins[i] for i in ahead.inputs], consts)

    def lowered_like(self, mesh: DeviceMesh) -> tuple[JittedFunction, Sequence[PyTree]]:
        """The program as a call runs it, and the shapes of what it takes beside its arguments."""
        physical, ahead = self.plan.physical, self.read_ahead
        assert physical is not None
        beside = () if ahead is None else read_ahead_structs(physical, mesh, ahead)
        return self.jit(mesh, ahead=ahead), beside

    @locked_property
    def executable(self) -> tuple[JittedFunction, list[NamedSharding], list[jax.Array]]:
        """The jitted program, the shardings of its arguments, and the closed-over arrays."""
        physical = self.plan.physical
        assert physical is not None
        mesh = physical.placement.mesh
        ins, _ = shardings(physical, mesh)
        ahead = self.read_ahead
        jitted = self.jit(mesh, self.key_counts, checked=True, ahead=ahead)
        beside = () if ahead is None else read_ahead_structs(physical, mesh, ahead)
        # Before anything is placed: that takes all processes, too.
        inputs = [physical.graph.values[v] for v in physical.graph.inputs]
        self.shared_program = check_same(jitted, inputs, ins, self.plan, beside)
        n = len(self.traced.in_paths)
        names = [physical.graph.values[v].name for v in physical.graph.inputs[n:]]
        consts = [own_copy(*c) for c in zip(physical.graph.consts, ins[n:], names, strict=True)]
        return jitted, ins[:n], consts

    def run(self, leaves: Sequence[Leaf]) -> PyTree:
        """Runs the program on the leaves of a call."""
        if self.key_counts is not None:
            replan(self, leaves)
        jitted, _, consts = self.executable
        note_call(self.shared_program)
        keys = self.keys_ahead
        leaves = leaves if keys is None else keys.place(leaves)
        placed, away = self._placed(leaves, told=True)
        beside = [] if keys is None else keys.arguments(placed)
        if self.kept_donations is None:
            with (
                self.lock,
                log_activity("run once" if self.loaded else "compiled and run once", self.plan.name) as words,
            ):
                with cache_context(self.cache) as cache:
                    begin_together(self.plan, lambda: self._compiled([*placed, *consts, *beside], cache))
                    out = block_until_ready(jitted(*placed, *consts, *beside))  # too little memory shows here
                words.append(cache)
                self.kept_donations = tuple(i for i in self.donate if not placed[i].is_deleted())
        else:
            out = jitted(*placed, *consts, *beside)
        if keys is not None:
            *out, sent = out
            keys.keep(sent, beside[1])
        flags = None
        if self.watch is not None:
            *out, flags = out
        if self.key_counts is not None:
            *out, counts = out
            self.key_counts.add(counts)
        # What had to be moved was donated as a copy, and XLA has no use for some; donation promises that
        # the original is gone too.
        for i in (*self.kept_donations, *away) if self.donate else ():
            if i in self.donate and isinstance(leaves[i], jax.Array) and not leaves[i].is_deleted():
                leaves[i].delete()
        if flags is not None:
            self._look(flags)
        return jax.tree.unflatten(self.traced.out_tree, out)

    def _compiled(self, placed: Sequence[PyTree], cache: CacheRequests) -> None:
        """Compiles the program for such arguments, unless it was loaded; a call then finds it."""
        if not self.loaded:
            cache.keep(self.executable[0].lower(*placed).compile())

    def _look(self, flags: jax.Array) -> None:
        """Raises if a result has a NaN or an infinity that the user refuses."""
        physical, watch = self.plan.physical, self.watch
        assert physical is not None and watch is not None
        paths = self.traced.in_paths, self.traced.out_paths
        findings.look(flags, watch, physical, paths, self.plan.name)

    @property
    def ends(self) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """Shapes, dtypes and shardings of arguments and results."""
        physical = self.plan.physical
        assert physical is not None
        graph, n = physical.graph, len(self.traced.in_paths)
        ins, outs = shardings(physical, physical.placement.mesh)
        given = [graph.values[v] for v in graph.inputs[:n]]
        made = [graph.operand(x) for x in graph.outputs]
        return (
            [struct(v.shape, v.dtype, sharding=s) for v, s in zip(given, ins[:n], strict=True)],
            [struct(x.shape, x.dtype, sharding=s) for x, s in zip(made, outs, strict=True)],
        )

    def place(self, leaves: Sequence[Leaf]) -> list[jax.Array]:
        """Moves the leaves to the shardings of the program; jit would compile again for its own moves."""
        return self._placed(leaves)[0]

    def _placed(self, leaves: Sequence[Leaf], told: bool = False) -> tuple[list[jax.Array], list[int]]:
        """The leaves under the shardings of the program, and the positions of those that were moved.

        Arguments:
          told: whether the user is warned of moves.

        Raises:
          DonationError: if a donated argument shares memory with another one.
        """
        _, ins, _ = self.executable
        if self.alike.lacks(()):  # all processes come here the first time, whatever they give
            self._compare(leaves, ins)
        layouts = layouts_of(leaves)
        # In a loop they are the very objects that were all in place the last time.
        if (
            self.settled_layouts
            and all(map(is_, layouts, self.settled_layouts))
            and (not self.donate or distinct(leaves))
        ):
            return list(leaves), []
        raise_all(self.owners.check(leaves, layouts, lambda: self.traced.in_paths))
        if layouts == ins:
            self.settled_layouts = layouts
            return list(leaves), []
        placed = list(leaves)
        away = [i for i, (x, s) in enumerate(zip(layouts, ins, strict=True)) if x != s]
        for i in away if told else ():
            self._note_move(i, leaves[i], ins[i])
        if self.alike.lacks(away):
            self._compare(leaves, ins)
        moved = moved_to([leaves[i] for i in away], [ins[i] for i in away])
        for i, x in zip(away, moved, strict=True):
            placed[i] = x
        return placed, away

    def _compare(self, leaves: Sequence[Leaf], ins: Sequence[NamedSharding]) -> None:
        """Compares host arrays that are new with those of other processes."""
        given = [(x, takes_part(s)) for x, s in zip(leaves, ins, strict=True)]
        self.alike.check(process_group(), self.plan.name, self.traced.in_paths, given)

    def _note_move(self, i: int, x: Leaf, sharding: NamedSharding) -> None:
        """Warns, once, of an argument that lies on several devices under another sharding."""
        if not isinstance(x, jax.Array) or not x.committed or len(x.sharding.device_set) == 1:
            return
        path = self.traced.in_paths[i]
        if path not in self.moved_leaves and not x.sharding.is_equivalent_to(sharding, x.ndim):
            self.moved_leaves[path] = f"{path} arrived as {getattr(x.sharding, 'spec', x.sharding)}"
            warn_user(
                f"{self.moved_leaves[path]} and is moved to {sharding.spec} on every call; "
                "place it once with jax.device_put, or give in_sbp the signature that it has"
            )
