"""When values are used under a limit on memory: soon after they are made, and again much later."""

from dataclasses import dataclass

from sbp.passes.plan import constants
from sbp.passes.plan.model import ValueUse
from sbp.passes.plan.room import RoomModel
from sbp.passes.program.graph import Const, Node, speaks

ANEW = ("rng_uniform",)
"""Ops that give something else each time."""


@dataclass(frozen=True, slots=True)
class UseSpan:
    """When a value is used that need not be kept in between.

    Arguments:
      early, late: its uses before and after the longest time without one.
      start, until: from when until when it is wanted again, be it for an op that runs again.
      soonest: when it may be made again, for others that are; `start` if that is hardly before.
    """

    early: list[ValueUse]
    late: list[ValueUse]
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
        self.read = dict[int, set[tuple[int, int]]]()

    def wanted_later(self) -> dict[int, UseSpan]:
        """What is wanted later, or may be since an op runs again, in the order in which it is made."""
        found, wanted = dict[int, UseSpan](), dict[int, list[int]]()
        for node in reversed(self.m.graph.nodes):
            for v in filter(self.is_free, node.outputs):
                early, late, own = self.divided(v)
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

    def divided(self, v: int) -> tuple[list[ValueUse], list[ValueUse], list[tuple[int, int]]]:
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

    def reads(self, v: int) -> set[tuple[int, int]]:
        """When a value is read, by those too that compute what is never in memory of it."""
        if v not in self.read:
            uses = self.m.demand.get(v, ())
            inner = (self.reads(x) for u in uses for x in self.not_written(u.user))
            self.read[v] = {self.m.when(u) for u in uses}.union(*inner)
        return self.read[v]

    def not_written(self, user: int) -> list[int]:
        """The results of an op that are not in memory."""
        node = self.by_id.get(user)
        if node is None or node.bodies:
            return []
        return [x for x in node.outputs if x not in self.m.lives and x in self.m.demand]
