"""Under a limit: the best that assignments come to together, each part of the program as in one of them.

What is cheapest at some prices of bytes needs too much or too little, since equal layers choose alike at
prices. Together such assignments have what a good one takes: some layers as here, some as there. So a network
of which each node has only the states that some of them have, and those that cost least by the bound, has an
answer nearly as good as the whole, and is a tenth of it or less (a column generation: Dantzig and Wolfe,
1960).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbp.passes.plan import constants
from sbp.passes.plan.budget import Load, loads_on
from sbp.passes.plan.flat import Indices
from sbp.passes.plan.network import CostNetwork, Table
from sbp.passes.plan.parts import restricted


@dataclass(frozen=True, slots=True)
class Together:
    """A network on the states that some assignments have.

    Arguments:
      network, loads: on these states.
      kept: per node the states.
    """

    network: CostNetwork
    loads: tuple[Load, ...]
    kept: tuple[Indices, ...]

    def narrowed(self, states: Indices) -> list[int]:
        """One of the assignments in terms of this network."""
        return [int(keep.searchsorted(state)) for keep, state in zip(self.kept, states, strict=True)]

    def widened(self, states: Sequence[int]) -> Indices:
        """States of this network in terms of the whole."""
        return np.array([keep[state] for keep, state in zip(self.kept, states, strict=True)], dtype=np.int64)


def together(network: CostNetwork, loads: Sequence[Load], among: Sequence[Indices]) -> Together:
    """The network on the states that some assignments have.

    >>> network = CostNetwork((np.arange(3.0), np.arange(3.0)), ())
    >>> found = together(network, (), [np.array([0, 2]), np.array([1, 2])])
    >>> [theta.tolist() for theta in found.network.unary]
    [[0.0, 1.0], [2.0]]
    """
    columns = np.sort(np.stack(among), axis=0)
    is_new = np.ones(columns.shape, dtype=np.bool_)
    is_new[1:] = columns[1:] != columns[:-1]
    return on_states(network, loads, [columns[is_new[:, k], k] for k in range(columns.shape[1])])


def on_states(network: CostNetwork, loads: Sequence[Load], kept: Sequence[Indices]) -> Together:
    """The network on some of the states of each node, in ascending order."""
    return Together(restricted(network, kept), loads_on(loads, kept), tuple(kept))


def cheapest_states(excess: Sequence[Table], count: int) -> list[Indices]:
    """So many assignments: of every node the state that adds the least to the bound, the next one, and so on.

    >>> [states.tolist() for states in cheapest_states([np.array([2.0, 0.0, 1.0]), np.array([0.0])], 2)]
    [[1, 0], [2, 0]]
    """
    order = [np.argsort(added, kind="stable") for added in excess]
    return [np.array([x[min(k, x.size - 1)] for x in order], dtype=np.int64) for k in range(count)]


class Known:
    """Assignments of a network that were seen, and which of them were brought together last."""

    def __init__(self) -> None:
        self.states: list[Indices] = []
        self.seen, self.last = set[bytes](), set[bytes]()
        self.lower = -np.inf

    def forget(self) -> None:
        """That any were brought together: what they come to is another thing under another limit."""
        self.last, self.lower = set(), -np.inf

    def add(self, states: Indices) -> None:
        """Keeps an assignment, if it is a new one."""
        key = states.tobytes()
        if key not in self.seen:
            self.seen.add(key)
            self.states.append(states.copy())

    def chosen(
        self, values: Sequence[float], cost: float, lower: float, best: Indices | None
    ) -> list[Indices]:
        """Those with the least values, and the best one; nothing if these are those of the last time. What
        is far from the best is forgotten.

        Arguments:
          values: of all that are kept, at the prices of now.
          cost: of the best one.
          lower: the bound. What is worth as much more than the cost as this is below it is far away.
        """
        most = 2.0 * cost - lower if np.isfinite(cost) else np.inf
        order = [
            k for k in np.argsort(np.array(values), kind="stable")[: constants.KEPT] if values[k] <= most
        ]
        self.states = [self.states[k] for k in order]
        among = list[Indices]()
        for states in [*([] if best is None else [best]), *self.states]:
            far = constants.APART * states.size
            if len(among) < constants.TOGETHER and all(np.count_nonzero(states != x) > far for x in among):
                among.append(states)
        keys = {x.tobytes() for x in among}
        if keys <= self.last:
            return []
        self.last = keys
        return among

    def has_risen(self, cost: float, lower: float) -> bool:
        """Whether the bound has risen much since the last time that it had."""
        if not lower - self.lower > constants.RISEN * (cost - lower):
            return False
        self.lower = lower
        return True
