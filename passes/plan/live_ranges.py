"""When values are used under a limit on memory: soon after they are made, and again much later.

Some values are never in memory as they are made: each kernel that reads such a value computes it (a norm's
last product, a mask). It is there later in one of two ways: its share is boxed, so that it lies in memory
after all, and stays there; or what it is made of is there, under signatures from which it can be computed
without sending anything. Kernels that the program has read it so for nothing: the op counts what all of them
read. An op that runs again is a kernel more, for which the op that makes the value runs again too, so that is
a third way, which costs what this op takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbp.compat.exact_keys import memo
from sbp.passes.plan import constants
from sbp.passes.plan.memory_problem import RoomModel
from sbp.passes.plan.model import ValueUse
from sbp.passes.plan.network import Table, written_down
from sbp.passes.program.graph import Const, Node, Operand, speaks
from sbp.signature import B, NdSbp, Split

ANEW = ("rng_uniform",)
"""Ops that give something else each time."""


@dataclass(frozen=True, slots=True)
class UseSpan:
    """When a value is used that need not be kept in between.

    Arguments:
      early_uses, late_uses: its uses before and after the longest time without one.
      start, until: from when until when it is wanted again, be it for an op that runs again.
      soonest: when it may be made again, for others that are; `start` if that is hardly before.
    """

    early_uses: list[ValueUse]
    late_uses: list[ValueUse]
    start: int
    until: int
    soonest: int


def is_plain(node: Node) -> bool:
    """Whether an op may run again: it makes one result of its operands, and does nothing besides."""
    alone = not node.bodies and node.barrier < 0
    return alone and len(node.outputs) == 1 and not speaks(node) and node.op not in ANEW


class LaterUses:
    """Finds what of a program is used later than it is made.

    Arguments:
      model: of the program, its demand complete.
    """

    def __init__(self, model: RoomModel) -> None:
        self.m = model
        self.times = model.c.times
        self.makers = {v: n for n in model.graph.nodes for v in n.outputs}
        self.by_id = {n.id: n for n in model.graph.nodes}
        self.results = {x for x in model.graph.outputs if not isinstance(x, Const)}
        self.early_ops = self.forward()

    def wanted_later(self) -> dict[int, UseSpan]:
        """What is wanted later, or may be since an op runs again, in the order in which it is made."""
        found, wanted = dict[int, UseSpan](), dict[int, list[int]]()
        for node in reversed(self.m.graph.nodes):
            for v in filter(self.is_free, node.outputs):
                early, late, own = self.divide_uses(v)
                again = wanted.get(v, [])
                if not own and not again:
                    continue
                start = min((t for t, _ in own), default=max(again, default=0))
                until = max([*(t for _, t in own), *(t + 1 for t in again)])
                soonest = min([start, *(t for t in again if start - t > constants.NEAR_PART * self.m.end)])
                found[v] = UseSpan(early, late, start, until, soonest)
                for x in node.inputs if is_plain(node) else ():
                    if not isinstance(x, Const):
                        wanted.setdefault(x, []).extend((soonest, start))
        return self.in_memory(dict(reversed(found.items())))

    def in_memory(self, found: dict[int, UseSpan]) -> dict[int, UseSpan]:
        """Without what is computed where it is read, of what is there all the time."""
        kept = dict[int, UseSpan]()
        for v, span in found.items():
            if v in self.m.lives or any(x in kept for x in self.makers[v].inputs):
                kept[v] = span
        return kept

    def forward(self) -> set[int]:
        """The ops that no gradient has to be known for, by their ids: all, in a program without gradients."""
        after, found = set[int](), set[int]()
        for node in self.m.graph.nodes:
            if node.role.undoes or not after.isdisjoint(x for x in node.inputs if not isinstance(x, Const)):
                after.update(node.outputs)
            else:
                found.add(node.id)
        return found

    def is_free(self, v: int) -> bool:
        """Whether a value may be kept or not: it is no result, nor in a loop, and that makes a difference."""
        life = self.m.lives.get(v)
        inside = any(not self.m.is_outermost(u) for u in self.m.demand.get(v, ()))
        inside = inside or self.makers[v].id not in self.early_ops
        result = v in self.results or (life is not None and life.is_result)
        return not inside and not result and self.m.supply[v].times == 1 and self.matters(v)

    def matters(self, v: int) -> bool:
        """Whether it makes a difference how long a value is kept, or that what it is made of is."""
        return self.m.is_large(v) or v not in self.m.lives

    def divide_uses(self, v: int) -> tuple[list[ValueUse], list[ValueUse], list[tuple[int, int]]]:
        """The uses of a value before the longest time in which nobody reads it, those after it, and when it
        is read then."""
        until, since = self.times[self.makers[v].id][1], self.m.end + 1
        longest = constants.APART_PART * self.m.end
        reads = sorted(self.reads(v))
        for start, end in reads:
            if start - until > longest:
                longest, since = start - until, start
            until = max(until, end)
        early, late = list[ValueUse](), list[ValueUse]()
        for use in self.m.demand.get(v, ()):
            (early if self.m.when(use)[0] < since else late).append(use)
        return early, late, [t for t in reads if t[0] >= since]

    @memo
    def reads(self, v: int) -> set[tuple[int, int]]:
        """When a value is read, by those too that compute what is never in memory of it."""
        uses = self.m.demand.get(v, ())
        inner = (self.reads(x) for u in uses for x in self.not_written(u.user))
        return {self.m.when(u) for u in uses}.union(*inner)

    def not_written(self, user: int) -> list[int]:
        """The results of an op that are not in memory."""
        node = self.by_id.get(user)
        if node is None or node.bodies:
            return []
        return [x for x in node.outputs if x not in self.m.lives and x in self.m.demand]


NOWHERE: Any = None
"""The signature of what is not there, or not wanted."""


@dataclass(frozen=True, slots=True)
class LaterUse:
    """A value for the later uses of another one.

    Arguments:
      value, maker: the first one, and the op that makes it.
      id: of the second one.
      variable: where it comes from; states are `kept`, then the strategies of the op, then nothing if nobody
        has to have it.
      kept_count: the signatures under which the first one may be kept; of what is not written twice: boxed,
        and computed of what is kept; or three times: computed for what runs again too.
      each: so many of them are of one way.
      users: who uses the first one much later, in the program as it is.
      since, start, until: when its early uses end; when the second is there, and until when.
      begins: `[states]`, when it is made again; infinite where it is not.
    """

    value: int
    maker: Node
    id: int
    variable: int
    kept_count: int
    each: int
    users: frozenset[int]
    since: int
    start: int
    until: int
    begins: Table

    @property
    def has_spots(self) -> bool:
        """Whether it costs more where it is computed for what runs again."""
        return self.kept_count == 3 * self.each


class UnwrittenValues:
    """Adds to a model what keeps values that are not written.

    Arguments:
      model: with the demand and the copies of a value before it is kept.
      later: the values for later uses.
    """

    def __init__(self, model: RoomModel, later: Mapping[int, LaterUse]) -> None:
        self.m, self.later = model, later
        self.arguments = frozenset[Operand](model.graph.inputs)

    def is_computed_again(self, node: Node) -> bool:
        """Whether what makes a value takes something where the value is computed for what runs again.

        Of what an argument is read for it may be the value itself that is kept, since the argument lies
        otherwise.
        """
        traffic = self.m.c.traffic.get(node.id)
        if traffic is None or not is_plain(node) or any(x in self.arguments for x in node.inputs):
            return False
        behind = (self.later[x] for x in node.inputs if not isinstance(x, Const) and x in self.later)
        return any(traffic.reads) or any(x.has_spots for x in behind)

    def charge(self, x: LaterUse, maker: int) -> None:
        """Ties how a value is kept to the op that makes it: what is computed later lies as this op makes it,
        and what is computed for what runs again takes what this op does.

        Nothing is lost: who reads it cuts it from how it is made as well as from how its share lies.

        Arguments:
          maker: the variable of the op.
        """
        lies, strategies, taken = self.m.states[x.variable], self.m.states[maker], self.m.unary[maker]
        key = "charged", id(lies), x.each, id(strategies), id(taken)
        if key not in self.m.columns:
            table = np.zeros((len(strategies), len(lies)))
            for column in range(x.each, x.kept_count):
                made = np.array([s.results[0] == lies[column] for s in strategies])
                table[:, column] = np.where(made, taken if column >= 2 * x.each else 0.0, np.inf)
            self.m.columns[key] = written_down(table), lies, strategies, taken
        self.m.add_edge(x.value, maker, x.variable, self.m.columns[key][0])

    def read_again(self, x: LaterUse, variable: int, wanted: tuple[NdSbp, ...]) -> None:
        """Ties a value to an op that may run again and reads it: then it is not only computed for other uses.

        Arguments:
          variable: with how the op runs again.
          wanted: by its states, how it wants the value.
        """
        lies = self.m.states[x.variable]
        key = "read again", id(lies), x.kept_count, x.each, id(wanted)
        if key not in self.m.columns:
            table = np.ones((len(lies), len(wanted)), dtype=bool)
            for row in range(x.each, 2 * x.each):
                table[row] = [nd is NOWHERE or not is_cut(lies[row], nd) for nd in wanted]
            self.m.columns[key] = written_down(_forbidden(table)), lies, wanted
        self.m.add_edge(x.value, x.variable, variable, self.m.columns[key][0])

    def keep(self, x: LaterUse, copy: int | None) -> None:
        """Ties how a value is kept to whether its share is boxed, and adds its bytes.

        Arguments:
          copy: the variable with whether the share is boxed, as `RoomModel.copies` makes it; None if it
            never is.
        """
        n, lies = x.each, self.m.states[x.variable]
        if copy is None:
            self.m.unary[x.variable][:n] = np.inf
        else:
            key = "boxed or computed", len(lies), n, x.kept_count
            if key not in self.m.tables:
                # Copies: under each signature one, or none; how the value is kept is in the same order.
                boxed, computed = np.split(np.eye(2 * n, dtype=bool), 2)
                others = np.ones((len(lies) - x.kept_count, 2 * n), dtype=bool)
                ways = [boxed, *[computed] * (x.kept_count // n - 1), others]
                self.m.tables[key] = written_down(_forbidden(np.vstack(ways)))
            self.m.add_edge(x.value, x.variable, copy, self.m.tables[key])
            sizes = np.zeros(len(lies))
            sizes[:n] = self.m.held_bytes(x.value, tuple(lies[:n]))
            self.m.load(x.variable, x.since, x.start, sizes)
        for k, operand in enumerate(x.maker.inputs):
            if not isinstance(operand, Const) and operand in self.later:
                self.need(x, k, self.later[operand])

    def need(self, x: LaterUse, k: int, source: LaterUse) -> None:
        """What is computed needs its operand `k` kept, under a signature that makes nobody send it."""
        lies, strategies = self.m.states[source.variable], self.m.c.strategies[x.maker.id]
        boxing, own = self.m.boxing(source.value), self.m.states[x.variable]
        again = x.has_spots and source.has_spots
        key = (
            "needs",
            id(lies),
            source.kept_count,
            id(strategies),
            id(own),
            x.kept_count,
            k,
            again,
            id(boxing),
        )
        if key not in self.m.columns:
            wanted: dict[Any, dict[NdSbp, int]] = {}
            for s in strategies:
                wanted.setdefault(s.results[0], {})[s.operands[k]] = boxing.index[s.operands[k]]
            silent = ~boxing.sends[1][[boxing.index[nd] for nd in lies[: source.kept_count]]]
            table = np.ones((len(lies), len(own)), dtype=bool)
            for column in range(x.each, x.kept_count):
                to = wanted.get(own[column], {})
                table[:, column] = False
                table[: source.kept_count, column] = silent[:, sorted(to.values())].any(axis=1)
                for row in range(source.each, 2 * source.each) if again and column >= 2 * x.each else ():
                    # Cut out of what is computed, whichever strategy the result is of: it is computed anew.
                    table[row, column] &= not all(is_cut(lies[row], nd) for nd in to)
            self.m.columns[key] = written_down(_forbidden(table)), lies, strategies, own, boxing
        self.m.add_edge(source.value, source.variable, x.variable, self.m.columns[key][0])


def is_cut(nd: NdSbp, wanted: NdSbp) -> bool:
    """Whether what lies so is, or has in each device's part, what is wanted.

    >>> is_cut((B, Split(0)), (Split(1), Split(0))), is_cut((Split(0), B), (B, B))
    (True, False)
    """
    return all(a == b or (a == B and isinstance(b, Split)) for a, b in zip(nd, wanted, strict=True))


def _forbidden(allowed: Table) -> Table:
    """Costs: nothing for what is allowed."""
    return np.where(allowed, 0.0, np.inf)
