"""Files of checkpoints: made by one writer, replaced as a whole, on the disk in order; and all by storage."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from sbp.errors import CheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files

RUNTIME = Path(__file__).parents[3] / "runtime"


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    return epath.Path(tmp_path)


# -- one writer

RACE = """
import os, sys, warnings
warnings.simplefilter("ignore")
from etils import epath
from sbp.runtime.storage import files
folder = epath.Path(sys.argv[1])
gate, opened = os.pipe()
for child in range(8):
    if os.fork() == 0:
        os.close(opened)
        os.read(gate, 1)  # ends when all are there
        won = []
        for i in range(50):
            try:
                files.create(folder / str(i), b"%d " % child * 1000)
                won.append(i)
            except FileExistsError:
                pass
        (folder / f"won{child}").write_text(" ".join(map(str, won)))
        os._exit(0)
os.close(opened)
for _ in range(8):
    assert os.wait()[1] == 0
"""


def test_of_eight_processes_one_creates_each_file(folder: Any) -> None:
    subprocess.run([sys.executable, "-c", RACE, folder], check=True)
    won = {child: (folder / f"won{child}").read_text().split() for child in range(8)}
    assert sorted(i for x in won.values() for i in x) == sorted(map(str, range(50)))
    for child, names in won.items():
        assert {files.read(folder / name) for name in names} <= {b"%d " % child * 1000}
    assert not [name for name in files.names(folder) if name.endswith(".tmp")]


def test_what_is_there_is_not_created_again(folder: Any) -> None:
    files.create(folder / "x", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(FileExistsError):
            files.create(folder / "x", data)
    assert files.read(folder / "x") == b"first" and files.names(folder) == ["x"]
    with pytest.raises(FileNotFoundError):
        files.create(folder / "no" / "x", b"")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links_has_one_writer_too(
    code: int, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(code, "no links")

    monkeypatch.setattr(os, "link", link)
    files.create(folder / "x", b"first")
    with pytest.raises(FileExistsError):
        files.create(folder / "x", b"second")
    assert files.read(folder / "x") == b"first" and files.names(folder) == ["x"]


def test_a_link_whose_answer_was_lost_counts(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the client asks again, and the server finds what the first try has made."""
    link = os.link

    def lossy(source: Any, target: Any) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", lossy)
    files.create(folder / "x", b"mine")
    assert files.read(folder / "x") == b"mine"
    with pytest.raises(FileExistsError):
        files.create(folder / "x", b"mine")


# -- as a whole


