"""What a program has built, by what it was built for: each once, whichever thread comes first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, Self, TypeVar, cast, overload

T = TypeVar("T")


class BuildSlot(Generic[T]):
    """The place of one build.

    It has a lock of its own: two programs whose traces call each other wait for each other's builds only
    where the calls themselves would never end.
    """

    def __init__(self) -> None:
        self.built: T | None = None
        self.lock = threading.RLock()

    @property
    def made(self) -> T:
        """What was built here."""
        assert self.built is not None
        return self.built

    def get(self, stale: Callable[[T], bool], make: Callable[[], T]) -> T:
        """What is here, made now if nothing is, or if that is stale; who comes meanwhile waits.

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

    def beside(self, key: tuple[Hashable, ...]) -> list[T]:
        """What has been built under keys that differ from `key` in their last part alone.

        >>> builds = Builds()
        >>> builds.slot(("a", 1)).get(bool, lambda: "made")
        'made'
        >>> builds.beside(("a", 2)), builds.beside(("b", 1))
        (['made'], [])
        """
        found = [s for k, s in list(self._slots.items()) if isinstance(k, tuple) and k[:-1] == key[:-1]]
        return [s.built for s in found if s.built is not None]

    def values(self) -> list[T]:
        """All that has been built, the first one first."""
        return [s.built for s in list(self._slots.values()) if s.built is not None]

    def __len__(self) -> int:
        return len(self.values())


class Locked(Protocol):
    """An object with a lock of its own."""

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """Held by the thread that works something out."""


class locked_property(functools.cached_property[T]):
    """A `functools.cached_property` that is worked out by one thread; its object has a `lock`."""

    @overload
    def __get__(self, obj: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, obj: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, obj: object, owner: type[Any] | None = None) -> Self | T:
        if obj is None:
            return self
        with cast(Locked, obj).lock:
            return super().__get__(obj, owner)
