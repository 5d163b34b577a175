"""What 2 x 4 devices have saved comes back in stages and in two processes, bit for bit, and trains on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils

import sbp
from sbp import B, S
from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from tests.runtime.processes import cases
from tests.runtime.processes.test_two_processes import launched

OPTIMIZER = optax.adam(1e-2)
SPLIT = [S(0), S(1)]


def start() -> tuple[Any, Any]:
    params = {"w": [cases.arrays(w=(cases.DIMS, cases.DIMS))["w"] + i / 64 for i in range(4)]}
    return params, jax.tree.map(np.asarray, OPTIMIZER.init(params))


def program_of(stages: int, shape: tuple[int, ...]) -> Any:
    """The same training, on one placement or in stages."""
    if stages == 1:
        whole = sbp.placement("cpu", shape=shape)
        asked = ([S(0)] * len(shape) if len(shape) != 2 else SPLIT), sbp.AUTO, [S(0)] + [B] * (len(shape) - 1)
        return sbp.compile(cases.step_of(cases.tower([whole]), OPTIMIZER), whole, in_sbp=asked)
    whole = sbp.placement("cpu", shape=shape, axes=("stage", "data"))
    return sbp.compile(cases.step_of(cases.tower(whole.split("stage")), OPTIMIZER, 4), whole)


PLACES = {
    "8": (1, (8,)),
    "4": (1, (4,)),
    "2 x 2 x 2": (1, (2, 2, 2)),
    "1": (1, (1,)),
    "2 stages": (2, (2, 4)),
    "4 stages": (4, (4, 2)),
}
IN_PROCESSES = ("8", "2 stages")


def restored(folder: str, place: str, bits: str) -> float:
    """Restores for a program, compares each bit with what was saved; the loss of the step that follows.

    Arguments:
      bits: a file of the arrays that were saved, in the order of the leaves.
    """
    program = program_of(*PLACES[place])
    program.plan(*start(), cases.batch_of(2))
    found = sbp.restore(folder, like=program)
    with np.load(bits) as saved:
        for x, name in zip(jax.tree.leaves(sbp.to_host(found)), saved.files, strict=True):
            assert x.dtype == saved[name].dtype and x.tobytes() == saved[name].tobytes(), (place, name)
    assert jax.tree.structure(found) == jax.tree.structure(start())
    return float(program(*found, cases.batch_of(2))[2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, float]:
    """A step saved on 2 x 4 devices, its bits in a file, and the loss of the next one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    program, state = program_of(1, (2, 4)), start()
    for i in range(2):
        *state, _ = program(*state, cases.batch_of(i))
    assert not all(x.is_fully_replicated for x in jax.tree.leaves(state))
    sbp.save(folder / "run", tuple(state), step=2)
    np.savez(folder / "bits.npz", *map(np.asarray, jax.tree.leaves(state)))
    return str(folder / "run"), str(folder / "bits.npz"), float(program(*state, cases.batch_of(2))[2])


@pytest.mark.some(1)
@pytest.mark.parametrize("place", PLACES)
def test_every_bit_comes_back(place: str, saved: tuple[str, str, float]) -> None:
    folder, bits, loss = saved
    assert restored(folder, place, bits) == pytest.approx(loss, rel=1e-5)


@pytest.mark.full
def test_and_in_two_processes(saved: tuple[str, str, float]) -> None:
    """Each of them compares all that was saved, and hears of the other one's folder that cannot be made."""
    folder, bits, loss = saved
    run = launched("-m", "tests.runtime.checkpoint.test_elsewhere", folder, bits)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count(" is a file") == 2, run.stdout
    assert run.stdout.count("passed over to step 1, strict refused") == 4, run.stdout
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if " then " in line]
    assert losses == pytest.approx([loss] * len(IN_PROCESSES) * 2, rel=1e-5)


def refused(folder: Path) -> str:
    """What a process is told where another one, or itself, cannot make a folder."""
    path = folder / "bits.npz" / "below" if jax.process_index() else folder / "refused"
    try:
        sbp.save(path, {"w": np.zeros(3)}, step=1)
    except CheckpointError as e:
        return e.problems[0].got
    return "saved"


def passed_over(folder: Path, pattern: str) -> str:
    """Where two processes come to when the newest of two steps is damaged; how they fare with `strict`."""
    with Checkpoints(folder) as runs:
        for step in (1, 2):
            runs.save({"w": np.full(1000, step)}, step)
    if jax.process_index() == 0:
        (file, *_) = sorted((folder / "step_00000002").rglob(pattern), key=lambda p: -p.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1])
    multihost_utils.sync_global_devices(pattern)
    found = runs.restore({"w": np.zeros(1000, int)})["w"][0]
    try:
        runs.restore({"w": np.zeros(1000, int)}, strict=True)
    except DamagedCheckpointError:
        return f"passed over to step {found}, strict refused"
    return f"passed over to step {found}"


if __name__ == "__main__":
    for i, pattern in enumerate(("sbp_manifest.json", "d/*")):
        print(passed_over(Path(sys.argv[2]).parent / f"damaged {i}", pattern), flush=True)
    print("refused:", refused(Path(sys.argv[2]).parent), flush=True)
    for name in IN_PROCESSES:
        print(name, "then", restored(sys.argv[1], name, sys.argv[2]), flush=True)
