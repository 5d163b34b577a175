"""What it takes to keep a value for its later uses that is never in memory as it is made.

Such a value is computed by each kernel that reads it (a norm's last product, a mask). It is there later in
one of two ways: its share is boxed, so that it lies in memory after all, and stays there; or what it is made
of is there, under signatures from which it can be computed without sending anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbp.passes.plan.indexed import written_down
from sbp.passes.plan.network import Table
from sbp.passes.plan.room import RoomModel
from sbp.passes.program.graph import Const, Node

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
        computed of what is kept.
      users: who uses the first one much later, in the program as it is.
      since, start, until: when its early uses end; when the second is there, and until when.
    """

    value: int
    made: Node
    id: int
    variable: int
    kept: int
    users: frozenset[int]
    since: int
    start: int
    until: int


class Unwritten:
    """Adds to a model what keeps values that are not written.

    Arguments:
      model: with the demand and the copies of a value before it is kept.
      later: the values for later uses.
    """

    def __init__(self, model: RoomModel, later: Mapping[int, Later]) -> None:
        self.m, self.later = model, later

    def keep(self, x: Later, copy: int | None) -> None:
        """Ties how a value is kept to whether its share is boxed, and adds its bytes.

        Arguments:
          copy: the variable with whether the share is boxed, as `RoomModel.copies` makes it; None if it
            never is.
        """
        n, lies = x.kept // 2, self.m.states[x.variable]
        if copy is None:
            self.m.unary[x.variable][:n] = np.inf
        else:
            key = "boxed or computed", len(lies), n
            if key not in self.m.tables:
                # Copies: under each signature one, or none; how the value is kept is in the same order.
                allowed = np.vstack(
                    [np.eye(2 * n, dtype=bool), np.ones((len(lies) - 2 * n, 2 * n), dtype=bool)]
                )
                self.m.tables[key] = written_down(_forbidden(allowed))
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
        key = "needs", id(lies), source.kept, id(strategies), id(own), x.kept, k, id(boxing)
        if key not in self.m.columns:
            sends = self.m.copied(boxing)[1]
            wanted: dict[Any, set[int]] = {}
            for s in strategies:
                wanted.setdefault(s.results[0], set()).add(boxing.index[s.operands[k]])
            silent = ~sends[[boxing.index[nd] for nd in lies[: source.kept]]]
            table = np.ones((len(lies), len(own)), dtype=bool)
            for column in range(x.kept // 2, x.kept):
                to = sorted(wanted.get(own[column], ()))
                table[:, column] = False
                table[: source.kept, column] = silent[:, to].any(axis=1)
            self.m.columns[key] = written_down(_forbidden(table)), lies, strategies, own, boxing
        self.m.add_edge(source.value, source.variable, x.variable, self.m.columns[key][0])


def _forbidden(allowed: Table) -> Table:
    """Costs: nothing for what is allowed."""
    return np.where(allowed, 0.0, np.inf)
