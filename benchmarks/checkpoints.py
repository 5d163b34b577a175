"""What a checkpoint costs: how long a step is held up, and how long it takes until what is saved counts.

    python -m benchmarks.checkpoints [--megabytes 64,256,1024] [--saves 5] [--processes 4] [--folder DIR]

Held up: while steps run on eight CPU devices of one process, every fifth is saved. What stands still is the
time inside `save`; beside it stands the copy of the same state to the host, of arrays that nobody has read
yet, twice (A/A: what the machine's noise makes of equal work). A save may take 1.2 x the copy.

Counts: the largest state, on a device of each of `--processes` processes, is saved by orbax's own
CheckpointManager, by sbp.Checkpoints, and by a second manager of orbax's (A/A), which take turns on one disk
in an order that all processes know. Timed is from the call until the step can be restored, in all processes.
It may take 1.25 x what orbax takes. Times are medians; CPU seconds, of all processes, say what other work on
the machine does not change much. First stands how fast checksums are taken.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import sbp
from sbp.runtime.arrays.checksums import checksum

EVERY = 5
LEAVES = 16
MOST_TO_COPY, MOST_TO_ORBAX = 1.2, 1.25
NAMES = ("orbax", "sbp", "orbax again")


@dataclass(frozen=True)
class Held:
    """Medians of one size of state, in seconds.

    Arguments:
      step: of a training step.
      save: inside `save`.
      copy, again: of the state to the host alone, before the save and behind it.
      cpu: of the process, inside `save`.
    """

    megabytes: int
    step: float
    save: float
    copy: float
    again: float
    cpu: float

    @property
    def ratio(self) -> float:
        """The save to the copy."""
        return self.save / self.copy


@dataclass(frozen=True)
class Counted:
    """What one save of a state took until it counted, in seconds.

    Arguments:
      seconds: by the clock, until all processes knew.
      inside: until the call returned.
      cpu: of all processes.
    """

    seconds: float
    inside: float
    cpu: float


def trained(megabytes: int, devices: int) -> tuple[Any, Any]:
    """A step, and a state of so many megabytes after one."""
    program = sbp.compile(
        lambda state: [x * 0.999 + jnp.tanh(x) * 1e-3 for x in state],
        sbp.placement("cpu", shape=(devices,)),
        in_sbp=([sbp.S(0)],),
        donate_argnums=0,
    )
    size = megabytes * 2**20 // 4 // LEAVES // 1024
    rng = np.random.default_rng(0)  # orbax compresses, which random numbers do not let it do
    (state,) = program.place([rng.normal(size=(size, 1024)).astype(np.float32) for _ in range(LEAVES)])
    return program, jax.block_until_ready(program(state))


def seconds_of(action: Callable[[], object]) -> tuple[float, float]:
    """What something takes: by the clock, and of this process's CPU time."""
    began, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - cpu


def held(megabytes: int, saves: int, folder: str | None) -> Held:
    """Trains and saves on eight CPU devices."""
    program, state = trained(megabytes, 8)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("step", "save", "copy", "again")}

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(program(state))

    def save(runs: sbp.Checkpoints, i: int) -> None:
        runs.save(state, step=i)

    def copied() -> None:
        shards = [shard.data for x in state for shard in x.addressable_shards]
        for x in shards:
            x.copy_to_host_async()
        # A copy also where the host could look at the device's own memory.
        [np.array(x) for x in shards]

    with tempfile.TemporaryDirectory(dir=folder) as path:
        runs = sbp.Checkpoints(path, keep=1)
        for i in range(saves + 1):
            for _ in range(EVERY):
                times["step"].append(seconds_of(step))
            runs.wait()  # steps here are short: elsewhere it is on disk long before
            actions = {"copy": copied, "save": partial(save, runs, i), "again": copied}
            for name, action in actions.items():
                step()  # arrays that nobody has copied yet
                times[name].append(seconds_of(action))
                runs.wait()
        runs.close()
    # The first one makes the folder, and orbax's threads.
    found = {name: median(seconds for seconds, _ in x[1:]) for name, x in times.items()}
    return Held(megabytes, **found, cpu=median(cpu for _, cpu in times["save"][1:]))


def savers(folder: Path) -> dict[str, tuple[Callable[[int, Any], object], Callable[[], object]]]:
    """How a step is saved, and waited for, by each of those who are compared."""
    import orbax.checkpoint as ocp

    runs = sbp.Checkpoints(folder / "sbp", keep=1)
    found: dict[str, Any] = {"sbp": (lambda i, state: runs.save(state, step=i), runs.wait)}
    for name in NAMES:
        if name != "sbp":
            options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
            manager = ocp.CheckpointManager(folder / name.replace(" ", "_"), options=options)
            found[name] = (
                lambda i, state, manager=manager: manager.save(i, args=ocp.args.StandardSave(state)),
                manager.wait_until_finished,
            )
    return found


