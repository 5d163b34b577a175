"""An object store that fails now and then, is slow, or lists late: what epath and this library see of `s3://`.

TensorStore, which writes the arrays, sees the store as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pytest
from etils.epath import backend

from sbp.runtime.storage import object_store

s3fs = pytest.importorskip("s3fs", reason="the extra emulators is not installed")


@dataclass
class Weather:
    """How a store behaves.

    Arguments:
      failing: the share of operations that raise.
      late_seconds: how long something is not listed after it was written.
      slow_seconds: how long an operation takes at most.
      seed: of the random numbers.
    """

    failing: float = 0.0
    late_seconds: float = 0.0
    slow_seconds: float = 0.0
    seed: int = 0
    failed: int = 0
    chance: random.Random = field(default_factory=random.Random)

    async def blow(self, what: str) -> None:
        """Waits, and fails, before an operation, or behind it."""
        if self.slow_seconds:
            await asyncio.sleep(self.chance.uniform(0, self.slow_seconds))
        if self.chance.random() < self.failing:
            self.failed += 1
            kind = self.chance.choice((OSError, ConnectionError, TimeoutError, PermissionError))
            raise kind(f"the store does not answer to {what}")


class FaultyS3(s3fs.S3FileSystem):  # type: ignore[misc]
    """`s3://` in some weather."""

    weather = Weather()

    async def _shaken(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """An operation that fails before it is done, or after that."""
        is_done_first = self.weather.chance.random() < 0.5
        if not is_done_first:
            await self.weather.blow(name)
        found = await getattr(super(), name)(*args, **kwargs)
        if is_done_first:
            await self.weather.blow(name)
        return found

    async def _pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        return await self._shaken("_pipe_file", *args, **kwargs)

    async def _cat_file(self, *args: Any, **kwargs: Any) -> Any:
        return await self._shaken("_cat_file", *args, **kwargs)

    async def _info(self, *args: Any, **kwargs: Any) -> Any:
        return await self._shaken("_info", *args, **kwargs)

    async def _rm_file(self, *args: Any, **kwargs: Any) -> Any:
        return await self._shaken("_rm_file", *args, **kwargs)

    async def _bulk_delete(self, *args: Any, **kwargs: Any) -> Any:
        return await self._shaken("_bulk_delete", *args, **kwargs)

    async def _lsdir(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """A listing, without what was written just now; folders of nothing else are left out with it."""
        found = await self._shaken("_lsdir", path, *args, **kwargs)
        if not self.weather.late_seconds:
            return found
        first = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=self.weather.late_seconds)
        files = await super()._lsdir(path, delimiter="")
        old = [x["name"] for x in files if x["LastModified"] < first]
        return [
            x for x in found if any(name == x["name"] or name.startswith(f"{x['name']}/") for name in old)
        ]


@contextlib.contextmanager
def weather(**how: Any) -> Iterator[Weather]:
    """Has `s3://` behave so, for this library and for epath."""
    made = Weather(**how)
    made.chance = random.Random(made.seed)
    FaultyS3.weather = made
    fsspec.register_implementation("s3", FaultyS3, clobber=True)
    forget()
    try:
        yield made
    finally:
        fsspec.register_implementation("s3", s3fs.S3FileSystem, clobber=True)
        forget()


def forget() -> None:
    """Drops the file systems that are kept."""
    object_store._filesystem_of.cache_clear()
    type(backend.fsspec_backend)._get_filesystem.cache_clear()
