"""A step that counts outlives a loss of power, and one that does not changes nothing."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from sbp.errors import CheckpointError, LeaseError
from sbp.runtime.checkpoint import steps, writer
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files, lease
from sbp.runtime.storage.messages import lease_lost


def state_of(value: float) -> dict[str, Any]:
    return {"w": jnp.full((8, 4), float(value)), "n": int(value)}


def saved(runs: Checkpoints, *numbers: int) -> None:
    for step in numbers:
        runs.save(state_of(step), step, {"rows": jnp.arange(step)})
    runs.wait()


def value_of(runs: Checkpoints, step: int | None = None) -> float:
    found = runs.restore(state_of(0), step)
    assert {*found["w"].reshape(-1).tolist()} == {float(found["n"])}
    return float(found["n"])


@dataclass
class Disk:
    """What of a folder would be there after a loss of power: what was synced, as it was then; nothing else.

    Arguments:
      root: of the folder, which is there.
      after: what is done with what would be there, each time that this changes.
    """

    root: Path
    states: list[dict[str, bytes]] = field(default_factory=list)
    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[str, dict[str, int]] = field(default_factory=dict)

    def fsync(self, descriptor: int) -> None:
        """Notes the content of a file, or the names in a folder."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self.folders[path] = {x.name: x.inode() for x in os.scandir(path)}
        else:
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                self.files[os.fstat(descriptor).st_ino] = file.read()
        if (state := self.there()) not in self.states[-1:]:
            self.states.append(state)

    def there(self, folder: str = "") -> dict[str, bytes]:
        """The files, by their path."""
        found = dict[str, bytes]()
        for name, inode in self.folders.get(os.path.join(self.root, folder).rstrip("/"), {}).items():
            path = os.path.join(folder, name)
            if os.path.join(self.root, path) in self.folders:
                found |= self.there(path)
            else:
                found[path] = self.files.get(inode, b"")
        return found


def test_a_loss_of_power_at_any_moment_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 and 2, back to 1, and 3, of which one stays; each time that something more is on the disk."""
    root = tmp_path / "run"
    root.mkdir()
    disk, fsync = Disk(root), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        disk.fsync(descriptor)

    with Checkpoints(root, keep=1) as runs, monkeypatch.context() as patch:
        runs.prepare()
        patch.setattr(os, "fsync", noted)
        ends = []
        for back, step in ((None, 1), (None, 2), (2, 3), (None, 4)):
            if back is not None:
                value_of(runs, back)
            saved(runs, step)
            ends.append(len(disk.states))
    assert ends[-1] - ends[0] > 20
    for i, state in enumerate(disk.states):
        counted = sum(i >= end - 1 for end in ends)
        for name, data in state.items():
            path = tmp_path / f"state {i}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        there = Checkpoints(tmp_path / f"state {i}")
        assert {*there.steps} & {counted, counted + 1} or not counted, (i, ends, there.steps)
        for step in there.steps:
            assert value_of(there, step) == step and len(there.extra(step)["rows"]) == step


def test_the_manifest_is_the_last_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a step has is synced before its manifest has its name, and its folder is before it counts."""
    done = list[tuple[str, str]]()
    fsync, link, remove = os.fsync, os.link, os.unlink

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def linked(source: Any, target: Any) -> None:
        link(source, target)
        done.append(("link", os.fspath(target)))

    def removed(path: Any, **options: Any) -> None:
        remove(path, **options)
        done.append(("remove", os.fspath(path)))

    with Checkpoints(tmp_path, keep=1) as runs:
        saved(runs, 1)
        for name, action in (("fsync", synced), ("link", linked), ("unlink", removed), ("remove", removed)):
            monkeypatch.setattr(os, name, action)
        saved(runs, 2)
        monkeypatch.undo()
    folder = tmp_path / "step_00000002"
    at = done.index(("link", str(folder / steps.MANIFEST)))
    (data,) = folder.glob("data-*")
    synced_before = {path for what, path in done[:at] if what == "sync"}
    assert {str(data), *map(str, data.rglob("*"))} <= synced_before
    assert any(f".{steps.MANIFEST}." in path for path in synced_before)
    assert {str(folder), str(tmp_path)} <= synced_before and ("sync", str(folder)) in done[at:]
    old = str(tmp_path / "step_00000001")
    (gone,) = (
        i for i, (what, path) in enumerate(done) if what == "remove" and f"{old}/sbp_manifest." in path
    )
    arrays = [i for i, (what, path) in enumerate(done) if what == "remove" and i > gone]
    assert at < gone < done.index(("sync", old), gone) < arrays[0]


