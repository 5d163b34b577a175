"""The planning problem under a limit on memory: the model with what its choices keep alive.

Where memory is short a value need not be kept under the signature that several uses want. So uses that are
near each other in time are a *cluster* with a share of its own, and a later cluster boxes the value anew from
what is kept: weights at rest in parts are gathered for the forward and again for the backward (ZeRO-3).

Counted are values that are written to memory, as they are made; what they are boxed to, from its boxing to
the end of its use; what libraries want laid out otherwise; arguments and results all the time. Copies take
variables of their own: whether there is one depends on two choices. What the evaluator's kernels and bodies
hold beside that is not counted, and it has the last word (passes/search/limited_space.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.passes.boxing.paths import Boxing, Boxings
from sbp.passes.plan import constants
from sbp.passes.plan.budget import Load
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.clusters import Cluster
from sbp.passes.plan.cost import local_bytes
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model, ValueUse
from sbp.passes.plan.network import IndexedNetwork, IndexedTable, Table, written_down
from sbp.passes.plan.traffic import Lifetime, OperandCopy
from sbp.passes.program.graph import Const
from sbp.signature import NdSbp


@dataclass(frozen=True, slots=True)
class BoxedOnce:
    """A value of one use.

    Arguments:
      copy: the variable with whether it is boxed: copies, then none, under each signature that is wanted.
      supply: where it comes from.
      at: when it is boxed, as the search counts it.
    """

    copy: int
    supply: ValueUse
    at: int


class RoomModel(Model):
    """The model of a program under a limit; `loads` has what its states keep in memory once it is built.

    Arguments:
      limit_bytes: about what a device has; the size of what is small.
      donated: positions of the inputs whose memory the results may take.
      holes: of what is neither argument nor result, what lies unused between.
    """

    has_chains = False
    """Whether anything is made again long before its own uses, for others that are."""

    def __init__(
        self,
        candidates: Candidates,
        boundary: Boundary,
        boxings: Boxings,
        limit_bytes: float,
        donated: Sequence[int] = (),
        holes: float = 0.0,
    ) -> None:
        super().__init__(candidates, boundary, boxings)
        self.large_bytes = constants.SMALL_PART * limit_bytes
        self.donated, self.holes = frozenset(donated), holes
        self.times = dict(candidates.times)
        self.end = max((end for _, end in self.times.values()), default=0)
        self.lives = {life.value: life for life in candidates.lives}
        self.outermost = {n.id for n in self.graph.nodes}
        self.arguments = frozenset(self.graph.inputs)
        self.results = frozenset(x for x in self.graph.outputs if not isinstance(x, Const))
        self.near: dict[int, list[tuple[int | None, list[ValueUse]]]] = {}
        self.loads: list[Load] = []
        self.boxed_once: dict[int, BoxedOnce] = {}

    def build_indexed(self) -> IndexedNetwork:
        """The network, with variables for copies."""
        super().build_indexed()
        self.load_results()
        for v, uses in self.demand.items():
            if uses:  # none of what would be made again for ops that are not run again themselves
                self.load_value(v, uses)
        for v in dict.fromkeys(self.graph.inputs):
            if v not in self.demand:  # nobody uses it, and it is there all the same
                self.load(self.supply[v].variable, 0, self.end + 1, self.sizes(v, self.supply[v].needs))
        for copy in self.c.operand_copies:
            self.load_copy(copy)
        return self.network()

    def serve(self, v: int, supply: ValueUse, uses: list[ValueUse]) -> None:
        """Edges to the uses, through a share for each of several clusters."""
        clusters = self.cluster_uses(v, uses)
        if len(clusters) < 2:
            super().serve(v, supply, uses)
            return
        self.near[v] = []
        for cluster in clusters:
            share = self.share(v, supply, cluster) if len(cluster) > 1 else None
            self.near[v].append((None if share is None else share.variable, cluster))
            for use in cluster:
                self.edge(v, supply if share is None else share, use)

    def cluster_uses(self, v: int, uses: list[ValueUse]) -> list[list[ValueUse]]:
        """The uses in clusters; one for what bodies of loops use, or what is small."""
        outside = v in self.arguments or (v in self.lives and self.supply[v].times == 1)
        if not outside or not self.is_large(v) or any(not self.is_outermost(u) for u in uses):
            return [uses]
        clusters: list[list[ValueUse]] = []
        until = 0
        for use in sorted(uses, key=lambda u: self.when(u)[0]):
            start, end = self.when(use)
            if not clusters or start - until > constants.APART_PART * self.end:
                clusters.append([])
            clusters[-1].append(use)
            until = max(until, end)
        return clusters

    def is_large(self, v: int) -> bool:
        """Whether copies of a value are counted."""
        value = self.graph.values[v]
        return local_bytes(value.shape, value.dtype, (), ()) >= self.large_bytes

    def is_outermost(self, use: ValueUse) -> bool:
        """Whether a use is in no body of a loop."""
        return use.user < 0 or use.user in self.outermost

    def when(self, use: ValueUse) -> tuple[int, int]:
        """From when until when an op runs; a result is boxed at the end."""
        return self.c.times[use.user] if use.user >= 0 else (self.end, self.end + 1)

    # What is alive.

    def load_results(self) -> None:
        """Results lie in spaces of their own all the time, but for those of donated arguments."""
        for x, variable, tie in zip(self.graph.outputs, self.outputs, self.boundary.ties, strict=True):
            if isinstance(x, Const) or variable is None or tie in self.donated:
                continue
            self.load(variable, 0, self.end + 1, self.sizes(x, tuple(self.states[variable])))

    def load_value(self, v: int, uses: list[ValueUse]) -> None:
        """Loads of a value as it is made, and of its copies."""
        life, supply = self.lives.get(v), self.supply[v]
        is_argument = v in self.arguments
        if is_argument:
            self.load(supply.variable, 0, self.end + 1, self.sizes(v, supply.needs))
        elif v in self.results or (life is not None and life.is_result):
            life = None
        if not self.is_large(v):
            if life is not None and not is_argument:
                self.load(supply.variable, life.start, life.end, self.held_bytes(v, supply.needs))
            return
        if v in self.shares:
            self.load_share(v, uses, None if is_argument else life)
        else:
            self.load_single(v, uses[0], life, is_argument)

    def load_single(self, v: int, use: ValueUse, life: Lifetime | None, is_argument: bool) -> None:
        """A value of one use: as it is made until it is boxed, and as it is wanted from then on."""
        supply, (at, end) = self.supply[v], self.when(use)
        end = max(end, life.last if life is not None else end)
        if life is not None and not is_argument:
            self.load(supply.variable, life.start, at + 1, self.held_bytes(v, supply.needs))
        copy = self.copies(v, supply, use, at, end, whole_time=life is not None and not is_argument)
        if copy is not None:
            self.boxed_once[v] = BoxedOnce(copy, supply, at)

    def load_share(self, v: int, uses: list[ValueUse], life: Lifetime | None) -> None:
        """A value of several uses: its share, those of its clusters, and what each of them takes."""
        supply, times = self.supply[v], [self.when(use) for use in uses]
        first, last = min(t for t, _ in times), max(t for _, t in times)
        states = tuple(self.states[self.shares[v]])
        share = ValueUse(self.shares[v], states, (), 1)
        near = self.near.get(v, [(None, uses)])
        if life is not None:
            self.load(supply.variable, life.start, first + 1, self.held_bytes(v, supply.needs))
            self.load(share.variable, first + 1, life.end, self.held_bytes(v, states))
            last = first + 1
        elif v in self.arguments and len(near) > 1 and self.is_updated(v):
            # The update takes what lies at rest.
            last = max(self.when(use)[1] for _, cluster in near[:-1] for use in cluster)
        self.copies(v, supply, share, first, last)
        for variable, cluster in near:
            source = share
            if variable is not None:
                source = ValueUse(variable, tuple(self.states[variable]), (), 1)
                at = [self.when(use) for use in cluster]
                self.copies(v, share, source, min(t for t, _ in at), max(t for _, t in at))
            for use in cluster:
                self.copies(v, source, use, *self.when(use))

    def load_copy(self, x: OperandCopy) -> None:
        """What a library wants laid out otherwise, under the signature that the first op wants."""
        needs = self.column(self.c.strategies[x.node], "operands", x.operand)
        sizes = self.sizes(x.value, needs, x.factor * (1.0 + self.holes))
        self.load(self.nodes[x.node], x.start, x.end, sizes)

    def is_updated(self, v: int) -> bool:
        """Whether an argument comes back with its next value."""
        return self.graph.inputs.index(v) in self.boundary.ties

    def copies(
        self, v: int, source: ValueUse, use: ValueUse, start: int, end: int, *, whole_time: bool = False
    ) -> int | None:
        """A variable with what a use has of a value beside its source: a copy under another signature. Its
        states: a copy, or none, under each that the use wants, in their order; None if there is never one.

        Arguments:
          start, end: from the boxing to the end of the use.
          whole_time: whether it has the value after the boxing even if there is no copy.
        """
        boxing = self.boxing(v)
        # What is merged into its readers is written at all only because it is boxed.
        computed = v not in self.lives and v not in self.arguments
        key = "copies", id(boxing), id(source.needs), id(use.needs), computed
        if key not in self.columns:
            own = tuple(dict.fromkeys(use.needs))
            place = {nd: k for k, nd in enumerate(own)}
            same = np.tile(np.where(np.eye(len(own), dtype=np.bool_), 0.0, np.inf), 2)
            made = self.copy_mask(boxing, source.needs, own, computed)
            free = np.where(made, np.inf, 0.0)
            beside = np.where(made, self.held_bytes(v, source.needs)[:, None], np.inf).min(axis=0)
            beside[np.isinf(beside) | (not computed)] = 0.0
            self.columns[key] = (
                written_down(np.hstack([np.where(made, 0.0, np.inf), free])),
                IndexedTable(same, np.array([place[nd] for nd in use.needs]), np.arange(2 * len(own))),
                np.zeros(2 * len(own)),
                beside,
                own,
                bool(made.any()),
                (boxing, source.needs, use.needs),
            )
        before, match, zero, beside, own, is_boxed, _ = self.columns[key]
        if not is_boxed and not whole_time:
            return None
        n, sizes = len(own), self.held_bytes(v, own)
        variable = self.variable((*own, *own), zero)
        self.add_edge(v, source.variable, variable, before)
        self.add_edge(v, use.variable, variable, match)
        alone = np.concatenate([sizes, np.zeros(n)])
        self.load(variable, start, start + 1, alone + np.concatenate([beside, np.zeros(n)]))
        self.load(variable, start + 1, end, np.concatenate([sizes, sizes if whole_time else np.zeros(n)]))
        return variable

    def copy_mask(
        self, boxing: Boxing, before: tuple[NdSbp, ...], after: tuple[NdSbp, ...], computed: bool
    ) -> NDArray[np.bool_]:
        """Whether boxing makes a copy, per signature before and after: a collective other than an all-reduce,
        which writes over its operand; of what is computed where it is read, any. Cuts and zeros are computed
        by who reads them."""
        rows, columns = ([boxing.index[nd] for nd in nds] for nds in (before, after))
        return boxing.sends[int(computed)][np.ix_(rows, columns)]

    def load(self, variable: int, start: int, end: int, sizes: Table) -> None:
        """Adds a load, unless it is of no time."""
        if start < end:
            self.loads.append(Load(variable, start, end, sizes))

    def held_bytes(self, v: int, signatures: tuple[NdSbp, ...]) -> Table:
        """The bytes of a temporary under each signature, with the holes beside it."""
        return self.sizes(v, signatures, 1.0 + self.holes)

    def sizes(self, v: int, signatures: tuple[NdSbp, ...], factor: float = 1.0) -> Table:
        """Of a device's part of a value under each signature."""
        value, hierarchy = self.graph.values[v], self.c.placement.shape
        # By identity: to hash hundreds of signatures for each value would take longer than all else here.
        key: Any = "bytes", value.shape, str(value.dtype), id(signatures), factor
        if key not in self.columns:
            parts = [factor * local_bytes(value.shape, value.dtype, nd, hierarchy) for nd in signatures]
            self.columns[key] = np.array(parts), signatures
        found: Table = self.columns[key][0]
        return found

    def chosen_signatures(self, states: Sequence[int], cost: float, bound: float) -> ChosenSignatures:
        """What states of the variables mean, with the clusters."""
        clusters = {
            v: tuple(
                Cluster(
                    frozenset(use.user for use in cluster),
                    None if variable is None else self.states[variable][states[variable]],
                )
                for variable, cluster in near
            )
            for v, near in self.near.items()
        }
        return replace(super().chosen_signatures(states, cost, bound), clusters=clusters)
