"""Files that are code: run if nobody else can have written them, or a key has signed them; else refused."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sbp
from sbp.errors import ArgumentError, ExecutableError, InternalError
from sbp.runtime.cache import trust
from sbp.runtime.cache.cache_folder import (
    COMPILED,
    Cache,
    CacheFolder,
    CompiledFolder,
    cache_context,
    warn_of,
)
from sbp.runtime.saved import file as files
from tests.runtime.program import starting
from tests.runtime.program.starting import BATCH, FOUND, counted
from tests.runtime.program.starting import COMPILED as COMPILATIONS

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
LINE = sbp.placement("cpu", shape=(2,))
X = np.arange(4, dtype=np.float32)


class Payload:
    """What somebody else would like to run here."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a program that doubles."""
    path = tmp_path_factory.mktemp("genuine") / "double.sbpx"
    sbp.compile(lambda x: x * 2, LINE).save_executable(path, X)
    return path


@pytest.fixture
def forged(genuine: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A file with a right header and checksum and another program, and what is there once that has run."""
    header, _ = files.read(genuine)
    path, marker = tmp_path / "own" / "x.sbpx", tmp_path / "it ran"
    files.write(path, header, pickle.dumps(Payload(marker)))
    return path, marker


def test_what_is_forged_here_would_run(forged: tuple[Path, Path]) -> None:
    """As a file of the user's own: nothing else is wrong with it."""
    path, marker = forged
    with pytest.raises(InternalError, match="cannot unpack"):
        sbp.load_executable(path)
    assert marker.exists()


def of_another(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes something another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        other = os.geteuid() + 1
        patch.setattr(os, "geteuid", lambda: other)


def linked(path: Path) -> Path:
    link = path.parents[1] / "link.sbpx"
    link.symlink_to(path)
    return link


Given = Callable[[Path, pytest.MonkeyPatch], "Path | None"]
UNTRUSTED: dict[str, tuple[Given, str]] = {
    "everybody": (lambda p, _: p.chmod(0o602), r"x\.sbpx can be written by everybody"),
    "a group": (lambda p, _: p.chmod(0o660), r"x\.sbpx can be written by the group "),
    "both": (lambda p, _: p.chmod(0o666), r"can be written by the group \S+ and everybody"),
    "another user's": (lambda p, patch: of_another(p, patch), r"belongs to the user "),
    "its folder": (lambda p, _: p.parent.chmod(0o777), r"own can be written by the group \S+ and everybody"),
    "its folder's group": (lambda p, _: p.parent.chmod(0o770), r"own can be written by the group "),
    "another user's folder": (lambda p, patch: of_another(p.parent, patch), r"belongs to the user "),
    "another user's sticky folder": (
        lambda p, patch: (p.parent.chmod(0o1700), of_another(p.parent, patch))[1],
        r"belongs to the user ",
    ),
    "a folder far above": (lambda p, _: p.parents[1].chmod(0o777), r"can be written by the group \S+ and"),
    "behind a link": (lambda p, _: (p.parent.chmod(0o777), linked(p))[1], r"own can be written by"),
    "everybody's, through a link": (
        lambda p, _: (p.chmod(0o666), linked(p))[1],
        r"x\.sbpx can be written by",
    ),
}


@pytest.fixture
def no_private_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have several users, as on the machines where it matters."""
    monkeypatch.setattr(trust, "_is_private", lambda *_: False)


@pytest.mark.parametrize("case", UNTRUSTED)
@pytest.mark.usefixtures("no_private_groups")
def test_what_others_can_have_written_is_refused(
    case: str, forged: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, marker = forged
    make, who = UNTRUSTED[case]
    given = make(path, monkeypatch) or path
    with pytest.raises(ExecutableError, match=who) as e:
        sbp.load_executable(given)
    assert "a file of yours or of root that nobody else can write" in e.value.problems[0].legal
    assert "it is code: whoever can write" in str(e.value)
    assert not marker.exists()
    path.parents[1].chmod(0o700)  # as it was, for those who tidy up
    path.parent.chmod(0o700)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.sbpx")
    for key in (None, KEY):
        with pytest.raises(ExecutableError, match=r"x\.sbpx is no regular file"):
            sbp.load_executable(tmp_path / "x.sbpx", signing_key=key)


def test_a_link_to_a_file_of_ones_own_is_taken_and_so_is_a_sticky_folder(
    genuine: Path, tmp_path: Path
) -> None:
    (tmp_path / "x").symlink_to(genuine)
    assert sbp.load_executable(tmp_path / "x")(X).tolist() == [0, 2, 4, 6]
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "x").write_bytes(genuine.read_bytes())
    (sticky / "x").chmod(0o644)
    assert sbp.load_executable(sticky / "x")(X).tolist() == [0, 2, 4, 6]


def test_what_is_written_is_the_users_alone(genuine: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(genuine.stat().st_mode) == 0o600
    sbp.compile(lambda x: x * 3, LINE, options=sbp.Options(cache=tmp_path / "cache"))(X)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "cache").iterdir()} == {0o600}
    umask = os.umask(0o022)
    try:
        trust.write_file(tmp_path / "shared" / "x", b"x", KEY)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "shared" / "x").stat().st_mode) == 0o644


GROUPS: dict[str, tuple[dict[str, Any], bool]] = {
    "of one user": ({}, True),
    "with another member": ({"members": ["alice", "bob"]}, False),
    "of another name": ({"group": "staff"}, False),
    "not the user's first one": ({"first": 100}, False),
    "root's": ({"gid": 0, "first": 0}, False),
    "with a list of users": ({"lists": [trust.ACL]}, False),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_group_of_one_user_is_that_user(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change, is_private = GROUPS[case]
    of = {"members": [], "group": "alice", "first": 1000, "gid": 1000, "lists": [], **change}
    user = SimpleNamespace(pw_name="alice", pw_gid=of["first"])
    group = SimpleNamespace(gr_name=of["group"], gr_mem=of["members"])
    monkeypatch.setattr("pwd.getpwuid", lambda _: user)
    monkeypatch.setattr("grp.getgrgid", lambda _: group)
    monkeypatch.setattr(os, "listxattr", lambda *_, **__: of["lists"], raising=False)
    found: Any = SimpleNamespace(st_uid=1000, st_gid=of["gid"])
    assert trust._is_private(str(tmp_path), found) == is_private


# -- with a key


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("signed") / "double.sbpx"
    program = sbp.compile(lambda x: x * 2, LINE, options=sbp.Options(signing_key=KEY))
    program.save_executable(path, X)
    return path


def test_a_signed_file_is_taken_whoever_can_write_it(
    signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(signed.read_bytes())
    path.chmod(0o666)
    tmp_path.chmod(0o777)
    of_another(path, monkeypatch)
    assert sbp.load_executable(path, signing_key=KEY)(X).tolist() == [0, 2, 4, 6]
    tmp_path.chmod(0o700)


def test_a_wrong_signature_is_refused(signed: Path, genuine: Path, forged: tuple[Path, Path]) -> None:
    forgery, marker = forged
    with pytest.raises(ExecutableError, match="a file that was not signed"):
        sbp.load_executable(genuine, signing_key=KEY)
    with pytest.raises(ExecutableError, match="a file that was signed with a key, and no key"):
        sbp.load_executable(signed)
    with pytest.raises(ExecutableError, match="another signature than this key gives"):
        sbp.load_executable(signed, signing_key=OTHER_KEY)
    header, program = files.read(forgery)
    files.write(forgery, header, program, OTHER_KEY)
    relabelled = forgery.with_name("relabelled")
    rest = forgery.read_bytes()[len(files.SIGNED) + trust.DIGEST_BYTES :]
    relabelled.write_bytes(files.SIGNED + hashlib.sha256(rest).digest() + rest)
    data = bytearray(signed.read_bytes())
    data[-1] ^= 1
    changed = forgery.with_name("changed")
    changed.write_bytes(data)
    for path in (forgery, relabelled, changed):
        with pytest.raises(ExecutableError, match="so nothing of it was run"):
            sbp.load_executable(path, signing_key=KEY)
    assert not marker.exists()


def test_a_key_is_bytes_that_nobody_guesses(signed: Path) -> None:
    for wrong, got in (("x" * 32, "a str"), (b"x" * 31, "31 bytes"), (7, "a int"), (b"", "0 bytes")):
        given: Any = wrong
        with pytest.raises(ArgumentError, match=f"got    {got}"):
            sbp.load_executable(signed, signing_key=given)
        with pytest.raises(ArgumentError, match=r"(?s)Options\(signing_key=.*at least 32 bytes that nobody"):
            sbp.Options(signing_key=given)


@pytest.mark.parametrize("make", [starting.whole, starting.staged])
def test_a_key_is_written_and_shown_nowhere(make: Callable[..., Any], tmp_path: Path) -> None:
    options = sbp.Options(cache=tmp_path / "cache", signing_key=KEY)
    program = make(options)
    program(starting.weights(4), BATCH)
    program.save_executable(tmp_path / "x.sbpx")
    program.plan(starting.weights(4), BATCH).save(tmp_path / "plan.json")
    shown = f"{options!r} {options} {program!r} {Cache(tmp_path, KEY)!r} {vars(program)!r}".encode()
    for data in (shown, *(f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())):
        assert KEY not in data and KEY.hex().encode() not in data and repr(KEY).encode() not in data


# -- the cache


def compiled(folder: Path, key: bytes | None = None, factor: float = 2.0) -> tuple[list[float], int, int]:
    """What a program gives, and how many programs were compiled, and found."""
    options = sbp.Options(cache=folder, signing_key=key)
    program = sbp.compile(lambda x: x * factor, LINE, options=options)
    with counted() as events:
        out = program(X).tolist()
    return out, events.get(COMPILATIONS, 0), events.get(FOUND, 0)


def swapped(folder: Path) -> None:
    """Gives every compiled program of a folder the name of another one."""
    programs = sorted(folder.glob(f"*{COMPILED}"))
    assert len(programs) > 1
    data = [p.read_bytes() for p in programs]
    for path, other in zip(programs, data[1:] + data[:1], strict=True):
        path.write_bytes(other)


@pytest.mark.usefixtures("no_private_groups")
def test_a_cache_that_others_can_write_is_not_used_and_that_is_said_once(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    compiled(folder)
    assert compiled(folder)[1:] == (1, 1)
    folder.chmod(0o777)
    warn_of.cache_clear()
    with pytest.warns(UserWarning, match=r"cache are not used: .*cache can be written by the group .*code"):
        out, _, found = compiled(folder)
    assert (out, found) == ([0, 2, 4, 6], 0)
    assert compiled(folder)[2] == 0  # and nothing is said: a warning would be an error
    before = sorted(folder.glob(f"*{COMPILED}"))
    compiled(folder, factor=3.0)
    assert sorted(folder.glob(f"*{COMPILED}")) == before


@pytest.mark.usefixtures("no_private_groups")
def test_a_sticky_folder_of_all_is_no_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.warns(UserWarning, match="can be written by"):
        assert compiled(tmp_path)[2] == 0
    assert not list(tmp_path.glob(f"*{COMPILED}"))
    tmp_path.chmod(0o700)


@pytest.mark.usefixtures("no_private_groups")
def test_a_program_that_others_can_have_written_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = CompiledFolder(CacheFolder(tmp_path, COMPILED, 1e6))
    kept.put("jit_step-1", b"a program")
    (file,) = tmp_path.iterdir()
    file.chmod(0o666)
    warn_of.cache_clear()
    with pytest.warns(UserWarning, match="can be written by the group"):
        assert kept.get("jit_step-1") is None
    file.chmod(0o600)
    assert kept.get("jit_step-1") == b"a program"
    of_another(file, monkeypatch)
    with pytest.warns(UserWarning, match="belongs to the user"):
        assert kept.get("jit_step-1") is None


@pytest.mark.usefixtures("no_private_groups")
def test_a_signed_cache_is_used_whoever_can_write_it(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    assert compiled(folder, KEY)[1:] == (1, 0) and compiled(folder, KEY)[1:] == (1, 1)
    assert compiled(folder, OTHER_KEY)[2] == 0  # and it has written it anew
    assert compiled(folder, KEY)[2] == 0
    compiled(folder, KEY, factor=3.0)
    swapped(folder)  # by someone without the key, who has right files of it
    assert compiled(folder, KEY) == ([0, 2, 4, 6], 1, 0)
    kept = CompiledFolder(CacheFolder(folder, COMPILED, 1e6, KEY))
    kept.put("a", b"a program")
    file = kept.folder.file(kept._name("a"))
    assert kept.get("a") == b"a program"
    file.write_bytes(hashlib.sha256(file.name.removesuffix(COMPILED).encode() + b"evil").digest() + b"evil")
    assert kept.get("a") is None


@pytest.mark.usefixtures("no_private_groups")
def test_xla_keeps_nothing_of_its_own_where_others_write(tmp_path: Path) -> None:
    """Its own files are not signed."""
    from jax._src import config

    setting: Any = config.persistent_cache_enable_xla_caches
    usual = setting.value
    with cache_context(Cache(tmp_path, KEY)):
        assert setting.value == usual
    tmp_path.chmod(0o777)
    with cache_context(Cache(tmp_path, KEY)):
        assert setting.value == "none"
    tmp_path.chmod(0o700)
    assert setting.value == usual
