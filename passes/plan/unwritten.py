"""What it takes to keep a value for its later uses that is never in memory as it is made.

Such a value is computed by each kernel that reads it (a norm's last product, a mask). It is there later in
one of two ways: its share is boxed, so that it lies in memory after all, and stays there; or what it is made
of is there, under signatures from which it can be computed without sending anything. Kernels that the program
has read it so for nothing: the op counts what all of them read. An op that runs again is a kernel more, for
which the op that makes the value runs again too, so that is a third way, which costs what this op takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbp.passes.plan.indexed import written_down
from sbp.passes.plan.later import is_plain
from sbp.passes.plan.network import Table
from sbp.passes.plan.room import RoomModel
from sbp.passes.program.graph import Const, Node, Operand
from sbp.signature import B, NdSbp, Split

NOWHERE: Any = None
"""The signature of what is not there, or not wanted."""


@dataclass(frozen=True, slots=True)
class Later:
    """A value for the later uses of another one.

    Arguments:
      value, made: the first one, and the op that makes it.
      id: of the second one.
      variable: where it comes from; states are `kept`, then the strategies of the op, then nothing if nobody
        has to have it.
      kept: the signatures under which the first one may be kept; of what is not written twice: boxed, and
        computed of what is kept; or three times: computed for what runs again too.
      each: so many of them are of one way.
      users: who uses the first one much later, in the program as it is.
      since, start, until: when its early uses end; when the second is there, and until when.
      begins: `[states]`, when it is made again; infinite where it is not.
    """

    value: int
    made: Node
    id: int
    variable: int
    kept: int
    each: int
    users: frozenset[int]
    since: int
    start: int
    until: int
    begins: Table

    @property
    def has_spots(self) -> bool:
        """Whether it costs more where it is computed for what runs again."""
        return self.kept == 3 * self.each


class Unwritten:
    """Adds to a model what keeps values that are not written.

    Arguments:
      model: with the demand and the copies of a value before it is kept.
      later: the values for later uses.
    """

    def __init__(self, model: RoomModel, later: Mapping[int, Later]) -> None:
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

    def charge(self, x: Later, maker: int) -> None:
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
            for column in range(x.each, x.kept):
                made = np.array([s.results[0] == lies[column] for s in strategies])
                table[:, column] = np.where(made, taken if column >= 2 * x.each else 0.0, np.inf)
            self.m.columns[key] = written_down(table), lies, strategies, taken
        self.m.add_edge(x.value, maker, x.variable, self.m.columns[key][0])

    def read_again(self, x: Later, variable: int, wanted: tuple[NdSbp, ...]) -> None:
        """Ties a value to an op that may run again and reads it: then it is not only computed for other uses.

        Arguments:
          variable: with how the op runs again.
          wanted: by its states, how it wants the value.
        """
        lies = self.m.states[x.variable]
        key = "read again", id(lies), x.kept, x.each, id(wanted)
        if key not in self.m.columns:
            table = np.ones((len(lies), len(wanted)), dtype=bool)
            for row in range(x.each, 2 * x.each):
                table[row] = [nd is NOWHERE or not is_cut(lies[row], nd) for nd in wanted]
            self.m.columns[key] = written_down(_forbidden(table)), lies, wanted
        self.m.add_edge(x.value, x.variable, variable, self.m.columns[key][0])

    def keep(self, x: Later, copy: int | None) -> None:
        """Ties how a value is kept to whether its share is boxed, and adds its bytes.

        Arguments:
          copy: the variable with whether the share is boxed, as `RoomModel.copies` makes it; None if it
            never is.
        """
        n, lies = x.each, self.m.states[x.variable]
        if copy is None:
            self.m.unary[x.variable][:n] = np.inf
        else:
            key = "boxed or computed", len(lies), n, x.kept
            if key not in self.m.tables:
                # Copies: under each signature one, or none; how the value is kept is in the same order.
                boxed, computed = np.split(np.eye(2 * n, dtype=bool), 2)
                others = np.ones((len(lies) - x.kept, 2 * n), dtype=bool)
                ways = [boxed, *[computed] * (x.kept // n - 1), others]
                self.m.tables[key] = written_down(_forbidden(np.vstack(ways)))
            self.m.add_edge(x.value, x.variable, copy, self.m.tables[key])
            sizes = np.zeros(len(lies))
            sizes[:n] = self.m.held(x.value, tuple(lies[:n]))
            self.m.load(x.variable, x.since, x.start, sizes)
        for k, operand in enumerate(x.made.inputs):
            if not isinstance(operand, Const) and operand in self.later:
                self.need(x, k, self.later[operand])

    def need(self, x: Later, k: int, source: Later) -> None:
        """What is computed needs its operand `k` kept, under a signature that makes nobody send it."""
        lies, strategies = self.m.states[source.variable], self.m.c.strategies[x.made.id]
        boxing, own = self.m.boxing(source.value), self.m.states[x.variable]
        again = x.has_spots and source.has_spots
        key = "needs", id(lies), source.kept, id(strategies), id(own), x.kept, k, again, id(boxing)
        if key not in self.m.columns:
            sends = self.m.copied(boxing)[1]
            wanted: dict[Any, dict[NdSbp, int]] = {}
            for s in strategies:
                wanted.setdefault(s.results[0], {})[s.operands[k]] = boxing.index[s.operands[k]]
            silent = ~sends[[boxing.index[nd] for nd in lies[: source.kept]]]
            table = np.ones((len(lies), len(own)), dtype=bool)
            for column in range(x.each, x.kept):
                to = wanted.get(own[column], {})
                table[:, column] = False
                table[: source.kept, column] = silent[:, sorted(to.values())].any(axis=1)
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
