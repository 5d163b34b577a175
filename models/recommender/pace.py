"""What a training prints of itself: some losses as they come, and its rates in the end."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SHOWN = 10
"""How many losses a run prints."""


@dataclass
class Pace:
    """Prints some losses of a training as they come, and in the end how fast that was; takes rows of `fit`.

    Arguments:
      say: what prints.
      every: steps between two losses that are printed; the first one is printed too.
      began: when training began, by `time.perf_counter`.
      first: when the first loss was there.
      steps: how many there are.
    """

    say: Callable[..., None]
    every: int
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    steps: int = 0

    def __call__(self, row: Mapping[str, float]) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first = time.perf_counter()
        if self.steps == 1 or row["step"] % self.every == 0:
            self.say(f"  step {row['step']:>6}: loss {row['loss']:.4f}")

    def end(self, flow: object, batch: int) -> None:
        """Prints the rates of the stages, the time to the first loss, and the rate from there on."""
        if self.steps:
            rate = (self.steps - 1) * batch / (time.perf_counter() - self.first)
            self.say(f"{flow}")
            self.say(
                f"{self.first - self.began:.1f} s to the first loss with compilation, "
                f"then {rate:,.0f} samples/s\n"
            )