def test_who_reads_sees_the_old_file_or_the_new_one(folder: Any) -> None:
    texts = [bytes([65 + i]) * 200_000 for i in range(20)]
    files.replace(folder / "x", texts[0])
    seen, done = set[bytes](), threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(files.read(folder / "x"))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for t in threads:
        t.start()
    for text in texts:
        files.replace(folder / "x", text)
    done.set()
    for t in threads:
        t.join()
    assert seen <= {*texts} and files.names(folder) == ["x"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(name: str, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.replace(folder / "x", b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space left"):
        files.replace(folder / "x", b"new")
    if name == "fsync":
        with pytest.raises(OSError, match="No space left"):
            files.create(folder / "y", b"new")
    assert files.read(folder / "x") == b"old" and files.names(folder) == ["x"]


# -- on the disk


def test_content_is_on_the_disk_before_the_name_and_the_name_before_it_counts(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[str, str]]()
    fsync, link, rename = os.fsync, os.link, os.replace

    def synced(at: int) -> None:
        fsync(at)
        path = Path(os.readlink(f"/proc/self/fd/{at}"))
        seen.append(("sync", "folder" if path.is_dir() else f"file of {path.stat().st_size}"))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", lambda *x: (link(*x), seen.append(("name", "link"))))
    monkeypatch.setattr(os, "replace", lambda *x: (rename(*x), seen.append(("name", "rename"))))
    files.create(folder / "x", b"1234")
    assert seen == [("sync", "file of 4"), ("name", "link"), ("sync", "folder")]
    seen.clear()
    files.replace(folder / "x", b"12345")
    assert seen == [("sync", "file of 5"), ("name", "rename"), ("sync", "folder")]
    seen.clear()
    files.make_folder(folder / "tree" / "in")
    for name in ("tree/a", "tree/in/b"):
        (folder / name).write_bytes(b"123456")
    files.sync_tree(folder / "tree")
    assert sorted(seen) == [("sync", "file of 6")] * 2 + [("sync", "folder")] * 2


def test_a_step_is_on_the_disk_before_its_manifest_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the manifest vouches for, the folders that it lies in, and then the manifest."""
    seen, fsync, link = list[str](), os.fsync, os.link

    def synced(at: int) -> None:
        fsync(at)
        seen.append(os.readlink(f"/proc/self/fd/{at}"))

    def linked(source: Any, target: Any) -> None:
        link(source, target)
        seen.append(f"name {target}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    with Checkpoints(tmp_path / "run") as runs:
        runs.save({"w": 1.0}, 7, extra={"x": [1]})
        runs.wait()
    step = tmp_path / "run" / "step_00000007"
    (data,) = step.glob("data-*")
    named = seen.index(f"name {step / 'sbp_manifest.json'}")
    files = {str(x) for x in (data, *data.rglob("*")) if x.is_dir() or not x.name.endswith(".tmp")}
    assert len(files) > 5 and not files - {*seen[:named]} - {str(data / "sbp_owner.json")}
    assert str(step) in seen[:named] and str(step) in seen[named:] and str(step.parent) in seen[named:]


def test_what_cannot_be_synced_does_not_stop_a_save(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems sync no folders; a disk that fails is an error."""
    codes = [errno.EINVAL]

    def fsync(_: int) -> None:
        raise OSError(codes[0], "no")

    monkeypatch.setattr(os, "fsync", fsync)
    files.sync_folder(folder)
    codes[0] = errno.EIO
    with pytest.raises(OSError, match="no"):
        files.sync_folder(folder)


# -- lists and what is not there


def test_lists_sizes_and_deletes(folder: Any) -> None:
    for name in ("a/b/c", "a/d", "e"):
        files.make_folder((folder / name).parent)
        files.replace(folder / name, name.encode())
    assert files.names(folder) == ["a", "e"] and files.names(folder / "a") == ["b", "d"]
    assert files.sizes(folder) == {"a/b/c": 5, "a/d": 3, "e": 1}
    assert files.names(folder / "none") == files.names(folder / "e") == []
    assert files.exists(folder / "e") and not files.exists(folder / "none")
    assert not files.exists(folder / "e" / "below")
    files.remove_empty(folder / "a")
    assert files.exists(folder / "a" / "d")
    files.remove(folder / "a" / "d")
    files.remove_tree(folder / "a" / "b")
    files.remove_empty(folder / "a")
    for remove in (files.remove, files.remove_tree, files.remove_empty):
        remove(folder / "none")
    assert files.names(folder) == ["e"]


def test_what_cannot_be_looked_at_is_not_taken_for_absent(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lists, sweeps and prunes would delete the arrays of a manifest that seems not to be there."""

    def stat(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "the disk does not answer")

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(CheckpointError, match="does not answer"):
        files.exists(folder / "x")


# -- the house

FILES = ("files.py", "locations.py", "object_store.py")
"""Which all others go through."""
PROCESSES = {"lease.py": {"open", "os.readlink"}}
"""What one of them asks of /proc: about processes of this host, which lie in no folder of checkpoints."""
MODULES = {"pathlib", "shutil", "glob", "tempfile", "fsspec", "os.path", "posixpath"}
OS_NAMES = {"fspath", "getpid", "PathLike", "name"}
"""Of `os`, what touches no file."""
METHODS = set(
    "exists glob hardlink_to is_dir is_file iterdir lstat mkdir open read_bytes read_text rename rglob "
    "rmdir rmtree stat symlink_to touch unlink walk write_bytes write_text".split()
)
"""Of paths, what touches files."""


def around_storage(source: str) -> list[str]:
    """What a module does with files by itself."""
    found = list[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [x.name for x in names if x.name in MODULES]
            case ast.ImportFrom(module=module, names=names):
                found += [module for _ in names if module in MODULES]
                found += [f"os.{x.name}" for x in names if module == "os" and x.name not in OS_NAMES]
            case ast.Attribute(value=ast.Name(id="os"), attr=name):
                found += [f"os.{name}"] if name not in OS_NAMES else []
            case ast.Attribute(value=value, attr=name):
                is_ours = isinstance(value, ast.Name) and value.id in ("files", "steps")
                found += [f".{name}"] if name in METHODS and not is_ours else []
            case ast.Call(func=ast.Name(id="open")):
                found.append("open")
    return found


FOLDERS = ("arrays", "checkpoint", "storage")
MODULES_OF_FOLDERS = sorted(p for folder in FOLDERS for p in (RUNTIME / folder).glob("*.py"))


@pytest.mark.parametrize("path", MODULES_OF_FOLDERS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_files_of_checkpoints_are_touched_in_one_place(path: Path) -> None:
    found = around_storage(path.read_text())
    assert path.name in FILES or {*found} <= PROCESSES.get(path.name, set()), found


@pytest.mark.parametrize(
    "line",
    ["import pathlib", "from shutil import rmtree", "os.remove(x)", "os.path.join(x)", "open(x)", "x.mkdir()"]
    + ["(a / b).exists()", "from os import path", "import os.path"],
)
def test_the_check_of_the_house_sees(line: str) -> None:
    assert around_storage(line) and not around_storage("os.fspath(x); files.exists(x); x / y")
