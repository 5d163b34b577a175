"""What was found before is not found again: exact keys of parameters of ops, and methods whose results are
kept.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

_PLAIN = frozenset([bool, int, str, type(None)])
Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Found = TypeVar("Found")


def memo(method: Callable[Concatenate[Owner, Given], Found]) -> Callable[Concatenate[Owner, Given], Found]:
    """A method whose results its object keeps: each is found once per arguments, given by position.

    >>> class Squares:
    ...     @memo
    ...     def of(self, x):
    ...         print("finds", x)
    ...         return x * x
    >>> squares = Squares()
    >>> squares.of(3), squares.of(3)
    finds 3
    (9, 9)
    """
    slot = _slot(method.__name__)

    # No keywords: what was found for one would be given for another.
    @functools.wraps(method)
    def remembered(self: Owner, *args: object) -> Found:
        known: dict[tuple[object, ...], Found] = vars(self).get(slot) or results_of(self, method.__name__)
        if args not in known:
            known[args] = cast("Callable[..., Found]", method)(self, *args)
        return known[args]

    return cast("Callable[Concatenate[Owner, Given], Found]", remembered)


def results_of(of: object, method: str) -> dict[tuple[object, ...], Any]:
    """The results of a method that an object keeps, by their arguments."""
    found: dict[tuple[object, ...], Any] = vars(of).setdefault(_slot(method), {})
    return found


def _slot(method: str) -> str:
    return f"_{method}_memo"


class Same:
    """An object as a key: equal only to itself, and kept alive, so that no other object gets its address."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def key_of(x: object) -> Hashable:
    """A key of a parameter, exact to the last bit and to its type.

    Arrays are compared by their bytes (their text leaves out the middle of a large one), containers by their
    items, and anything that can neither be hashed nor opened by identity.

    >>> key_of(np.arange(3)) == key_of(np.arange(3)), key_of(1) == key_of(1.0), key_of(0.0) == key_of(-0.0)
    (True, False, False)
    >>> key_of({"a": [1, np.zeros(5000)]}) == key_of({"a": [1, np.eye(1, 5000, 2500)[0]]})
    False
    """
    kind = type(x)
    if kind in _PLAIN:  # most are; and to ask for each of the others takes a while
        return kind, x
    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        return kind, x.dtype, x.shape, x.tobytes()
    if isinstance(x, np.generic):
        return kind, x.dtype, x.tobytes()
    if isinstance(x, float | complex):
        return kind, repr(x)
    if isinstance(x, Mapping):
        return kind, frozenset((key_of(k), key_of(v)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return kind, tuple(map(key_of, x))
    try:
        hash(x)
    except TypeError:
        if dataclasses.is_dataclass(x):
            return kind, tuple(key_of(getattr(x, f.name)) for f in dataclasses.fields(x))
        return Same(x)
    return kind, x
