"""Plans on disk: found again by another process, never half written, never the reason why nothing works."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sbp
from benchmarks.cases import gpt_case
from sbp.passes.plan.record import ChoiceRecord
from sbp.passes.search import search
from sbp.runtime.cache import cache_folder, plan_store
from sbp.runtime.cache.cache_folder import user_folder
from sbp.runtime.cache.plan_store import SUFFIX, PlanFolder, code_digest, store_of

LINE = sbp.placement("h100", shape=(8,))
X = np.ones((64, 64), np.float32)
HERE = Path(__file__).resolve()


def model(w: Any, x: Any) -> Any:
    return (w * (x @ w).sum(), x.sum())


def planned(folder: Path | bool, fn: Callable[..., Any] = model, **options: Any) -> sbp.Plan:
    return sbp.compile(fn, LINE, options=sbp.Options(cache=folder, **options)).plan(X, X)


def no_search(*_: Any) -> Any:
    raise AssertionError("a plan of this is on disk")


def test_a_plan_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path / "plans")
    (file,) = (tmp_path / "plans").iterdir()
    data = json.loads(gzip.decompress(file.read_bytes()))
    assert data["format"] == "sbp-signatures" and ["dot_general", *data["rows"][0][1:]] in data["rows"]
    monkeypatch.setattr(search, "solve_indexed", no_search)
    again = planned(tmp_path / "plans")
    assert again == plan and again.choice == plan.choice and str(again) == str(plan)


@pytest.mark.full
def test_another_process_finds_it(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    code = (
        "import sys, pathlib, tests.runtime.cache.test_plan_store as t; "
        "t.search.solve_indexed = t.no_search; "
        "print(repr(t.planned(pathlib.Path(sys.argv[1]))))"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(run, cwd=HERE.parents[3], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, repr(plan)), done.stderr


def test_a_hit_searches_nothing_and_is_the_same_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPT with two layers."""
    case = gpt_case("auto", (2, 4), 2)
    at, args = sbp.placement("h100", shape=(2, 4)), case.shapes()

    def plan(folder: Path | bool) -> sbp.Plan:
        program = sbp.compile(case.step, at, donate_argnums=(0, 1), options=sbp.Options(cache=folder))
        return program.plan(*args)

    made, kept = plan(False), plan(tmp_path)

    monkeypatch.setattr(search, "solve_indexed", no_search)
    assert made == kept == plan(tmp_path)


def changed(packed: bytes, **fields: Any) -> bytes:
    return gzip.compress(json.dumps(json.loads(gzip.decompress(packed)) | fields).encode())


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda b: b"",
    "half of it": lambda b: b[: len(b) // 2],
    "a bit": lambda b: b[:-20] + bytes([b[-20] ^ 1]) + b[-19:],
    "no archive": lambda b: b"{}",
    "no JSON": lambda b: gzip.compress(b"{"),
    "a list": lambda b: gzip.compress(b"[1]"),
    "another format": lambda b: gzip.compress(json.dumps({"format": "x"}).encode()),
    "another key": lambda b: gzip.compress(
        json.dumps(json.loads(gzip.decompress(b)) | {"key": "x"}).encode()
    ),
    "a signature that is none": lambda b: gzip.compress(gzip.decompress(b).replace(b"[B]", b"[Q]")),
    "no ops": lambda b: changed(b, ops=3),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_cannot_be_read_is_replaced(tmp_path: Path, broken: Callable[[bytes], bytes]) -> None:
    plan = planned(tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(broken(good))
    assert planned(tmp_path) == plan
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == good


def test_another_version_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path)
    monkeypatch.setattr(plan_store, "versions", lambda: "sbp 99, jax 99")
    planned(tmp_path)
    monkeypatch.setattr(plan_store, "code_digest", lambda: "of other code")
    planned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert len(code_digest()) == 64


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    assert planned(file / "plans") == planned(False)


def test_the_oldest_go_first(tmp_path: Path) -> None:
    record = planned(False).choice
    assert isinstance(record, ChoiceRecord)
    PlanFolder(tmp_path).save("0", record)
    (first,) = tmp_path.iterdir()
    size = first.stat().st_size
    folder = PlanFolder(tmp_path, most_bytes=3.5 * size)
    unfinished = tmp_path / f"unfinished{SUFFIX}x"
    unfinished.write_bytes(b"x" * size)
    os.utime(unfinished, (1.0, 1.0))
    for key in "12":
        folder.save(key, record)
    for age, file in enumerate([folder._file("1"), folder._file("2"), first], 1):
        os.utime(file, (age * 1e6, age * 1e6))
    assert not unfinished.exists()
    assert folder.load("1") == record  # it is in use, and the youngest now
    folder.save("3", record)
    assert [folder.load(key) is not None for key in "0123"] == [True, True, False, True]
    assert len(list(tmp_path.iterdir())) == 3


def test_who_keeps_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert store_of(sbp.Options()) is None, "tests must not"
    monkeypatch.setattr(cache_folder, "user_folder", user_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert store_of(sbp.Options()) == PlanFolder(tmp_path / "sbp")
    assert store_of(sbp.Options(cache=tmp_path)) == PlanFolder(tmp_path)
    assert store_of(sbp.Options(cache=False)) is None
    for leads in (True, False):  # of several processes the one that plans
        monkeypatch.setattr(plan_store, "process_group", lambda leads=leads: SimpleNamespace(leads=leads))
        assert (store_of(sbp.Options()) is not None) == leads


@pytest.mark.parametrize(
    ("platform", "variable", "below"),
    [
        ("linux", "", ".cache"),
        ("darwin", "", "Library/Caches"),
        ("win32", "LOCALAPPDATA", ""),
        ("linux", "XDG_CACHE_HOME", ""),
    ],
)
def test_the_folder_of_the_user(
    platform: str, variable: str, below: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("LOCALAPPDATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert user_folder() == tmp_path / below / "sbp"

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert user_folder() is None
