"""Writing a step while training goes on: what is handed to orbax, its checksums, and when the step counts.

Every process hands its parts of the arrays to orbax's handler, which copies them to the host, and computes
their checksums in a thread while they are written. Then each says how that went; process 0 writes the
manifest only when all have written all, and tells the others. So what one cannot write is an error in all.
"""

import functools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import jax

from sbp.compat.forks import before_exit
from sbp.compat.untyped import PyTree
from sbp.errors import CheckpointError, Problem, raise_all
from sbp.runtime.arrays.checksums import WORD
from sbp.runtime.arrays.writer import HostShard, await_written, begin_write, checksums_of, merge, parts_of
from sbp.runtime.checkpoint import messages, steps
from sbp.runtime.checkpoint.manifest import MANIFEST, Manifest
from sbp.runtime.checkpoint.steps import ARRAYS
from sbp.runtime.processes.process_group import ProcessGroup, process_group
from sbp.runtime.storage import files
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.lease import Lease
from sbp.runtime.storage.messages import storage_failure

LOG = logging.getLogger("sbp")
MERGED = "manifest.ocdbt"
"""What orbax writes when it merges what all processes have written."""
LISTING_SECONDS, LISTING_LOOK_SECONDS = 60.0, 0.2
_T = TypeVar("_T")


@dataclass(frozen=True)
class SaveSpec:
    """One step that is to be written.

    Arguments:
      folder: of the checkpoints.
      manifest: of the step, but for the checksums.
      extra: the file of arrays that are kept beside the state; empty where there are none.
      newer: the steps that are set aside, the oldest first: training went on from one before them.
      keep, keep_every: which steps stay.
    """

    folder: Path
    manifest: Manifest
    extra: bytes
    newer: tuple[int, ...]
    keep: int
    keep_every: int | None

    @property
    def path(self) -> Path:
        """Of the step."""
        return steps.step_path(self.folder, self.manifest.step)

    @property
    def data(self) -> Path:
        """The folder that is written, marked as this library's."""
        return self.path / self.manifest.data


