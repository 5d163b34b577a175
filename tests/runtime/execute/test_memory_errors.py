"""Out of memory: the tensors that were alive are named, from the plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import MemoryLimitError
from tests.runtime.program import starting

WORD = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234567 bytes."


def exhausted(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError(WORD + "\nand a long table of XLA's")


def message(program: Any, *args: Any) -> Any:
    with pytest.raises(MemoryLimitError) as caught:
        program(*args)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    (problem,) = caught.value.problems
    return problem


def test_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = starting.whole()
    params = starting.weights()
    built: Any = program._prepare((params, starting.BATCH), {})[1]
    _, ins, consts = built.executable
    built.__dict__["executable"] = exhausted, ins, consts
    problem = message(program, params, starting.BATCH)
    assert problem.where == "step on cpu(x=8)" and problem.got == WORD
    assert problem.legal.endswith(" per device at the peak, by the plan")
    assert "alive at the peak, by the plan: " in problem.why
    assert "params[0] float32[16, 16] [S(0)] 128 B" in problem.why
    assert " at starting.py:" in problem.why  # what ops have made has its line
    assert problem.fix.startswith("Options(memory_limit=...) below what is free")
    assert "jax.checkpoint around a layer" in problem.fix


def test_when_it_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(8,)), in_sbp=([B],))
    x = np.ones((8, 8), np.float32)
    program.plan(x)
    monkeypatch.setattr("sbp.runtime.execute.compiled_program.moved_to", exhausted)
    assert message(program, x).got == WORD
    assert message(program.place, x).got == WORD


def test_in_stages_the_fullest_one_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sbp.placement("cpu", shape=(2, 4)).split(0)

    def fn(x: Any) -> Any:
        with sbp.on(first):
            x = x + 1
        with sbp.on(second):
            return (jnp.outer(x, x) @ jnp.ones((64, 64))).sum()

    program = sbp.compile(fn, sbp.placement("cpu", shape=(2, 4)))
    monkeypatch.setattr("sbp.runtime.pipeline.program.make_executor", exhausted)
    problem = message(program, np.ones(64, np.float32))
    assert "ranks [4, 5, 6, 7]" in problem.where or "ranks 4..7" in problem.where
    assert " at test_memory_errors.py:" in problem.why


def test_a_true_one() -> None:
    """16 TB, which no CPU has: XLA says so before it touches any memory."""

    def huge(x: Any, y: Any) -> Any:
        return jnp.sort(x[:, None] * y[None, :], axis=0)[0, :4]

    options = sbp.Options(memory_limit=math.inf)
    program = sbp.compile(huge, sbp.placement("cpu", shape=(1,)), options=options)
    problem = message(program, np.ones(1 << 20, np.float32), np.ones(1 << 22, np.float32))
    assert "RESOURCE_EXHAUSTED" in problem.got
    assert "at test_memory_errors.py:" in problem.why and "float32[1048576, 4194304]" in problem.why


def test_other_errors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(8,)), in_sbp=([S(0)],))
    x = np.ones(8, np.float32)
    program.plan(x)

    def broken(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr("sbp.runtime.execute.compiled_program.moved_to", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        program(x)


class Fails:
    """Runs, and then finds too little memory."""

    def __init__(self, run: Any, steps: int, word: str = WORD) -> None:
        self.run, self.left, self.word = run, steps, word

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise jax.errors.JaxRuntimeError(self.word)
        return self.run(*args)


@pytest.mark.parametrize("word", [WORD, WORD + " The buffers that were donated are deleted."])
def test_in_a_later_step(word: str) -> None:
    """Also where the runtime's words could be taken for those of a donated array."""
    program = sbp.compile(
        lambda w, x: w + (x * w).sum(axis=0),
        sbp.placement("cpu", shape=(8,)),
        in_sbp=([B], [S(0)]),
        donate_argnums=(0,),
    )
    w, x = program.place(np.ones(4, np.float32), np.ones((8, 4), np.float32))
    w = program(w, x)
    built: Any = program._prepare((w, x), {})[1]
    run, *rest = built.executable
    built.__dict__["executable"] = Fails(run, 1, word), *rest
    w = program(w, x)
    problem = message(program, w, x)
    assert problem.got == word and "alive at the peak, by the plan: " in problem.why


@pytest.mark.some(1)
@pytest.mark.parametrize("threads", [True, False])
def test_in_a_later_step_of_a_stage(threads: bool) -> None:
    program = starting.staged(sbp.Options())
    params = starting.weights(4)
    program(params, starting.BATCH)
    built: Any = program._prepare((params, starting.BATCH), {})[1]
    executor, built.drivers.threads = built.executor, threads
    last = executor.executors[-1]
    runnables = {part: replace(r, run=exhausted) for part, r in last.runnables.items()}
    executors = *executor.executors[:-1], replace(last, runnables=runnables)
    built.__dict__["executor"] = replace(executor, executors=executors)
    assert message(program, params, starting.BATCH).got == WORD


def test_when_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(8,)), in_sbp=([B],))
    monkeypatch.setattr("sbp.runtime.program.program.measure", exhausted)
    assert message(program.profile, np.ones((8, 8), np.float32)).got == WORD


class Lost:
    """A result of a step that found too little memory when nobody was there to hear of it."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return exhausted()


def test_when_fit_reads_a_metric() -> None:
    program = sbp.compile(lambda w, x: (w, x.sum()), sbp.placement("cpu", shape=(8,)), in_sbp=([B], [S(0)]))

    def fit(*_: Any) -> Any:
        return sbp.fit(program, (jnp.ones(4),), lambda i: jnp.ones((8, 4)), steps=2)

    def run(leaves: Any) -> Any:
        return leaves[0], Lost()

    built: Any = program._prepare((jnp.ones(4), jnp.ones((8, 4))), {}, concrete=True)[1]
    built.run = run
    problem = message(fit)
    assert problem.got == WORD and "x float32[8, 4] [S(0)]" in problem.why


def test_other_errors_of_results_are_left_alone() -> None:
    program = sbp.compile(lambda x: x, sbp.placement("cpu", shape=(8,)))
    program.raise_known(RuntimeError(WORD))  # nothing is known before a call
    program(jnp.ones(8))
    program.raise_known(RuntimeError("INTERNAL: something else"))