def counted(megabytes: int, saves: int, folder: Path) -> dict[str, list[Counted]]:
    """Saves in turn, in each of several processes."""
    program, state = trained(megabytes, jax.device_count())
    there, order = savers(folder), random.Random(0)
    found: dict[str, list[Counted]] = {name: [] for name in NAMES}
    for i in range(saves + 1):
        for name in order.sample(NAMES, len(NAMES)):
            state = jax.block_until_ready(program(state))
            save, wait = there[name]
            multihost_utils.sync_global_devices("begin")
            began, cpu = time.perf_counter(), time.process_time()
            save(i, state)
            inside = time.perf_counter() - began
            wait()
            multihost_utils.sync_global_devices("end")
            spent = np.asarray(time.process_time() - cpu)
            every = multihost_utils.process_allgather(spent)
            if i:  # the first one makes folders and threads
                found[name].append(Counted(time.perf_counter() - began, inside, float(every.sum())))
    return found


def launched(options: argparse.Namespace) -> dict[str, list[Counted]]:
    """The same from outside: starts the processes, and reads what they have found."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(folder) / "found.json"
        launch = ["launch", "--processes", str(options.processes), "--devices", "1"]
        sizes = ["--megabytes", options.megabytes, "--saves", str(options.saves)]
        inside = ["-m", "benchmarks.checkpoints", *sizes, "--folder", folder, "--write", str(file)]
        command = [sys.executable, "-m", "sbp", *launch, *inside]
        subprocess.run(command, check=True, capture_output=True)
        found = json.loads(file.read_text())
    return {name: [Counted(**one) for one in found[name]] for name in NAMES}


def checksum_rate(megabytes: int = 256) -> float:
    """Bytes of an array that a processor checksums in a second."""
    part = np.random.default_rng(0).random(megabytes << 17)
    box = ((0, part.size),)
    checksum(part[:1], ((0, 1),), part.shape)  # compiles it
    began = time.process_time()
    checksum(part, box, part.shape)
    return part.nbytes / (time.process_time() - began)


def held_table(rows: Sequence[Held]) -> str:
    """How long a step stands still, in words."""
    heads = ("step", "save", "copy", "save/copy", "A/A", "at most", "save CPU")
    lines = [f"{'held up':<12}" + "".join(f"{head:>11}" for head in heads)]
    for h in rows:
        times = "".join(f"{x:>9.3f} s" for x in (h.step, h.save, h.copy))
        ratios = "".join(f"{x:>11.2f}" for x in (h.ratio, h.again / h.copy, MOST_TO_COPY))
        lines.append(f"{f'{h.megabytes} MB':<12}{times}{ratios}{h.cpu:>9.3f} s")
    return "\n".join(lines)


def counted_table(found: dict[str, list[Counted]], megabytes: int, processes: int) -> str:
    """How long it takes until a step counts, in words."""
    title = f"{megabytes} MB by {processes} processes"
    lines = [f"{title:<24}{'counts':>10}{'to orbax':>10}{'at most':>9}{'inside':>10}{'CPU':>10}"]
    orbax = median(c.seconds for c in found["orbax"])
    for name in NAMES:
        total, inside, cpu = (median(getattr(c, x) for c in found[name]) for x in Counted.__annotations__)
        most = f"{MOST_TO_ORBAX:>9.2f}" if name == "sbp" else f"{'A/A' if 'again' in name else '':>9}"
        times = f"{total:>8.3f} s{total / orbax:>10.2f}{most}{inside:>8.3f} s{cpu:>8.3f} s"
        lines.append(f"{name:<24}{times}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> list[Held]:
    """Prints both tables; or, in one of several processes, writes what it has found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--megabytes", default="64,256,1024", help="sizes of the state")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4, help="that save the largest state; 0 for none")
    parser.add_argument("--folder", help="on the disk that is measured")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    sizes = [int(m) for m in options.megabytes.split(",")]
    if options.write:
        every = counted(max(sizes), options.saves, Path(options.folder))
        if jax.process_index() == 0:
            Path(options.write).write_text(json.dumps({n: [asdict(c) for c in x] for n, x in every.items()}))
        return []
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"checksums: {checksum_rate() / 1e9:.1f} GB a CPU second\n")
    found = [held(m, options.saves, options.folder) for m in sizes]
    print(held_table(found), flush=True)
    if options.processes:
        print(f"\n{counted_table(launched(options), max(sizes), options.processes)}")
    return found


if __name__ == "__main__":
    main()
