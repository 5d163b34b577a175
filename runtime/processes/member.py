"""One process of a launch: joins the others, and runs the user's script or module as `python` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import cast

from sbp.compat_processes import board
from sbp.runtime.processes.calls import calls_of
from sbp.runtime.processes.ending import tell
from sbp.runtime.processes.start import initialize
from sbp.untyped import set_jax


def main(argv: Sequence[str]) -> None:
    """Runs "MEETING PROCESSES INDEX DEVICES FOLDER", and what is run behind it."""
    meeting, processes, index, devices, folder, *what = argv
    if int(devices):
        set_jax("jax_platforms", "cpu")
        set_jax("jax_num_cpu_devices", int(devices))
    initialize(meeting, int(processes), int(index))
    found = board()
    if found is not None:
        calls_of(cast(Hashable, found)).keep_in(Path(folder), int(index))
    try:
        run(what)
    except SystemExit as e:
        if e.code and found is not None:
            sys.stderr.write(f"{e.code}\n" if isinstance(e.code, str) else "")
            tell(found, int(index), e)
        raise


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
