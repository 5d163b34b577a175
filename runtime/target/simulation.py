"""Simulates a scheduled GPU program: when each kernel and each collective runs, and the time of a step.

Kernels run one after another, in the order of the text. Collectives run beside them, those inside an NVLink
domain and those between domains each one after another: a `-start` as soon as its wires are free, and its
`-done` lets the kernels wait for its end. docs/simulator.md lists what the model leaves out.

How long one kernel takes on a chip: its arithmetic or its traffic, whichever is longer, and its launch.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sbp.rates.chips import LAUNCH_SECONDS, MEMORY_SHARE, Chip
from sbp.rates.matmuls import fused_seconds, matmul_seconds, peak_flops
from sbp.rates.tables import Evidence, Timing
from sbp.runtime.hlo.meter import COLLECTIVES, HasText, text_of
from sbp.runtime.hlo.parser import Computation, HloTextError, Instruction, Module, parse
from sbp.runtime.hlo.shapes import arrays
from sbp.runtime.hlo.trip_counts import trip_count
from sbp.runtime.target.events import HOST, KERNELS, LOOPS, NETWORK, NVLINK, Event, Simulation
from sbp.runtime.target.matmuls import MatrixProduct
from sbp.runtime.target.traffic import Domains, WireTraffic, traffic_of
from sbp.runtime.target.work import FREE, Work, work_of


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of one kernel and what they are made of; the longest of the parts, and the launch, count."""

    seconds: float
    matrix_seconds: float
    vector_seconds: float
    memory_seconds: float
    source: Evidence


def kernel_time(chip: Chip, work: Work) -> KernelTime:
    """How long a kernel takes.

    >>> from sbp.rates.chips import CHIPS
    >>> round(kernel_time(CHIPS["h100"], Work(bytes=3 * 2**30)).seconds * 1e6)  # an addition of 1 GiB arrays
    1069
    """
    if work == Work():
        return KernelTime(0.0, 0.0, 0.0, 0.0, "formula")
    timed = [
        (_timed(p)(chip, p.m, p.n, p.k, batch=p.batch, operands=p.operands), p.count * p.passes)
        for p in work.products
    ]
    matrix = sum(t.seconds * count for t, count in timed)
    # The peak counts a fused multiply-add as two.
    vector = 2 * work.operations / chip.vector_flops
    memory = work.bytes / (chip.memory_bytes_per_second * MEMORY_SHARE)
    longest = max(matrix, vector, memory)
    by_matrix = timed and longest == matrix
    source: Evidence = max((t.source for t, _ in timed), key=_CERTAIN.index) if by_matrix else "formula"
    return KernelTime(LAUNCH_SECONDS + longest, matrix, vector, memory, source)


def _timed(product: MatrixProduct) -> Callable[..., Timing]:
    """How products of a kind are timed."""
    return fused_seconds if product.fused else matmul_seconds


_CERTAIN: list[Evidence] = ["measured", "scaled", "formula"]


WIRES = (NVLINK, NETWORK, HOST)
# To and from the memory of the host: PCIe 5 x16, as XLA's description of an H100 has it.
HOST_BYTES_PER_SECOND = float(32 << 30)
_HOST_SPACE = 5
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def simulate(
    program: str | HasText,
    chip: Chip,
    *,
    domain_devices: int | None = None,
    ranks: Sequence[int] | None = None,
) -> Simulation:
    """A step of a program that XLA has compiled for GPUs, simulated on a chip.

    Arguments:
      program: what `lowered.compile()` gives, or the text of it.
      domain_devices: devices that NVLink connects, if not as many as usual for the chip; those of a domain
        have consecutive ranks.
      ranks: the rank of each device id of the text; None for the id itself.

    Raises:
      HloTextError: if the text is not that of a scheduled HLO module, or cannot be read.

    >>> from sbp.rates.chips import CHIPS
    >>> found = simulate('''HloModule m, is_scheduled=true, num_partitions=8
    ... ENTRY %main (p: f32[268435456]) -> f32[268435456] {
    ...   %p = f32[268435456]{0} parameter(0)
    ...   ROOT %sum = f32[268435456]{0} all-reduce(%p), replica_groups=[1,8]<=[8], channel_id=1,
    ...     use_global_device_ids=true
    ... }''', CHIPS["h100"])
    >>> round(found.seconds * 1e3, 2), found.exposed_seconds == found.seconds
    (4.72, True)
    """
    module = parse(program if isinstance(program, str) else text_of(program))
    if module.entry not in module.computations or module.header.get("is_scheduled") != "true":
        raise HloTextError(
            "no scheduled HLO module; the simulator reads the text of what lowered.compile() gives for a "
            "GPU; it begins with HloModule and says is_scheduled=true"
        )
    walk = _Walk(module, chip, Domains(domain_devices or chip.domain_devices, tuple(ranks or ())))
    walk.run(module.entry, 1, ())
    return walk.result()


