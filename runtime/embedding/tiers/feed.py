"""Batches of a training whose rows come and go with its passes, as `sbp.fit` takes them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, TypeAlias

from sbp.compat.untyped import PyTree
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.tiers import messages
from sbp.runtime.embedding.tiers.passes import IdsInBatch, PassCutter, TierPass
from sbp.runtime.embedding.tiers.rates import TierRates
from sbp.runtime.embedding.tiers.tiered import Tiered, Versions

GivenBatches: TypeAlias = Callable[[int], PyTree] | Iterable[PyTree] | Any
"""As of `sbp.fit`, but no iterator: batches are read ahead."""


class TierFeed:
    """Batches of a training with slots in the place of ids; rows are on the devices when a step needs them.

    Arguments:
      tiered: the tables.
      batches: as of `sbp.fit`: a function of the step, a sequence, or an object with `batches_from(step)`. A
        batch holds ids on the host, in a dict by feature. All processes have the same batches.
      ids: batch -> that dict, where a batch is not a tree with one such dict in it.
      put: batch, dict -> the batch with the dict in the place of its own.

    Raises:
      EmbeddingError: for an iterator, which cannot be read ahead and then be saved where training is; and for
        `ids` without `put`.
    """

    def __init__(
        self,
        tiered: Tiered,
        batches: GivenBatches,
        *,
        ids: Callable[[PyTree], Mapping[str, Any]] | None = None,
        put: Callable[[PyTree, Mapping[str, Any]], PyTree] | None = None,
    ) -> None:
        if isinstance(batches, Iterator):
            raise EmbeddingError(messages.no_iterator(type(batches).__name__))
        if (ids is None) != (put is None):
            raise EmbeddingError(messages.ids_and_put())
        mapping = IdsInBatch.mapping(tiered.own.features)
        self.where = mapping if ids is None or put is None else IdsInBatch(ids, put)
        self.tiered, self.batches = tiered, batches
        self._reading: _Reading | None = None
        self._named: dict[int, Versions] = {}
        self._began = time.monotonic()
        self._shown = self._began, TierRates()

    def batches_from(self, step: int) -> _Reading:
        """The batches behind the first `step` ones."""
        self._reading = _Reading(self._cutter(), self._source(step), step)
        return self._reading

    def state_for(self, step: int, state: PyTree) -> PyTree:
        """The state that a step is given: where a pass begins, with its rows.

        Raises:
          StoreError: if rows cannot be read or written.
          EmbeddingError: if the state is not of these tables and their optimizer.
        """
        assert self._reading is not None, "no batch was drawn"
        state = self._reading.state_for(self.tiered, step, state)
        self.tiered.step = step
        return state

    def example(self, batch: PyTree) -> PyTree:
        """A batch with slots in the place of ids, as it would be alone: to plan a step with.

        Raises:
          EmbeddingError: for ids that are none of their table, and for a batch that does not fit.
        """
        (alone,) = self._cutter().passes([batch], 0)
        (found,) = alone
        return found

    def get_state(self) -> PyTree:
        """For checkpoints: the keys of the rows on the devices, and versions of all others."""
        return {
            "slots": {name: keys.copy() for name, keys in self.tiered.slots.items()},
            "versions": {n: [[p, v] for p, v in of.items()] for n, of in self.tiered.commit().items()},
        }

    def set_state(self, state: PyTree) -> None:
        """Goes back to rows as they were.

        Raises:
          EmbeddingError: if they were on devices with another budget.
        """
        self._named = {}
        self.tiered.open(state["slots"], _versions(state))

    def keep(self, steps: Sequence[int], state_of: Callable[[int], PyTree], coming: PyTree) -> None:
        """Lets go of rows that no step has which can be restored, nor the one that is saved next."""
        self._named = {n: self._named.get(n) or _versions(state_of(n)) for n in steps}
        every = [*self._named.values(), _versions(coming)]
        self.tiered.keep(every, is_restorable=bool(self._named))

    def __str__(self) -> str:
        """What was moved since this was asked the last time."""
        (began, before), now = self._shown, (time.monotonic(), self.tiered.rates)
        self._shown = now
        return (now[1] - before).text(now[0] - began)

    @property
    def total(self) -> str:
        """What was moved since these batches began, in words."""
        return self.tiered.rates.text(time.monotonic() - self._began)

    def _cutter(self) -> PassCutter:
        tiered = self.tiered
        tables = {t.name: p.name for p in tiered.own.passes for t in p.tables}
        features = {
            f.name: (f, tables[f.table.name], tiered.own.numbers[f.table.name]) for f in tiered.own.features
        }
        slots = {name: tiered.slot_table(name) for name in tiered.slots}
        budgets = tiered.device_bytes, tiered.batch_bytes, tiered.host_bytes
        return PassCutter(features, slots, self.where, tiered.batches, *budgets)

    def _source(self, step: int) -> AbstractContextManager[Iterable[PyTree]]:
        given = self.batches
        if hasattr(given, "batches_from"):
            found: AbstractContextManager[Iterable[PyTree]] = given.batches_from(step)
            return found
        if callable(given):
            return nullcontext(map(given, itertools.count(step)))
        return nullcontext(itertools.islice(iter(given), step, None))


def _versions(state: PyTree) -> Versions:
    return {n: {int(p): int(v) for p, v in of} for n, of in state["versions"].items()}


class _Reading:
    """Passes that a thread cuts: while one trains, the next one is there, and the one behind it is cut."""

    def __init__(
        self, cutter: PassCutter, source: AbstractContextManager[Iterable[PyTree]], step: int
    ) -> None:
        self._cutter, self._source, self._step = cutter, source, step
        self._ready: queue.Queue[TierPass | BaseException | None] = queue.Queue()
        self._wanted, self._stopped = threading.Semaphore(2), threading.Event()
        self._thread = threading.Thread(target=self._cut, name="sbp-passes", daemon=True)
        self._left = ExitStack()
        self._drawn: dict[int, TierPass] = {}
        self._next: TierPass | None = None
        self._fetched: dict[int, Future[None]] = {}

    def __enter__(self) -> _Reading:
        self._left.callback(self._thread.join)
        self._left.callback(self._stop)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.close()

    def __iter__(self) -> Iterator[PyTree]:
        """The batches, with slots in the place of ids."""
        while (coming := self._coming()) is not None:
            self._drawn[coming.first + 1] = coming
            self._next = None
            yield from coming

    def state_for(self, tiered: Tiered, step: int, state: PyTree) -> PyTree:
        """As of `TierFeed`."""
        if step == self._step + 2:  # the first one has compiled it
            tiered.begin_measuring()
        for first in sorted(n for n in self._drawn if n <= step):  # fewer where the first batch is left out
            begins = self._drawn.pop(first)
            if first not in self._fetched:
                self._fetched[first] = tiered.fetch(begins, state)
            tiered.await_fetch(self._fetched.pop(first))
            state = tiered.exchange(state, begins, first - 1)
            self._wanted.release()
        if not self._fetched and not self._drawn and (coming := self._peeked()) is not None:
            self._fetched[coming.first + 1] = tiered.fetch(coming, state)
        return state

    # -- inside

    def _peeked(self) -> TierPass | None:
        """The next pass, if it is ready."""
        if self._next is None and not self._ready.empty():
            item = self._ready.get()
            if isinstance(item, TierPass):
                self._next = item
            else:
                self._ready.put(item)
        return self._next

    def _coming(self) -> TierPass | None:
        """The next pass, when it is ready; None behind the last one."""
        if self._next is not None:
            return self._next
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _cut(self) -> None:
        """The thread: reads batches, and cuts them into passes."""
        try:
            with self._source as batches:
                passes = self._cutter.passes(_until(self._stopped, batches), self._step)
                while True:
                    self._wanted.acquire()
                    if self._stopped.is_set():
                        return
                    found = next(passes, None)
                    if found is None:
                        break
                    self._ready.put(found)
            self._ready.put(None)
        except BaseException as e:  # it is raised where a batch is drawn
            self._ready.put(e)

    def _stop(self) -> None:
        self._stopped.set()
        self._wanted.release()


def _until(stopped: threading.Event, batches: Iterable[PyTree]) -> Iterator[PyTree]:
    for batch in batches:
        if stopped.is_set():
            return
        yield batch