@dataclass
class Save:
    """A step that is being written.

    Arguments:
      spec: what it is.
      lease: in process 0, of the folder.
      problems: what went wrong.
      pid: of the process that writes it.
    """

    spec: SaveSpec
    lease: Lease | None
    problems: tuple[Problem, ...] = ()
    pid: int = field(default_factory=os.getpid)
    _thread: threading.Thread | None = None
    _parts: list[HostShard] = field(default_factory=list)

    def hand_over(self, state: PyTree) -> None:
        """Gives the state to orbax; returns when a copy is on the host, and goes on in a thread.

        Arguments:
          state: as orbax takes it, in all processes.
        """
        futures, cause = list[Any](), tuple[Problem, ...]()
        try:
            if not files.exists(self.spec.data / steps.OWNER):
                raise CheckpointError(messages.not_shared(self.spec.data))
            self._parts = parts_of(jax.tree.leaves(state))
            futures = begin_write(self.spec.data / ARRAYS, state)
        except Exception as e:  # the others wait for what this process says
            cause = _problems(self.spec.path, e)
        self._thread = threading.Thread(target=self._finish, args=(futures, cause), name="sbp checkpoint")
        _running().threads.add(self._thread)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the step counts.

        Raises:
          CheckpointError: if it could not be written; older steps are still there.
        """
        if self._thread is not None:
            self._thread.join()
        raise_all(self.problems)

    # -- in the thread

    def _finish(self, futures: Sequence[Any], problems: tuple[Problem, ...]) -> None:
        others = process_group()
        sums = dict[str, int]()
        if not problems:
            sums, problems = _tried(self.spec.path, lambda: self._written(futures), sums)
        said = {"problems": [asdict(p) for p in problems], "sums": sums}
        key = f"save/{self.spec.manifest.token}"
        if others is None:
            self.problems = self._committed([said])
        else:
            try:
                self.problems = _exchanged(others, key, said, self._committed)
            except Exception as e:  # a process is gone, and JAX ends this one, too
                self.problems = _problems(self.spec.path, e)
        self._parts = []
        if self.problems and jax.process_index() == 0:
            LOG.warning("%s was not saved: %s", self.spec.path.name, messages.in_one_line(self.problems[0]))

    def _written(self, futures: Sequence[Any]) -> dict[str, int]:
        """Waits until all of this process is written; the checksums of it, per leaf."""
        sums = checksums_of(self._parts)
        await_written(futures)
        return sums

    def _committed(self, said: Sequence[Mapping[str, Any]]) -> tuple[Problem, ...]:
        """In process 0, what is done when all have written: the step counts; or the first error of all."""
        wrong = [Problem(**problem) for one in said for problem in one["problems"]][:1]
        is_still_written = bool(wrong)  # by threads of TensorStore, which end when they end
        if not wrong:
            _, problems = _tried(self.spec.path, lambda: self._commit([one["sums"] for one in said]), None)
            wrong = list(problems)
        if wrong:
            _tried(self.spec.path, lambda: self._drop(is_still_written), None)
            _, lost = _tried(self.spec.path, self._check_lease, None)
            wrong = [p for p in lost if p.kind == "lease"] or wrong  # the cause of whatever else there is
        return tuple(wrong)

    def _commit(self, sums: Sequence[Mapping[str, int]]) -> None:
        spec, manifest = self.spec, self.spec.manifest
        self._await_listing([i for i, one in enumerate(sums) if one])
        merge(spec.data / ARRAYS)
        if any(sums) and not files.exists(spec.data / ARRAYS / MERGED):  # orbax passes over a failed listing
            raise CheckpointError(messages.not_listed(spec.data / ARRAYS, [MERGED]))
        if spec.extra:
            files.replace(spec.data / steps.EXTRA, spec.extra)
        files.sync_tree(spec.data)
        total = [sum(one.get(str(i), 0) for one in sums) % WORD for i in range(len(manifest.leaves))]
        leaves = tuple(replace(x, checksum=s) for x, s in zip(manifest.leaves, total, strict=True))
        self._exist(replace(manifest, leaves=leaves, sizes=files.sizes(spec.data / ARRAYS)))
        try:
            steps.write_index(spec.folder, steps.finished_steps(spec.folder))
            steps.prune(spec.folder, spec.keep, spec.keep_every, self._check_lease)
            self._drop_again()
        except Exception as e:  # the step counts; the next one tries again
            LOG.warning("%s", messages.not_pruned(spec.folder, manifest.step, e))

    def _await_listing(self, processes: Sequence[int]) -> None:
        """Returns when the storage lists what all processes have written, which orbax is about to merge."""
        path, end = self.spec.data / ARRAYS, time.monotonic() + LISTING_SECONDS
        wanted = {f"ocdbt.process_{i}" for i in processes}
        while missing := wanted - files.listed_by_orbax(path, "ocdbt.process_*"):
            self._check_lease()  # a new owner has swept it away
            if time.monotonic() > end:
                raise CheckpointError(messages.not_listed(path, sorted(missing)))
            time.sleep(LISTING_LOOK_SECONDS)

    def _exist(self, manifest: Manifest) -> None:
        """Sets aside what training has gone back from, and lets the step exist: both, or neither."""
        spec, token = self.spec, manifest.token
        # The newest goes first, so that what is left is a branch. What has come since then is another one's.
        aside = {s: steps.aside_path(spec.folder, s, token) for s in spec.newer[::-1]}
        try:
            for step, path in aside.items():
                self._check_lease()
                files.rename(steps.step_path(spec.folder, step) / MANIFEST, path)
            self._check_lease()
            files.create(spec.path / MANIFEST, manifest.encode())
        except Exception as e:
            _tried(spec.path, lambda: self._undo(token, aside), None)
            if isinstance(e, FileExistsError):
                raise CheckpointError(messages.step_exists(spec.path)) from None
            raise
        if spec.newer:
            LOG.warning("%s", messages.set_aside(spec.folder, spec.newer, manifest.step))

    def _undo(self, token: str, aside: Mapping[int, Path]) -> None:
        """Makes the steps what they were; not in a folder that another one has taken, and goes on in."""
        self._check_lease()
        _tried(self.spec.path, lambda: steps.withdraw(self.spec.folder, self.spec.manifest.step, token), None)
        for step in self.spec.newer:
            _tried(
                self.spec.path, functools.partial(steps.take_back, self.spec.folder, step, aside[step]), None
            )

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _drop(self, is_still_written: bool) -> None:
        """Takes away what was written of a step that does not count; again later, if more might come."""
        step, data = self.spec.manifest.step, self.spec.manifest.data
        steps.drop(self.spec.folder, step, data, keeps_mark=is_still_written)
        if is_still_written and self.lease is not None:
            self.lease.failed_saves.append((step, data))

    def _drop_again(self) -> None:
        """Takes away what was written late of steps that failed before."""
        while self.lease is not None and self.lease.failed_saves:
            steps.drop(self.spec.folder, *self.lease.failed_saves.pop())


def make_data_folder(spec: SaveSpec, lease: Lease | None) -> None:
    """Makes the folder of a step's arrays, with the mark in it first; in process 0, before others write."""
    files.make_folder(spec.data)
    mark = {"token": spec.manifest.token, "lease": None if lease is None else lease.holder.token}
    files.create(spec.data / steps.OWNER, json.dumps(mark).encode())
    files.make_folder(spec.data / ARRAYS)
    files.sync_folder(spec.path)
    files.sync_folder(spec.folder)


# -- inside


@dataclass
class _Running:
    """The threads that write, for which the end of Python waits."""

    threads: weakref.WeakSet[threading.Thread] = field(default_factory=weakref.WeakSet)

    def join(self) -> None:
        for thread in list(self.threads):
            thread.join()


@functools.cache
def _running() -> _Running:
    made = _Running()
    before_exit(made.join)
    return made


def _tried(path: Path, action: Callable[[], _T], otherwise: _T) -> tuple[_T, tuple[Problem, ...]]:
    """What an action gives, or what is wrong with it."""
    try:
        return action(), ()
    except Exception as e:
        LOG.debug("%s", path, exc_info=True)
        return otherwise, _problems(path, e)


def _problems(path: Path, error: Exception) -> tuple[Problem, ...]:
    if isinstance(error, CheckpointError):
        return tuple(error.problems)
    return (storage_failure(path, error),)


def _exchanged(
    others: ProcessGroup,
    key: str,
    said: Mapping[str, Any],
    commit: Callable[[Sequence[Mapping[str, Any]]], tuple[Problem, ...]],
) -> tuple[Problem, ...]:
    """Says how this process has fared; process 0 hears all, commits, and says how that went."""
    if not others.leads:
        others.put(f"{key}/{others.index}", said)
        answer = others.wait_for(f"{key}/said")
        return tuple(Problem(**p) for p in answer["problems"])
    every = [said, *(others.wait_for(f"{key}/{p}") for p in range(1, others.count))]
    problems = commit(every)
    others.put(f"{key}/said", {"problems": [asdict(p) for p in problems]})
    return problems
