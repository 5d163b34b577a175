"""What it takes to start, and what checks for NaN cost: `python -m benchmarks.starting`.

A GPT's train step on eight CPU devices, in processes of their own: with an empty cache, with what the process
before has left, and from a file of the program. The seconds are those of the first step: of its process's own
CPU time, which other work on the machine does not change much, and by the clock.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from benchmarks.cases import gpt_case

LAYERS, STEPS = 2, 5
WAYS = {
    "empty cache": "nothing is there",
    "cache": "plan and programs are found",
    "file": "sbp.load_executable",
    "no checks": "a step",
    "debug_nans": "a step with Options(debug_nans=True)",
}


def arguments(case: Any) -> Any:
    """Small numbers in the shapes of a case."""

    def filled(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.full(x.shape, 0.01, x.dtype)

    return jax.tree.map(filled, case.shapes())


def measured(way: str, folder: Path) -> dict[str, float]:
    """Seconds of the first step, or of later ones, in this process."""
    case = gpt_case("auto", (2, 4), LAYERS)
    args = jax.block_until_ready(arguments(case))
    began, cpu = time.perf_counter(), time.process_time()
    file = folder / "step.sbpx"
    if way == "file":
        program: Any = sbp.load_executable(file)
    else:
        options = sbp.Options(cache=folder / "cache", debug_nans=way == "debug_nans")
        program = sbp.compile(case.step, sbp.placement("cpu", shape=(2, 4)), options=options)
    jax.block_until_ready(program(*args))
    found = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    if way == "empty cache":
        program.save_executable(file)
    if way in ("no checks", "debug_nans"):
        placed = program.place(*args)
        times = []
        for _ in range(STEPS):
            cpu = time.process_time()
            jax.block_until_ready(program(*placed))
            times.append(time.process_time() - cpu)
        found["step_cpu_seconds"] = float(np.median(times))
    return found


def main() -> None:
    """Prints a line per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.way:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        print(json.dumps(measured(given.way, given.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for way, words in WAYS.items():
            command = [sys.executable, "-m", "benchmarks.starting", "--way", way, "--folder", folder]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = json.loads(out.splitlines()[-1])
            figures = "  ".join(f"{name.replace('_', ' ')} {x:.2f}" for name, x in found.items())
            print(f"{way:<12} {words:<40} {figures}")


if __name__ == "__main__":
    main()
