"""How long the actions of a pipeline take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sbp.errors import Problem, raise_all
from sbp.passes.schedule.actions import Action, Kind


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, or any other unit, of each action; integers and fractions stay exact.

    Arguments:
      forward: of each stage.
      input_gradient: of each stage's `I`.
      weight_gradient: of each stage's `W`; a `B` takes both.
      recompute: what each stage does before `B` or `I`: with checkpoints its forward, once more. () is
        nothing.
      transfers: (stage that has the value, stage that needs it) -> time on the way; gradients go from the
        later to the earlier stage.
      transfer: of what `transfers` does not have.
      pairs: (stage of F, stage of B) -> time of the two together, where that is not the sum.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    transfers: Mapping[tuple[int, int], float] = field(default_factory=dict)
    transfer: float = 0
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def of(self, a: Action) -> float:
        """The time of one computing action."""
        again = self.recompute[a.stage] if self.recompute else 0
        match a.kind:
            case Kind.F:
                return self.forward[a.stage]
            case Kind.W:
                return self.weight_gradient[a.stage]
            case Kind.I:
                return again + self.input_gradient[a.stage]
            case _:
                return again + self.input_gradient[a.stage] + self.weight_gradient[a.stage]

    def of_step(self, step: Sequence[Action]) -> float:
        """The time of what runs together: one computing action, or a forward and a backward."""
        alone = sum(self.of(a) for a in step)
        return alone if len(step) == 1 else self.pairs.get((step[0].stage, step[1].stage), alone)

    def on_the_way(self, source: int, target: int) -> float:
        """The time of a value from a stage to another one."""
        return self.transfers.get((source, target), self.transfer)

    def check(self, stages: int) -> None:
        """Raises `ArgumentError` unless there is a time of 0 or more for every action of so many stages."""
        raise_all(self._problems(stages))

    def _problems(self, stages: int) -> Iterator[Problem]:
        for name in ("forward", "input_gradient", "weight_gradient", "recompute"):
            times = getattr(self, name)
            if len(times) != stages and not (name == "recompute" and not times):
                got, legal = f"{len(times)} times", f"{stages}, one per stage"
                yield Problem(
                    "argument", f"times.{name}", got, legal, "every stage takes its time", "add or cut"
                )
        singles = (*self.forward, *self.input_gradient, *self.weight_gradient, *self.recompute, self.transfer)
        every = (*singles, *self.transfers.values(), *self.pairs.values())
        if wrong := [t for t in every if not 0 <= t < float("inf")]:
            fix = "measure again: a clock that went back gives negative times"
            yield Problem("argument", "times", f"{wrong[0]}", "0 or more", "time does not go back", fix)


def equal_times(
    stages: int,
    forward: float = 1,
    input_gradient: float = 1,
    weight_gradient: float = 1,
    transfer: float = 0,
) -> Times:
    """The same times for each stage; by default 1 for F, I and W, and transfers that take none."""
    return Times(
        (forward,) * stages, (input_gradient,) * stages, (weight_gradient,) * stages, transfer=transfer
    )
