"""The floor: plans that are there although a search was cut off, and are never worse than what people write.

They are the cheapest of the signatures that do the same along every axis, and the parallelisms by name among
these. To build the model of all signatures of a large program on three and four axes takes longer than some
have time for; that of few does not.
"""

from collections.abc import Callable

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.exposure import Clock
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.grouped import axes_alike
from sbp.passes.plan.model import Boundary, Model, ValueUse
from sbp.passes.plan.seeds import plain_seeds, seed_name
from sbp.passes.program.graph import Node
from sbp.passes.search.limited import FITTING
from sbp.passes.search.pool import Pool
from sbp.passes.search.space import Space


class CutOff(Exception):
    """The time of the user is over."""


class CutModel(Model):
    """A model that is given up when the time of the user is over.

    Arguments:
      is_over: whether it is.
    """

    def __init__(
        self, candidates: Candidates, boundary: Boundary, boxings: Boxings, is_over: Callable[[], bool]
    ) -> None:
        super().__init__(candidates, boundary, boxings)
        self.is_over = is_over

    def add_node(self, node: Node, times: int) -> None:
        self._check()
        super().add_node(node, times)

    def connect(self, v: int, uses: list[ValueUse]) -> None:
        self._check()
        super().connect(v, uses)

    def _check(self) -> None:
        if self.is_over():
            raise CutOff


def add_floor(pool: Pool, clock: Clock, asked: Boundary, donated: tuple[int, ...]) -> None:
    """Adds the plans to a pool.

    Raises:
      Infeasible: if what the user asks for needs signatures that differ from axis to axis.
    """
    axes = clock.candidates.placement.ndim
    few = axes_alike(clock.candidates, (tuple(range(axes)),))
    model = Model(few, asked, clock.boxings)
    space = Space(model, model.build(), clock, donated)
    seeds = [*plain_seeds(axes), *((use,) * axes for use in FITTING)]
    for unary, name in (
        (space.network.unary, "the cheapest of few signatures"),
        *((space.restricted(seed), seed_name(seed)) for seed in dict.fromkeys(seeds)),
    ):
        found = space.solved(unary, name, Effort().at_most(constants.TRY_SECONDS))
        if found is not None:
            pool.add(found)
