"""A plan is the same in every process: nothing hangs on addresses, or on how Python hashes strings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANNED = """
import jax
jax.config.update("jax_platforms", "cpu")
import sbp
from benchmarks import cases

case = cases.resnet_case("auto", (2, 4), 18)
options = sbp.Options(cache=False, progress=False)
plan = sbp.compile(case.step, sbp.placement("h100", shape=(2, 4)), options=options).plan(*case.shapes())
print(repr((plan.seconds, plan.bound, plan.step_seconds, plan.memory_bytes)))
print(plan)
"""


@pytest.mark.full
def test_a_plan_is_the_same_in_every_process() -> None:
    """Batch norms have kernels that could be merged in several ways, which once hung on addresses."""

    def began(seed: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", PLANNED], env=env, stdout=subprocess.PIPE, text=True)

    texts = [process.communicate()[0] for process in [began("1"), began("2")]]
    assert texts[0] == texts[1] and "collectives" in texts[0]
