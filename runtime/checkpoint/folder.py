"""A folder of checkpoints: saved by all processes while training goes on, restored under any placement.

orbax writes and reads the arrays; the manifest, and what is done where something went wrong, is ours.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from sbp.errors import ArgumentError, CheckpointError, Problem
from sbp.runtime.checkpoint import files, messages
from sbp.runtime.checkpoint.state import as_asked, leaves_of, plain, plain_like, wanted
from sbp.runtime.pipeline.ways import Ways
from sbp.runtime.processes.team import team
from sbp.untyped import PyTree

LOG = logging.getLogger("sbp")
UNFINISHED = ".orbax-checkpoint-tmp"
"""What orbax puts behind the name of a step that is not complete."""


class Checkpoints:
    """The checkpoints of one run, a folder for each step that was saved.

    Arguments:
      path: of the folder; made if it is not there. All processes see the same one.
      keep: how many of the last steps stay. While one is written there is one more.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     runs = Checkpoints(folder)
    ...     runs.save({"w": jax.numpy.arange(3.0)}, step=7, extra={"epoch": 1})
    ...     runs.wait()
    ...     runs.steps, runs.restore({"w": jax.numpy.zeros(3)})["w"].tolist(), runs.extra()
    ([7], [0.0, 1.0, 2.0], {'epoch': 1})
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ArgumentError(messages.keep(keep))
        self.path, self.keep = Path(path).absolute(), keep
        self._pending: int | None = None
        self._ways = Ways()
        self._finish: Callable[[], None] = lambda: None

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, the oldest first."""
        return files.steps_in(self.path)

    def prepare(self) -> None:
        """Makes the folder, and raises now what the first save would raise some hours later.

        All processes call it.

        Raises:
          CheckpointError: if orbax is not installed, or nothing can be written there.
        """
        _orbax()
        self._begin("prepare checkpoints", self.path)

    def save(self, state: PyTree, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Saves the state of a step while training goes on: it returns when a copy is on the host.

        All processes call it. What went wrong with the step before is raised here, or by `wait`.

        Arguments:
          state: arrays, numbers and keys in containers; arrays whole in the logical view, however they lie.
          extra: what JSON can hold: where the data were, for one.

        Raises:
          CheckpointError: if it cannot be written; older steps are still there.
        """
        self.wait()
        told = json.loads(json.dumps(dict(extra or {})))
        target = files.step_path(self.path, step)
        self._begin(f"begin {target.name}", target)
        described = leaves_of(state)
        self._finish = functools.partial(self._manifest, target, step, described, told)
        with reported(target):
            self._pending = step
            self._writer.save(target, args=_orbax().args.StandardSave(plain(state, self._ways)), force=True)

    def wait(self) -> None:
        """Waits until what is being saved is on disk, and deletes what is older than the last `keep`.

        Raises:
          CheckpointError: if it could not be written; older steps are still there.
        """
        if self._pending is None:
            return
        target, self._pending = files.step_path(self.path, self._pending), None
        with reported(target):
            self._writer.wait_until_finished()
        if jax.process_index() == 0:
            files.prune(self.path, self.keep)

    def restore(self, like: PyTree, step: int | None = None, *, check: bool = True) -> PyTree:
        """The state of a step, laid as is asked, whatever placement, devices or processes it was saved from.

        All processes call it.

        Arguments:
          like: a tree of the shape of what was saved: arrays, or `ShapeDtypeStruct`s with shardings; or a
            `Program` that was planned, for its arguments by name or position. Leaves without a sharding come
            to the host.
          step: which one; None for the last one that is complete.
          check: whether checksums are compared, each process its share of the files.

        Raises:
          CheckpointError: if there is none, it is damaged, or it is of something else.
        """
        self.wait()
        step = self._existing(step)
        target = files.step_path(self.path, step)
        manifest = files.read_manifest(target)
        asked = wanted(like, manifest.leaves)
        if differs := list(_differences(manifest.leaves, leaves_of(asked))):
            raise CheckpointError(messages.other_state(target, differs))
        if check:
            _check_files(target, manifest)
        with reported(target):
            abstract = jax.tree.map(plain_like, asked)
            found = self._reader.restore(target, args=_orbax().args.StandardRestore(abstract))
        return jax.tree.map(lambda x, like: as_asked(x, like, self._ways), found, asked)

    def extra(self, step: int | None = None) -> dict[str, Any]:
        """What was saved beside the state of a step."""
        step = self._existing(step)
        return dict(files.read_manifest(files.step_path(self.path, step)).extra)

    def close(self) -> None:
        """Waits for what is being saved, and lets its threads end."""
        self.wait()
        if "_writer" in self.__dict__:
            self._writer.close()
            del self.__dict__["_writer"]

    # -- inside

    def _begin(self, what: str, target: Path) -> None:
        """Makes the folder; what a crash has left of an earlier try is deleted.

        What is wrong in one process is raised in all: nobody waits for one that has none to save with.

        Arguments:
          what: is begun, for who waits.
          target: the folder of a step, or that of all.
        """
        found, cause = tuple[Problem, ...](), None
        try:
            with reported(target):
                self.path.mkdir(parents=True, exist_ok=True)
                if jax.process_index() == 0:
                    files.sweep(self.path)
                    files.probe(self.path)
            if target != self.path and target.exists():
                raise CheckpointError(messages.there(target))
        except CheckpointError as e:
            found, cause = e.problems, e.__cause__
        if (others := team()) is not None:
            told = others.gathered(what, [asdict(p) for p in found])
            found = found or tuple(Problem(**p) for p in next(filter(None, told), ()))
        if found:
            raise CheckpointError(*found) from cause

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if step is None and steps:
            return steps[-1]
        if step is None or step not in steps:
            raise CheckpointError(messages.none(self.path, step, steps))
        return step

    @functools.cached_property
    def _writer(self) -> Any:
        """orbax's, which goes on in a thread."""
        ocp = _orbax()
        options = ocp.options.AsyncOptions(post_finalization_callback=lambda: self._finish())
        return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), async_options=options)

    @property
    def _reader(self) -> Any:
        ocp = _orbax()
        return ocp.Checkpointer(ocp.StandardCheckpointHandler())

    def _manifest(
        self, target: Path, step: int, leaves: tuple[tuple[str, str], ...], extra: Mapping[str, Any]
    ) -> None:
        """Writes the manifest when all files are there, before orbax gives the step its name."""
        if jax.process_index():
            return
        unfinished = target.with_name(target.name + UNFINISHED)
        there = unfinished if unfinished.is_dir() else target
        files.with_files(there, step, leaves, extra).write(there)


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turns what orbax and the file system raise into an error that says what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(messages.failed(path, e)) from e


