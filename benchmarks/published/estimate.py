"""From a row to seconds: stages are planned, their times go through a schedule, the end is added."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import prod

from benchmarks.published.chips import hardware_of, kind_of
from benchmarks.published.layout import Lying
from benchmarks.published.model import Stage
from benchmarks.published.moved import layer_weights, moved_bytes
from benchmarks.published.program import StageProgram
from benchmarks.published.recompute import EVERYTHING, NOTHING, kept_results
from benchmarks.published.rows import PublishedStep
from sbp.hardware.catalogue import Hardware
from sbp.passes.boxing.links import Network
from sbp.passes.explain.plan import Collective
from sbp.passes.schedule.orders import make
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times


@dataclass(frozen=True, slots=True)
class EndSeconds:
    """What follows the passes of a step on one rank.

    Arguments:
      sum, send: of the gradients over copies of the weights, and of new weights to them.
      update: of the optimizer.
    """

    sum: float
    send: float
    update: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step and where they are.

    Arguments:
      seconds: of the step.
      passes: forward and backward passes without any wait, of the busiest rank.
      bubble: in which that rank waits for others.
      exposed: sums of gradients and new weights, where no pass hides them.
      update: of the optimizer.
      kept: names of results that are kept for the backward pass.
    """

    seconds: float
    passes: float
    bubble: float
    exposed: float
    update: float
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Of forward and backward of a part of the model.

    Arguments:
      step, serial: with collectives beside kernels as XLA has them, and one after the other.
      kernels: without collectives.
      others: of what context parallel devices send to each other alone: keys and values.
    """

    step: float
    serial: float
    kernels: float
    others: float

    def __sub__(self, less: PassSeconds) -> PassSeconds:
        return PassSeconds(*(a - b for a, b in zip(astuple(self), astuple(less), strict=True)))


@dataclass
class Estimator:
    """Estimates a row; equal parts of the model are planned once.

    Arguments:
      on: the hardware; None for the row's chip as it runs for hours.
    """

    row: PublishedStep
    on: Hardware | None = None
    hardware: Hardware = field(init=False)
    kept: Collection[str] = field(init=False)
    lying: Lying = field(init=False)
    _known: dict[Stage, PassSeconds] = field(init=False, default_factory=dict)
    _ends: dict[Stage, EndSeconds] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.hardware = hardware_of(self.row.chip) if self.on is None else self.on
        self.lying = Lying(kind_of(self.row.chip), self.row.layout, self.row.sequence_parallel)
        self.kept = kept_results(self.row, self.hardware)

    def estimate(self) -> Estimate:
        """What a step takes."""
        ways, trips = self.row.layout, self.row.micro_batches
        stages = stages_of(self.row)
        both = [self._passes_seconds(stage) for stage in stages]
        # A backward pass has two products for each of a forward pass, and those that are computed again. How
        # both share the time of a micro-batch hardly matters to a pipeline: its bubble is of their sum.
        forward = [x / (3 + _recomputed(self.kept)) for x in both]
        passes = max(trips * sum(both[rank :: ways.pp]) for rank in range(ways.pp))
        makespan = passes if ways.pp == 1 else self._makespan(both, forward)
        waits = []
        for rank in range(ways.pp):
            end = self._end_seconds(_together(stages[rank :: ways.pp]))
            # Buckets of gradients leave while the last backward pass goes on, and new weights arrive while
            # the next forward pass does, as in Megatron and in PyTorch.
            first, last = sum(forward[rank :: ways.pp]), sum(both[rank :: ways.pp])
            exposed = max(0.0, end.sum - (last - first)) + max(0.0, end.send - first)
            waits.append((end.update, exposed))
        update, exposed = max(waits, key=sum)
        seconds = makespan + update + exposed
        return Estimate(seconds, passes, makespan - passes, exposed, update, tuple(sorted(self.kept)))

    def _makespan(self, both: list[float], forward: list[float]) -> float:
        """Of the passes of all micro-batches through the pipeline."""
        ways, trips = self.row.layout, self.row.micro_batches
        name, chunks = ("1f1b", 1) if ways.vp == 1 else ("interleaved", ways.vp)
        if chunks > 1 and trips >= 2 * ways.pp and trips % (trips // ways.pp):
            # Rounds of micro-batches that are not equal: nothing is interleaved then.
            name, chunks = "1f1b", 1
            both, forward = ([sum(x[r :: ways.pp]) for r in range(ways.pp)] for x in (both, forward))
        rank_of = tuple(range(ways.pp)) * chunks
        backward = tuple(b - f for b, f in zip(both, forward, strict=True))
        times = Times(tuple(forward), backward, (0.0,) * len(both), transfer=self._hop_seconds())
        return float(simulate(make(name, rank_of, trips), times).makespan)

    def _hop_seconds(self) -> float:
        """Of the activations of one micro-batch from one stage to the next, each device sending its part."""
        row, ways = self.row, self.row.layout
        own = range(row.gpus // ways.pp)
        link = self.hardware.link_between(own, [r + len(own) for r in own])
        sent = 2 * row.micro_batch * row.sequence * row.width / (ways.cp * ways.tp)
        return link.latency_seconds + sent / link.bytes_per_second

    def _passes_seconds(self, stage: Stage) -> float:
        """Of forward and backward of one micro-batch in a stage: the sum of its parts.

        A layer is what a third one adds to two: between others, it hides what it sends as most layers do.
        """
        found = 0.0
        for count, one in (
            (stage.dense, Stage(1, 0, False, False)),
            (stage.sparse, Stage(0, 1, False, False)),
        ):
            found += count * self._layer_seconds(one) if count else 0.0
        for has, end in ((stage.first, Stage(0, 0, True, False)), (stage.last, Stage(0, 0, False, True))):
            found += self._planned(end).step if has else 0.0
        return found

    def _layer_seconds(self, one: Stage) -> float:
        two, three = (replace(one, dense=n * one.dense, sparse=n * one.sparse) for n in (2, 3))
        layer = self._planned(three) - self._planned(two)
        moved = moved_bytes(self.row, one) / self.hardware.memory_bytes_per_second
        if self.row.framework.units and self.row.layout.fsdp > 1 and not one.sparse:
            return self._in_units(layer.kernels + moved, one) + layer.others
        if self.row.in_loop:
            # Plans have kernels as fast in loops as alone.
            return layer.step + moved + (1 - self.hardware.beside_share) * (layer.serial - layer.step)
        return layer.step + moved

    def _in_units(self, kernels: float, one: Stage) -> float:
        """A layer whose weights are gathered as one message while the layer before it computes, and once more
        for the backward pass, and whose gradients are summed up as one while the next one computes."""
        placement, weights = self.lying.one_copy.placement, layer_weights(self.row, one)
        network = Network(placement, self.hardware)
        cutting = {i: a.size for i, a in enumerate(self.lying.one_copy.axes) if a.way == "shard"}
        axes, ranks = tuple(cutting), prod(cutting.values())
        used, summed = 1 if self.row.precision == "fp8" else 2, 4 if self.row.framework.wide_sums else 2

        def seconds(kind: str, each: int) -> float:
            return network.collective_seconds(kind, axes, each * weights * (ranks - 1) / ranks)

        gathered = seconds("all_gather", used)
        forward = kernels / (3 + _recomputed(self.kept))
        backward = self._beside(kernels - forward, gathered + seconds("reduce_scatter", summed))
        return self._beside(forward, gathered) + backward + self._between_products(network)

    def _between_products(self, network: Network) -> float:
        """What tensor parallel devices send between the products of a layer: kernels wait for all of it.

        Activations are gathered before two products of a layer and summed up after two, and so are their
        gradients in the backward pass; what two products read is gathered once more for the gradients of
        their weights (arXiv:2205.05198, 4.2.2). A layer that is computed again sends all again.
        """
        row = self.row
        if row.layout.tp == 1:
            return 0.0
        axis = self.lying.one_copy.placement.axes.index("tp")
        tokens = row.micro_batch * row.sequence / row.layout.cp
        share = (row.layout.tp - 1) / row.layout.tp
        gathers, sums = (8, 6) if self.kept == NOTHING else (6, 4)
        read = 1 if row.precision == "fp8" else 2  # what products read in 8 bits is sent in 8

        def seconds(kind: str, each: int) -> float:
            return network.collective_seconds(kind, (axis,), each * tokens * row.width * share)

        return gathers * seconds("all_gather", read) + sums * seconds("reduce_scatter", 2)

    def _beside(self, kernels: float, sending: float) -> float:
        """Kernels while something is sent, which takes some of the chip from them."""
        share = self.hardware.beside_share
        slowed = min(kernels, share * sending)
        return max(sending, kernels + slowed * (1 / share - 1))

    def _planned(self, part: Stage) -> PassSeconds:
        if part not in self._known:
            plan = self._program(part, self.lying.one_copy).passes_plan()
            kernels = plan.seconds - sum(c.seconds for c in plan.collectives)
            others = sum(c.seconds for c in plan.collectives if c.axes == ("cp",))
            self._known[part] = PassSeconds(plan.step_seconds, plan.seconds, kernels, others)
        return self._known[part]

    def _program(self, stage: Stage, lying: Lying) -> StageProgram:
        return StageProgram(self.row, stage, lying, self.hardware, self.kept)

    def _end_seconds(self, rank: Stage) -> EndSeconds:
        """Of all that one rank of the pipeline has."""
        if rank not in self._ends:
            program = self._program(rank, self.lying)
            plans = [plan for plan in map(program.update_plan, (False, True)) if plan is not None]
            self._ends[rank] = EndSeconds(
                sum(c.seconds for p in plans for c in p.collectives if not _is_send(c)),
                sum(c.seconds for p in plans for c in p.collectives if _is_send(c)),
                sum(p.seconds - sum(c.seconds for c in p.collectives) for p in plans),
            )
        return self._ends[rank]


def _together(stages: Sequence[Stage]) -> Stage:
    """Several stages as one."""
    dense, sparse, first, last = zip(*map(astuple, stages), strict=True)
    return Stage(sum(dense), sum(sparse), any(first), any(last))


def _recomputed(kept: Collection[str]) -> float:
    """Roughly which share of a forward pass is computed again."""
    if kept == NOTHING:
        return 1.0
    return 0.0 if kept == EVERYTHING else 0.5


def _is_send(c: Collective) -> bool:
    """Whether new weights are sent in it, `parts n`; all others bring gradients to where they are summed up,
    whatever their kind."""
    return c.kind == "all_gather" and len(c.shape) == 2


def stages_of(row: PublishedStep) -> list[Stage]:
    """The stages of a pipeline, as even as layers divide; the first and the last have less if they do not."""
    count = row.layout.pp * row.layout.vp
    each, more = divmod(row.layers, count)
    # Embedding and head are work too: what is left over goes to the others first, from behind.
    order = [*range(count - 2, 0, -1), 0, count - 1] if count > 1 else [0]
    layers = [each + (i in order[:more]) for i in range(count)]
    dense = row.experts.dense_layers if row.experts else row.layers
    found = []
    for i, n in enumerate(layers):
        begin = sum(layers[:i])
        mine = max(0, min(n, dense - begin))
        found.append(Stage(mine, n - mine, i == 0, i == count - 1))
    return found
