"""One process of a launch: joins the others, and runs the user's script or module as `python` would."""

import runpy
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import cast

from sbp.runtime.processes.initialize import set_launched
from sbp.runtime.processes.lifeline import end_with_launcher


def main(argv: Sequence[str]) -> None:
    """Runs "PIPE JOB MEETING PROCESSES INDEX DEVICES FOLDER" with the command behind it."""
    pipe, job, *more = argv
    end_with_launcher(int(pipe))  # before JAX is imported, which may take some seconds
    set_launched(job)
    join(*more[:5])
    what = more[5:]
    try:
        run(what)
    except SystemExit as e:
        if e.code:
            sys.stderr.write(f"{e.code}\n" if isinstance(e.code, str) else "")
            leave(int(more[2]), e)
        raise


def join(meeting: str, processes: str, index: str, devices: str, folder: str) -> None:
    """Joins the other processes.

    Arguments:
      meeting: "host:port" of process 0.
      processes, index: the number of processes, and the index of this one.
      devices: CPU devices of this process; "0" for those that JAX finds.
      folder: where it keeps its calls.
    """
    from sbp.compat.processes import kv_store
    from sbp.compat.untyped import set_jax
    from sbp.runtime.processes.calls import calls_of
    from sbp.runtime.processes.initialize import initialize

    if int(devices):
        set_jax("jax_platforms", "cpu")
        set_jax("jax_num_cpu_devices", int(devices))
    initialize(meeting, int(processes), int(index))
    found = kv_store()
    if found is not None:
        calls_of(cast(Hashable, found)).keep_in(Path(folder), int(index))


def leave(index: int, error: SystemExit) -> None:
    """Notifies the others that this process ends without success, and ends it."""
    from sbp.compat.processes import kv_store
    from sbp.runtime.processes.failure_propagation import tell

    found = kv_store()
    if found is not None:
        tell(found, index, error)


def run(what: Sequence[str]) -> None:
    """Runs "-m module ..." or "script.py ...", as `python` would."""
    if what[0] == "-m":
        sys.argv = [*what[1:]]
        sys.path[0] = ""
        runpy.run_module(what[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*what]
        sys.path[0] = str(Path(what[0]).resolve().parent)
        runpy.run_path(what[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
