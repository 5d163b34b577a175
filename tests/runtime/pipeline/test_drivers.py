"""Who drives a pipeline: the faster of one driver and a thread for each placement, or what is asked for."""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.runtime.pipeline.pipeline_executor import PipelineExecutor
from sbp.runtime.pipeline.program import STEPS, CompiledPipeline, Drivers, may_help
from tests.options import options_of
from tests.runtime.pipeline.programs import chain_of, parts, training

NAP = 0.03
ASLEEP: list[int] = []  # how many stages sleep, after each change
WIDE = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
CHIPS = sbp.placement("h100", shape=(2, 8), axes=("stage", "data"))


def asleep(x: Any) -> Any:
    """The same array, a while later."""

    def sleep(x: Any) -> Any:
        ASLEEP.append(1 + (ASLEEP[-1] if ASLEEP else 0))
        time.sleep(NAP)
        ASLEEP.append(ASLEEP[-1] - 1)
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def slow(x: Any) -> Any:
    """A layer that sleeps in both directions."""
    return asleep(x)


slow.defvjp(lambda x: (asleep(x), None), lambda _, g: (asleep(g),))


def program_of(sleeps: bool, microbatches: int = 4, **options: Any) -> tuple[sbp.Program, Any]:
    """A training of two stages of one device each, and the arguments of a call."""
    whole, places = parts((2, 1), ("stage", "data"))
    plain, weights = chain_of(places)

    def loss(w: Any, x: Any, y: Any) -> Any:
        for i, place in enumerate(places):
            with sbp.on(place):
                x = jnp.tanh((slow(x) if sleeps else x) @ w[f"l{i}"]["k"])
        with sbp.on(places[-1]):
            return jnp.mean((x - y) ** 2)

    step = training(loss if sleeps else plain, microbatches, 2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2 * microbatches, 8)), jnp.float32)
    program = sbp.compile(step, whole, options=options_of(**options))
    return program, ((weights, step.tx.init(weights)), x, x[::-1])


def built_of(program: sbp.Program) -> CompiledPipeline:
    (built,) = program._built.values()
    assert isinstance(built, CompiledPipeline)
    return built


def test_stages_that_wait_are_driven_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that sleep do so at the same time; steps of either kind give the same, bit for bit."""
    used: list[bool] = []
    run = PipelineExecutor.run

    def noted(self: PipelineExecutor, placed: Any, threads: bool = False, **more: Any) -> list[Any]:
        used.append(threads)
        return run(self, placed, threads, **more)

    monkeypatch.setattr(PipelineExecutor, "run", noted)
    program, args = program_of(True)
    ASLEEP.clear()
    results = [jax.tree.leaves(program(*args)) for _ in range(2 * STEPS + 1)]
    assert used == [*[True, False] * STEPS, built_of(program).drivers.threads]
    assert max(ASLEEP) == 2
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.some(1)
@pytest.mark.parametrize("threads", [True, False])
def test_what_is_asked_for_is_done(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program, args = program_of(False, threads=threads)
    started: list[Any] = []
    monkeypatch.setattr(threading.Thread, "start", _noting(started, threading.Thread.start))
    for _ in range(2):
        program(*args)
    assert built_of(program).drivers.threads is threads and not built_of(program).drivers.seconds[threads]
    assert len([t for t in started if t is not None]) == (4 if threads else 0)


def _noting(started: list[Any], start: Any) -> Any:
    def noted(self: threading.Thread) -> None:
        started.append(self)
        start(self)

    return noted


@pytest.mark.parametrize(
    ("placements", "scheduled", "legal"),
    [
        (sbp.placement("cpu", shape=(2, 1)).split(0), True, True),
        (sbp.placement("cpu", shape=(2, 1)).split(0), False, False),
        (sbp.placement("cpu", shape=(2, 1)).split(0)[:1], True, False),
        (WIDE.split(0), True, False),
        (CHIPS.split(0), True, True),
    ],
    ids=["one device each", "no micro-batches", "one stage", "several CPU devices each", "chips"],
)
def test_where_threads_may_help(placements: Any, scheduled: bool, legal: bool) -> None:
    assert may_help(placements, scheduled) is legal


def test_where_they_cannot_one_driver_it_is() -> None:
    whole, places = parts((2, 2), ("stage", "data"))
    loss, weights = chain_of(places)
    step = training(loss, 2, 2)
    program = sbp.compile(step, whole)
    program.plan((weights, step.tx.init(weights)), jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert built_of(program).drivers.threads is False


@pytest.mark.parametrize(
    ("with_threads", "alone", "threads"),
    [([9, 1, 1], [9, 2, 2], True), ([9, 2, 2], [9, 1, 1], False), ([9, 0.95, 1], [9, 1, 1], False)],
)
def test_the_faster_one_is_kept(with_threads: list[float], alone: list[float], threads: bool) -> None:
    """Threads must be clearly faster; the first step of either kind does not count."""
    drivers = Drivers(None)
    for a, b in zip(with_threads, alone, strict=True):
        assert drivers.threads is None
        drivers.note(True, a)
        drivers.note(False, b)
    assert drivers.threads is threads


def test_a_stage_that_fails_while_it_is_found_out() -> None:
    """The caller sees the failure of either driver, and the next call is a try again."""

    class Broken(Exception):
        pass

    drivers = Drivers(None)

    def step(threads: bool) -> Any:
        raise Broken

    for _ in range(3):
        with pytest.raises(Broken):
            drivers.run(step, [])
    assert drivers.threads is None and drivers.seconds == {True: [], False: []}


@pytest.mark.full
def test_an_interrupt_stops_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's Ctrl-C reaches who waits for the threads: they do not finish the step first."""
    program, args = program_of(True, 64, threads=True)
    before, join = threading.active_count(), threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program(*args)
    monkeypatch.setattr(threading.Thread, "join", join)
    while threading.active_count() > before:  # or the test's own limit ends it
        time.sleep(NAP)
