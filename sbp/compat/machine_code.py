"""Compiles inner loops to machine code, by numba.

The code is cached on disk beside the module (or in the user's cache), so that it is compiled once. numba
takes long to load: it is loaded when the first loop runs.
"""

from collections.abc import Callable
from functools import cached_property
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

        return njit(cache=True)(self.function)

    @property
    def _numba_type_(self) -> Any:
        """Its numba type in the code of another kernel."""
        from numba import types

        return types.Dispatcher(self.dispatcher)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        found: _R = self.dispatcher(*args, **kwargs)
        return found


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, compiled at its first call, and later read from disk."""
    return _Kernel(function)
