"""Compiles programs that differ only in their devices once, and loads them onto the other devices.

So compile time depends on the number of different stages. Each program is traced and lowered.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
from jax.typing import ArrayLike

from sbp.compat.cache import SerialProgram, load_program, serialise
from sbp.compat.untyped import JaxDevice
from sbp.runtime.cache.cache_folder import Cache, cache_context

# The host's functions are not saved with an executable.
CALLBACK = "callback"


class Executable(Protocol):
    """A compiled program, whose call JAX leaves untyped."""

    def __call__(self, *args: ArrayLike) -> Sequence[jax.Array]:
        """Runs it."""

    def as_text(self) -> str | None:
        """Its HLO text."""


@dataclass
class XlaExecutable:
    """A program that XLA has compiled.

    Arguments:
      program: as JAX has it.
      devices: the devices that it was compiled for, in the order of the mesh.
      cached_bytes: its bytes, if it was found in the cache.
      calls_host: whether it calls a function of this process.
    """

    program: jax.stages.Compiled
    devices: tuple[JaxDevice, ...]
    cached_bytes: bytes | None = None
    calls_host: bool = False

    @functools.cached_property
    def serial(self) -> SerialProgram | None:
        """The program as bytes; None if the backend cannot save it."""
        return serialise(self.program, self.devices, self.cached_bytes)


@dataclass
class Executables:
    """Compiled programs, by the text of the lowered program.

    Arguments:
      cache: the folder of programs that earlier processes have compiled; None for none.
      compiled_count: how many programs XLA has compiled, or the cache had.
      loaded_count: how many were taken from another stage.
      keys: the key of each program that is run.
    """

    cache: Cache | None = None
    by_text: dict[str, XlaExecutable] = field(default_factory=dict)
    compiled_count: int = 0
    loaded_count: int = 0
    keys: dict[int, str] = field(default_factory=dict)

    def get(
        self, lowered: jax.stages.Lowered, devices: Sequence[JaxDevice], rows: Sequence[str] = ()
    ) -> Executable:
        """The executable of a lowered program on its devices.

        Arguments:
          rows: the names of its collectives, in order; a shared executable brings its own. The text has
            neither these nor the user's lines, which are those of the stage that was compiled.
        """
        text = lowered.as_text()
        key = hashlib.sha256(f"{lowered.args_info}{rows}{text}".encode()).hexdigest()
        known = self.by_text.get(key)
        if known is not None and not known.calls_host and known.serial is not None:
            self.loaded_count += 1
            return self.note_use(key, load_program(known.serial, devices))
        with cache_context(self.cache) as cache:
            made = lowered.compile()
            cache.keep(made)
        self.by_text.setdefault(key, XlaExecutable(made, tuple(devices), cache.last_found, CALLBACK in text))
        self.compiled_count += 1
        return self.note_use(key, made)

    def __str__(self) -> str:
        """How many programs were compiled, found and loaded, for the log."""
        found = sum(c.cached_bytes is not None for c in self.by_text.values())
        cached = "" if self.cache is None else f", {found} of them found in the cache"
        return f": {self.compiled_count} programs{cached}, {self.loaded_count} shared by stages"

    def note_use(self, key: str, program: Executable) -> Executable:
        """Notes which program is run: by identity, for an executable has no other key."""
        self.keys[id(program)] = key
        return program
