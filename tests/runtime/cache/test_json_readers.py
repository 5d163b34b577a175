"""Files of JSON that are damaged or made up: every reader of them says so in words of this library."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbp
from sbp.checker.report import check_file
from sbp.errors import ArgumentError, CheckpointError, ExecutableError, StoreError
from sbp.hardware.file import hardware_from
from sbp.passes import face
from sbp.runtime.cache import trust
from sbp.runtime.cache.plan_store import PlanFolder
from sbp.runtime.checkpoint import steps
from sbp.runtime.checkpoint.manifest import MANIFEST
from sbp.runtime.embedding.tiers.store import RowStore
from sbp.runtime.processes.flight_recorder import recorded_calls
from sbp.runtime.saved import file as files
from sbp.runtime.storage import lease
from sbp.text.json_reader import json_of

ROOT = Path(__file__).parents[3]
LINE = sbp.placement("cpu", shape=(2,))
X = np.ones(4, np.float32)
DEEP = 200_000
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "half of it": lambda b: b[: len(b) // 2],
    "a byte that is no UTF-8": lambda b: b[:1] + b"\xff" + b[1:],
    "deep lists": lambda _: b"[" * DEEP + b"]" * DEEP,
    "deep objects": lambda _: b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep lists as a field": lambda b: b[:-1] + b', "format": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "NaN": lambda _: b"NaN",
    "NaN as a field": lambda b: b[:-1] + b', "step": NaN, "seconds": NaN, "version": NaN}',
    "infinity as a field": lambda b: b[:-1] + b', "step": -Infinity, "seconds": Infinity, "version": 1e999}',
    "a huge number": lambda _: b"9" * 5000,
    "huge numbers as fields": lambda b: b[:-1] + b', "step": %s, "version": %s}' % (b"9" * 4000, b"9" * 400),
    "a list": lambda b: b"[" + b + b"]",
    "a text": lambda _: b'"x"',
    "a number": lambda _: b"7",
    "null": lambda _: b"null",
    "an empty object": lambda _: b"{}",
    "half of a character": lambda _: b'{"\\ud800": "\\ud800"}',
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What each kind of file is when it is right."""
    folder = tmp_path_factory.mktemp("whole")
    program = sbp.compile(lambda x: x * 2, LINE, options=sbp.Options(cache=folder / "plans"))
    program(X)
    program.plan(X).save(folder / "plan.json")
    program.save_executable(folder / "x.sbpx")
    with sbp.Checkpoints(folder / "runs") as runs:
        runs.save({"w": X}, step=3)
    with RowStore(folder / "rows", 8) as store:
        store.commit()
    (packed,), (version,) = (folder / "plans").glob("*.gz"), (folder / "rows").glob("version_*.json")
    return {
        "plan": (folder / "plan.json").read_bytes(),
        "kept plan": gzip.decompress(packed.read_bytes()),
        "header": json.dumps(files.read(folder / "x.sbpx")[0]).encode(),
        "manifest": (steps.step_path(folder / "runs", 3) / MANIFEST).read_bytes(),
        "index": (folder / "runs" / steps.INDEX).read_bytes(),
        "lease": max((folder / "runs").glob("sbp_lease-*.json")).read_bytes(),
        "words": b'{"0123": ["step"]}',
        "version of rows": version.read_bytes(),
    }


def plan_file(folder: Path, data: bytes) -> None:
    (folder / "plan.json").write_bytes(data)
    with pytest.raises(ArgumentError, match=r"(?s)got .*legal .*why .*try"):
        sbp.load_plan(folder / "plan.json")
    options = sbp.Options(plan=folder / "plan.json")
    with pytest.raises(ArgumentError, match=r"(?s)got .*legal .*why .*try"):
        sbp.compile(lambda x: x, LINE, options=options).plan(X)
    with contextlib.suppress(UnicodeDecodeError), pytest.raises(ArgumentError, match="unpickling a plan"):
        face.read_text(data.decode())


def checked_plan(folder: Path, data: bytes) -> None:
    """The command `check`, which says itself what a ValueError means."""
    (folder / "plan.json").write_bytes(data)
    with contextlib.suppress(ValueError):
        assert check_file(folder / "plan.json").complaints


def kept_plan(folder: Path, data: bytes) -> None:
    store = PlanFolder(folder)
    for packed in (gzip.compress(data), data):
        store._file("key").write_bytes(packed)
        assert store.load("key") is None


def header(folder: Path, data: bytes) -> None:
    rest = files.LENGTH.pack(len(data)) + data
    trust.write_file(folder / "x.sbpx", files.MAGIC + trust.digest(None, rest) + rest, None)
    with pytest.raises(ExecutableError):
        sbp.load_executable(folder / "x.sbpx")


def manifest(folder: Path, data: bytes) -> None:
    path = steps.step_path(folder, 3)
    path.mkdir()
    (path / MANIFEST).write_bytes(data)
    with pytest.raises(CheckpointError):
        sbp.Checkpoints(folder).restore({"w": X}, step=3)


def index(folder: Path, data: bytes) -> None:
    (folder / steps.INDEX).write_bytes(data)
    assert sbp.Checkpoints(folder).steps == []


def lease_file(folder: Path, data: bytes) -> None:
    (folder / "sbp_lease-000001.json").write_bytes(data)
    found = lease._last(folder)
    assert found is not None and found[0] == 1


def words(folder: Path, data: bytes) -> None:
    (folder / "calls0").write_bytes(bytes(4096))
    (folder / "words0").write_bytes(data)
    found = recorded_calls(folder, 0)[1]
    assert all(isinstance(word, str) for said in found.values() for word in said)


