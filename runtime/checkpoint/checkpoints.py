"""A folder of checkpoints: saved by all processes while training goes on, restored under any placement.

orbax writes and reads the arrays. What makes a step count, who may write, what is good, what may be deleted
and what is checked is ours: see `writer`, `steps` and `reader` here, and the folders `storage` and `arrays`.
"""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from sbp.compat.untyped import DType, PyTree
from sbp.errors import ArgumentError, CheckpointError, DamagedCheckpointError
from sbp.passes.explain.internal_errors import public
from sbp.runtime.arrays.selection import RestoreRequest, selection
from sbp.runtime.arrays.state import LeafRecord, leaves_of, plain
from sbp.runtime.checkpoint import messages, steps
from sbp.runtime.checkpoint.manifest import Manifest, decode
from sbp.runtime.checkpoint.reader import check_sizes, read_extra, read_state
from sbp.runtime.checkpoint.rows_by_id import RowReader
from sbp.runtime.checkpoint.writer import Save, SaveSpec, make_data_folder
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.nan_checks.state_check import Traits, first_not_finite, traits_of, verdict, zero_warning
from sbp.runtime.pipeline.transfer_engine import TransferEngine
from sbp.runtime.processes.initialize import job_name
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.storage import extras, files, lease
from sbp.runtime.storage.agreement import agree
from sbp.runtime.storage.libraries import orbax

LOG = logging.getLogger("sbp")
_T = TypeVar("_T")