def _check_files(path: Path, manifest: files.Manifest) -> None:
    """Compares the checksums of all files; each process looks at its share, and all say the same."""
    others = team()
    if others is None:
        found = list(files.damage(path, manifest))
    else:
        mine = list(files.damage(path, manifest, others.index, others.count))
        found = [str(x) for part in others.gathered(f"checksums of {path.name}", mine) for x in part]
    if found:
        raise CheckpointError(messages.damaged(path, files.others(path), "; ".join(found[:4])))


def _differences(saved: tuple[tuple[str, str], ...], asked: tuple[tuple[str, str], ...]) -> list[str]:
    """How the leaves that are asked for differ from those that were saved, in words."""
    here, there = dict(asked), dict(saved)
    missing = [f"{path} {what} is not in it" for path, what in asked if path not in there]
    other = [f"{path} is {there[path]}, not {what}" for path, what in asked if there.get(path, what) != what]
    more = [f"{path} {what} is in it, too" for path, what in saved if path not in here]
    return [*other, *missing, *more]


@functools.cache
def _orbax() -> ModuleType:
    """orbax, which is imported when it is needed."""
    try:
        found = importlib.import_module("orbax.checkpoint")
    except ImportError:
        raise CheckpointError(messages.not_installed()) from None
    logging.getLogger("absl").setLevel(logging.WARNING)
    return found
