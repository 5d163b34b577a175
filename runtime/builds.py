"""What a program has built, by what it was built for: each once, whichever thread comes first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """The place of one build.

    It has a lock of its own: two programs whose traces call each other wait for each other's builds only
    where the calls themselves would never end.
    """

    def __init__(self) -> None:
        self.built: T | None = None
        self.lock = threading.RLock()

    def get(self, stale: Callable[[T], bool], make: Callable[[], T]) -> T:
        """What is here, made now if nothing is, or if that is stale; who comes meanwhile waits.

        >>> slot = Slot()
        >>> slot.get(lambda built: built < 2, lambda: 1), slot.get(lambda built: built < 2, lambda: 2)
        (1, 2)
        """
        with self.lock:
            if self.built is None or stale(self.built):
                self.built = make()
            return self.built


class Builds(Generic[T]):
    """Slots by key."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, Slot[T]] = {}
        self._lock = threading.Lock()

    def slot(self, key: Hashable) -> Slot[T]:
        """The slot of a key."""
        with self._lock:
            return self._slots.setdefault(key, Slot())

    def values(self) -> list[T]:
        """All that has been built, the first one first."""
        return [s.built for s in list(self._slots.values()) if s.built is not None]

    def __len__(self) -> int:
        return len(self.values())


class locked_property(functools.cached_property[T]):
    """A `functools.cached_property` that is worked out by one thread; its object has a `lock`."""

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        with obj.lock:
            return super().__get__(obj, owner)