class Checkpoints:
    """The checkpoints of one run, a folder for each step that was saved.

    Arguments:
      path: a folder, which is made if needed, or a URL such as "gs://bucket/run". All processes see the same
        one. The first that saves or prepares owns it until `close`, or the end of its process.
      keep: how many of the last steps stay; one more while a step is written.
      keep_every: steps divisible by this number stay for good; None for none.
      job: the name of this job. If the job is started again, it owns the folder at once. None for the name
        that the launcher, SLURM or Kubernetes gives it.
      tables: of a state with tables: then rows, and lines of an optimizer's state, are restored by table and
        id, however the tables were stacked and split. A table may have more rows than were saved; those
        behind are as in `like`, and zero if that has no values.

    Raises:
      ArgumentError: if no step is to stay.
      CheckpointError: if orbax is not installed, or cannot write to such a path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     runs = Checkpoints(folder)
    ...     runs.save({"w": jax.numpy.arange(3.0)}, step=7, extra={"epoch": 1})
    ...     runs.wait()
    ...     runs.steps, runs.restore({"w": jax.numpy.zeros(3)})["w"].tolist(), runs.extra()
    ([7], [0.0, 1.0, 2.0], {'epoch': 1})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int = 3,
        *,
        keep_every: int | None = None,
        job: str | None = None,
        tables: Collection | None = None,
    ) -> None:
        for name, count in (("keep", keep), ("keep_every", keep_every)):
            if count is not None and count < 1:
                raise ArgumentError(messages.keep(name, count))
        self.path = files.folder_path(path)
        self.keep, self.keep_every, self.job = keep, keep_every, job
        self._ways = TransferEngine()
        self._pending: Save | None = None
        self._lease: lease.Lease | None = None
        self._head: tuple[int, str] | None = None
        self._latest: int | None = None
        self._good: Traits | None = None
        self._tables = None if tables is None else {n: m.as_json() for n, m in tables.row_maps.items()}
        self._rows = None if tables is None else RowReader(self.path, tables, self._ways)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, the oldest first."""
        return steps.finished_steps(self.path)

    @property
    def abandoned_steps(self) -> list[int]:
        """The steps that were set aside when training continued from an older one; the first saved first."""
        return [x.step for x in steps.abandoned_steps(self.path)]

    # -- saving

    def prepare(self) -> None:
        """Makes the folder and takes its lease, so that errors come now and not at the first save.

        All processes call it.

        Raises:
          CheckpointError: if orbax is not installed, nothing can be written there, or another run has it.
        """
        orbax()
        agree("prepare checkpoints", self.path, self._own)

    @public
    def baseline(self, state: PyTree) -> Traits:
        """Records which leaves of a state are not finite, as the state that later saves are compared with.

        All processes call it. `restore` does it by itself. Returns the record.
        """
        self._good = self._traits(state)
        return self._good

    @public
    def check(self, state: PyTree, step: int, exempt: Sequence[str] = ()) -> None:
        """Checks a state on its devices, and refuses it if a leaf that was finite is not finite any more.

        All processes call it.

        Arguments:
          state: as for `save`.
          step: for the message.
          exempt: patterns of the paths of leaves that are not checked, such as "opt_state/*".

        Raises:
          NonFiniteError: naming the leaves.
        """
        self._checked(state, step, exempt)

    @public
    def save(self, state: PyTree, step: int, extra: PyTree = None, *, exempt: Sequence[str] = ()) -> None:
        """Saves the state of a step in the background; returns when a copy is on the host.

        Call `wait` or `close`, or leave `with`, before the program ends. From Python 3.12 on no write can
        start at the end, and the step is lost with a warning.

        All processes call it. Errors of the save before are raised here, or by `wait`. If training went back
        to an older step, newer steps are set aside when this one is complete.

        Arguments:
          state: arrays, numbers and keys in containers; arrays may have any sharding.
          extra: a tree of JSON values, NumPy arrays and keys, such as the position in the data. That of
            process 0 is kept.
          exempt: see `check`.

        Raises:
          NonFiniteError: if the state is not good; it is not saved.
          CheckpointError: if it cannot be written; older steps are still there.
        """
        self.wait()
        content, file = extras.encode({} if extra is None else extra)
        path = steps.step_path(self.path, step)
        described = leaves_of(state)
        traits = self._checked(state, step, exempt)
        told = agree(f"begin {path.name}", path, lambda: self._begin(step, content, file))
        leaves = tuple(LeafRecord(p, t, traits=traits.get(p, frozenset())) for p, t in described)
        digest, sequence = extras.digest(file), told["sequence"]
        data, token = told["data"], told["token"]
        manifest = Manifest(step, leaves, content, data, token, self._head, sequence, digest)
        manifest = replace(manifest, tables=self._tables)
        self._pending = Save(self._spec(manifest, file, told["newer"]), self._lease)
        self._pending.hand_over(plain(state, self._ways))
        self._head, self._latest, self._good = (step, told["token"]), step, traits

    def wait(self) -> None:
        """Waits until the step that is being saved is complete.

        Raises:
          CheckpointError: if it could not be written; older steps are still there.
        """
        pending, self._pending = self._pending, None
        if pending is None or pending.pid != os.getpid():  # in a fork: its parent has the thread that writes
            return
        try:
            pending.wait()
        except CheckpointError:
            self._head = pending.spec.manifest.parent
            self._latest = None if self._head is None else self._head[0]
            raise

    def close(self) -> None:
        """Waits for what is being saved, and lets others have the folder."""
        try:
            self.wait()
        finally:
            held, self._lease = self._lease, None
            if held is not None:
                lease.give_up(held)

    # -- restoring

    @public
    def restore(
        self,
        like: PyTree,
        step: int | None = None,
        *,
        check: bool = True,
        only: str | int | Sequence[str | int] | None = None,
        dtype: DType | type | None = None,
        strict: bool = False,
    ) -> PyTree:
        """The state of a step, with the wanted shardings, whatever placement or processes it was saved from.

        All processes call it. Later saves continue from this step. If no step is named, a damaged one is
        passed over with a warning, and the one before it is restored.

        Arguments:
          like: a tree like the saved one, of arrays or of `ShapeDtypeStruct`s with shardings; or a `Program`
            that was planned, which stands for its arguments, by name or position. Leaves without a sharding
            are restored to the host.
          step: which one; None for the last one that is complete and intact.
          check: whether checksums are compared.
          only: the key of the part to restore, or its keys, outermost first: "params" of a dict, 0 of a
            tuple. `like` is then that part.
          dtype: the type to convert floating leaves to; None for no conversion.
          strict: whether a damaged last step is an error.

        Raises:
          DamagedCheckpointError: if the step is damaged; if no step was named, only if all are.
          CheckpointError: if there is no such step, or it is of another state.
        """
        self.wait()
        damaged = list[int]()
        while True:
            found = self._agreed_step(step, damaged)
            try:
                manifest = self._agreed_manifest(found)
                state = self._restored(manifest, RestoreRequest(like, only, dtype), check)
            except DamagedCheckpointError as e:
                damaged.append(found)
                there = agree("look again", self.path, lambda: self.steps)
                if found not in there:
                    self._vanished(step, found)
                elif step is not None or strict or not {*there} - {*damaged}:
                    raise
                elif jax.process_index() == 0:
                    LOG.warning("%s", messages.passed_over(self.path, found, e.problems[0].got))
                continue
            self._latest = found
            if only is None:
                self._head = (found, manifest.token)
                self._good = {x.path: x.traits for x in manifest.leaves}
            return state

    def extra(self, step: int | None = None) -> Any:
        """The `extra` of a step.

        Arguments:
          step: which one; None for the one that was saved or restored last by this object, otherwise the last
            complete one.

        Raises:
          DamagedCheckpointError: if it is not as it was written.
          CheckpointError: if there is no such step.
        """
        self.wait()
        named = self._latest if step is None else step
        while True:
            found = self._existing(named)
            try:
                manifest = steps.read_manifest(self.path, found)
                path, others = steps.step_path(self.path, found), steps.others(self.path, found)
                return read_extra(path, manifest, others)
            except DamagedCheckpointError:
                if found in self.steps:
                    raise
                self._vanished(named, found)

    # -- inside: saving

    def _own(self) -> None:
        """Makes the folder, and in process 0 takes it; what crashes have left is deleted."""
        files.make_folder(self.path)
        if jax.process_index() == 0:
            if self._lease is None:
                self._lease = lease.acquire(self.path, self.job or job_name(), self._clean)
            self._lease.check()

    def _clean(self) -> None:
        """Deletes what crashes have left, where nobody is writing."""
        steps.sweep(self.path)
        steps.write_index(self.path, self.steps)

    def _begin(self, step: int, content: Any, file: bytes) -> dict[str, Any]:
        """Makes the folder of a step's arrays; what process 0 says of it to all."""
        orbax()
        self._own()
        if jax.process_index():
            return {}
        path = steps.step_path(self.path, step)
        there = self.steps
        after = step + 1 if self._head is None else min(self._head[0], step) + 1
        if step in there and step < after:
            raise CheckpointError(messages.step_exists(path))
        if steps.is_foreign(path):
            raise CheckpointError(messages.foreign(path))
        token = uuid.uuid4().hex
        sequence = 1 + steps.last_sequence(self.path, there)
        manifest = Manifest(step, (), content, f"data-{token}", token)
        newer = [s for s in there if s >= after]
        make_data_folder(self._spec(manifest, file, newer), self._lease)
        return {"token": token, "data": manifest.data, "newer": newer, "sequence": sequence}

    def _spec(self, manifest: Manifest, file: bytes, newer: Sequence[int]) -> SaveSpec:
        return SaveSpec(self.path, manifest, file, tuple(newer), self.keep, self.keep_every)

    def _traits(self, state: PyTree) -> Traits:
        """What all processes see of a state."""
        mine, others = traits_of(state), process_group()
        if others is None:
            return mine
        every = others.gather("look at a state", {p: sorted(t) for p, t in mine.items()})
        paths = {p for one in every for p in one}
        return {p: frozenset(t for one in every for t in one.get(p, ())) for p in paths}

    def _checked(self, state: PyTree, step: int, exempt: Sequence[str]) -> Traits:
        traits = self._traits(state)
        where = f"step {step}"
        if self._good is None:
            if wrong := [p for p, _ in verdict(state, traits, {}, exempt).bad]:
                LOG.warning("%s", first_not_finite(where, wrong))
            return traits
        found = verdict(state, traits, self._good, exempt)
        found.enforce(where)
        if found.zero_paths and jax.process_index() == 0:
            LOG.warning("%s", zero_warning(where, found.zero_paths))
        return traits

    # -- inside: restoring

    def _existing(self, step: int | None, damaged: Sequence[int] = ()) -> int:
        there = self.steps
        if step is None and (left := [s for s in there if s not in damaged]):
            return left[-1]
        if step is None or step not in there:
            files.check_folder(self.path)
            raise CheckpointError(messages.none(self.path, step, there, self.abandoned_steps))
        return step

    def _agreed_step(self, step: int | None, damaged: Sequence[int]) -> int:
        """The step that all processes restore, as process 0 finds it."""
        look = functools.partial(self._existing, step, damaged)
        return int(agree("choose a step", self.path, look if jax.process_index() == 0 else int))

    def _agreed_manifest(self, step: int) -> Manifest:
        """Its manifest, whose files are there."""
        path = steps.step_path(self.path, step)

        def look() -> str:
            data, others = steps.read_bytes(self.path, step), steps.others(self.path, step)
            check_sizes(path, decode(path, step, data, others), others)
            return data.decode()

        told = agree(f"look at {path.name}", path, look if jax.process_index() == 0 else str)
        return decode(path, step, told.encode())

    def _restored(self, manifest: Manifest, request: RestoreRequest, check: bool) -> PyTree:
        """What is asked for of a step."""
        if self._rows and (found := self._rows.restore(manifest, request, check)) is not None:
            return found
        wanted = selection(steps.step_path(self.path, manifest.step), manifest.leaves, request)
        return wanted.convert(read_state(self.path, manifest, wanted, self._ways, check=check))

    def _vanished(self, step: int | None, found: int) -> None:
        """Says that a step was pruned while it was read.

        Raises:
          DamagedCheckpointError: if it was asked for by its number.
        """
        if step is not None:
            raise DamagedCheckpointError(messages.pruned_step(steps.step_path(self.path, found))) from None
        LOG.warning("%s", messages.taken_next(self.path, found))
