"""What a run is called by who has started it, and starts it again: its name stays the same over restarts.

The lease of a folder of checkpoints is taken over at once by the job that held it. A name that two runs share
while both live would let one rob the other: so a SLURM job is named with its step and task, and a pod by its
hostname, which is another one for each pod that is alive.
"""

from __future__ import annotations

import functools
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
KUBERNETES = "KUBERNETES_SERVICE_HOST"
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass
class _Launched:
    """What the launcher of this process calls the run; "" where there is none."""

    name: str = ""


@functools.cache
def _launched() -> _Launched:
    return _Launched()


def set_launched(name: str) -> None:
    """Notes what the launcher calls the run of this process."""
    _launched().name = name


def job_name() -> str | None:
    """The name of the job that this process belongs to: SLURM's, Kubernetes', or else the launcher's; None
    where nobody has given it one.

    Where a launcher runs under SLURM or Kubernetes, theirs holds: they may start it again on another host.
    """
    if all(name in os.environ for name in SLURM):
        return "slurm " + ".".join(os.environ[name] for name in SLURM)
    if KUBERNETES in os.environ:
        namespace = "default"
        with suppress(OSError):
            namespace = _NAMESPACE.read_text().strip()
        return f"kubernetes {namespace}/{platform.node()}"
    return _launched().name or None
