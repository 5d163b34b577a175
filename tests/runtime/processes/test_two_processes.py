"""Two processes give what one gives: the same programs, run by the launcher and here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.runtime.processes import cases

ROOT = Path(__file__).parents[3]


def launched(*argv: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """A launch of some processes that have eight devices together."""
    options = ["--processes", str(processes), "--devices", str(8 // processes)]
    command = [sys.executable, "-m", "sbp", "launch", *options, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("cases") / "found.json"
    run = launched("-m", "tests.runtime.processes.cases", str(file))
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(json.loads(file.read_text()))


@pytest.mark.full
@pytest.mark.parametrize("name", cases.CASES)
def test_losses_are_those_of_one_process(name: str, found: dict[str, Any]) -> None:
    one = cases.CASES[name](cases.STEPS)
    assert found[name]["losses"] == pytest.approx(one["losses"], rel=1e-6)
    for here, there in zip(one["params"], found[name]["params"], strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_rooms_that_turn_out_too_small_are_planned_again_by_all(found: dict[str, Any]) -> None:
    """Process 0 says so once, and keys are counted over all processes."""
    assert found["rooms too small"]["again"] == 1
    assert found["rooms too small"]["counted"] == [
        [op, cases.STEPS, True] for op in ("sbp_lookup", "sbp_add_rows")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", cases.CASES)
def test_so_are_twenty_steps_in_64_bits(name: str, processes: int, tmp_path: Path) -> None:
    """Rounding is all that may differ: sums are added in the same order wherever a placement is the same."""
    file = tmp_path / "found.json"
    options = ("--steps", "20", "--x64", name, str(file))
    run = launched("-m", "tests.runtime.processes.cases", *options, processes=processes)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(file.read_text())[name]
    with jax.enable_x64(True):
        one = cases.CASES[name](20)
    assert len(found["losses"]) == 20
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
    apart = [np.abs(np.subtract(*pair)).max() for pair in zip(one["params"], found["params"], strict=True)]
    off = np.abs(np.subtract(one["losses"], found["losses"])).max()
    print(f"{name}, {processes} processes: losses {off:.1e}, parameters {max(apart):.1e}")
    assert max(apart) < 1e-9


SCRIPT = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np, sbp
rank = jax.process_index()
eight = sbp.placement("cpu", shape=(8,))
"""
WRONG: dict[str, tuple[str, str]] = {
    "another shape": (
        "sbp.compile(lambda x: x * 2, eight)(np.ones((8 + rank, 4), np.float32))",
        "x: float32[9, 4] in process 1, x: float32[8, 4] in process 0",
    ),
    "another constant": (
        "sbp.compile(lambda x: x * (2.0 + rank), eight)(np.ones((8, 4), np.float32))",
        "process 1 has other constants or code",
    ),
    "another option": (
        "options = sbp.Options(memory_limit=1e9 * (1 + rank))\n"
        "sbp.compile(lambda x: x * 2, eight, options=options)(np.ones((8, 4), np.float32))",
        "limits (30.0, 2000000000.0) in process 1, limits (30.0, 1000000000.0) in process 0",
    ),
    "a shape that process 0 does not have now": (
        "total = sbp.compile(lambda x: x.sum(), eight, in_sbp=([sbp.S(0)],))\n"
        "for rows in (8, 8 + 8 * rank):\n    print(float(total(np.ones((rows, 4), np.float32))))",
        "process 0 has gone on with <lambda>, x: float32[8, 4]",
    ),
    "a shape that process 1 does not have now": (
        "total = sbp.compile(lambda x: x.sum(), eight, in_sbp=([sbp.S(0)],))\n"
        "for rows in (8, 16 - 8 * rank):\n    print(float(total(np.ones((rows, 4), np.float32))))",
        "process 1 has gone on with <lambda>, x: float32[8, 4]",
    ),
    "no plan": (
        "options = sbp.Options(memory_limit=10)\n"
        "sbp.compile(lambda x: x @ x.T, eight, options=options)(np.ones((64, 64), np.float32))",
        "memory",
    ),
}


def refused(code: str, tmp_path: Path) -> str:
    """What a launch says that comes to a wrong end."""
    file = tmp_path / "wrong.py"
    file.write_text(SCRIPT + code)
    run = launched(str(file))
    assert run.returncode == 1
    return run.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_the_same_program_is_said_by_all(name: str, tmp_path: Path) -> None:
    code, said = WRONG[name]
    err = refused(code, tmp_path)
    assert said in err
    assert err.count("Error") >= 2 or "ends, since process" in err


