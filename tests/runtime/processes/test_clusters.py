"""The files of docs/cluster, run as SLURM and Kubernetes would: killed, asked to end, and started again."""

from __future__ import annotations

import json
import os
import platform
import signal
from pathlib import Path

import pytest

from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.processes.failure_cause import FOLLOWS
from sbp.runtime.processes.initialize import job_name, set_launched
from tests.runtime.processes.schedulers import (
    CLUSTER,
    SMALL,
    Pods,
    Slurm,
    await_step,
    directives,
    ended,
    job_pods,
    jobset_pods,
)

LAST = int(SMALL[1])


def holder(folder: Path) -> str:
    """The job whose lease a folder has."""
    return str(json.loads(max(folder.glob("sbp_lease-*.json")).read_text())["job"])


@pytest.mark.full
def test_slurm_starts_a_run_again_until_it_is_done(tmp_path: Path) -> None:
    slurm, runs = Slurm(tmp_path, os.getpid()), tmp_path / "runs"
    slurm.install()
    script, arguments = CLUSTER / "slurm.sh", (*SMALL, "--checkpoint", str(runs))
    job = slurm.sbatch(script, *arguments)
    killed_after = await_step(runs, 0)
    os.kill(slurm.pids()[2], signal.SIGKILL)
    assert ended([job]) != [0] and slurm.requeued()

    job = slurm.sbatch(script, *arguments)
    await_step(runs, killed_after)
    os.kill(slurm.pids()[0], signal.SIGTERM)  # as --signal=TERM@120 does, to the tasks and not to the shell
    assert ended([job]) == [os.EX_TEMPFAIL] and slurm.requeued()
    asked_after = max(Checkpoints(runs).steps)
    assert killed_after < asked_after < LAST

    job = slurm.sbatch(script, *arguments)
    assert ended([job]) == [0] and not slurm.requeued()
    assert max(Checkpoints(runs).steps) == LAST
    assert holder(runs) == f"slurm {slurm.job}.0.0"
    out = (tmp_path / "out").read_text()
    assert f"step {asked_after + 1}/{LAST}" in out


def test_slurm_does_not_start_a_run_again_for_ever(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, 4711, restarts=50)
    slurm.install()
    (slurm.programs / "srun").write_text("#!/bin/sh\nexit 1\n")
    assert ended([slurm.sbatch(CLUSTER / "slurm.sh")]) == [1] and not slurm.requeued()
    slurm.restarts = 49
    assert ended([slurm.sbatch(CLUSTER / "slurm.sh")]) == [1] and slurm.requeued()


def test_slurm_is_asked_for_what_a_run_needs() -> None:
    asked = directives(CLUSTER / "slurm.sh")
    assert asked["signal"] == "TERM@120" and "requeue" in asked  # without B: it goes to the tasks
    assert (asked["ntasks-per-node"], asked["open-mode"]) == ("1", "append")


@pytest.mark.slow
def test_a_job_goes_on_after_a_pod_was_killed(tmp_path: Path) -> None:
    pods, runs = job_pods(), tmp_path / "train"
    started = pods.start(tmp_path)
    step = await_step(runs, 0)
    started[1].kill()
    code, killed = ended(started)
    assert killed == -signal.SIGKILL and code in (FOLLOWS, -signal.SIGABRT)
    assert ended(pods.start(tmp_path)) == [0, 0]
    assert max(Checkpoints(runs).steps) == LAST
    assert step < LAST and f"/{LAST}" in (tmp_path / "pod0.log").read_text()
    assert holder(runs) == f"kubernetes default/{platform.node()}"


@pytest.mark.slow
def test_a_jobset_goes_on_after_it_was_asked_to_end(tmp_path: Path) -> None:
    pods, runs = jobset_pods(), tmp_path / "train"
    started = pods.start(tmp_path)
    step = await_step(runs, 0)
    for pod in started:
        pod.terminate()
    assert ended(started) == [os.EX_TEMPFAIL] * 2  # no success: it is to be started again
    assert step <= max(Checkpoints(runs).steps) < LAST
    assert ended(pods.start(tmp_path)) == [0, 0]
    assert max(Checkpoints(runs).steps) == LAST


@pytest.mark.parametrize("pods", [job_pods(), jobset_pods()], ids=["Job", "JobSet"])
def test_pods_are_as_many_as_join_and_have_time_to_save(pods: Pods) -> None:
    arguments = pods.container["args"]
    assert pods.spec["completions"] == pods.spec["parallelism"]
    assert arguments[arguments.index("--processes") + 1] == str(pods.spec["completions"])
    assert pods.spec["completionMode"] == "Indexed"
    spec = pods.spec["template"]["spec"]
    assert spec["restartPolicy"] == "Never" and spec["terminationGracePeriodSeconds"] >= 60
    assert {v["name"] for v in spec["volumes"]} == {m["name"] for m in pods.container["volumeMounts"]}


def test_what_is_no_failure_of_a_pod_does_not_count() -> None:
    rules = job_pods().spec["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    assert [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule] == [
        [FOLLOWS, os.EX_TEMPFAIL]
    ]


def test_a_job_has_the_name_that_its_scheduler_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert job_name() is None
    set_launched("launch host/1")
    try:
        assert job_name() == "launch host/1"
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        monkeypatch.setattr(platform, "node", lambda: "train-0")
        assert job_name() == "kubernetes default/train-0"
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        assert job_name() == "kubernetes default/train-0"  # a shell of the job, where no step runs
        monkeypatch.setenv("SLURM_STEP_ID", "1")
        monkeypatch.setenv("SLURM_PROCID", "0")
        assert job_name() == "slurm 7.1.0"
    finally:
        set_launched("")
