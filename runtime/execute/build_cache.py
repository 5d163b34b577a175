"""Compiled signatures of a program by their keys; each is built once, by the thread that comes first."""

import functools
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, Self, TypeVar, cast, overload

T = TypeVar("T")


class BuildSlot(Generic[T]):
    """The place of one build.

    It has a lock of its own. Two programs whose traces call each other block each other only where the calls
    themselves would never end.
    """

    def __init__(self) -> None:
        self.built: T | None = None
        self.lock = threading.RLock()

    @property
    def build(self) -> T:
        """The build in this slot."""
        assert self.built is not None
        return self.built

    def get(self, stale: Callable[[T], bool], make: Callable[[], T]) -> T:
        """The build in this slot, made if there is none or if it is stale; other threads wait.

        >>> slot = BuildSlot()
        >>> slot.get(lambda built: built < 2, lambda: 1), slot.get(lambda built: built < 2, lambda: 2)
        (1, 2)
        """
        with self.lock:
            if self.built is None or stale(self.built):
                self.built = make()
            return self.built


class BuildCache(Generic[T]):
    """Slots by key."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, BuildSlot[T]] = {}
        self._lock = threading.Lock()

    def slot(self, key: Hashable) -> BuildSlot[T]:
        """The slot of a key."""
        with self._lock:
            return self._slots.setdefault(key, BuildSlot())

    def siblings(self, key: tuple[Hashable, ...]) -> list[T]:
        """The builds whose keys differ from `key` only in their last part.

        >>> builds = BuildCache()
        >>> builds.slot(("a", 1)).get(bool, lambda: "made")
        'made'
        >>> builds.siblings(("a", 2)), builds.siblings(("b", 1))
        (['made'], [])
        """
        found = [s for k, s in list(self._slots.items()) if isinstance(k, tuple) and k[:-1] == key[:-1]]
        return [s.built for s in found if s.built is not None]

    def values(self) -> list[T]:
        """All builds, in the order in which they were made."""
        return [s.built for s in list(self._slots.values()) if s.built is not None]

    def __len__(self) -> int:
        return len(self.values())


class LockedObject(Protocol):
    """An object with a lock of its own."""

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """Held by the thread that computes a property."""


class locked_property(functools.cached_property[T]):
    """A `functools.cached_property` that only one thread computes; its object has a `lock`."""

    @overload
    def __get__(self, obj: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, obj: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, obj: object, owner: type[Any] | None = None) -> Self | T:
        if obj is None:
            return self
        with cast(LockedObject, obj).lock:
            return super().__get__(obj, owner)
