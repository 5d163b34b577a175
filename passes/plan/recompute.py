"""The planning problem under a limit on memory in which ops may run again, so that less is kept.

A value that is made early and used again much later has a second value beside it here, for its later uses.
A variable decides where that comes from: the first one is kept until then (as its share lies), the op that
made it runs again (under any of its signatures), or nobody needs it. An op that runs again wants its
operands late, which again are kept, boxed anew or recomputed. So chains of ops that run again come by
themselves, and whether a product is worth it is a matter of costs.

What may run again: ops of the program itself (none in a loop's or a branch's body) that have one result and
do nothing besides, that need no gradient, and under signatures with which they send nothing themselves. Small
values are kept as ever.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.passes.boxing.paths import Boxing, Boxings
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.clusters import Cluster, RecomputedValue, op_count
from sbp.passes.plan.live_ranges import NOWHERE, LaterUse, LaterUses, UnwrittenValues, UseSpan, is_plain
from sbp.passes.plan.memory_problem import RoomModel
from sbp.passes.plan.model import Boundary, ChosenSignatures, ValueUse
from sbp.passes.plan.network import IndexedTable, Indices, Table, written_down
from sbp.passes.plan.traffic import Lifetime
from sbp.passes.program.graph import Const, Node, Value
from sbp.passes.program.views import communication_of
from sbp.signature import B, NdSbp, Partial


class RecomputingModel(RoomModel):
    """The model of a program under a limit; ops may run again.

    Arguments as of `RoomModel`; `by_chain`: whether what is made again for others that are, long before its
    own later uses, is counted from the first of them on, however many are between; else of each two alone,
    which is too low for long chains, but a smaller problem.
    """

    def __init__(
        self,
        candidates: Candidates,
        boundary: Boundary,
        boxings: Boxings,
        limit_bytes: float,
        donated: Sequence[int] = (),
        holes: float = 0.0,
        by_chain: bool = False,
    ) -> None:
        super().__init__(candidates, boundary, boxings, limit_bytes, donated, holes)
        self.by_chain = by_chain
        self.count = op_count(self.graph)
        self.stride = 2 * self.count + len(self.graph.values)
        """Ids of users: ops, copies, what keeps values; stride by stride follow the operands of copies."""
        self.later: dict[int, LaterUse] = {}
        self.makers = {v: n for n in self.graph.nodes for v in n.outputs}
        self.wider: dict[Any, tuple[Table, Boxing]] = {}
        self.boxed: dict[int, int] = {}
        """Per value, the variable with whether its share is boxed."""
        self.unwritten = UnwrittenValues(self, self.later)

    def complete_demand(self) -> None:
        """Divides the uses of what may be recomputed into early and later ones."""
        self.uses = LaterUses(self)
        wanted = self.uses.wanted_later()
        self.has_chains = any(x.soonest < x.start for x in wanted.values())
        values, partials, dims = list(self.graph.values), dict(self.c.partials), dict(self.c.dims)
        second = dict[int, int]()
        for v in wanted:
            like = values[v]
            second[v] = len(values)
            values.append(Value(len(values), like.shape, like.dtype, like.name))
            partials[second[v]], dims[second[v]] = partials[v], dims[v]
        self.graph = replace(self.graph, values=tuple(values))
        self.c = replace(self.c, partials=partials, dims=dims, graph=self.graph)
        for v, span in wanted.items():
            self.add_later(v, second, span)

    def add_later(self, v: int, second: dict[int, int], span: UseSpan) -> None:
        """Adds the variable of a value's later uses, and moves these to the second value."""
        node, p, early, late = self.makers[v], second[v], span.early_uses, span.late_uses
        nothing, strategies = 0 if late else 1, self.silent(node)
        shared = (
            self.share_signatures(self.supply[v], early, self.c.partials[v])
            if early
            else self.supply[v].needs
        )
        each, ways = shared, 1
        if v not in self.lives:
            ways = 3 if early and self.unwritten.is_computed_again(node) else 2
            shared = self.columns.setdefault((ways, "times", id(each)), (each * ways, each))[0]
        starts = tuple(dict.fromkeys((span.start, span.soonest if self.by_chain else span.start)))
        n, key = len(shared), (id(shared), id(strategies), nothing, len(starts))
        made = self.column(strategies, "results", 0) * len(starts) if strategies else ()
        lies = self.pad((*key, "lies"), 0, (*shared, *made), nothing)
        # What has no early use is made later only; what it takes is counted already.
        again = np.zeros(len(strategies))
        if early and strategies:
            every = self.c.strategies[node.id]
            again = self.costs[id(every), 1, self.c.traffic.get(node.id)]
            if strategies is not every:
                own_ids = set(map(id, strategies))
                again = again[[id(s) in own_ids for s in every]]
        costs = np.concatenate([np.zeros(n), np.tile(again, len(starts)), np.zeros(nothing)])
        variable = self.variable(lies, costs)
        own, keeping = self.count + node.id, 2 * self.count + v
        alike = self.alike(True, len(lies))
        keep = ValueUse(variable, self.pad((*key, "keep"), 0, shared, len(lies) - n), alike, 1, keeping)
        life = self.lives.get(v)
        since = max([self.times[node.id][1], *(t for _, t in self.uses.reads(v) if t <= span.start)])
        until = span.until if life is None else max(span.until, life.last)
        users = frozenset(u.user for u in late)
        begins = np.array([*[math.inf] * n, *np.repeat(starts, len(strategies)), *[math.inf] * nothing])
        self.later[v] = LaterUse(v, node, p, variable, n, n // ways, users, since, span.start, until, begins)
        if ways == 3:
            self.unwritten.charge(self.later[v], self.nodes[node.id])
        self.times[keeping], self.times[own] = (since - 1, since), (span.start, span.start + 1)
        self.outermost.update((keeping, *(own + k * self.stride for k in range(len(node.inputs) + 1))))
        self.demand[v], self.demand[p] = [*early, keep], [*late]
        self.supply[p] = ValueUse(variable, lies, (), 1)
        if life is not None:
            self.lives[v] = replace(life, end=min(life.end, since), last=min(life.last, since))
            self.lives[p] = Lifetime(p, span.start, until, span.start, until)
            self.load(
                variable, starts[-1], span.start, np.where(begins < span.start, self.held_bytes(v, lies), 0.0)
            )
        for k, x in enumerate(node.inputs if strategies else ()):
            if not isinstance(x, Const):
                wanted = self.column(strategies, "operands", k) * len(starts)
                needs = self.pad((*key, k), n, wanted, nothing)
                self.want_later(x, second, ValueUse(variable, needs, alike, 1, own + self.stride * (k + 1)))
                if self.by_chain and x in self.later:
                    self.add_order(self.later[x], self.later[v])

    def want_later(self, x: int, second: Mapping[int, int], use: ValueUse) -> None:
        """An operand of an op that may run again, maybe earlier than its own later uses are."""
        start = at = self.times[use.user % self.stride][0]
        if x in self.later:
            at = max(start, self.later[x].start)
            if not self.by_chain and x in self.lives and at - start > constants.NEAR_PART * self.end:
                self.load_early(self.later[x], use, start)
            if self.later[x].has_spots:
                self.unwritten.read_again(self.later[x], use.variable, use.needs)
        self.times[use.user] = at, at + 1
        self.demand.setdefault(second.get(x, x), []).append(use)

    def load_early(self, x: LaterUse, use: ValueUse, start: int) -> None:
        """A variable with what is made again for another op that runs again, until its own later uses."""
        lies = tuple(self.states[x.variable])
        again = tuple(dict.fromkeys(nd for nd in lies[x.kept_count :] if nd is not NOWHERE))
        key = "early", id(self.states[x.variable]), id(use.needs)
        if key not in self.columns:
            # Its states: how it lies; nobody wants it early; it is not made again.
            made = [k >= x.kept_count and nd is not NOWHERE for k, nd in enumerate(lies)]
            first = [[*(m and nd == b for b in again), True, not m] for nd, m in zip(lies, made, strict=True)]
            wanted = [nd is not NOWHERE for nd in use.needs]
            then = [[*(w for _ in again), not w, True] for w in wanted]
            tables = (written_down(np.where(table, 0.0, np.inf)) for table in (first, then))
            self.columns[key] = *tables, lies, use.needs
        first_table, then_table = self.columns[key][:2]
        variable = self.variable((*again, NOWHERE, NOWHERE))
        self.add_edge(x.value, x.variable, variable, first_table)
        self.add_edge(x.value, use.variable, variable, then_table)
        self.load(variable, start, x.start, self.held_bytes(x.value, (*again, NOWHERE, NOWHERE)))

    def add_order(self, first: LaterUse, second: LaterUse) -> None:
        """What is made again of a value that is made again too is made after it."""
        sooner, later = first.begins[:, None], second.begins[None, :]
        allowed = (sooner <= later + constants.NEAR_PART * self.end) | np.isinf(sooner) | np.isinf(later)
        key = "order", allowed.shape, allowed.tobytes()
        table = self.tables.setdefault(key, written_down(np.where(allowed, 0.0, np.inf)))
        self.add_edge(first.value, first.variable, second.variable, table)

    def silent(self, node: Node) -> tuple[Strategy, ...]:
        """The signatures under which an op may run again."""
        listed = self.c.strategies[node.id] if is_plain(node) else ()
        if node.rule is None or node.rule.communication is None or not listed:
            return listed
        key = "silent", id(listed)
        if key not in self.columns:
            shape = self.c.placement.shape
            self.columns[key] = tuple(
                s for s in listed if not communication_of(self.graph, node, s.signatures, shape)
            )
        return self.columns[key]

    def pad(self, key: Any, before: int, signatures: tuple[NdSbp, ...], after: int) -> tuple[NdSbp, ...]:
        """Signatures with nothing before and after them; the same object for the same key."""
        made = (*[NOWHERE] * before, *signatures, *[NOWHERE] * after)
        return self.columns.setdefault(("padded", *key), made)

    def when(self, use: ValueUse) -> tuple[int, int]:
        """From when until when an op runs, the copies of ops too."""
        return self.times[use.user] if use.user >= 0 else super().when(use)

    def share_signatures(
        self, supply: ValueUse, uses: Sequence[ValueUse], natural: frozenset[str]
    ) -> tuple[NdSbp, ...]:
        """What a value may be boxed to first; nothing, where there may be nothing."""
        key = id(supply.needs), natural, *dict.fromkeys(id(u.needs) for u in uses)
        if key not in self.merged:
            every = dict.fromkeys((*supply.needs, *(nd for u in uses for nd in u.needs)))
            last = (NOWHERE,) if NOWHERE in supply.needs else ()
            every.pop(NOWHERE, None)
            legal = (nd for nd in every if all(s.op in natural for s in nd if isinstance(s, Partial)))
            self.merged[key] = (*legal, *last)
        return self.merged[key]

    def edge(self, v: int, supply: ValueUse, use: ValueUse) -> None:
        """An edge; nothing can be brought anywhere where nothing is wanted, and nowhere else."""
        key = "wide", id(self.boxing(v)), id(supply.needs), id(use.needs), id(use.strict), use.times
        if use.user % self.stride >= 2 * self.count and use.user > 0:
            if ("keep", *key[2:4]) not in self.tables:
                number = {nd: k for k, nd in enumerate(dict.fromkeys((*supply.needs, *use.needs)))}
                rows, columns = (np.array([number[nd] for nd in nds]) for nds in (supply.needs, use.needs))
                same = (rows[:, None] == columns[None, :]) | (columns == number.get(NOWHERE, -1))[None, :]
                self.tables["keep", *key[2:4]] = written_down(np.where(same, 0.0, np.inf))
            self.add_edge(v, supply.variable, use.variable, self.tables["keep", *key[2:4]])
        elif self.fill(supply.needs)[1] is None and self.fill(use.needs)[1] is None:
            super().edge(v, supply, use)
        else:
            if key not in self.tables:
                self.tables[key] = self.wide_table(self.boxing(v), supply, use)
            self.add_edge(v, supply.variable, use.variable, self.tables[key])

    def wide_table(self, boxing: Boxing, supply: ValueUse, use: ValueUse) -> IndexedTable:
        """What boxing takes where there may be nothing, or nothing may be wanted."""
        n = len(boxing.universe)
        if id(boxing) not in self.wider:
            core = np.zeros((n + 1, 2 * n + 1))
            core[:n, : 2 * n] = boxing.both
            core[n, : 2 * n] = np.inf
            self.wider[id(boxing)] = core, boxing
        rows = [n if nd is NOWHERE else boxing.index[nd] for nd in supply.needs]
        columns = [
            2 * n if nd is NOWHERE else boxing.index[nd] + n * bool(strict)
            for nd, strict in zip(use.needs, use.strict, strict=True)
        ]
        return IndexedTable(self.wider[id(boxing)][0], np.array(rows), np.array(columns), float(use.times))

    def order(self) -> Indices:
        """The variables as the program runs; where a later use is served from stands before it."""
        place = np.empty(len(self.states))
        place[super().order()] = np.arange(len(self.states))
        for x in reversed(self.later.values()):
            users = [place[u.variable] for u in self.demand[x.id]]
            place[x.variable] = min(users) - 0.5 if users else place[x.variable]
            if x.id in self.shares:
                place[self.shares[x.id]] = place[x.variable] + 0.25
        return np.argsort(place, kind="stable")

    # What is alive.

    def load_value(self, v: int, uses: list[ValueUse]) -> None:
        """Loads of a value and of its copies; of one that may be kept for its later uses, until these."""
        super().load_value(v, uses)
        later = self.later.get(v)
        if later is not None and v in self.lives:
            sizes = self.held_bytes(v, tuple(self.states[later.variable])).copy()
            sizes[later.kept_count :] = 0.0
            self.load(later.variable, later.since, later.start, sizes)
        elif later is not None:
            self.unwritten.keep(later, self.boxed.get(v))

    def copies(
        self, v: int, source: ValueUse, use: ValueUse, start: int, end: int, *, whole_time: bool = False
    ) -> int | None:
        """A variable with what a use has beside its source; what is kept for later is no copy."""
        if use.user > 0 and use.user % self.stride >= 2 * self.count:
            return None
        copy = super().copies(v, source, use, start, end, whole_time=whole_time)
        if copy is not None and self.shares.get(v) == use.variable:
            self.boxed[v] = copy
        return copy

    def copy_mask(
        self, boxing: Boxing, before: tuple[NdSbp, ...], after: tuple[NdSbp, ...], computed: bool
    ) -> NDArray[np.bool_]:
        """Whether boxing makes a copy; of nothing there is none."""
        there, wanted = (np.array([nd is not NOWHERE for nd in nds]) for nds in (before, after))
        made = super().copy_mask(boxing, self.fill(before)[0], self.fill(after)[0], computed)
        return made & np.outer(there, wanted)

    def sizes(self, v: int, signatures: tuple[NdSbp, ...], factor: float = 1.0) -> Table:
        """Of a device's part of a value under each signature; of nothing none."""
        filled, nowhere = self.fill(signatures)
        found = super().sizes(v, filled, factor)
        return found if nowhere is None else np.where(nowhere, 0.0, found)

    def fill(self, signatures: tuple[NdSbp, ...]) -> tuple[tuple[NdSbp, ...], NDArray[np.bool_] | None]:
        """Signatures with a whole value instead of nothing, and which these are, if any."""
        key = "filled", id(signatures)
        if key not in self.columns:
            nowhere = np.array([nd is NOWHERE for nd in signatures], dtype=np.bool_)
            whole = (B,) * self.c.placement.ndim
            some = tuple(whole if nd is NOWHERE else nd for nd in signatures)
            self.columns[key] = *((some, nowhere) if nowhere.any() else (signatures, None)), signatures
        some, is_nowhere = self.columns[key][:2]
        return some, is_nowhere

    # What was chosen.

    def chosen_signatures(self, states: Sequence[int], cost: float, bound: float) -> ChosenSignatures:
        """What states of the variables mean, in terms of the program as it is and of what is recomputed."""
        base = super().chosen_signatures(states, cost, bound)
        shares, clusters = dict(base.shares), dict(base.clusters)
        recomputed = dict[int, RecomputedValue]()
        run = {self.count + x.maker.id for x in self.later.values() if self.runs(x, states)}

        def real(near: Iterable[Cluster]) -> tuple[Cluster, ...]:
            named = ((c, {u if u < 0 else u % self.stride for u in c.users}) for c in near)
            kept = (
                replace(c, users=frozenset(u for u in us if u < self.count or u in run)) for c, us in named
            )
            return tuple(c for c in kept if c.users)

        for v, x in self.later.items():
            share = shares.pop(x.id, NOWHERE)
            late = clusters.pop(x.id, (Cluster(frozenset(u.user for u in self.demand[x.id]), share),))
            early = clusters.pop(v, (Cluster(frozenset(u.user for u in self.demand[v]), None),))
            if self.runs(x, states):
                silent = self.silent(x.maker)
                strategy = silent[(states[x.variable] - x.kept_count) % len(silent)]
                near = real(late) if len(real(late)) > 1 else ()
                recomputed[v] = RecomputedValue(strategy, x.users, share, near)
                late = ()
            near = real((*early, *late))
            if len(near) > 1:
                clusters[v] = near
        left = {v: real(near) for v, near in clusters.items()}
        return replace(base, shares=shares, clusters=left, recomputed=recomputed)

    def runs(self, x: LaterUse, states: Sequence[int]) -> bool:
        """Whether a value is recomputed."""
        return math.isfinite(x.begins[states[x.variable]])