def hardware(folder: Path, data: bytes) -> None:
    """TOML, but of users too."""
    (folder / "a.toml").write_bytes(b"efficiency = " + data)
    with pytest.raises(ArgumentError):
        hardware_from(folder / "a.toml")


def version_of_rows(folder: Path, data: bytes) -> None:
    """Made up, too: with the digest of what it says."""
    text = data.decode(errors="replace")
    made_up = json.dumps({"content": text, "digest": hashlib.sha256(text.encode()).hexdigest()}).encode()
    for given in (data, made_up):
        (folder / "version_000000000001.json").write_bytes(given)
        with pytest.raises(StoreError, match=r"(?s)got .*legal .*why .*try"):
            RowStore(folder, 8)


READERS: dict[str, tuple[str, Callable[[Path, bytes], None]]] = {
    "load_plan": ("plan", plan_file),
    "check_file": ("plan", checked_plan),
    "plan store": ("kept plan", kept_plan),
    "load_executable": ("header", header),
    "manifest": ("manifest", manifest),
    "index of steps": ("index", index),
    "lease": ("lease", lease_file),
    "words of a process": ("words", words),
    "version of rows": ("version of rows", version_of_rows),
    "hardware_from": ("plan", hardware),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_damaged_is_refused_in_words(
    reader: str, damage: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    kind, read = READERS[reader]
    read(tmp_path, DAMAGE[damage](whole[kind]))


def test_what_is_whole_is_read(whole: dict[str, bytes], tmp_path: Path) -> None:
    """So that what is refused is refused for its damage."""
    (tmp_path / "plan.json").write_bytes(whole["plan"])
    assert sbp.load_plan(tmp_path / "plan.json").name == "<lambda>"
    assert not check_file(tmp_path / "plan.json").complaints
    assert all(json_of(data) == json.loads(data) for data in whole.values())
    assert pickle.loads(pickle.dumps(sbp.load_plan(tmp_path / "plan.json"))).name == "<lambda>"


ODD = (None, [], {}, "x", -1, 1.5, True, 1e308, 10**250, [[1]], {"a": 1}, "[S(0)]")


def changes(x: Any, depth: int = 3) -> Any:
    """A tree with each of its parts replaced by each odd value."""
    yield from ODD
    if depth and isinstance(x, dict):
        yield from ({**x, k: new} for k, v in x.items() for new in changes(v, depth - 1))
        yield from ({k: v for k, v in x.items() if k != gone} for gone in x)
    if depth and isinstance(x, list):
        yield from (x[:i] + [new] + x[i + 1 :] for i, v in enumerate(x[:2]) for new in changes(v, depth - 1))


def test_every_field_of_a_plan_may_be_wrong(whole: dict[str, bytes], tmp_path: Path) -> None:
    """A plan is read, or refused: nothing else is raised."""
    path, refused, count = tmp_path / "plan.json", 0, 0
    for changed in changes(json.loads(whole["plan"])):
        path.write_text(json.dumps(changed))
        count += 1
        try:
            sbp.load_plan(path)
        except ArgumentError as e:
            refused += 1
            assert e.problems[0].why and e.problems[0].fix
        with contextlib.suppress(ValueError):
            check_file(path)
    assert count > 500 and refused > 100


def test_a_kept_plan_that_would_fill_the_memory_is_none(tmp_path: Path) -> None:
    store = PlanFolder(tmp_path)
    packed = gzip.compress(b"[" + b" " * 300_000_000, compresslevel=1)
    assert len(packed) < 2e6
    store._file("key").write_bytes(packed)
    assert store.load("key") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * DEEP, "it is nested too deeply"),
        ("[NaN]", "NaN is no number of JSON"),
        ("-Infinity", "-Infinity is no number of JSON"),
        ("1e999", "1e999 is larger than any number here"),
        ("9" * 301, "a whole number of 301 digits is larger than any number here"),
        (b"\xff", "codec can't decode"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_is_said(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as e:
        json_of(text)
    assert not isinstance(e.value, RecursionError)


def test_every_reader_of_json_is_known() -> None:
    """Whoever reads JSON in a new place adds it here, and to the readers above if a user's file is read."""
    known = {
        "sbp/text/json_reader.py",
        "runtime/checkpoint/manifest.py",  # the lease and the index too: NaN is legal in what they keep
        "runtime/storage/lease.py",
        "runtime/checkpoint/steps.py",
        # what this library, or XLA, has written in the same moment
        *(f"runtime/processes/{name}.py" for name in ("calls", "failure_propagation", "process_group")),
        *("runtime/storage/extras.py", "runtime/hlo/parser.py", "runtime/report/pipeline_contents.py"),
    }
    reads = re.compile(r"^(?! *>>>).*\bjson\.(load|loads|JSONDecoder)\b", re.MULTILINE)
    links = ROOT / "sbp" / "passes", ROOT / "sbp" / "runtime"
    found = {
        str(path.relative_to(ROOT))
        for top in ("sbp", "passes", "runtime", "models")
        for path in (ROOT / top).rglob("*.py")
        if not any(link in path.parents for link in links) and reads.search(path.read_text(encoding="utf-8"))
    }
    assert found == known


@pytest.mark.parametrize("rest", [b"", b"\0" * 7, struct.pack("<Q", 2**63) + b"{}"])
def test_a_header_without_its_length_is_refused(rest: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.sbpx").write_bytes(files.MAGIC + trust.digest(None, rest) + rest)
    (tmp_path / "x.sbpx").chmod(0o600)
    with pytest.raises(ExecutableError):
        sbp.load_executable(tmp_path / "x.sbpx")
