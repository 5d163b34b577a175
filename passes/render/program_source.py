"""A distributed program as text: a Python module with explicit collectives."""

import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from sbp.compat.untyped import PyTree


@dataclass(frozen=True, repr=False)
class ProgramSource:
    """A distributed program as a Python module; `print` shows it.

    Arguments:
      name: of its function, which takes and returns leaves of whole arrays.
      text: of the module.
      given: what no text can say, by name: large arrays, kernels, functions; the module calls it `given`.
      constants: the arrays that the program closes over, which the function takes behind its other arguments.
    """

    name: str
    text: str = field(repr=False)
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    constants: Sequence[Any] = field(default=(), compare=False)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Source of {self.name}: {self.text.count(chr(10))} lines>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the module; it runs by itself unless something must be `given`, or it closes over arrays."""
        Path(path).write_text(self.text, encoding="utf-8")

    def load(self) -> Callable[..., tuple[Any, ...]]:
        """The module's function, to be called as the program is: it returns the leaves of the results.

        Raises:
          PlacementError: if JAX does not see the devices.
        """
        file = f"<source of {self.name}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(True), file)
        module: dict[str, Any] = {"__name__": self.name, "given": dict(self.given)}
        exec(compile(self.text, file, "exec"), module)
        function, constants = module[self.name], tuple(self.constants)

        def run(*args: PyTree, **kwargs: PyTree) -> tuple[Any, ...]:
            return tuple(function(*jax.tree.leaves((args, kwargs)), *constants))

        return run
