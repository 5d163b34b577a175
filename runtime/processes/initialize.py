"""Joining the processes of one program.

What a process waits for while it joins the others: JAX says nothing for minutes, and then ends it.

The address at which a process is reached by the others, where CPU devices exchange data through gloo.

gloo takes what the host's own name stands for. That is often nothing, or an address that only the host itself
can reach (127.0.1.1 in Debian's /etc/hosts). But all processes reach process 0: so a process takes the
address from which it does; and the host of process 0 the one at which processes of other hosts do.

What a run is called by who has started it, and starts it again: its name stays the same over restarts.

The lease of a folder of checkpoints is taken over at once by the job that held it. A name that two runs share
while both live would let one rob the other: so a SLURM job is named with its step and task, and a pod by its
hostname, which is another one for each pod that is alive.
"""

import functools
import ipaddress
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from sbp.compat.processes import KVStore, how_many, kv_store, own_index, set_own_address
from sbp.compat.processes import coordinator as coordinator_of_all
from sbp.compat.untyped import set_jax
from sbp.errors import Problem, ProcessError
from sbp.runtime.processes.failure_propagation import watch
from sbp.runtime.processes.liveness import LivenessWatch
from sbp.runtime.processes.messages import nobody_answers, not_all_have_come

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


WAIT_SECONDS = 60.0
"""For the word of the others, which have joined by then."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostRoute:
    """How a process reaches process 0.

    Arguments:
      own: its own address on the way there.
      address: the address of process 0.
    """

    own: str
    address: str


def route_to(coordinator: str) -> HostRoute:
    """How this process reaches "host:port"; nothing is sent.

    Raises:
      OSError: if the host has no address, or there is no way to it.

    >>> route_to("127.0.0.1:80")
    HostRoute(own='127.0.0.1', address='127.0.0.1')
    """
    host, _, port = coordinator.rpartition(":")
    for family, kind, _, _, address in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    ):
        with suppress(OSError), socket.socket(family, kind) as s:
            s.connect(address)
            return HostRoute(str(s.getsockname()[0]), str(s.getpeername()[0]))
    raise OSError(f"there is no way to {coordinator}")


def is_loopback(address: str) -> bool:
    """Whether only the host itself reaches an address.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address(kv_store: KVStore, index: int, count: int, coordinator: str) -> str | None:
    """The address at which the others reach this process; None where nobody can tell. All processes call it.

    Arguments:
      index, count: of this process, and of all.
      coordinator: "host:port" of process 0.

    Raises:
      JaxRuntimeError: if the others do not say how they reach process 0.
    """
    route = None
    with suppress(OSError, ValueError):  # gRPC takes other addresses, too
        route = route_to(coordinator)
    there = "" if route is None else route.address
    kv_store.key_value_set_bytes(f"sbp/reached/{index}", there.encode(), allow_overwrite=True)
    if route is None:
        return None
    if not is_loopback(route.own):
        return route.own
    # On the host of process 0: who comes from another one knows what that is called from there.
    for other in range(1, count):
        key, milliseconds = f"sbp/reached/{other}", int(1000 * WAIT_SECONDS)
        there = kv_store.blocking_key_value_get_bytes(key, milliseconds).decode()
        if there and not is_loopback(there):
            return there
    return LOOPBACK


LOG = logging.getLogger("sbp")
MOST_SECONDS = 300
"""What all processes have to come in."""
SAID_AGAIN_SECONDS = 30.0
CONNECT_SECONDS = 5.0


@contextmanager
def join_watch(
    where: Callable[[], tuple[int, int, str]],
    most_seconds: float = MOST_SECONDS,
    said_again_seconds: float = SAID_AGAIN_SECONDS,
) -> Iterator[None]:
    """Says now and then what is waited for, and ends this process with it after a time.

    Arguments:
      where: gives the number of this process, how many there are, and "host:port" of process 0; "" where that
        is not known yet.
      most_seconds: after which it ends.
      said_again_seconds: after which it says again that it waits.
    """
    done = threading.Event()

    def wait() -> None:
        began = time.monotonic()
        while not done.wait(said_again_seconds):
            index, count, coordinator = where()
            if not coordinator:  # JAX still asks a cluster where it is
                continue
            waited = time.monotonic() - began
            problem = missing_processes(index, count, coordinator, waited)
            if done.is_set():
                return
            if waited >= most_seconds:
                sys.stderr.write(f"sbp: process {index} ends: ProcessError: {ProcessError(problem)}\n")
                sys.stderr.flush()
                os._exit(1)
            LOG.warning("%s: %s", problem.where, problem.got)

    threading.Thread(target=wait, daemon=True, name="sbp joining").start()
    try:
        yield
    finally:
        done.set()


def missing_processes(index: int, count: int, coordinator: str, seconds: float) -> Problem:
    """What has not come so far.

    Arguments:
      index, count: of this process, and of all.
      coordinator: "host:port" of process 0.
      seconds: how long it was waited.
    """
    if index and (said := no_answer_reason(coordinator)):
        return nobody_answers(index, coordinator, said, seconds)
    return not_all_have_come(index, count, coordinator, seconds)


def no_answer_reason(coordinator: str) -> str:
    """Why nobody answers at "host:port", in the words of the system; "" where somebody does.

    >>> no_answer_reason("127.0.0.1:1")
    'Connection refused'
    """
    host, _, port = coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as e:
        return str(getattr(e, "strerror", None) or e)
    return ""


HEARTBEAT_SECONDS = 10
"""After which a process that says nothing is taken for dead; JAX's default is 100 s. Who compiles goes on
saying: JAX has a thread for it."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    initialization_timeout: int = MOST_SECONDS,
    heartbeat_timeout_seconds: int = HEARTBEAT_SECONDS,
    **more: Any,
) -> None:
    """Joins the processes of one program, as `jax.distributed.initialize` does, whose arguments it takes.

    Call it before anything asks JAX for devices. Under SLURM, Open MPI and on Cloud TPU no addresses are
    needed. CPU devices of several processes exchange data by gloo, at the address from which a process
    reaches process 0. If a process raises, the others end and say so. A process that is not heard is named
    before JAX ends the others. A process that waits for others to join says for whom.

    Arguments:
      coordinator_address: "host:port" of process 0, where all meet.
      num_processes: how many there are.
      process_id: of this one, from 0.
      local_device_ids: the GPUs of this process, by their numbers on its host. None for all; but under SLURM
        and Open MPI, where JAX expects one process per GPU, for the one with the local rank's number.
      initialization_timeout: seconds that a process waits for others to join before it ends.
      heartbeat_timeout_seconds: after this time a silent process is considered dead, and the others end.
      more: for `jax.distributed.initialize`, such as `coordinator_bind_address`.

    Raises:
      ValueError: of JAX, where it finds neither arguments nor a cluster that says them.
    """
    set_jax("jax_cpu_collectives_implementation", "gloo")
    ids = local_device_ids
    with join_watch(lambda: (own_index(), how_many(), coordinator_of_all()), initialization_timeout):
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            ids if ids is None or isinstance(ids, int) else [*ids],
            initialization_timeout=2 * initialization_timeout,  # later than what says why
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            **more,
        )
    found = kv_store()
    if found is not None:
        mine, where = own_index(), coordinator_of_all()
        address = own_address(found, mine, how_many(), where)
        if address is not None:
            set_own_address(address)
        watch(found, mine, LivenessWatch(found, mine, where, heartbeat_timeout_seconds))
