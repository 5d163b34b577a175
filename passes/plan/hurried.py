"""Models for searches with little time: one that stops being built, and one of few signatures.

To build the model of a large program on three and four axes can take longer than a search may. Then only
those strategies are looked at that do the same along every axis, as if the axes were one. What is found so is
a plan like any other; what it is proven against is what the ops alone take at least, with all of their
strategies.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cheapest import relaxed_bound
from sbp.passes.plan.cost import Shards, seconds_of
from sbp.passes.plan.grouped import axes_alike
from sbp.passes.plan.indexed import IndexedNetwork
from sbp.passes.plan.model import Boundary, Model, ValueUse
from sbp.passes.plan.phases import Phases
from sbp.passes.program.control import assumed_trips
from sbp.passes.program.graph import Node

MODEL_SHARE = 0.6
"""Of the time for a search, for building its model."""
FEW_SHARE = 1.0
"""What the model of few strategies and its solution take, of what the passes before the search do: of GPTs of
96 layers on three axes as much."""
LEAST_SHARE = 0.5
"""Where less time than this part of that is left for a search, no model of all strategies is begun: that is
what it takes at least."""


class OutOfTime(Exception):
    """The time for building a model is over."""


class TimedModel(Model):
    """A model that is given up when its time is over.

    Arguments:
      until: that time, by a clock.
      now: the clock.
    """

    def __init__(
        self,
        candidates: Candidates,
        boundary: Boundary,
        boxings: Boxings,
        until: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(candidates, boundary, boxings)
        self.until, self.now = until, now

    def add_node(self, node: Node, times: int) -> None:
        self._check()
        super().add_node(node, times)

    def connect(self, v: int, uses: list[ValueUse]) -> None:
        self._check()
        super().connect(v, uses)

    def _check(self) -> None:
        if self.now() >= self.until:
            raise OutOfTime


@dataclass(frozen=True)
class BuiltModel:
    """A model and its network.

    Arguments:
      is_whole: whether it has all strategies.
      seconds: that it took.
    """

    model: Model
    network: IndexedNetwork
    is_whole: bool
    seconds: float


def model_in_time(
    candidates: Candidates,
    boundary: Boundary,
    boxings: Boxings,
    seconds: float | None,
    is_late: bool = False,
    phases: Phases | None = None,
) -> BuiltModel:
    """A model that leaves some of the time for its solution.

    Arguments:
      seconds: for both; None for no limit.
      is_late: whether so much time is gone that no model of all strategies is begun.
      phases: where this is noted.
    """
    phases = Phases() if phases is None else phases
    given = boundary, boxings
    if seconds is None or candidates.placement.ndim == 1:  # on one axis no strategy is left out
        with phases.of("model"):
            return _built(Model(candidates, *given), True, phases.now)
    if not is_late:
        until = phases.now() + MODEL_SHARE * seconds
        with phases.of("model of all signatures", needed=False), suppress(OutOfTime):
            return _built(TimedModel(candidates, *given, until, phases.now), True, phases.now)
    with phases.of("model of few signatures"):
        return _built(model_of_few(candidates, *given), False, phases.now)


def model_of_few(candidates: Candidates, boundary: Boundary, boxings: Boxings) -> Model:
    """A model of the strategies that do the same along every axis."""
    every = tuple(range(candidates.placement.ndim))
    return Model(axes_alike(candidates, (every,)), boundary, boxings)


def _built(model: Model, is_whole: bool, now: Callable[[], float]) -> BuiltModel:
    begun = now()
    network = model.build_indexed()
    return BuiltModel(model, network, is_whole, now() - begun)


def least_seconds(candidates: Candidates, boxings: Boxings) -> float:
    """What the ops of a program take at least, however values are boxed: no plan takes less."""
    found, known, shards = 0.0, dict[object, float](), Shards()

    def add(nodes: Sequence[Node], times: int) -> None:
        nonlocal found
        for node in nodes:
            for body in node.bodies:
                add(body.nodes, times * assumed_trips(node))
            if node.bodies:
                continue
            strategies, traffic = candidates.strategies[node.id], candidates.traffic.get(node.id)
            key = id(strategies), traffic
            if key not in known:
                graph, network = candidates.graph, boxings.network
                known[key] = min(seconds_of(graph, node, strategies, network, traffic, shards))
            found += times * known[key]

    add(candidates.graph.nodes, 1)
    return found


def bound_in_time(
    candidates: Candidates, boundary: Boundary, boxings: Boxings, seconds_left: float | None
) -> float:
    """What no plan can be cheaper than, whatever versions of a value others are made from: what the ops take
    alone where no time is left."""
    if seconds_left == 0.0:
        return least_seconds(candidates, boxings)
    return relaxed_bound(candidates, boundary, boxings, seconds_left)