@dataclass(slots=True)
class _Record:
    """An event, while it is recorded."""

    first: Event
    times: float = 0
    exposed: float = 0.0
    during: list[str] = field(default_factory=list)

    def event(self) -> Event:
        return replace(self.first, times=self.times, exposed_seconds=self.exposed, kernels=tuple(self.during))


@dataclass(frozen=True, slots=True)
class _Begun:
    """One execution on wires, and its end."""

    record: _Record
    end: float
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """The computation of an instruction, the executions that it stands for, and its callers."""

    computation: Computation
    times: float
    path: tuple[str, ...]


@dataclass(slots=True)
class _State:
    """The state of a simulation."""

    now: float = 0.0  # when the kernels that were launched have ended
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WIRES, 0.0))
    pending: dict[str, list[_Begun]] = field(default_factory=dict)  # by the name of the start
    records: dict[tuple[str, ...], _Record] = field(default_factory=dict)
    ideal_seconds: float = 0.0
    loops: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)


class _Walk:
    """Runs computations in their order, each execution standing for `times` of them."""

    def __init__(self, module: Module, chip: Chip, domains: Domains) -> None:
        self._module, self._chip, self._domains = module, chip, domains
        self._state = _State()
        # An instruction in a loop is read once.
        self._works: dict[str, Work] = {}
        self._traffic: dict[str, WireTraffic | None] = {}

    def run(self, name: str, times: float, path: tuple[str, ...]) -> None:
        if name not in self._module.computations:
            raise HloTextError(f"computation {name!r} is called but not in the text; give the whole module")
        place = _Place(self._module.computations[name], times, path)
        for x in place.computation.instructions.values():
            self._step(x, place)

    def result(self) -> Simulation:
        state = self._state
        events = sorted((r.event() for r in state.records.values()), key=lambda e: e.start_seconds)
        seconds = max(state.now, *state.free.values())
        busy = {w: sum(e.seconds for e in events if e.resource == w) for w in (KERNELS, *WIRES)}
        return Simulation(
            seconds=seconds,
            kernel_seconds=busy.pop(KERNELS),
            network_seconds={resource: found for resource, found in busy.items() if found},
            exposed_seconds=sum(e.exposed_seconds for e in events),
            flops=sum(e.flops * e.times for e in events),
            mfu=state.ideal_seconds / seconds if seconds else 0.0,
            events=tuple(events),
            unknown_trip_counts=tuple(state.loops),
            unknown_kernels=tuple(state.unknown),
        )

    def _step(self, x: Instruction, place: _Place) -> None:
        match x.opcode:
            case opcode if opcode in FREE:
                pass
            case "while":
                self._while(x, place)
            case "conditional":
                self._conditional(x, place)
            case "call":
                self.run(x.inner[0], place.times, (*place.path, x.name))
            case "async-start" | "call-start":
                self._async(x, place)
            case "recv":  # what is received is sent at the same time, by a send that is simulated
                self._state.pending[x.name] = []
            case "copy-start":
                self._copy(x, place)
            case opcode if opcode.endswith(("-done", "-update")):
                self._done(x, place)
            case opcode if opcode.removesuffix("-start") in COLLECTIVES:
                self._collective(x, place)
            case _:
                self._kernel(x, place)

    # --- what takes time

    def _kernel(self, x: Instruction, place: _Place) -> None:
        if x.name not in self._works:
            self._works[x.name] = work_of(self._module, place.computation, x)
        state, work = self._state, self._works[x.name]
        time = kernel_time(self._chip, work)
        if not time.seconds:
            return
        timing = Timing(time.seconds, time.source)
        self._record(x, place, KERNELS, state.now, timing, work.bytes, work.flops)
        state.now += time.seconds
        ideal = sum(p.flops / peak_flops(self._chip, p.operands) for p in work.products)
        state.ideal_seconds += ideal * place.times
        if not work.known:
            state.unknown[x.name] = None
        for begun in state.pending.values():
            for each in begun:
                if each.is_first:
                    each.record.during.append(x.name)

    def _collective(self, x: Instruction, place: _Place) -> None:
        begun = self._begin(x, place)
        if x.is_synchronous or not (x.opcode.endswith("-start") or x.opcode == "send"):
            self._wait(begun, place.times)
        else:
            self._state.pending[x.name] = begun

    def _begin(self, x: Instruction, place: _Place) -> list[_Begun]:
        """Puts a collective on its wires; nothing for one in groups of one device."""
        if x.name not in self._traffic:
            self._traffic[x.name] = traffic_of(self._module, place.computation, x, self._domains)
        traffic = self._traffic[x.name]
        if traffic is None:
            return []
        return [self._send(x, place, traffic.resource, traffic.timing(self._chip), traffic.bytes)]

    def _copy(self, x: Instruction, place: _Place) -> None:
        """A copy with a start and a done: to or from the host's memory; any other is one more kernel."""
        shapes = arrays(x.shape)[:2]
        if all(shape.space != _HOST_SPACE for shape in shapes):
            self._kernel(x, place)
            return
        size = max(shape.bytes for shape in shapes)
        timing = Timing(LAUNCH_SECONDS + size / HOST_BYTES_PER_SECOND, "formula")
        self._state.pending[x.name] = [self._send(x, place, HOST, timing, size)]

    def _async(self, x: Instruction, place: _Place) -> None:
        """A computation with a start and a done: its collectives run beside the kernels."""
        (name,) = x.called_computations("calls")
        inner = _Place(self._module.computations[name], place.times, (*place.path, x.name))
        begun: list[_Begun] = []
        for each in inner.computation.instructions.values():
            if each.opcode in COLLECTIVES:
                begun += self._begin(each, inner)
            else:
                self._step(each, inner)
        self._state.pending[x.name] = begun

    def _send(self, x: Instruction, place: _Place, resource: str, timing: Timing, size: float) -> _Begun:
        """Puts something on its wires, where it starts when they are free."""
        state = self._state
        start = max(state.now, state.free[resource])
        state.free[resource] = start + timing.seconds
        record = self._record(x, place, resource, start, timing, size, 0.0)
        return _Begun(record, start + timing.seconds, record.times == place.times)

    def _done(self, x: Instruction, place: _Place) -> None:
        begun = self._state.pending.pop(x.operands[0], [])
        if x.opcode.endswith("-update"):
            self._state.pending[x.name] = begun
        elif x.opcode == "recv-done":
            sends = [b for each in self._state.pending.values() for b in each]
            self._wait([b for b in sends if b.record.first.opcode == "send"], place.times)
        else:
            self._wait(begun, place.times)

    def _wait(self, begun: list[_Begun], times: float) -> None:
        """Lets the kernels wait."""
        state = self._state
        for each in sorted(begun, key=lambda b: b.end):
            each.record.exposed += max(0.0, each.end - state.now) * times
            state.now = max(state.now, each.end)

    def _record(
        self,
        x: Instruction,
        place: _Place,
        resource: str,
        start: float,
        timing: Timing,
        size: float,
        flops: float,
    ) -> _Record:
        end, source = start + timing.seconds, timing.source
        event = Event(x.name, x.opcode, resource, start, end, bytes=size, flops=flops, source=source)
        record = self._state.records.setdefault((*place.path, x.name), _Record(event))
        record.times += place.times
        return record

    # --- what holds other computations

    def _while(self, x: Instruction, place: _Place) -> None:
        """The first trip, and a second one that stands for all others."""
        state, path = self._state, (*place.path, x.name)
        start, trips = state.now, self._trips(x, place)
        # Where XLA has counted the trips, nobody asks the condition.
        condition = () if "known_trip_count" in x.config() else x.called_computations("condition")
        for times in [1, trips - 1][: min(trips, 2)]:
            before, free = state.now, dict(state.free)
            for name in (*condition, *x.called_computations("body")):
                self.run(name, place.times * times, path)
            ahead = (times - 1) * (state.now - before)
            state.now += ahead
            state.free = {w: t if t == free[w] else t + ahead for w, t in state.free.items()}
        for name in condition:
            self.run(name, place.times, path)
        self._record(x, place, LOOPS, start, Timing(state.now - start, "formula"), 0.0, 0.0)

    def _trips(self, x: Instruction, place: _Place) -> int:
        """How often a loop runs; if the text does not have it, once, and its name is kept."""
        trips = trip_count(self._module.computations, place.computation, x)
        if trips is not None:
            return trips
        if x.is_overflow:
            return 0  # rounds of a sparse exchange for more keys than planned
        self._state.loops[x.name] = None
        return 1

    def _conditional(self, x: Instruction, place: _Place) -> None:
        """The branch that takes longest: the text does not have which one runs."""
        before, ends = self._state, {}
        for name in x.called_computations(*_BRANCHES):
            self._state = copy.deepcopy(before)
            self.run(name, place.times, (*place.path, x.name))
            ends[name] = self._state.now
        self._state = before
        self.run(max(ends, key=ends.__getitem__), place.times, (*place.path, x.name))
