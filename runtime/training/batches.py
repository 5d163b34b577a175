"""What `sbp.fit` takes for batches, and where in them a run begins, and goes back to."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from sbp.compat.untyped import PyTree


@runtime_checkable
class Feed(Protocol):
    """Batches that have to be told where to begin, and when nobody wants more: of threads that read files."""

    def batches_from(self, step: int) -> AbstractContextManager[Iterable[PyTree]]:
        """The batches behind the first `step` ones; it is left when training ends, however that is."""


@runtime_checkable
class Stateful(Protocol):
    """What says where it is, and can be put there again: an iterator of grain, a vocabulary."""

    def get_state(self) -> PyTree:
        """Where it is: what JSON can hold, arrays and keys, in dicts and lists."""

    def set_state(self, state: PyTree) -> None:
        """Puts it where it was."""


@runtime_checkable
class MovesState(Stateful, Protocol):
    """Batches for which a part of the state comes and goes, such as rows of tables larger than devices.

    Progress shows `str` of them.
    """

    def state_for(self, step: int, state: PyTree) -> PyTree:
        """The state that a step is given, of what the step before has left; in every process."""

    def keep(self, steps: Sequence[int], state_of: Callable[[int], PyTree], coming: PyTree) -> None:
        """Lets go of what nobody goes back to.

        Arguments:
          steps: that can be restored.
          state_of: what `get_state` gave for one of them.
          coming: what it gave for the one that is saved next.
        """


Batches: TypeAlias = Callable[[int], PyTree] | Iterable[PyTree] | Feed
"""Number of the step -> batch; or batches in a row; or a feed."""


@dataclass
class BatchSource:
    """The batches of a run.

    Arguments:
      batches: as they were given.
    """

    batches: Batches
    _coming: Iterator[PyTree] = field(default_factory=lambda: iter(()))
    _taken: int = 0
    _peeked: tuple[int, PyTree] | None = None
    _left: ExitStack = field(default_factory=ExitStack)

    @property
    def can_go_back(self) -> bool:
        """Whether a batch that was taken can be had again: of an iterator only if it knows where it is."""
        return not isinstance(self.batches, Iterator) or isinstance(self.batches, Stateful)

    def peek(self, step: int) -> PyTree | None:
        """A batch to plan with, without taking it; None where there are none.

        It is the one behind the first `step` ones; of an iterator the first one, since nobody knows yet from
        which step the run goes on, and an iterator does not go back.
        """
        at = 0 if isinstance(self.batches, Iterator) else step
        self.seek(at)
        batch = next(self._coming, None)
        self._peeked = None if batch is None else (at, batch)
        return batch

    def seek(self, step: int, *, again: bool = False) -> None:
        """Goes to where `step` batches were taken. Of an iterator those before are taken, and left out.

        Arguments:
          again: what was peeked at has changed since, and is made again where that can be.
        """
        given, peeked = self.batches, self._peeked
        if peeked is not None and peeked[0] == step and not (again and self.can_go_back):
            return
        self._peeked = None
        if isinstance(given, Iterator):
            if not isinstance(given, Stateful):
                left_out = step - self._taken - (peeked is not None)
                collections.deque(itertools.islice(given, max(0, left_out)), maxlen=0)
            self._coming = given
        elif isinstance(given, Feed):
            self.close()
            self._coming = iter(self._left.enter_context(given.batches_from(step)))
        elif callable(given):
            self._coming = map(given, itertools.count(step))
        else:
            self._coming = itertools.islice(iter(given), step, None)
        self._taken = step

    def draw(self) -> PyTree | None:
        """The next batch; None where there are no more."""
        if self._peeked is not None:
            (_, batch), self._peeked = self._peeked, None
        else:
            batch = next(self._coming, None)
        self._taken += batch is not None
        return batch

    def state_for(self, step: int, state: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """The state that a step is given, of what the step before has left."""
        return self.batches.state_for(step, state) if isinstance(self.batches, MovesState) else state

    def close(self) -> None:
        """Nobody wants more."""
        self._left.close()
        self._coming = iter(())
