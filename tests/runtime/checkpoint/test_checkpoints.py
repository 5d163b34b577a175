"""What is saved comes back bit for bit, under whatever placement; what is damaged does not come back."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.options import PipelineOptions
from sbp.runtime.checkpoint import steps
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from tests.runtime.processes import cases

ROOT = Path(__file__).parents[3]
OPTIMIZER = optax.adam(1e-2)
STEP = cases.step_of(cases.mlp, OPTIMIZER)


def program_on(shape: tuple[int, ...], **options: Any) -> Any:
    return sbp.compile(STEP, sbp.placement("cpu", shape=shape), **options)


def start() -> tuple[Any, Any]:
    params = cases.weights()
    return params, OPTIMIZER.init(params)


def same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[float]]:
    """A folder with steps 2 and 4 of a run on 2 x 4, the last state, and the losses of two steps more."""
    folder = tmp_path_factory.mktemp("run")
    program = program_on((2, 4), in_sbp=({"up": [B, S(1)], "down": [B, S(0)]}, sbp.AUTO, [S(0), B]))
    params, state = start()
    runs = Checkpoints(folder)
    for i in range(4):
        params, state, _ = program(params, state, cases.batch_of(i))
        if i % 2:
            runs.save({"params": params, "state": state}, step=i + 1, extra={"batch": i + 1})
    runs.wait()
    last, losses = {"params": params, "state": state}, []
    for i in range(4, 6):
        params, state, loss = program(params, state, cases.batch_of(i))
        losses.append(float(loss))
    return folder, last, losses


@pytest.mark.some(2)
@pytest.mark.parametrize("shape", [(8,), (4,), (2, 2, 2), (1,)], ids=str)
def test_a_run_goes_on_under_another_placement(shape: tuple[int, ...], saved: Any) -> None:
    folder, last, losses = saved
    program = program_on(shape, in_sbp=([S(0)] * len(shape), sbp.AUTO, sbp.AUTO))
    program.plan(*start(), cases.batch_of(0))
    found = sbp.restore(folder, like=program)
    same_bits(found, last)
    assert jax.tree.map(lambda x: x.sharding, found["params"]) == program.in_shardings[0]
    params, state = found["params"], found["state"]
    for i, before in zip(range(4, 6), losses, strict=True):
        params, state, loss = program(params, state, cases.batch_of(i))
        assert float(loss) == pytest.approx(before, rel=1e-5)
    assert Checkpoints(folder).extra() == {"batch": 4} and Checkpoints(folder).extra(2) == {"batch": 2}


def test_stages_take_what_a_program_of_one_placement_has_saved(tmp_path: Path) -> None:
    params = {"w": [cases.arrays(w=(cases.DIMS, cases.DIMS))["w"] for _ in range(4)]}
    state = OPTIMIZER.init(params)
    sbp.save(tmp_path, (params, state), step=1)
    whole = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))
    step = cases.step_of(cases.tower(whole.split("stage")), OPTIMIZER, 4)
    program = sbp.compile(step, whole)
    program.plan(params, state, cases.batch_of(0))
    found = sbp.restore(tmp_path, like=program)
    same_bits(found, (params, state))
    assert {len(x.sharding.device_set) for x in found[0]["w"]} == {4}
    program(*found, cases.batch_of(0))
    one = sbp.restore(tmp_path, like=(params, state))
    same_bits(one, (params, state))


def test_stacked_weights_of_stages_come_back(tmp_path: Path) -> None:
    whole = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))

    def double(w: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2).mean()

        value, grad = sbp.microbatch(jax.value_and_grad(loss), 4, batch_args=(1,))(w, x)
        return w - grad, value

    options = sbp.Options(pipeline=PipelineOptions(stages=2))
    program = sbp.compile(double, whole, options=options)
    w, x = cases.arrays(w=(4, 16, 16), x=(32, 16)).values()
    w, _ = program(w, x)
    sbp.save(tmp_path, {"w": w}, step=1)
    found = sbp.restore(tmp_path, like=program)["w"]
    same_bits(found, w)
    assert found.sharding == w.sharding == program.in_shardings[0]


def test_keys_numbers_and_small_types_come_back(tmp_path: Path) -> None:
    state = {
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1), 4),
        "half": jnp.arange(8, dtype=jnp.bfloat16) / 3,
        "flag": jnp.array([True, False]),
        "nothing": jnp.zeros((0, 3)),
        "nan": jnp.array([np.nan, -0.0, np.inf]),
        "count": 3,
        "rate": 0.5,
    }
    sbp.save(tmp_path, state, step=1)
    found = sbp.restore(tmp_path, like=state)
    assert (found["count"], found["rate"]) == (3, 0.5)
    assert jax.random.key_impl(found["key"]) == jax.random.key_impl(state["key"])
    words = {k: jax.random.key_data(found[k]) for k in ("key", "keys")}
    same_bits(words, {k: jax.random.key_data(state[k]) for k in words})
    arrays = ("half", "flag", "nothing", "nan")
    same_bits({k: found[k] for k in arrays}, {k: state[k] for k in arrays})


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    runs = Checkpoints(tmp_path, keep=2)
    for step in range(5):
        runs.save({"w": jnp.full(3, float(step))}, step=step)
        assert len(runs.steps) <= 2
    runs.wait()
    assert runs.steps == [3, 4]
    assert runs.restore({"w": np.zeros(3, np.float32)}, step=3)["w"].tolist() == [3, 3, 3]
    runs.close()


def copied(saved: Any, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def step_path(folder: Path, step: int = 4) -> Path:
    return Path(steps.step_path(folder, step))


def largest(folder: Path, step: int = 4) -> Path:
    """The file of a step that holds most of its arrays."""
    data = [p for p in step_path(folder, step).rglob("d/*") if p.is_file()]
    return max(data, key=lambda p: p.stat().st_size)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("break_it", [cut, flip, empty, zeros, os.unlink], ids=lambda f: f.__name__)
def test_damage_is_found_and_the_step_before_is_there(
    break_it: Any, saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left unraised is in threads of TensorStore, whose other reads are given up."""
    folder = copied(saved, tmp_path)
    break_it(largest(folder))
    params, state = start()
    like = {"params": params, "state": state}
    with pytest.raises(DamagedCheckpointError, match=r"restore\(..., step=2\)"):
        sbp.restore(folder, like=like, strict=True)
    with pytest.raises(DamagedCheckpointError):
        sbp.restore(folder, like=like, step=4)
    with caplog.at_level(logging.WARNING, "sbp"):
        assert set(sbp.restore(folder, like=like)) == {"params", "state"}
    assert f"{folder}: step 4 is passed over, since it is damaged: " in caplog.text
    break_it(largest(folder, 2))
    with pytest.raises(DamagedCheckpointError):
        sbp.restore(folder, like=like)


