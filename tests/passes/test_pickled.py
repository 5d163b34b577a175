"""Plans are pickled as they are saved, and can be sent to other processes."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

import sbp
from sbp.errors import ArgumentError
from tests.golden import two_layers, two_stages
from tests.runtime.source.equal import GRID


def flat() -> Any:
    """A plan of one placement."""
    return sbp.compile(two_layers.step, GRID).plan(*two_layers.small_args)


def staged() -> Any:
    """One of two."""
    program = sbp.compile(two_stages.step, two_stages.step_placement, in_sbp=two_stages.step_sbp)
    return program.plan(*two_stages.step_args())


@pytest.fixture(params=[flat, staged], ids=["flat", "staged"])
def plan(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_a_pickled_plan_says_the_same(plan: Any) -> None:
    found = pickle.loads(pickle.dumps(plan))
    assert type(found) is type(plan) and found == plan
    assert str(found) == str(plan) and found.physical is None
    assert pickle.loads(pickle.dumps(found)) == plan


@pytest.mark.full
@pytest.mark.some(1)
def test_a_plan_comes_to_another_process(plan: Any) -> None:
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(plan), capture_output=True, check=True
    )
    assert done.stdout.decode() == f"{plan}\n"


def test_a_copy_is_the_plan(plan: Any) -> None:
    assert copy.copy(plan) is plan and copy.deepcopy({"plan": plan})["plan"] is plan


@pytest.mark.parametrize("asked", ["source()", "why('x')", "what_if('x', sbp.B)"])
def test_what_needs_the_program_says_that_it_is_not_there(plan: Any, asked: str) -> None:
    found = pickle.loads(pickle.dumps(plan))
    with pytest.raises(ArgumentError, match=r"without its program(.|\n)*it was loaded or unpickled"):
        eval(f"found.{asked}", {"found": found, "sbp": sbp})


def test_a_plan_of_another_version_is_told() -> None:
    make, (text,) = flat().__reduce__()
    with pytest.raises(ArgumentError, match=r"unpickling a plan(.|\n)*\('sbp-plan', 3\)"):
        make(text.replace('"version": 4', '"version": 3').replace('"version":4', '"version":3'))


def test_a_pickled_plan_is_an_option() -> None:
    first = flat()
    options = sbp.Options(plan=pickle.loads(pickle.dumps(first)))
    again = sbp.compile(two_layers.step, GRID, options=options).plan(*two_layers.small_args)
    assert again.seconds == first.seconds and again.in_sbp == first.in_sbp
