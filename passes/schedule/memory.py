"""How much of a step's activations each rank holds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that one micro-batch keeps on a rank, in bytes or any other unit.

    Arguments:
      residuals: of each stage, from the end of its forward to that of its backward (of `I`, if it is split).
      for_weights: what `I` leaves for `W`; () if that is as much.
      working_bytes: of each stage, more while `B` or `I` runs: with checkpoints, what the repeated forward
        leaves.
    """

    residuals: tuple[float, ...]
    for_weights: tuple[float, ...] = ()
    working_bytes: tuple[float, ...] = ()

    def before(self, a: Action) -> float:
        """How much more is held once an action starts."""
        match a.kind:
            case Kind.F:
                return self.residuals[a.stage]
            case Kind.B | Kind.I:
                return self.working_bytes[a.stage] if self.working_bytes else 0
            case _:
                return 0

    def after(self, a: Action) -> float:
        """How much less is held once it has ended."""
        left = self.for_weights[a.stage] if self.for_weights else self.residuals[a.stage]
        match a.kind:
            case Kind.I:
                return self.before(a) + self.residuals[a.stage] - left
            case Kind.B:
                return self.before(a) + self.residuals[a.stage]
            case Kind.W:
                return left
            case _:
                return 0

    def check(self, stages: int) -> None:
        """Raises `ArgumentError` unless there is a size of 0 or more for each of so many stages."""
        raise_all(self._problems(stages))

    def _problems(self, stages: int) -> Iterator[Problem]:
        for name in ("residuals", "for_weights", "working_bytes"):
            sizes = getattr(self, name)
            if (sizes or name == "residuals") and (len(sizes) != stages or min(sizes) < 0):
                got, legal = f"{sizes}", f"{stages} sizes of 0 or more, one per stage"
                yield Problem("argument", f"footprint.{name}", got, legal, "each stage holds its own", "")


def units(stages: int) -> Footprint:
    """Counts activations: each micro-batch leaves 1 on each stage, until `B` or `W` is done."""
    return Footprint((1,) * stages)


def peaks(schedule: Schedule, footprint: Footprint) -> tuple[float, ...]:
    """The most that each rank holds at once; of a schedule without backward, nothing is kept.

    It depends on the orders alone, not on when things run.

    Raises:
      ArgumentError: if the footprint does not fit the stages.
    """
    footprint.check(schedule.stages)
    if not schedule.trains:
        return (0,) * schedule.ranks
    return tuple(peak(schedule.steps(rank), footprint) for rank in range(schedule.ranks))


def peak(steps: Iterable[Sequence[Action]], footprint: Footprint) -> float:
    """The most that one rank holds at once, if it takes these steps of a training."""
    held: float = 0
    most: float = 0
    for step in steps:
        held += sum(footprint.before(a) for a in step)
        most = max(most, held)
        held -= sum(footprint.after(a) for a in step)
    return most
