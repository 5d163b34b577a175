"""Faults of the library that are planted into the processes of a history: the histories must find each."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from typing import Any

from sbp.runtime.checkpoint import checkpoints, steps, writer
from sbp.runtime.storage import files, lease


def _one_too_many() -> None:
    prune = steps.prune

    def greedy(folder: Any, keep: int, keep_every: int | None, check: Any) -> None:
        prune(folder, max(keep - 1, 1), keep_every, check)

    steps.prune = greedy


def _manifest_first() -> None:
    begun = writer._begun

    class Hurried:
        """A future whose result nobody waits for."""

        def result(self) -> None:
            return None

    def hurried(path: Any, state: Any) -> list[Any]:
        begun(path, state)
        return [Hurried()]

    writer._begun = hurried
    writer.Save._await_listing = lambda self, processes: None  # type: ignore[method-assign]


def _sweep_by_name() -> None:
    def sweep(folder: Any) -> None:
        for name in files.names(folder):
            if name.startswith("step_") and not files.exists(folder / name / steps.MANIFEST):
                shutil.rmtree(folder / name)

    steps.sweep = sweep


def _one_data_folder() -> None:
    class Shared:
        """Writers that take the same name."""

        @staticmethod
        def uuid4() -> uuid.UUID:
            return uuid.UUID(int=7)

    checkpoints.uuid = Shared  # type: ignore[assignment]
    make = checkpoints.make_data_folder

    def made(spec: Any, held: Any) -> None:
        if not files.exists(spec.data / steps.OWNER):
            make(spec, held)

    checkpoints.make_data_folder = made


def _no_lease() -> None:
    lease._why_it_may = lambda owner, holder, silent_seconds: ""
    lease.Lease.check = lambda self: None  # type: ignore[method-assign]


def _no_checks() -> None:
    checkpoints.check_arrays = lambda path, records, found, others: None
    checkpoints.check_sizes = lambda path, manifest, others: None


PLANTED: dict[str, Callable[[], None]] = {
    "prune deletes one too many": _one_too_many,
    "the manifest is written before the arrays are": _manifest_first,
    "names decide what is swept": _sweep_by_name,
    "two savers share a folder of arrays": _one_data_folder,
    "nobody looks at the lease": _no_lease,
    "nothing is compared with its checksum": _no_checks,
}
