"""A process that starts again compiles nothing: what the one before has compiled is found in a folder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from sbp.runtime.cache.cache_folder import COMPILED as SUFFIX
from sbp.runtime.cache.cache_folder import CacheFolder, CompiledFolder, cache_context, host_cpu
from tests.runtime.program import starting
from tests.runtime.program.starting import BATCH, COMPILED, FOUND, counted

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process has left."""
    path = tmp_path_factory.mktemp("cache")
    started(path)
    return path


def started(path: Path) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.runtime.program.starting", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.full
def test_another_process_compiles_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This one, which has not compiled these programs: pipelines share what was found among stages, too."""
    options = sbp.Options(cache=folder)
    with caplog.at_level(logging.INFO, logger="sbp"):
        for make, layers in ((starting.whole, 2), (starting.staged, 4)):
            with counted() as events:
                new, value = make(options)(starting.weights(layers), BATCH)
            assert events[FOUND] == events[COMPILED] > 0
            kept, fresh = make(sbp.Options(cache=False))(starting.weights(layers), BATCH)
            assert float(value) == float(fresh)
            for a, b in zip(new, kept, strict=True):
                np.testing.assert_array_equal(a, b)
    said = [r.getMessage() for r in caplog.records]
    assert f"signatures found in the cache ({folder})" in said
    assert any(
        s.startswith("step: compiled and run once in ") and s.endswith(" s, found in the cache") for s in said
    )
    assert any(
        s.startswith("staged_step: compiled in ") and "11 of them found in the cache" in s for s in said
    )


def test_what_is_compiled_first_is_said_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def double(x: Any) -> Any:
        return x * 2

    program = sbp.compile(double, sbp.placement("cpu", shape=(8,)), options=sbp.Options(cache=tmp_path))
    with caplog.at_level(logging.INFO, logger="sbp"):
        program(np.ones(8, np.float32))
    said = [r.getMessage() for r in caplog.records]
    assert any(s.endswith(" s, not in the cache") for s in said)
    assert f"signatures not in the cache ({tmp_path})" in said
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1
    jax.jit(lambda x: x * 3).lower(1.0).compile()  # of the user's: that is not our matter
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    kept = CompiledFolder(CacheFolder(tmp_path, SUFFIX, 1e6))
    kept.put("jit_step-1", b"a program")
    assert kept.get("jit_step-1") == b"a program" and kept.get("jit_step-2") is None
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert kept.get("jit_step-1") is None
    file.write_bytes(b"")
    assert kept.get("jit_step-1") is None


def test_another_cpu_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledFolder(CacheFolder(tmp_path, SUFFIX, 1e6))
    kept.put("jit_step-1", b"a program")
    assert host_cpu() == host_cpu()
    monkeypatch.setattr("sbp.runtime.cache.cache_folder.host_cpu", lambda: "another")
    assert kept.get("jit_step-1") is None


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[Path]:
    """The user's own setting of JAX."""
    from jax.experimental.compilation_cache import compilation_cache

    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    compilation_cache.reset_cache()


def test_the_users_own_setting_goes_first(own_cache: Path, tmp_path: Path) -> None:
    """And what stages share is right there, too: JAX cannot save again what it has found."""
    params = starting.weights(4)
    for _ in range(2):
        _, value = starting.staged(sbp.Options(cache=tmp_path / "ours"))(params, BATCH)
        assert float(value) == pytest.approx(0.6294955, abs=1e-4)
    assert list(own_cache.iterdir())
    assert not list((tmp_path / "ours").glob(f"*{SUFFIX}"))


def test_nothing_is_kept_unasked() -> None:
    with cache_context(None) as cache:
        jax.jit(lambda x: x * 5).lower(1.0).compile()
    assert cache.last_found is None and str(cache) == ""
