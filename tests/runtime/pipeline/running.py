"""Runs the programs of `programs` with every schedule, and as what they are: plain functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

import sbp
from sbp.options import PipelineOptions
from sbp.runtime.pipeline.program import CompiledPipeline, Drivers
from tests.runtime.pipeline.programs import CASES, Case

STEPS = 20


def case_of(name: str) -> Case:
    """A program, with the types of this moment: 64 bits under the fixture `x64`."""
    return _case(name, bool(jax.config.jax_enable_x64))  # type: ignore[attr-defined]


@functools.cache
def _case(name: str, x64: bool) -> Case:
    return CASES[name]()


def built(name: str, schedule: str, threads: bool = False) -> CompiledPipeline:
    """A program with a schedule; those that cut it alike share what is compiled."""
    case, x64 = case_of(name), bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    first = next(s for s in case.schedules if _cut(s) == _cut(schedule))
    shared = _compiled(name, first, x64)
    if schedule == first and not threads:
        return shared
    asked = sbp.passes.schedule.orders.make(schedule, case.stages, shared.stages.microbatches)
    other = replace(shared, schedule=asked, drivers=Drivers(threads))
    other.executor = replace(shared.executor, schedule=asked)
    return other


def _cut(schedule: str) -> tuple[bool, bool]:
    """Whether backward passes are in two, and whether the last rank has two stages in a row."""
    vee = schedule in ("zb-v", "dualpipe-v")
    return vee or schedule == "zb-h1", vee


@functools.cache
def _compiled(name: str, schedule: str, x64: bool) -> CompiledPipeline:
    case = _case(name, x64)
    program = sbp.compile(
        case.step,
        case.whole,
        in_sbp=case.signatures,
        donate_argnums=(0,) if case.donate else (),
        static_argnums=case.static,
        options=sbp.Options(check=True, pipeline=PipelineOptions(schedule=schedule)),
    )
    found = program._prepare(case.args, {})[1]
    assert isinstance(found, CompiledPipeline)
    assert found.schedule is not None and found.schedule.splits == _cut(schedule)[0]
    return found


@dataclass(frozen=True)
class Run:
    """What a training gave: of every step what is watched, and the last state."""

    watched: Sequence[Any]
    state: Any


def leaves_of(case: Case, state: Any) -> list[Any]:
    """The leaves of a call."""
    return [
        x for i, a in enumerate((state, *case.args[1:])) if i not in case.static for x in jax.tree.leaves(a)
    ]


def train(program: CompiledPipeline, case: Case, steps: int = STEPS) -> Run:
    """Some steps from the first state, which is copied: programs take its memory."""
    state, watched = jax.tree.map(lambda x: x.copy(), case.args[0]), []
    for _ in range(steps):
        state, out = program.run(leaves_of(case, state))
        watched.append(out)
    return Run(watched, state)


def reference(name: str) -> Run:
    """The same of the function itself, on one device."""
    return _reference(name, bool(jax.config.jax_enable_x64))  # type: ignore[attr-defined]


@functools.cache
def _reference(name: str, x64: bool) -> Run:
    case = _case(name, x64)
    step, state, watched = jax.jit(case.step, static_argnums=case.static), case.args[0], []
    for _ in range(STEPS):
        state, out = step(state, *case.args[1:])
        watched.append(out)
    return Run(watched, state)


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    """Trees of arrays with equal types; differences are relative to the largest entry of each."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (np.shape(a), jax.numpy.asarray(a).dtype) == (np.shape(b), jax.numpy.asarray(b).dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.max(np.abs(y), initial=0.0)
        assert np.max(np.abs(x - y), initial=0.0) <= tolerance * max(scale, 1e-3)
