"""A run that everything happens to, as a script: `python -m sbp launch ... unattended.py PLAN.json`.

Each fault happens once, over all starts of the run: a file says that it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from sbp import AUTO, S
from tests.runtime.processes import cases

PLACEMENTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "data": ((4,), (AUTO, AUTO, [S(0)])),
    "zero": ((2, 2), ([S(0), S(0)], AUTO, [S(0), S(0)])),
}


class Faults:
    """What is to happen, by the number of the batch that is made then.

    Arguments:
      plan: lists of such numbers by the name of the fault; "notes" is the folder of the files.
    """

    def __init__(self, plan: Any) -> None:
        self.plan, self.notes = plan, Path(plan["notes"])

    def comes(self, name: str, i: int) -> bool:
        """Whether a fault comes with this batch, in this process; it comes once."""
        if i not in self.plan[name]:
            return False
        note = self.notes / f"{name}-{i}-{jax.process_index()}"
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def kill(self, i: int) -> None:
        """Kills one of the processes: at once, or in the middle of what it writes."""
        if self.comes("kills", i) and i % 2 == jax.process_index():
            threading.Timer(0.001 * (i % 30), os.kill, (os.getpid(), signal.SIGKILL)).start()

    def damage(self, i: int) -> None:
        """Cuts a file of the last step, and kills the process that would have gone on."""
        if self.comes("damages", i) and jax.process_index() == 0:
            last = Path(self.plan["folder"]) / f"step_{sbp.Checkpoints(self.plan['folder']).steps[-1]:08d}"
            file = max((f for f in last.rglob("d/*") if f.is_file()), key=lambda f: f.stat().st_size)
            file.write_bytes(file.read_bytes()[:-1])
            os.kill(os.getpid(), signal.SIGKILL)

    def fill(self, i: int) -> None:
        """Fills the disk, or frees it."""
        ballast = Path(self.plan["folder"]) / "ballast"
        if self.comes("fulls", i) and jax.process_index() == 0:
            with ballast.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"\0" * 4096)
                except OSError:
                    pass
        if self.comes("frees", i) and jax.process_index() == 0:
            ballast.unlink()

    def batch(self, i: int) -> Any:
        """A batch, and what its gradients are multiplied by."""
        self.kill(i)
        self.damage(i)
        self.fill(i)
        return cases.batch_of(i), np.float32(np.nan if self.comes("poisons", i) else 1)


def program_of(kind: str, optimizer: Any) -> Any:
    """A train step whose gradients can be poisoned without a trace in the loss."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        inputs, scale = batch
        value, grads = jax.value_and_grad(cases.mlp)(params, inputs)
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    shape, (params, state, batch) = PLACEMENTS[kind]
    asked = params, state, (batch, AUTO)
    return sbp.compile(step, sbp.placement("cpu", shape=shape), in_sbp=asked, donate_argnums=(0, 1))


def trained(plan: Any, faults: Any, **more: Any) -> Any:
    """The run, with or without faults."""
    optimizer = optax.adam(1e-2)
    params = jax.tree.map(jnp.asarray, cases.weights())
    state = params, optimizer.init(params)
    return sbp.fit(program_of(plan["kind"], optimizer), state, faults, steps=plan["steps"], **more)


def main() -> None:
    """Trains to the end, however often it is started."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    policy = sbp.training.NonFinitePolicy(max_rollbacks=3)
    saving = {"checkpoint": plan["folder"], "save_every": plan["save_every"], "on_nonfinite": policy}
    done = trained(plan, Faults(plan).batch, log=plan["log"], progress=False, **saving)
    print("done" if done.is_done else "asked to end", done.step)


if __name__ == "__main__":
    main()