def test_what_is_not_complete_is_no_checkpoint(saved: Any, tmp_path: Path) -> None:
    """The arrays of a save that did not end are deleted when the folder has a new owner, and not before."""
    folder = copied(saved, tmp_path)
    (step_path(folder) / steps.MANIFEST).unlink()
    (left,) = step_path(folder).glob("data-*")
    assert Checkpoints(folder).steps == [2] and left.exists()
    params, state = start()
    with Checkpoints(folder) as runs:
        runs.save({"params": params, "state": state}, step=4)
    assert runs.steps == [2, 4] and not left.exists()


def test_a_checkpoint_of_another_model_is_refused(saved: Any) -> None:
    folder = saved[0]
    params, state = start()
    other = {"params": {**params, "up": np.zeros((3, 3), np.float32)}, "state": state}
    with pytest.raises(
        CheckpointError, match=r"\['params'\]\['up'\] is float32\[16, 64\], not float32\[3, 3\]"
    ):
        sbp.restore(folder, like=other)
    with pytest.raises(CheckpointError, match=r"\['state'\].* is in it, too"):
        sbp.restore(folder, like={"params": params})


NO_ARRAYS: dict[str, Any] = {
    "text": "run",
    "bytes": b"run",
    "function": jnp.sin,
    "generator": np.random.default_rng(0),
    "objects": np.array([None]),
    "texts": np.array(["a", "b"]),
    "day": np.datetime64("2026-11-26"),
    "large": 2**100,
}


def test_leaves_that_are_no_arrays_are_named_all_at_once(tmp_path: Path) -> None:
    state = {"w": jnp.ones(2), "n": 2**63, "none": None, **NO_ARRAYS}
    with pytest.raises(CheckpointError, match=r"extra= takes it") as refused:
        sbp.save(tmp_path, state, step=1)
    named = {p.where for p in refused.value.problems}
    assert named == {f"state[{name!r}]" for name in NO_ARRAYS}
    assert not list(tmp_path.glob("step_*"))
    sbp.save(tmp_path, {"w": jnp.ones(2)}, step=1)
    with pytest.raises(CheckpointError, match=r"state\['name'\]"):
        sbp.restore(tmp_path, like={"w": jnp.ones(2), "name": "run"})


