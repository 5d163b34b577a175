"""Saves one step after the other into a folder until it is killed: run by the launcher."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

import sbp
from sbp import S

SHAPE = (64, 48)


def array(step: int) -> np.ndarray[Any, Any]:
    """What a step is, in other bits than any other one's."""
    return np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)


def laid(step: int, devices: int) -> dict[str, Any]:
    """A state, split over some devices."""
    row = sbp.placement("cpu", shape=(devices,))
    copy = sbp.compile(lambda w, v: (w * 1, v * 1), row, in_sbp=([S(0)], [S(1)]))
    w, v = copy(array(step), array(-step % 1000))
    return {"w": w, "v": v, "step": step}


def differs(found: dict[str, Any], step: int) -> list[str]:
    """The names of what has other bits than were saved."""
    whole = {name: np.asarray(x) for name, x in sbp.to_host(found).items()}
    wanted = {"w": array(step), "v": array(-step % 1000), "step": np.array(step)}
    return [
        name for name, x in wanted.items() if whole[name].tobytes() != x.astype(whole[name].dtype).tobytes()
    ]


def main(url: str) -> None:
    """Prints what it goes on from, and each step that counts."""
    runs = sbp.Checkpoints(url, keep=2, job="killed")
    devices = jax.device_count()
    step = 0
    if runs.steps:
        found = runs.restore(laid(0, devices))
        step = int(found["step"])
        assert not differs(found, step), step
    print("restored", step, flush=True)
    while True:
        step += 1
        runs.save(laid(step, devices), step)
        runs.wait()
        print("done", step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
