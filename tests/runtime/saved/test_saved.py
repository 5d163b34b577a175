"""Compiled programs in files: run by who has compiled nothing, refused where they cannot run."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import S
from sbp.errors import ExecutableError
from sbp.runtime.saved import file as files
from sbp.runtime.saved.pack import LEFT_OUT
from tests.runtime.program import starting
from tests.runtime.program.starting import BATCH, COMPILED, counted

PROGRAMS = {"one placement": (starting.whole, 2), "four stages": (starting.staged, 4)}
TRACED = "/jax/core/compile/jaxpr_trace_duration"


@pytest.fixture(scope="module", params=PROGRAMS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A program that has run and was saved, its parameters, what it gave, and the file."""
    make, layers = PROGRAMS[request.param]
    program, path = make(), tmp_path_factory.mktemp("saved") / "step.sbpx"
    params = starting.weights(layers)
    new, value = program(params, BATCH)
    program.save_executable(path)
    again = program(new, BATCH)
    return program, params, (jax.tree.map(np.asarray, again[0]), float(value), float(again[1])), path


def test_the_same_numbers_and_nothing_is_compiled(saved: Any) -> None:
    _, params, (new, *values), path = saved
    loaded = sbp.load_executable(path)
    with counted() as events:
        state, first = loaded(params, BATCH)
    assert events.get(COMPILED, 0) == 0 and events.get(TRACED, 0) == 0
    held = state[0]
    state, second = loaded(state, BATCH)
    assert [float(first), float(second)] == values
    for a, b in zip(state, new, strict=True):
        np.testing.assert_array_equal(a, b)
    assert held.is_deleted()  # as donated


def test_it_knows_how_arrays_lie(saved: Any) -> None:
    program, params, _, path = saved
    loaded = sbp.load_executable(path)
    assert loaded.in_shardings == program.in_shardings and loaded.out_shardings == program.out_shardings
    assert loaded.abstract_args == program.abstract_args
    placed = loaded.place(params, BATCH)
    assert [x.sharding for x in placed[0]] == list(loaded.in_shardings[0])
    assert str(loaded.plan(params, x=BATCH)) == str(program.plan(params, BATCH))
    assert repr(loaded) == repr(program)


def test_other_arguments_are_refused(saved: Any) -> None:
    _, params, _, path = saved
    loaded = sbp.load_executable(path)
    with pytest.raises(ExecutableError, match=r"x is float32\[8, 16\], was float32\[16, 16\]"):
        loaded(params, BATCH[:8])
    with pytest.raises(sbp.SbpError, match="x has no default"):
        loaded(params)
    for call in (loaded.lower, loaded.trace, loaded.source, loaded.save_executable):
        with pytest.raises(sbp.SbpError):
            call("x") if call == loaded.save_executable else call(params, BATCH[:4])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with keys, a static argument, an array that is closed over, and an uneven one."""
    path = tmp_path_factory.mktemp("small") / "noise.sbpx"
    table = jnp.arange(10.0)

    def noise(key: Any, scale: str, x: Any = 1.0) -> Any:
        return jax.random.normal(key, (10,)) * x + table if scale == "small" else x

    program = sbp.compile(noise, sbp.placement("cpu", shape=(4,)), static_argnames="scale")
    program.save_executable(
        path, jax.random.key(0), scale="small", x=jax.ShapeDtypeStruct((10,), jnp.float32)
    )
    return path


def test_keys_static_arguments_and_closed_over_arrays(small: Path) -> None:
    loaded, x = sbp.load_executable(small), np.ones(10, np.float32)
    want = jax.random.normal(jax.random.key(3), (10,)) + jnp.arange(10.0)
    np.testing.assert_allclose(loaded(jax.random.key(3), scale="small", x=x), want, rtol=1e-6)
    with pytest.raises(ExecutableError, match="static arguments or settings of JAX are others"):
        loaded(jax.random.key(3), scale="large", x=x)


def test_nothing_is_unpickled_that_is_not_whole(small: Path, tmp_path: Path, monkeypatch: Any) -> None:
    data, path = small.read_bytes(), tmp_path / "changed.sbpx"

    def never(*_: Any) -> Any:
        raise AssertionError("it was looked at")

    monkeypatch.setattr(pickle, "loads", never)
    monkeypatch.setattr(pickle, "Unpickler", never)
    for changed in (data[:-1], data[:300], data[:2000] + bytes([data[2000] ^ 1]) + data[2001:]):
        path.write_bytes(changed)
        with pytest.raises(ExecutableError, match="another checksum"):
            sbp.load_executable(path)
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(ExecutableError, match="a file that begins with"):
        sbp.load_executable(path)
    header, program = files.read(small)
    for name, words in files.MUST.items():
        files.write(path, {**header, name: [[99, 0]] if name == "devices" else "other"}, program)
        with pytest.raises(ExecutableError, match=words[0]):
            sbp.load_executable(path)
    files.write(path, {}, program)
    with pytest.raises(ExecutableError) as e:
        sbp.load_executable(path)
    assert len(e.value.problems) == len(files.MUST)


def test_a_header_is_plain(small: Path) -> None:
    header, _ = files.read(small)
    assert json.loads(json.dumps(header)) == header
    assert header["devices"] == [[d.id, 0] for d in jax.devices()[:4]] and header["kind"] == "4 of cpu"
    assert header["sbp"].startswith(sbp.__version__)


def test_what_calls_the_host_is_not_saved(tmp_path: Path) -> None:
    def shout(x: Any) -> Any:
        jax.debug.callback(lambda: None)
        return x * 2

    program = sbp.compile(shout, sbp.placement("cpu", shape=(2,)), in_sbp=([S(0)],))
    with pytest.raises(ExecutableError, match="calls Python on the host"):
        program.save_executable(tmp_path / "x", np.ones(4, np.float32))
    with pytest.raises(sbp.SbpError, match="has not been planned"):
        sbp.compile(shout, sbp.placement("cpu", shape=(2,))).save_executable(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_program_that_was_found_in_the_cache_is_saved(tmp_path: Path) -> None:
    """On a CPU, XLA cannot save again what it has loaded."""
    for _ in range(2):
        program = sbp.compile(
            lambda x: jnp.tanh(x) @ x.T,
            sbp.placement("cpu", shape=(2,)),
            options=sbp.Options(cache=tmp_path / "cache"),
        )
        want = program(BATCH)
        program.save_executable(tmp_path / "file")
        np.testing.assert_array_equal(sbp.load_executable(tmp_path / "file")(BATCH), want)


def test_files_that_cannot_be_written_or_read(small: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ExecutableError, match="FileNotFoundError: No such file"):
        sbp.load_executable(tmp_path / "none")
    (tmp_path / "file").write_text("no folder")
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(2,)))
    with pytest.raises(ExecutableError, match=r"(?s)save_executable.*Error: .*a file that can be written"):
        program.save_executable(tmp_path / "file" / "x", np.ones(4, np.float32))
    monkeypatch.setattr("sbp.runtime.saved.save.serialise", lambda *_: None)
    with pytest.raises(ExecutableError, match="a program that XLA cannot save on this backend"):
        program.save_executable(tmp_path / "x", np.ones(4, np.float32))


def test_what_is_left_out_has_a_name_of_today() -> None:
    for cls, left_out in LEFT_OUT.items():
        assert left_out.keys() <= {f.name for f in fields(cls)}
