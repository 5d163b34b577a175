"""Inner loops as machine code, by numba.

What is compiled is kept on disk beside the module (or in the user's cache), so that a process compiles only
what nobody did before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import njit

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function as machine code, made at its first call and then read from disk."""
    return cast("Callable[_P, _R]", njit(cache=True)(function))
