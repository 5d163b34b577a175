"""Where a read fails the others come to their end before their loop is closed: nothing is said of them."""

from __future__ import annotations

import asyncio
import gc
import importlib
import threading
from pathlib import Path

import numpy as np
import pytest

from sbp.compat.orbax_loops import run_and_drain
from sbp.errors import DamagedCheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage.libraries import orbax


def test_tasks_that_are_left_come_to_their_end() -> None:
    ended: list[str] = []

    async def late(name: str) -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        threading.Timer(0.1, lambda: loop.call_soon_threadsafe(told.set)).start()
        await told.wait()
        ended.append(name)

    async def one_fails() -> None:
        async def raises() -> None:
            raise OSError("a file is gone")

        await asyncio.gather(late("a"), late("b"), raises())

    with pytest.raises(OSError, match="a file is gone"):
        run_and_drain(one_fails())
    assert sorted(ended) == ["a", "b"]


def test_damage_is_all_that_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of many arrays, one of which cannot be read."""
    orbax()
    assert (
        importlib.import_module("orbax.checkpoint._src.asyncio_utils")._run_sync_via_new_loop is run_and_drain
    )
    state = {str(i): np.random.default_rng(i).normal(size=(64, 64)) for i in range(12)}
    with Checkpoints(tmp_path) as runs:
        runs.save(state, step=1)
    for file in sorted(tmp_path.rglob("d/*"), key=lambda f: f.stat().st_size)[-2:]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    for _ in range(5):
        with pytest.raises(DamagedCheckpointError):
            Checkpoints(tmp_path).restore(state)
    gc.collect()
    assert "Event loop is closed" not in capfd.readouterr().err
