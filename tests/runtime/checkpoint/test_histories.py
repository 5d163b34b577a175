"""Random histories of a folder of checkpoints: nothing is lost, mixed, or wrong without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.runtime.checkpoint.histories.folder import Disk
from tests.runtime.checkpoint.histories.history import History
from tests.runtime.checkpoint.histories.operations import OPERATIONS
from tests.runtime.checkpoint.histories.planted import PLANTED
from tests.runtime.checkpoint.histories.processes import Server

pytestmark = pytest.mark.full

IN_CI, ALL, LENGTH = 10, 300, 14


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Finished checkpoints of orbax's, under names that look like ours, too."""
    folder = tmp_path_factory.mktemp("orbax")
    made = [folder / "step_100", folder / "step_00000100"]
    with ocp.StandardCheckpointer() as saver:
        for path in made:
            saver.save(path, {"w": np.ones(2)})
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk | None]:
    """A small disk; without the right to mount one, histories do without what fills it."""
    mounted = Disk.mounted(tmp_path / "disk")
    yield mounted
    if mounted is not None:
        mounted.unmount()


def history(
    seed: int, server: Server, templates: list[Path], tmp_path: Path, disk: Disk | None, planted: str = ""
) -> History:
    folder = (tmp_path if disk is None else disk.path) / f"run {seed}"
    return History(seed, server, folder, disk, templates, planted)


@pytest.mark.parametrize(
    "seed", [*range(IN_CI), *(pytest.param(i, marks=pytest.mark.slow) for i in range(IN_CI, ALL))]
)
def test_of_a_history(
    seed: int, server: Server, templates: list[Path], tmp_path: Path, disk: Disk | None
) -> None:
    history(seed, server, templates, tmp_path, disk).run(OPERATIONS, LENGTH)


FOUND_BY = {
    "prune deletes one too many": 2,
    "the manifest is written before the arrays are": 3,
    "names decide what is swept": 3,
    "two savers share a folder of arrays": 3,
    "nobody looks at the lease": 5,
    "nothing is compared with its checksum": 1,
}
"""The seed of a history that finds it; moments differ from run to run, so that it may take some more."""


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found(
    planted: str, server: Server, templates: list[Path], tmp_path: Path, disk: Disk | None
) -> None:
    """So what the histories do not find is not there."""
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(FOUND_BY[planted], FOUND_BY[planted] + IN_CI):
            history(seed, server, templates, tmp_path, disk, planted).run(OPERATIONS, LENGTH)
