"""Joining the processes of one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from sbp.compat.processes import coordinator as coordinator_of_all
from sbp.compat.processes import how_many, kv_store, own_index, set_own_address
from sbp.compat.untyped import set_jax
from sbp.runtime.processes.address import own_address
from sbp.runtime.processes.failure_propagation import watch
from sbp.runtime.processes.joining import MOST_SECONDS, joining
from sbp.runtime.processes.liveness import LivenessWatch

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
    with joining(lambda: (own_index(), how_many(), coordinator_of_all()), initialization_timeout):
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
