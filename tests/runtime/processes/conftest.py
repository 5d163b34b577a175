"""A run that takes its time, as a script: it saves, and goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.processes.test_two_processes import ROOT

SCRIPT = """
import os, sys, time
import jax, numpy as np, optax, sbp
from tests.runtime.processes import cases

folder, steps, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
optimizer = optax.adam(1e-2)
if kind == "stages":
    whole = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))
    loss = cases.tower(whole.split("stage"))
    program = sbp.compile(cases.step_of(loss, optimizer, 4), whole)
    params = {"w": [cases.arrays(w=(16, 16))["w"] for _ in range(4)]}
else:
    eight = sbp.placement("cpu", shape=(8,))
    asked = [sbp.S(0)], sbp.AUTO, [sbp.S(0)]
    program = sbp.compile(cases.step_of(cases.mlp, optimizer), eight, in_sbp=asked)
    params = cases.weights()
state = params, jax.tree.map(np.asarray, optimizer.init(params))

def batches(i):
    if "slow" in sys.argv:
        time.sleep(0.2)
    return cases.batch_of(i)

done = sbp.fit(program, state, batches, steps=steps, checkpoint=folder, save_every=2, log=folder + "/log.csv")
print("done" if done.is_done else "asked to end", done.step)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "long.py"
    file.write_text(SCRIPT)
    return str(file)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