ORDERS: dict[str, tuple[str, str]] = {
    "who waits for ever": (
        "one = sbp.compile(lambda x: x.sum(axis=0), eight, in_sbp=([sbp.S(0)],), out_sbp=sbp.B)\n"
        "two = sbp.compile(lambda x: jnp.sort(x, axis=0), eight, in_sbp=([sbp.S(1)],), out_sbp=sbp.B)\n"
        "x = np.ones((16, 8), np.float32)\nprint(one(x)[0], two(x)[0])\n"
        "calls = (one, two) if rank else (two, one)\n"
        "print([float(np.asarray(f(x)).sum()) for f in calls])",
        "call 3 of process 1, <lambda>(x: float32[16, 8])",
    ),
    "whom gloo ends": (
        "total = sbp.compile(lambda x: x.sum(axis=0), eight, in_sbp=([sbp.S(0)],), out_sbp=sbp.B)\n"
        "xs = [np.ones((8, n), np.float32) for n in (16, 64)]\n"
        "print([float(total(x)[0]) for x in (*xs, *(xs if rank else xs[::-1]))])",
        "<lambda>(x: float32[8, 16]) in process 1",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ORDERS)
def test_calls_in_another_order_are_said(name: str, tmp_path: Path) -> None:
    """All is compiled, so nobody waits in Python: a thread says it, or, of who is gone, the launcher."""
    code, said = ORDERS[name]
    err = refused(code, tmp_path)
    assert said in err
    assert "the last one of an epoch padded or dropped in all" in err


ENDS: dict[str, tuple[str, str]] = {
    "raises": ("raise ValueError('lost')", "process 0 ends, since process 1 has raised ValueError: lost"),
    "exits": ("sys.exit('no data')", "process 1 of 2 ended with code 1"),
    "is killed": ("os.kill(os.getpid(), 9)", "process 1 of 2 was killed by SIGKILL"),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ENDS)
def test_when_one_ends_the_others_do(name: str, tmp_path: Path) -> None:
    """They wait in a collective that never comes: nothing in Python could end them."""
    code, said = ENDS[name]
    file = tmp_path / "ends.py"
    file.write_text(
        SCRIPT
        + "double = sbp.compile(lambda x: x.sum(), eight, in_sbp=([sbp.S(0)],))\n"
        + "print(float(double(np.ones(8, np.float32))))\n"
        + f"if rank == 1:\n    {code}\n"
        + "print(float(double(np.ones(8, np.float32))))\ntime.sleep(600)\n"
    )
    run = launched(str(file))
    assert run.returncode == 1
    assert said in run.stderr


def test_a_launch_says_what_is_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    from sbp.__main__ import main

    assert main(["launch", "--processes", "0", "-m", "models.gpt"]) == 1
    assert main(["launch"]) == 1
    said = capsys.readouterr().err
    assert "0 processes, -m models.gpt" in said and "nothing to run" in said


def test_a_launch_hands_on_what_processes_say(tmp_path: Path) -> None:
    file = tmp_path / "says.py"
    file.write_text("import jax, sys\nprint('out', jax.process_index(), sys.argv[1:])\n")
    run = launched(str(file), "--x", "1")
    assert run.returncode == 0
    assert "out 0 ['--x', '1']" in run.stdout.splitlines()
    assert "[1] out 1 ['--x', '1']" in run.stdout.splitlines()


JOB = """
import jax, sbp
sbp.initialize(local_device_ids=range(8))
print(jax.process_index(), jax.process_count(), jax.config.read("jax_cuda_visible_devices"))
"""


CLUSTERS = {
    "SLURM": lambda i: {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    },
    "Open MPI 4": lambda i: {
        "OMPI_MCA_orte_hnp_uri": f"{os.getpid() << 12}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(i),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    },
}
"""What two tasks find in their environments, each on a host of eight GPUs; JAX alone gives it but one."""


@pytest.mark.full
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_says_who_meets_where(cluster: str, tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB)
    runs = []
    for i in range(2):
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **CLUSTERS[cluster](i)}
        command = [sys.executable, str(file)]
        runs.append(subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True))
    said = [run.communicate()[0].splitlines()[-1] for run in runs]
    assert said == [f"{i} 2 0,1,2,3,4,5,6,7" for i in range(2)]


@pytest.mark.full
def test_a_second_signal_ends_a_launch_at_once(tmp_path: Path) -> None:
    """The first one is for saving; who hangs in a collective hears neither."""
    file = tmp_path / "deaf.py"
    file.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "sbp", "launch", "--processes", "2", "--devices", "1", str(file)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert sorted(run.stdout.readline() for _ in range(2)) == ["[1] deaf\n", "deaf\n"]
    run.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(timeout=1)
    run.send_signal(signal.SIGTERM)
    run.communicate()
    assert run.returncode == 1