def test_a_manifest_of_another_version_is_refused(saved: Any, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    file = step_path(folder) / steps.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        sbp.restore(folder, like=start())
    file.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        sbp.restore(folder, like=start(), strict=True)


def test_a_step_is_written_once(saved: Any, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with pytest.raises(CheckpointError, match="there already"):
        sbp.save(folder, start(), step=4)


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete step"):
        sbp.restore(tmp_path / "no", like={})


CHILD = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np, sbp
runs = sbp.Checkpoints(sys.argv[1], keep=2)
placed = jax.device_put(np.arange(1 << 18, dtype=np.float32).reshape(512, 512),
    jax.sharding.NamedSharding(sbp.placement("cpu", shape=(8,)).mesh, jax.sharding.PartitionSpec("x")))
first = max(runs.steps, default=0) + 1
for step in range(first, first + 200):
    runs.save({"w": placed + step, "more": [placed] * 3}, step=step)
    print(step, flush=True)
"""


def killed_while_saving(folder: Path, rng: np.random.Generator) -> None:
    """Starts a run that saves all the time, and kills it at some moment; what was complete is complete."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for _ in range(int(rng.integers(2, 5))):
        child.stdout.readline()
    time.sleep(float(rng.uniform(0, 0.1)))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    runs = Checkpoints(folder)
    step = runs.steps[-1]
    like = {"w": np.zeros((512, 512), np.float32), "more": [np.zeros((512, 512), np.float32)] * 3}
    found = runs.restore(like)
    base = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    np.testing.assert_array_equal(found["w"], base + np.float32(step))


KILLS = 5


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 11))])
def test_whenever_it_is_killed_a_complete_step_is_there(seed: int, tmp_path: Path) -> None:
    """In pieces of some kills each, one after the other in one folder: what a crash leaves is swept up."""
    rng = np.random.default_rng(seed)
    for _ in range(KILLS):
        killed_while_saving(tmp_path, rng)


FULL = """
import resource, signal, sys
import jax, numpy as np, sbp
from sbp.errors import CheckpointError, DamagedCheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
runs = sbp.Checkpoints(sys.argv[1])
state = {"w": np.random.default_rng(0).normal(size=(256, 256))}
runs.save(state, step=1); runs.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    runs.save(state, step=2); runs.wait()
except CheckpointError as e:
    print(str(e).replace(chr(10), " "))
print(runs.steps, (runs.restore(state)["w"] == state["w"]).all())
"""


@pytest.mark.full
def test_a_disk_that_fills_up_is_said(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "the disk is full; the steps before are untouched" in run.stdout, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "[1] True"


LAST_LINE = """
import sys, jax.numpy as jnp, sbp
state = {"w": jnp.ones((2000, 100))}
if "waits" in sys.argv:
    sbp.save(sys.argv[1], state, step=1)
else:
    runs = sbp.Checkpoints(sys.argv[1])
    runs.save(state, step=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["waits", "goes on"])
def test_a_save_as_the_last_line(how: str, tmp_path: Path) -> None:
    """The step is there; or, where nothing new can be begun any more, it is said what to do."""
    command = [sys.executable, "-c", LAST_LINE, str(tmp_path), how]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    is_lost = "Python has ended while the step was written" in run.stderr
    assert sbp.Checkpoints(tmp_path).steps == ([] if is_lost else [1])
    assert not is_lost or (how == "goes on" and "wait() or close() of the Checkpoints" in run.stderr)


READ_ONLY = """
import os, sys
import numpy as np, sbp
from sbp.errors import CheckpointError, DamagedCheckpointError
state = {"w": np.random.default_rng(0).normal(size=(256, 256))}
runs = sbp.Checkpoints(sys.argv[1])
runs.save(state, step=1); runs.wait()
os.chmod(sys.argv[1], 0o555)
for again in (runs, sbp.Checkpoints(sys.argv[1])):
    try:
        again.save(state, step=2); again.wait()
    except CheckpointError as e:
        print(str(e).replace(chr(10), " "))
print(runs.steps, (runs.restore(state)["w"] == state["w"]).all())
os.chmod(sys.argv[1], 0o755)
runs.save(state, step=2); runs.wait()
print(runs.steps, (runs.restore(state)["w"] == state["w"]).all())
"""
WITHOUT_OVERRIDE = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Root writes where nobody may; what it starts without this capability does not (capabilities(7))."""


@pytest.mark.full
def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", WITHOUT_OVERRIDE, "-c", READ_ONLY, str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    *said, before, after = run.stdout.splitlines() or [run.stderr[-2000:]] * 2
    assert len(said) == 2 and all("Permission denied" in s and str(folder) in s for s in said), run.stdout
    assert (before, after) == ("[1] True", "[1, 2] True")


def test_a_file_where_a_folder_should_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        sbp.save(tmp_path / "file" / "below", start(), step=1)
