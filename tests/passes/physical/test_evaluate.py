"""The evaluator of physical programs, against a slow count step by step, and against XLA."""

import random
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.boxing.links import Network
from sbp.passes.physical import evaluate
from sbp.passes.physical.evaluate import Evaluator, executed, peak
from sbp.passes.physical.program import Border
from sbp.passes.program.control import WHILE_TRIPS

GRID = sbp.placement("cpu", shape=(2, 2))
LAYERS, WIDTH, ROWS = 12, 64, 256


@dataclass(frozen=True)
class Made:
    """A step of a made-up program."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def counted(steps: list[Made], kept: set[int], held: set[int], size: dict[int, float]) -> float:
    """The peak, by asking after every step of every tensor whether anybody still needs it."""
    there, most = set(held), sum(size[v] for v in held)
    for i, step in enumerate(steps):
        there |= set(step.writes)
        most = max(most, sum(size[v] for v in there))
        later = kept.union(*(s.reads for s in steps[i + 1 :]))
        there &= later
    return most


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_what_a_slow_count_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(evaluate, "reads", lambda s: list(s.reads))
    monkeypatch.setattr(evaluate, "writes", lambda s: list(s.writes))
    known = list(range(4))
    held, steps = set(known), []
    for _ in range(30):
        fresh = [len(known) + k for k in range(draw.choice([1, 1, 2]))]
        steps.append(Made(tuple(draw.sample(known[-8:], 2)), tuple(fresh)))
        known += fresh
    size = {v: float(draw.randrange(1, 100)) for v in known}
    kept = held | set(draw.sample(known, 5))
    found = peak(steps, size.__getitem__, kept, held)  # type: ignore[arg-type]
    assert sum(x.bytes for x in found) == counted(steps, kept, held, size)
    assert len({x.version for x in found}) == len(found)


def layers(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def unrolled(w: Any, x: Any) -> Any:
    for i in range(LAYERS):
        x = jnp.tanh(x @ w[i])
    return jnp.mean(x)


ARGS = np.ones((LAYERS, WIDTH, WIDTH), np.float32), np.ones((ROWS, WIDTH), np.float32)
SPLIT = ([B, B], [S(0), S(0)])


def test_a_loop_holds_one_trip_at_a_time() -> None:
    """Its peak is near that of the same layers one after the other, and near XLA's, forward and backward."""
    for fn, other, most in ((layers, unrolled, 1.5), (jax.grad(layers), jax.grad(unrolled), 2.0)):
        program = sbp.compile(fn, GRID, in_sbp=SPLIT)
        plan = program.plan(*ARGS)
        apart = sbp.compile(other, GRID, in_sbp=SPLIT).plan(*ARGS)
        assert plan.memory_bytes < most * apart.memory_bytes
        stats = program.lower(*ARGS).compile().memory_analysis()
        xla = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        assert 0.6 * xla < plan.memory_bytes < 1.6 * xla


def waiting(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0].sum() < 5, lambda c: (jnp.tanh(c[0] @ c[1]), c[1]), (x, x.T))[0]


def test_a_loop_of_unknown_length_counts_alike_in_the_search_and_in_the_plan() -> None:
    """So that the bound of the search and the seconds of the plan speak of one cost; bytes count it once."""
    plan = sbp.compile(waiting, GRID, in_sbp=([S(0), B],)).plan(np.ones((64, 64), np.float32))
    assert plan.physical is not None
    inside = [e for e in executed(plan.physical.steps) if e.assumed == WHILE_TRIPS]
    assert inside and all(e.times == 1 for e in inside)
    takes = Evaluator(plan.physical, Network(plan.placement, plan.hardware))
    assert plan.seconds == takes.seconds() >= WHILE_TRIPS * sum(takes.seconds_of(e.step) for e in inside)
    assert plan.seconds >= 0.999 * plan.bound
    assert sum(isinstance(s, Border) for s in plan.physical.steps) == 1
    sent = sum(takes.box_bytes(b) * n for b, n in plan.physical.boxes()) + sum(
        c.wire_bytes for c in plan.collectives if c.before == c.after
    )
    assert plan.wire_bytes == pytest.approx(sent) and plan.wire_bytes > 0
