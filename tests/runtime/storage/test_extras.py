"""Beside the state stands what a run needs besides: numbers, arrays and keys, and nothing that runs code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints

STATE = {"w": jnp.ones(2)}


def test_a_tree_comes_back(tmp_path: Path) -> None:
    extra = {
        "position": {"file": "part-3", "row": 12, "rates": [0.5, None, True], "pair": (1, 2)},
        "counts": np.arange(6, dtype=np.int16).reshape(2, 3),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "scalar": np.float32(0.1),
        "none": np.zeros((0, 2)),
        "raw": b"\0\xff of an iterator",
        "keys": jax.random.split(jax.random.key(4), 2),
    }
    with Checkpoints(tmp_path) as runs:
        runs.save(STATE, step=1, extra=extra)
        runs.save(STATE, step=2)
    found = runs.extra(1)
    assert found["position"] == {"file": "part-3", "row": 12, "rates": [0.5, None, True], "pair": [1, 2]}
    for name in ("counts", "half", "scalar", "none"):
        assert found[name].dtype == extra[name].dtype and found[name].shape == extra[name].shape
        assert found[name].tobytes() == np.asarray(extra[name]).tobytes()
    assert found["raw"] == extra["raw"]
    assert (jax.random.key_data(found["keys"]) == jax.random.key_data(extra["keys"])).all()
    assert runs.extra() == {}


@pytest.mark.parametrize(
    "wrong",
    [{"a": object()}, {"a": [{1, 2}]}, {1: "a"}, {"a": {"__array__": 0}}, {"a": bytearray(2)}, {"f": print}],
    ids=["object", "set", "number as key", "name of ours", "bytes that change", "function"],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(wrong: Any, tmp_path: Path) -> None:
    runs = Checkpoints(tmp_path / "run")
    with pytest.raises(CheckpointError, match="dicts by strings, lists, numbers"):
        runs.save(STATE, step=1, extra=wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_is_said(damage: str, tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as runs:
        runs.save(STATE, step=1, extra={"a": np.arange(5)})
    (file,) = tmp_path.rglob("extra.npz")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data) if damage == "flip" else bytes(data[:-5]))
    if damage == "missing":
        file.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"extra\.npz cannot be read"):
        runs.extra()
