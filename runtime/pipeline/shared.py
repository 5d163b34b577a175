"""Programs that differ in nothing but their devices are compiled once, and loaded onto the others.

So compile time goes with the number of different stages. Tracing and lowering are done for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
from jax.typing import ArrayLike

from sbp import compat
from sbp.untyped import JaxDevice

# The host's functions are not saved with an executable.
CALLBACK = "callback"


class Executable(Protocol):
    """A compiled program, whose call JAX leaves untyped."""

    def __call__(self, *args: ArrayLike) -> Sequence[jax.Array]:
        """Runs it."""

    def as_text(self) -> str | None:
        """What XLA has made of it."""


@dataclass
class Executables:
    """What has been compiled, by the text of the lowered program.

    Arguments:
      compiled: how many programs XLA has compiled.
      loaded: how many were taken from another stage.
    """

    known: dict[str, tuple[jax.stages.Compiled, tuple[JaxDevice, ...]]] = field(default_factory=dict)
    compiled: int = 0
    loaded: int = 0

    def get(
        self, lowered: jax.stages.Lowered, devices: Sequence[JaxDevice], rows: Sequence[str] = ()
    ) -> Executable:
        """The executable of a lowered program on its devices.

        Arguments:
          rows: the names of its collectives, in order: a shared executable brings along its own. The text
            has neither them nor the user's lines, which are those of the stage that was compiled.
        """
        text = lowered.as_text()
        key = hashlib.sha256(f"{lowered.args_info}{rows}{text}".encode()).hexdigest()
        known = self.known.get(key)
        if known is not None and CALLBACK not in text:
            theirs, held = known
            found = compat.onto_devices(theirs, held, devices)
            if found is not None:
                self.loaded += 1
                return found
        made = lowered.compile()
        self.known.setdefault(key, (made, tuple(devices)))
        self.compiled += 1
        return made
