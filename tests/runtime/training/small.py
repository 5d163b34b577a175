"""A small run: one vector that follows its batches, so that every step's state is known in closed form."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import sbp
from sbp import S
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.checkpoint.manifest import MANIFEST

SIZE = 4


@functools.cache
def program() -> Any:
    """`w` goes half of the way to its batch; the loss is how far that was."""

    def step(w: Any, momentum: Any, batch: Any) -> Any:
        return w + 0.5 * (batch - w), momentum + batch, jnp.mean(jnp.nan_to_num(batch - w) ** 2)

    return sbp.compile(step, sbp.placement("cpu", shape=(2,)), in_sbp=([S(0)], [S(0)], [S(0)]))


def start() -> Any:
    """The first state."""
    return np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)


def batch_of(i: int) -> Any:
    """The batch of a step."""
    return np.random.default_rng(i).normal(size=SIZE).astype(np.float32)


def poison_at(*steps: int) -> Any:
    """Batches of which that of some steps is NaN; under a loss that does not show it."""

    def batches(i: int) -> Any:
        return np.full(SIZE, np.nan, np.float32) if i + 1 in steps else batch_of(i)

    return batches


def fitted(batches: Any = batch_of, steps: int = 8, **given: Any) -> sbp.training.FitResult:
    """A run of the small program."""
    return sbp.fit(program(), start(), batches, **{"steps": steps, "progress": False, **given})


def losses(done: sbp.training.FitResult) -> list[float]:
    """The losses of the steps of a run."""
    return [row["loss"] for row in done.history]


def damage(folder: Path, step: int) -> None:
    """Flips a bit of a step's manifest."""
    file = folder / f"step_{step:08d}" / MANIFEST
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def cut(folder: Path, step: int) -> None:
    """Cuts the largest file of a step's arrays."""
    files = [f for f in (folder / f"step_{step:08d}").rglob("d/*") if f.is_file()]
    largest = max(files, key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def steps_in(folder: Path) -> list[int]:
    """The steps of a folder."""
    return Checkpoints(folder).steps
