"""Checkpoints of the version before, which this folder keeps, are restored, pruned and gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import DamagedCheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints

FIXTURE = Path(__file__).parent / "version_1"


def like() -> dict[str, Any]:
    mesh = sbp.placement("cpu", shape=(8,)).mesh
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    w = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split)
    half = jax.ShapeDtypeStruct((6,), jnp.bfloat16)
    return {"w": w, "half": half, "key": jax.random.key(0), "count": 0, "nothing": jnp.zeros((0, 3))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "run"))


@pytest.mark.parametrize("step", [3, 5])
def test_it_is_restored(step: int, folder: Path) -> None:
    runs = Checkpoints(folder)
    assert runs.steps == [3, 5] and runs.extra(step) == {"batch": step}
    found = runs.restore(like(), step)
    np.testing.assert_array_equal(found["w"], np.arange(32, dtype=np.float32).reshape(8, 4) * step)
    assert len(found["w"].sharding.device_set) == 8 and found["count"] == step
    np.testing.assert_array_equal(found["half"], np.asarray(jnp.arange(6, dtype=jnp.bfloat16) / 3))
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(step))).all()
    np.testing.assert_array_equal(runs.restore(like()["w"], step, only="w"), found["w"])


def test_a_flipped_bit_is_found(folder: Path) -> None:
    file = max((folder / "step_00000005").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(DamagedCheckpointError, match=r"has other bytes than were written(.|\n)*step=3"):
        Checkpoints(folder).restore(like(), strict=True)
    file.write_bytes(bytes(data[:-1]))
    with pytest.raises(DamagedCheckpointError, match=r" bytes, not "):
        Checkpoints(folder).restore(like(), strict=True)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        Checkpoints(folder).restore(like(), strict=True)


def test_a_run_goes_on_and_prunes_what_the_manifest_lists_alone(folder: Path) -> None:
    (folder / "step_00000003" / "notes.txt").write_text("mine")
    with Checkpoints(folder, keep=1) as runs:
        state = runs.restore(like())
        runs.save(state, step=6)
        runs.wait()
        assert runs.steps == [6]
        assert not (folder / "step_00000005").exists()
        left = [p for p in (folder / "step_00000003").rglob("*") if p.is_file()]
        assert [p.name for p in left] in (["notes.txt"], ["commit_success.txt", "notes.txt"])
        np.testing.assert_array_equal(runs.restore(like())["w"], state["w"])
