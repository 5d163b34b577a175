"""A manifest that is not what was written is refused, whatever was done to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.checkpoint.manifest import MANIFEST, LeafRecord, Manifest, decode

STATE = {"w": jnp.arange(4.0)}
WHOLE = Manifest(
    7,
    (LeafRecord("['w']", "float32[4]", 2**63 + 5, frozenset({"nan"})),),
    {"a": [1, None]},
    "data-1",
    "1",
    (5, "0"),
    3,
    "ab",
    {"d/1": 10},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Checkpoints(tmp_path) as runs:
        runs.save(STATE, step=1, extra={"rate": 0.1})
        runs.save(STATE, step=2)
    return tmp_path


def test_it_comes_back() -> None:
    assert decode(Path("run"), 7, WHOLE.encode()) == WHOLE


def edited(file: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(file), **changes}).encode()


EDITS = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "not UTF-8": lambda data: b"\xff" + data,
    "a list": lambda data: b"[1]",
    "null": lambda data: b"null",
    "nested": lambda data: b"[" * 100_000 + b"]" * 100_000,
    "another step": lambda data: edited(data, step=3),
    "another extra": lambda data: edited(data, extra={"rate": 9}),
    "other arrays": lambda data: edited(data, data="data-other"),
    "no checksum": lambda data: edited(data, sha256=None),
    "no leaves": lambda data: edited(data, leaves=[]),
    "leaves of another kind": lambda data: edited(data, leaves={"w": 1}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused(edit: str, folder: Path) -> None:
    file = folder / "step_00000002" / MANIFEST
    file.write_bytes(EDITS[edit](file.read_bytes()))
    runs = Checkpoints(folder)
    for action in (lambda: runs.restore(STATE, strict=True), runs.extra):
        with pytest.raises(DamagedCheckpointError, match=r"restore\(..., step=1\)"):
            action()
    np.testing.assert_array_equal(runs.restore(STATE)["w"], STATE["w"])
    assert runs.extra() == runs.extra(1)


def test_any_changed_byte_is_seen() -> None:
    data = WHOLE.encode()
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        try:
            assert decode(Path("run"), 7, bytes(changed)) == WHOLE
        except CheckpointError:
            continue


def test_a_renamed_or_copied_step_is_refused(folder: Path) -> None:
    shutil.copytree(folder / "step_00000002", folder / "step_00000009")
    runs = Checkpoints(folder)
    assert runs.steps == [1, 2, 9]
    with pytest.raises(DamagedCheckpointError, match="is that of step 2: the folder was renamed or copied"):
        runs.restore(STATE, strict=True)
    runs.restore(STATE, 2)


def test_damaged_manifests_do_not_push_good_steps_out(folder: Path) -> None:
    """The last step that can be restored stays, however many after it cannot."""
    with Checkpoints(folder, keep=2) as runs:
        for step in (3, 4, 5):
            runs.save(STATE, step=step)
            runs.wait()
            (folder / f"step_{step:08d}" / MANIFEST).write_bytes(b"{}")
        assert runs.steps == [2, 3, 4, 5]
        runs.restore(STATE, 2)