def failing(monkeypatch: pytest.MonkeyPatch, name: str, when: Any) -> None:
    """Lets an operation of the storage fail for some paths."""
    action = getattr(files, name)

    def fail(path: Any, *arguments: Any) -> Any:
        if when(os.fspath(path)):
            raise OSError(errno.EIO, "Input/output error")
        return action(path, *arguments)

    monkeypatch.setattr(files, name, fail)


@pytest.mark.parametrize("name", ["create", "rename", "sync_folder"])
def test_a_save_that_fails_sets_nothing_aside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its manifest, at the second step that is set aside, or when its manifest has its name already."""
    last = f"step_00000010/{steps.MANIFEST}"
    places = {
        "create": lambda path: path.endswith(last),
        "rename": lambda path: path.endswith(f"step_00000002/{steps.MANIFEST}"),
        "sync_folder": lambda path: path.endswith("step_00000010") and (tmp_path / last).exists(),
    }
    with Checkpoints(tmp_path, keep=9) as runs:
        saved(runs, 1, 2, 3)
        assert value_of(runs, 1) == 1
        with monkeypatch.context() as patch:
            failing(patch, name, places[name])
            with pytest.raises(CheckpointError, match="Input/output error"):
                saved(runs, 10)
        assert runs.steps == [1, 2, 3] and runs.abandoned_steps == []
        assert [value_of(runs, s) for s in (2, 3, 1)] == [2, 3, 1]
        saved(runs, 10)
        assert runs.steps == [1, 10] and runs.abandoned_steps == [2, 3]


def test_arrays_that_were_not_merged_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """orbax merges what it finds by a glob, which finds nothing where the listing fails, and says nothing."""
    with Checkpoints(tmp_path, keep=1) as runs:
        saved(runs, 1)
        with monkeypatch.context() as patch:
            patch.setattr(writer, "merge", str)
            with pytest.raises(CheckpointError, match=r"no manifest\.ocdbt"):
                saved(runs, 2)
        assert runs.steps == [1] and value_of(runs) == 1


def test_what_is_written_late_of_a_save_that_failed_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of orbax's futures fails, another one writes on, and a thread of TensorStore's even later."""

    class Failed:
        """What cannot be written."""

        def result(self) -> None:
            raise ValueError("RESOURCE_EXHAUSTED")

    @dataclass
    class Slow:
        """What is still being written."""

        path: Any

        def result(self) -> None:
            self.path.mkdir(exist_ok=True, parents=True)
            (self.path / "late").write_text("")

    with Checkpoints(tmp_path) as runs:
        saved(runs, 1)
        with monkeypatch.context() as patch:
            patch.setattr(writer, "begin_write", lambda path, state: [Failed(), Slow(path)])
            with pytest.raises(CheckpointError, match="the disk is full"):
                saved(runs, 2)
        (data,) = (tmp_path / "step_00000002").iterdir()
        assert os.listdir(data) == [steps.OWNER]  # so the next owner may delete what comes
        Slow(data / "arrays").result()
        saved(runs, 3)
        assert [p.name for p in sorted(tmp_path.glob("step_*"))] == ["step_00000001", "step_00000003"]


def test_a_step_counts_though_others_could_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpoints(tmp_path, keep=1) as runs:
        saved(runs, 1)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "sbp"):
            failing(patch, "remove", lambda path: ".pruned-" in path)
            saved(runs, 2)
        assert "step 2 was saved, but older ones could not be deleted: OSError" in caplog.text
        assert runs.steps == [1, 2]
        saved(runs, 3)
        assert runs.steps == [3] and runs.abandoned_steps == []


def test_who_has_lost_the_folder_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written is swept away: nobody waits until it is listed, or takes back what is set aside."""

    def lost(_: Any) -> None:
        raise LeaseError(lease_lost(tmp_path, "another one"))

    with Checkpoints(tmp_path, keep=9) as runs:
        saved(runs, 1, 2, 3)
        value_of(runs, 1)
        with monkeypatch.context() as patch:
            patch.setattr(files, "listed_by_orbax", lambda folder, pattern: set())
            patch.setattr(writer, "LISTING_SECONDS", 1e6)
            begun = writer.Save.hand_over

            def lose(self: Any, state: Any) -> None:
                patch.setattr(lease.Lease, "check", lost)
                begun(self, state)

            patch.setattr(writer.Save, "hand_over", lose)
            with pytest.raises(LeaseError, match="taken over by another one"):
                saved(runs, 10)
        with monkeypatch.context() as patch:
            rename = files.rename

            def renamed(path: Any, to: Any) -> None:
                rename(path, to)
                patch.setattr(lease.Lease, "check", lost)

            patch.setattr(files, "rename", renamed)
            with pytest.raises(LeaseError, match="taken over by another one"):
                saved(runs, 10)
        assert runs.steps == [1, 2] and runs.abandoned_steps == [3]
