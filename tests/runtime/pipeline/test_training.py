"""Twenty steps of training in stages equal those of the function on one device, with every schedule."""

from typing import Any

import jax
import numpy as np
import pytest

from sbp.passes.schedule.actions import Action, Kind
from sbp.passes.schedule.memory import peaks, units
from tests.runtime.pipeline.programs import CASES
from tests.runtime.pipeline.running import assert_close, built, case_of, leaves_of, reference, train

PAIRS = [(name, schedule) for name, make in CASES.items() for schedule in make().schedules]
QUICK = {
    "four stages": ("1f1b", "zb-h1"),
    "interleaved": ("interleaved",),
    "V of 2": ("zb-v", "dualpipe-v"),
    "convolution": ("1f1b",),
    "U-Net": ("1f1b",),
    "uneven": ("gpipe",),
    "mixed": ("zb-h1",),
}


def marked(pairs: list[tuple[str, str]], quick: dict[str, tuple[str, ...]]) -> list[Any]:
    """The pairs as parameters; those that are not quick are left to the slow run."""
    return [
        pytest.param(*p, marks=() if p[1] in quick.get(p[0], ()) else pytest.mark.slow, id=f"{p[0]}, {p[1]}")
        for p in pairs
    ]


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "schedule"), marked(PAIRS, QUICK))
def test_training_in_stages_equals_one_device(name: str, schedule: str) -> None:
    case, wanted = case_of(name), reference(name)
    program = built(name, schedule)
    assert program.schedule is not None and program.schedule.name == schedule
    assert schedule == "gpipe" or program.schedule.rank_of == case.stages
    found = train(program, case)
    assert_close(found.watched, wanted.watched, 1e-5)
    assert_close(found.state, wanted.state, 2e-4)  # Adam divides small gradients by small roots


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "schedule"), marked(PAIRS, {"V of 2": ("zb-v",)}))
def test_weights_equal_those_of_one_device_in_64_bits(name: str, schedule: str) -> None:
    found, wanted = train(built(name, schedule), case_of(name)), reference(name)
    assert_close(found.state[0], wanted.state[0], 1e-9)
    assert_close(found.watched, wanted.watched, 1e-9)


@pytest.mark.parametrize(
    ("name", "schedule"), marked([("V of 2", "zb-v"), ("four stages", "1f1b")], {"V of 2": ("zb-v",)})
)
@pytest.mark.parametrize("x64", [False, True])
def test_a_thread_per_rank_gives_the_same(name: str, schedule: str, x64: bool) -> None:
    """The threads do not have the caller's settings: what they run must have been compiled with them."""
    with jax.enable_x64(x64):
        one = train(built(name, schedule), case_of(name), 3)
        many = train(built(name, schedule, threads=True), case_of(name), 3)
        ends = [jax.tree.leaves((run.watched, run.state)) for run in (one, many)]
        for a, b in zip(*ends, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def recorded(name: str, schedule: str) -> Any:
    """What was measured of a second step."""
    case, program = case_of(name), built(name, schedule)
    state = train(program, case, 1).state
    record = program.executor.new_record()
    program.executor.run(program.arguments(leaves_of(case, state)), record=record)
    return record


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "schedule"),
    marked(
        [p for p in PAIRS if p[0] in ("four stages", "interleaved", "V of 2", "V of 4", "U-Net in a V")],
        QUICK,
    ),
)
def test_as_many_activations_live_as_the_schedule_says(name: str, schedule: str) -> None:
    program, record = built(name, schedule), recorded(name, schedule)
    assert program.schedule is not None
    assert tuple(record.live) == peaks(program.schedule, units(program.schedule.stages))
    done = [s.action for spans in record.spans for s in spans if s.action.computes]
    # Nobody wants the gradient of the first stage's inputs.
    idle = {Action(Kind.I, 0, m) for m in range(program.schedule.microbatches)}
    every = [a for order in program.schedule.orders for a in order]
    assert sorted(map(str, done)) == sorted(str(a) for a in every if a not in idle)
