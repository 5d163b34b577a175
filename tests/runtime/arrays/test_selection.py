"""A part of a step, and another precision: the weights of a training state, for inference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp.errors import ArgumentError, CheckpointError, DamagedCheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.checkpoint.manifest import LeafRecord, decode

PARAMS = {"w": jnp.arange(12.0).reshape(4, 3) / 7, "b": [jnp.ones(2), jnp.arange(3)]}
STATE = {"params": PARAMS, "opt": optax.adam(1e-3).init(PARAMS), "step": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Step 1 is a dict, step 2 a tuple."""
    runs = Checkpoints(tmp_path_factory.mktemp("run"))
    runs.save(STATE, step=1)
    runs.save((PARAMS, STATE["opt"]), step=2)
    runs.close()
    return runs


def equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
        assert getattr(x, "dtype", None) == getattr(y, "dtype", None)


@pytest.mark.parametrize(
    ("step", "only", "wanted"),
    [
        (1, "params", PARAMS),
        (1, ("params", "w"), PARAMS["w"]),
        (1, ("params", "b"), PARAMS["b"]),
        (1, ("params", "b", 1), PARAMS["b"][1]),
        (1, "step", 3),
        (1, ("opt", 0, "mu"), STATE["opt"][0].mu),
        (2, 0, PARAMS),
        (2, (0, "w"), PARAMS["w"]),
        (2, 1, STATE["opt"]),
    ],
    ids=str,
)
def test_a_part(step: int, only: Any, wanted: Any, saved: Checkpoints) -> None:
    equal(saved.restore(wanted, step, only=only), wanted)


def test_another_precision_of_all_floating_leaves(saved: Checkpoints) -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, PARAMS)
    for like in (half, PARAMS):
        equal(saved.restore(like, 1, only="params", dtype=jnp.bfloat16), half)
    found = saved.restore(STATE, 1, dtype="float16")
    assert found["params"]["w"].dtype == jnp.float16 and found["params"]["b"][1].dtype == jnp.int32
    assert found["step"] == 3


def test_a_part_for_a_program_of_inference(saved: Checkpoints) -> None:
    program = sbp.compile(
        lambda params, x: x @ params["w"] + params["b"][1],
        sbp.placement("cpu", shape=(4,)),
        in_sbp=({"w": [sbp.S(0)], "b": sbp.AUTO}, [sbp.B]),
    )
    x = jnp.ones((2, 4))
    program.plan(PARAMS, x)
    found = saved.restore(program, 1, only="params")
    assert found["w"].sharding == program.in_shardings[0]["w"]
    np.testing.assert_allclose(program(found, x), x @ PARAMS["w"] + PARAMS["b"][1], rtol=1e-6)
    equal(sbp.restore(saved.path, like=program, step=2, only=0), PARAMS)
    with pytest.raises(ArgumentError, match="its arguments"):
        saved.restore(program, 1, only="opt")


def test_what_is_no_part_is_refused(saved: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match=r"only=\('weights',\)") as e:
        saved.restore(PARAMS, 1, only="weights")
    assert "['params'], ['step']" in str(e.value) or "['opt'], ['params'], ['step']" in str(e.value)
    with pytest.raises(CheckpointError, match="only="):
        saved.restore(PARAMS, 1)
    with pytest.raises(CheckpointError, match=r"float32\[4, 3\], not bfloat16\[4, 3\]"):
        saved.restore(PARAMS["w"].astype(jnp.bfloat16), 1, only=("params", "w"))


def test_a_part_is_checked_too(tmp_path: Path) -> None:
    runs = Checkpoints(tmp_path)
    runs.save(STATE, step=1)
    runs.close()
    (manifest,) = tmp_path.rglob("sbp_manifest.json")
    found = decode(manifest.parent, 1, manifest.read_bytes())
    wrong = tuple(
        LeafRecord(x.path, x.type, x.checksum + 1 if x.path == "['params']['w']" else x.checksum, x.traits)
        for x in found.leaves
        if x.checksum is not None
    )
    manifest.write_bytes(replace(found, leaves=wrong).encode())
    with pytest.raises(DamagedCheckpointError, match=r"\['w'\] has other elements"):
        runs.restore(PARAMS, only="params")
    equal(runs.restore(PARAMS["b"], only=("params", "b")), PARAMS["b"])
    equal(runs.restore(PARAMS, only="params", check=False), PARAMS)
