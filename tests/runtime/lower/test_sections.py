"""A program in sections gives what it gives at once, and its sections are in the order that was planned."""

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from models import gpt
from sbp import AUTO, B, S
from sbp.compat.core import is_key
from sbp.passes.physical import sections as module
from sbp.passes.physical.fusion import ShardSizes
from sbp.passes.physical.kernels import program_kernels
from sbp.passes.physical.program import Compute, Physical, reads, writes
from sbp.passes.physical.sections import sections_of
from sbp.runtime.lower.lowering import lower
from tests.runtime.lower.test_recompute import arguments, step

ON = sbp.placement("cpu", shape=(4,))
WIDTH = 32


def transformer(params: Any, tokens: Any, key: Any) -> Any:
    config = gpt.Config(layers=2, width=32, heads=4, vocabulary=64, sequence=16, dropout=0.1)
    loss, grads = jax.value_and_grad(gpt.loss)(params, tokens, key, config)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def transformer_args() -> Any:
    config = gpt.Config(layers=2, width=32, heads=4, vocabulary=64, sequence=16, dropout=0.1)
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 64)
    return gpt.init(jax.random.key(0), config), tokens, jax.random.key(2)


def scanned(ws: Any, x: Any) -> Any:
    """A loop, a branch, a barrier, and what is read in several sections but merged into its readers."""

    def block(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w), jnp.square(x).sum()

    x, sums = lax.scan(jax.checkpoint(block), x, ws)
    y, x = lax.optimization_barrier((x @ ws[0], x))
    z = lax.cond(sums[0] > 0, jnp.sin, jnp.cos, y)
    mask = jnp.where(jnp.arange(WIDTH) % 2 == 0, 1.0, 0.0)
    for w in ws:
        z = (z * mask) @ w + mask
    return z.mean() + x.mean(), z.T, x.reshape(-1)


def scanned_args() -> Any:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (3, WIDTH, WIDTH)), jax.random.normal(keys[1], (64, WIDTH))


PROGRAMS = {
    "a GPT": (transformer, transformer_args, (AUTO, [S(0)], [B])),
    "a GPT, weights split": (transformer, transformer_args, ([S(0)], [S(0)], [B])),
    "loops and barriers": (scanned, scanned_args, ([S(1)], [S(0)])),
}


def physical_of(fn: Any, args: Any, in_sbp: Any, limit: float = math.inf) -> Physical:
    options = sbp.Options(memory_limit=limit, cache=False)
    found = sbp.compile(fn, ON, in_sbp=in_sbp, options=options).plan(*args).physical
    assert found is not None
    return found


def check(physical: Physical, args: Any, hastens: bool) -> None:
    """In sections it gives what it gives at once."""
    found = sections_of(physical, hastens).sections
    assert len(found) > 3
    flat = [*jax.tree.leaves(args), *physical.graph.consts]
    once, parted = (lower(physical, ON.mesh, (), sections=s)(*flat) for s in ((), found))
    for a, b in zip(once, parted, strict=True):
        if not is_key(a.dtype):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("hastens", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sections_give_what_the_program_gives(
    name: str, hastens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECTION_UNITS", 2)
    fn, make, in_sbp = PROGRAMS[name]
    args = make()
    check(physical_of(fn, args, in_sbp), args, hastens)


@pytest.mark.full
def test_so_do_those_of_a_program_with_ops_that_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECTION_UNITS", 2)
    args, in_sbp = arguments(), (AUTO, [S(0)], AUTO)
    options = sbp.Options(cache=False)
    needed = sbp.compile(step, ON, in_sbp=in_sbp, options=options).plan(*args).memory_bytes
    check(physical_of(step, args, in_sbp, 0.65 * needed), args, True)


def test_what_a_section_reads_of_another_goes_through_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else XLA would run it at any time."""
    monkeypatch.setattr(module, "SECTION_UNITS", 4)
    physical = physical_of(transformer, transformer_args(), ([S(0)], [S(0)], [B]))
    k = program_kernels(ShardSizes(physical))
    made = {
        v: p for p, x in enumerate(sections_of(physical, True).sections) for s in x.steps for v in writes(s)
    }
    kernels = {id(physical.steps[i]) for i in range(len(k.ops)) if k.runs(i)}
    sections = sections_of(physical, True).sections
    for before, section in itertools.pairwise(sections):
        own = {v for s in section.steps for v in writes(s)}
        for s in section.steps:
            crossing = {v for v in reads(s) if v not in own and v in made}
            assert crossing <= set(before.barrier_versions)
    # Every kernel is in one of them, once.
    ran = [id(s) for x in sections for s in x.steps if id(s) in kernels]
    assert len(ran) == len(set(ran)) and set(ran) == kernels


def test_what_is_made_twice_may_be_read_of_either() -> None:
    """A kernel behind the second one runs that reads the first through what is merged into it."""

    def product(x: Any) -> Any:
        y = sbp.annotate(x.T @ x, [B])
        return sbp.annotate(jnp.sin(y) * (y @ y), [B])

    physical = physical_of(product, (jax.random.normal(jax.random.key(0), (64, WIDTH)),), ([S(0)],))
    at = next(i for i, x in enumerate(physical.steps) if isinstance(x, Compute) and x.node.op == "sin")
    # The sum is sent again behind what reads it first.
    steps = *physical.steps[: at + 1], *map(replace, physical.steps[at - 2 : at]), *physical.steps[at + 1 :]
    again = replace(physical, steps=steps)
    k = program_kernels(ShardSizes(again))
    assert not k.runs(at)
    (section,) = sections_of(again, True).sections
    assert {id(x) for i, x in enumerate(again.steps) if k.runs(i)} <= {*map(id, section.steps)}


def test_sections_are_the_same_of_kernels_that_are_known() -> None:
    fn, args, in_sbp = PROGRAMS["a GPT"]
    physical = physical_of(fn, args(), in_sbp)
    known = program_kernels(ShardSizes(physical))
    assert sections_of(physical, True, known).sections == sections_of(physical, True).sections
