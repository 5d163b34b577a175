"""What SLURM and Kubernetes do with the files in docs/cluster, on one machine: start, signal, start again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.processes.launch import free_port

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "docs" / "cluster"
SMALL = ("--steps", "16", "--save-every", "2", "--step-seconds", "0.2")
"""What a test adds to the command, to see an end."""
PROCESSES = 2
"""In place of the four of the files."""
OWN = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}


def await_step(folder: Path, newer_than: int) -> int:
    """The next step that is complete."""
    while (last := max(Checkpoints(folder).steps, default=0)) <= newer_than:
        time.sleep(0.05)
    return last


SRUN = """\
#!{python}
import os, signal, subprocess, sys, time
begin = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("--"))
count = int(os.environ["SLURM_NTASKS"])
tasks = []
for i in range(count):
    own = {{"SLURM_PROCID": str(i), "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}}
    own["SLURM_STEP_NUM_NODES"] = str(count)
    own["SLURM_STEP_NODELIST"] = ",".join(["localhost"] * count)
    tasks.append(subprocess.Popen(sys.argv[begin:], env=os.environ | own))
signal.signal(signal.SIGTERM, lambda number, _: [t.send_signal(number) for t in tasks])
with open({pids!r} + ".new", "w") as file:
    file.write(" ".join(str(pid) for pid in (os.getpid(), *(t.pid for t in tasks))))
os.rename({pids!r} + ".new", {pids!r})
assert "--kill-on-bad-exit=1" in sys.argv[:begin]
end = None
while any(t.poll() is None for t in tasks):
    time.sleep(0.05)
    if end is None and any(t.poll() for t in tasks):
        end = time.monotonic() + 60
    if end is not None and time.monotonic() > end:
        [t.kill() for t in tasks]
sys.exit(max(t.returncode if t.returncode >= 0 else 128 - t.returncode for t in tasks))
"""
SCONTROL = '#!/bin/sh\necho "$@" >>{asked}\n'


@dataclass
class Slurm:
    """A scheduler that knows `sbatch`, `srun` and `scontrol requeue`.

    Arguments:
      folder: where its programs and notes are.
      job: the number of the one job that it has.
      restarts: how often that was started again.
    """

    folder: Path
    job: int
    restarts: int = 0

    def install(self) -> None:
        """Writes the programs that a job finds on its path."""
        self.programs.mkdir()
        made = {
            "srun": SRUN.format(python=sys.executable, pids=str(self.folder / "pids")),
            "scontrol": SCONTROL.format(asked=self.folder / "asked"),
            "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        }
        for name, text in made.items():
            file = self.programs / name
            file.write_text(text)
            file.chmod(0o755)

    @property
    def programs(self) -> Path:
        """The folder that is put before the path."""
        return self.folder / "bin"

    def sbatch(self, script: Path, *arguments: str) -> subprocess.Popen[str]:
        """Starts the job, for the first time or again, with as many tasks as the script asks for, but fewer
        hosts; what it says is appended to a file, as it asks for."""
        asked = directives(script)
        tasks = PROCESSES * int(asked["ntasks-per-node"])
        own = {"SLURM_JOB_ID": str(self.job), "SLURM_NTASKS": str(tasks), **OWN}
        own["PATH"] = f"{self.programs}:{os.environ['PATH']}"
        if self.restarts:
            own["SLURM_RESTART_COUNT"] = str(self.restarts)
        (self.folder / "pids").unlink(missing_ok=True)
        with (self.folder / "out").open("a" if asked["open-mode"] == "append" else "w") as out:
            command = ["bash", str(script), *arguments]
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | own, stdout=out, stderr=out, text=True
            )

    def pids(self) -> list[int]:
        """Of `srun`, and of the tasks."""
        file = self.folder / "pids"
        while not file.exists():
            time.sleep(0.05)
        return [int(pid) for pid in file.read_text().split()]

    def requeued(self) -> bool:
        """Whether the job has asked to be started again since this was asked last."""
        file = self.folder / "asked"
        if not file.exists():
            return False
        assert file.read_text().split() == ["requeue", str(self.job)]
        file.unlink()
        self.restarts += 1
        return True


def directives(script: Path) -> dict[str, str]:
    """What a script says to `sbatch`."""
    found = dict[str, str]()
    for line in script.read_text().splitlines():
        if line.startswith("#SBATCH"):
            found.update(re.findall(r"--([\w-]+)(?:=(\S+))?", line))
    return found


@dataclass(frozen=True)
class Pods:
    """The pods of an indexed job.

    Arguments:
      name: the job's.
      domain: the service that names them.
      spec: of the job.
    """

    name: str
    domain: str
    spec: Mapping[str, Any]

    @property
    def container(self) -> Mapping[str, Any]:
        """The one container of each."""
        (found,) = self.spec["template"]["spec"]["containers"]
        return dict(found)

    def hostname(self, index: int) -> str:
        """By which the others find a pod."""
        return f"{self.name}-{index}.{self.domain}"

    def start(self, runs: Path) -> list[subprocess.Popen[str]]:
        """Starts all of them: the command of the file in the environment that the controller gives.

        Arguments:
          runs: the folder that is mounted.
        """
        where = f"127.0.0.1:{free_port()}"  # in place of the name that the service would give
        words = [*self.container["command"], *self.container["args"], *SMALL]
        at = words.index("--coordinator") + 1
        assert words[at] == f"{self.hostname(0)}:1234"
        words[at], words[words.index("--processes") + 1] = where, str(PROCESSES)
        assert words[0] == "python" and self.container["volumeMounts"][0]["mountPath"] == "/runs"
        words = [sys.executable, *(re.sub("^/runs", str(runs), word) for word in words[1:])]
        started = []
        for i in range(PROCESSES):
            own = {"JOB_COMPLETION_INDEX": str(i), "KUBERNETES_SERVICE_HOST": "10.96.0.1", **OWN}
            own["HOSTNAME"] = self.hostname(i).partition(".")[0]
            with (runs / f"pod{i}.log").open("a") as out:
                pod = subprocess.Popen(
                    words, cwd=ROOT, env=os.environ | own, stdout=out, stderr=out, text=True
                )
            started.append(pod)
        return started


def job_pods() -> Pods:
    """Those of job.yaml."""
    service, job = yaml.safe_load_all((CLUSTER / "job.yaml").read_text())
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    name, domain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert service["metadata"]["name"] == domain and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    return Pods(name, domain, job["spec"])


def jobset_pods() -> Pods:
    """Those of jobset.yaml; a JobSet names them NAME-JOB-REPLICA-INDEX, and makes the service NAME."""
    (found,) = yaml.safe_load_all((CLUSTER / "jobset.yaml").read_text())
    assert (found["kind"], found["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    assert found["spec"]["network"]["enableDNSHostnames"]
    (job,) = found["spec"]["replicatedJobs"]
    name = found["metadata"]["name"]
    assert job["replicas"] == 1
    return Pods(f"{name}-{job['name']}-0", name, job["template"]["spec"])


def ended(processes: list[subprocess.Popen[str]]) -> list[int]:
    """The codes of processes that end by themselves."""
    try:
        return [p.wait() for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.send_signal(signal.SIGKILL)
                p.wait()
