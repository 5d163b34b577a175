"""A path as a user has given it is read as it was meant, or refused in words that name what is in the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import jax.numpy as jnp
import pytest
from etils import epath

import sbp
from sbp.errors import CheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files, object_store
from sbp.runtime.storage.locations import location

STATE = {"w": jnp.arange(3.0)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file and all kinds of links; it is the current one, and the home."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for link, target in {
        "to_folder": "folder",
        "to_file": "file",
        "to_nothing": "nothing",
        "to_far": "/nowhere/at/all",
        "to_link": "to_nothing",
        "to_itself": "to_itself",
    }.items():
        (tmp_path / link).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


WRONG = {
    "a link to nothing": ("to_nothing", "a symbolic link to PLACE/nothing, which is not there", "mkdir -p"),
    "a far one": (
        "to_far",
        "a symbolic link to /nowhere/at/all, which is not there",
        "mkdir -p /nowhere/at/all",
    ),
    "below one": ("to_nothing/a/b", "a symbolic link to PLACE/nothing, which is not there", "mkdir -p"),
    "a link to one": ("to_link", "which is a link to nothing itself", "rm PLACE/to_link"),
    "a link to itself": ("to_itself/a", "which is a link to nothing itself", "rm PLACE/to_itself"),
    "a file": ("file", "a file", "another folder"),
    "a link to a file": ("to_file", "a file", "another folder"),
    "below a file": ("folder/../file/a/b", "PLACE/file is a file", "another folder"),
    "below a link to a file": ("to_file/a", "PLACE/to_file is a file", "another folder"),
    "a long name": ("n" * 300, "its longest name of 300 bytes", "another folder"),
    "a long path": (
        "/".join(["n" * 200] * 30),
        "characters, its longest name of 200 bytes",
        "another folder",
    ),
    "a NUL": ("a\0b", "a NUL character", "runs/first"),
    "nothing": ("", "an empty path", "runs/first"),
    "nobody's home": ("~nobody_of_that_name/x", "no home directory for ~nobody_of_that_name", "./~nobody"),
    "a pattern": ("run[1]", "a name with [ in it", "another name"),
    "a URL of another host": ("file://other/a", "a file of the host 'other'", "the path alone"),
    "a URL of nothing": ("file://", "a URL of no file", "the path alone"),
    "another URL": ("hdfs://a/b", "a URL of hdfs://", "gs://bucket/folder"),
    "a URL without a bucket": ("s3:///a", "a URL without a bucket", "s3://bucket/folder"),
    "a URL by pathlib": (Path("gs://bucket/a"), "one slash behind the colon", "'gs://bucket/a'"),
    "a URL in capitals by pathlib": (Path("GS://bucket/a"), "one slash behind the colon", "'GS://bucket/a'"),
    "a URL with a pattern": ("gs://bucket/a*", "a name with * in it", "another name"),
    "a URL with an end": ("s3://bucket/a#1", "a name with # in it", "another name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_words(name: str, place: Path) -> None:
    """Before anything is saved, by every way in; and nothing is made."""
    path, got, fix = WRONG[name]
    before = sorted(place.rglob("*"))

    def save() -> None:
        sbp.save(path, STATE, step=1)

    for way_in in (save, lambda: Checkpoints(path).prepare()):
        with pytest.raises(CheckpointError) as said:
            way_in()
        (problem,) = said.value.problems
        assert got.replace("PLACE", str(place)) in problem.got
        assert fix.replace("PLACE", str(place)) in problem.fix
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("name", [x for x in WRONG if "pattern" not in x and "NUL" not in x])
def test_and_when_it_is_restored(name: str, place: Path) -> None:
    path, got, _ = WRONG[name]
    with pytest.raises(CheckpointError) as said:
        sbp.restore(path, like=STATE)
    assert got.replace("PLACE", str(place)) in said.value.problems[0].got


@pytest.fixture
def nobody(place: Path) -> Iterator[None]:
    """This process without the rights of root."""
    is_root = os.geteuid() == 0
    for folder in (place, *list(place.parents)[:3]):
        os.chmod(folder, 0o755)
    os.chmod(place / "folder", 0o700 if is_root else 0o000)
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)
    os.chmod(place / "folder", 0o700)


@pytest.mark.parametrize("path", ["folder", "folder/a", "to_folder/a/b"])
def test_a_folder_without_rights(path: str, nobody: None) -> None:
    for way_in in (lambda: Checkpoints(path).prepare(), lambda: sbp.restore(path, like=STATE)):
        with pytest.raises(CheckpointError, match="Permission denied") as said:
            way_in()
        assert said.value.problems[0].fix == "the rights of the folder, and its disk"


MEANT: dict[str, Callable[[Path], tuple[Any, str]]] = {
    "relative": lambda at: ("a/b", f"{at}/a/b"),
    "a slash behind": lambda at: ("a/b//", f"{at}/a/b"),
    "home": lambda at: ("~/a", f"{at}/a"),
    "a name with ~": lambda at: ("./~a", f"{at}/~a"),
    "bytes": lambda at: (os.fsencode(at / "ü"), f"{at}/ü"),
    "dots": lambda at: ("a/./b", f"{at}/a/b"),
    "dots behind a link": lambda at: ("to_folder/../a", f"{at}/a"),
    "epath": lambda at: (epath.Path(at) / "a", f"{at}/a"),
    "a URL": lambda at: (f"file://{at}/a%20b", f"{at}/a b"),
    "a URL of this host": lambda at: (f"file://localhost{at}/a", f"{at}/a"),
    "a URL by pathlib": lambda at: (Path(f"file://{at}/a"), f"{at}/a"),
    "a colon": lambda at: ("a:b/c", f"{at}/a:b/c"),
    "a link to a folder": lambda at: ("to_folder", f"{at}/to_folder"),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant(name: str, place: Path) -> None:
    given, meant = MEANT[name](place)
    assert os.fspath(files.folder_path(given)) == meant
    files.make_folder(files.folder_path(given))
    assert Path(meant).is_dir()


def test_urls_are_where_orbax_writes() -> None:
    assert location("gs://bucket/a//b/../c/") == "gs://bucket/a/c"
    assert location("S3://Bucket/a b/") == "s3://Bucket/a b"
    assert location("s3://bucket") == location("s3://bucket/") == "s3://bucket"
    assert location("gs://bucket/../../a") == "gs://bucket/a"


def test_a_folder_that_got_a_pattern_as_its_name_is_restored(place: Path) -> None:
    with Checkpoints("run") as runs:
        runs.save(STATE, step=1)
        runs.wait()
    os.rename("run", "run[1]")
    assert sbp.restore("run[1]", like=STATE)["w"].tolist() == [0, 1, 2]


def test_a_store_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def filesystem(scheme: str, **_: Any) -> None:
        raise ImportError(f"Please install what knows {scheme}")

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    object_store._filesystem_of.cache_clear()
    for scheme, package in {"gs": "gcsfs", "s3": "s3fs"}.items():
        with pytest.raises(CheckpointError, match=f"no {package}") as said:
            Checkpoints(f"{scheme}://bucket/run")
        assert said.value.problems[0].fix == "pip install 'sbp-jax[object-store]'"
    object_store._filesystem_of.cache_clear()
