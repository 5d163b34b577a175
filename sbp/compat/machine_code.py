"""Compiles inner loops to machine code, by numba.

The code is cached on disk beside the module (or in the user's cache), so that it is compiled once. numba
takes long to load: it is loaded when the first loop runs.

numba asks only whether the file with the loop has changed, and it loads what is stored before it asks. Where
the class of an argument has moved since, that is an error; with other fields, a wrong answer.
So what is stored has a digest of all modules that the loop's module takes names from, and of its numbers.
"""

import hashlib
import sys
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Kernel(Generic[_P, _R]):
    """A function that is compiled at its first call; other such functions may call it."""

    def __init__(self, function: Callable[_P, _R]) -> None:
        self.function = function

    @cached_property
    def dispatcher(self) -> Any:
        """numba's function."""
        from numba import njit

        found = njit(cache=True)(self.function)
        if stored := getattr(found, "_cache", None):  # it has none where the environment turns numba off
            stored._cache_file._version += _digest(self.function.__module__)
        return found

    @property
    def _numba_type_(self) -> Any:
        """Its numba type in the code of another kernel."""
        from numba import types

        return types.Dispatcher(self.dispatcher)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        found: _R = self.dispatcher(*args, **kwargs)
        return found


@cache
def _digest(module: str) -> str:
    """Of the sources of a module and of those of its package that it takes names from, and of its numbers."""
    named = [*vars(sys.modules[module]).values()]
    known = [str(getattr(x, "__module__", "") or getattr(x, "__name__", "")) for x in named]
    package = module.split(".")[0] + "."
    files = sorted({str(sys.modules[name].__file__) for name in (module, *known) if name.startswith(package)})
    numbers = repr([x for x in named if isinstance(x, int | float)]).encode()
    return hashlib.sha256(b"".join([numbers, *(Path(file).read_bytes() for file in files)])).hexdigest()


def compile_loops(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, compiled at its first call, and later read from disk."""
    return _Kernel(function)
