"""What is deleted in a folder, and what is never."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from sbp.errors import LeaseError
from sbp.runtime.checkpoint import steps
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files, lease
from sbp.runtime.storage.messages import lease_lost

TOKEN = f"{7:032x}"


def saved(runs: Checkpoints, *numbers: int) -> None:
    for step in numbers:
        runs.save({"w": jnp.full(3, float(step))}, step)
    runs.wait()


def value_of(runs: Checkpoints, step: int | None = None) -> float:
    return float(runs.restore({"w": jnp.zeros(3)}, step)["w"][0])


LEFT = {
    f".{steps.INDEX}.{TOKEN}.tmp": b'{"steps": [1',
    f".sbp_lease-000001.json.{TOKEN}.tmp": b'{\n "token": "x", "job"',
    f"step_00000001/.{steps.MANIFEST}.{TOKEN}.tmp": b'{"format": "sbp-checkpoint", "version": 2',
    f"step_00000008/.{steps.MANIFEST}.{TOKEN}.tmp": b"",
    f"step_00000008/data-{TOKEN}/.{steps.OWNER}.{TOKEN}.tmp": b'{"token": "',
}
"""What processes leave that were killed while they wrote a file."""
OTHERS = {
    f".{steps.INDEX}.{TOKEN[1:]}.tmp": b'{"steps": [1',
    f".notes.json.{TOKEN}.tmp": b"{",
    f"step_00000001/.{steps.MANIFEST}.{TOKEN[:-1]}1.tmp": b'{"format": "other"',
    f"step_00000006/data-{TOKEN}/.{steps.OWNER}.{TOKEN}.tmp": b"mine",
    f"step_00000007/data-{TOKEN}/weights": b"mine",
}
"""What looks like that in part."""


def test_temporary_files_of_the_killed_are_deleted_and_only_those(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as runs:
        saved(runs, 1)
    for name, data in (LEFT | OTHERS).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with Checkpoints(tmp_path) as again:
        again.prepare()
        assert [name for name in LEFT if (tmp_path / name).exists()] == []
        assert [name for name, data in OTHERS.items() if (tmp_path / name).read_bytes() != data] == []
        assert not (tmp_path / "step_00000008").exists()
        saved(again, 8)  # as a folder that holds nothing but a leftover, it would be somebody else's
        assert value_of(again) == 8


def test_what_another_one_is_writing_is_not_deleted_with_an_old_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in one process share the folder; one saves step 1 anew while the other one prunes the old one."""
    with Checkpoints(tmp_path, keep=1) as one:
        saved(one, 1)
        path = tmp_path / "step_00000001" / f"data-{TOKEN}"
        (path / "arrays").mkdir(parents=True)
        (path / steps.OWNER).write_text('{"token": ""}')
        saved(one, 2)
        assert one.steps == [2] and os.listdir(path.parent) == [path.name]
        with Checkpoints(tmp_path, keep=1) as two:
            two.prepare()  # shares the lease: it sweeps nothing
            assert path.exists()
    with Checkpoints(tmp_path) as again:
        again.prepare()
        assert not path.parent.exists()


def test_what_was_set_aside_keeps_its_order_after_damage(tmp_path: Path) -> None:
    """The number of a save goes on from the last one that can be read; the oldest are pruned first."""
    with Checkpoints(tmp_path, keep=3) as runs:
        saved(runs, 1, 2, 3)
        path = tmp_path / "step_00000003" / steps.MANIFEST
        path.write_bytes(path.read_bytes()[:-1])
        saved(runs, 4)
        value_of(runs, 1)
        runs.keep = 1
        saved(runs, 5)
    assert runs.steps == [5] and runs.abandoned_steps == [4]


def test_a_folder_that_cannot_be_read_numbers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that was given twice would let the wrong ones be pruned."""
    with Checkpoints(tmp_path) as runs:
        saved(runs, 1)
        read = files.read

        def failing(path: Any) -> bytes:
            if os.fspath(path).endswith(steps.MANIFEST):
                raise OSError("Input/output error")
            return read(path)

        monkeypatch.setattr(files, "read", failing)
        with pytest.raises(OSError, match="Input/output error"):
            steps.last_sequence(files.folder_path(tmp_path), [1])


def test_who_is_killed_while_it_deletes_leaves_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every operation of a deletion: the next owner deletes the rest."""

    class Killed(BaseException):
        """Instead of a signal."""

    own = threading.get_ident()

    def dying(action: Any, left: list[int]) -> Any:
        def act(*arguments: Any, **options: Any) -> Any:
            # Threads that renew the leases of other folders live on.
            left[0] -= threading.get_ident() == own
            if left[0] < 0 and threading.get_ident() == own:
                raise Killed
            return action(*arguments, **options)

        return act

    with Checkpoints(tmp_path / "run", keep=9) as runs:
        for step in (1, 2):
            runs.save({"w": jnp.full(3, float(step))}, step, {"rows": jnp.arange(3)})
    for moment in range(100):
        folder, left, is_killed = tmp_path / str(moment), [moment], False
        shutil.copytree(tmp_path / "run", folder)
        with monkeypatch.context() as patch:
            for name in ("unlink", "remove", "rmdir"):
                patch.setattr(os, name, dying(getattr(os, name), left))
            try:
                steps.prune(files.folder_path(folder), 1, None, lambda: None)
            except Killed:
                is_killed = True
        steps.sweep(files.folder_path(folder))
        there = steps.finished_steps(files.folder_path(folder))
        assert there == [2] or (there == [1, 2] and is_killed), moment
        assert (folder / "step_00000001").exists() == (1 in there), moment
        assert value_of(Checkpoints(folder)) == 2
        if not is_killed:
            break
    assert 9 < moment < 99


def test_a_lease_is_looked_at_before_each_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[list[int]]()
    with Checkpoints(tmp_path, keep=9) as runs:
        saved(runs, 1, 2, 3)
        check = lease.Lease.check

        def looking(self: lease.Lease) -> None:
            looked.append(runs.steps)
            check(self)

        monkeypatch.setattr(lease.Lease, "check", looking)
        runs.keep = 1
        saved(runs, 4)
    assert all(x in looked for x in ([1, 2, 3, 4], [2, 3, 4], [3, 4]))


def test_who_is_stopped_before_it_deletes_takes_nothing_from_a_new_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one has saved the step again meanwhile; the old one looks at its lease, and gives back."""
    with Checkpoints(tmp_path, keep=9) as runs:
        saved(runs, 1, 2)
    folder, held = files.folder_path(tmp_path), [True]

    def check() -> None:
        if not held[0]:
            raise LeaseError(lease_lost(folder, "another one"))

    read = steps._readable

    def stopping(path: Any, step: int) -> Any:
        found = read(path, step)
        if held[0] and step == 1:  # here it stops; when it goes on the folder has another owner
            held[0] = False
            shutil.rmtree(tmp_path / "step_00000001")
            with Checkpoints(tmp_path, keep=9) as other:
                saved(other, 1)
        return found

    monkeypatch.setattr(steps, "_readable", stopping)
    with pytest.raises(LeaseError):
        steps._remove_step(folder, 1, check)
    with Checkpoints(tmp_path) as again:
        again.prepare()
        assert value_of(again, 1) == 1
