"""Every message about a plan that is given to be taken, `Options(plan=...)`: every row."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import ArgumentError
from tests.errors.messages import Messages, check_message

GRID = sbp.placement("cpu", shape=(2, 4))
LINE = sbp.placement("cpu", shape=(8,))
X = np.ones((8, 8), np.float32)
AGAIN = "make the plan again with Program.plan(...), or leave the option out"
TAKEN = "every op takes its signature from the plan, and has it there"


def double(x: Any) -> Any:
    return x * 2


def of(fn: Any = double, *args: Any, **options: Any) -> Any:
    """The plan of a function with these options."""
    return sbp.compile(fn, GRID, **options).plan(*(args or (X,)))


def a_plan(fn: Any = double, on: Any = GRID, **signatures: Any) -> Any:
    return sbp.compile(fn, on, **signatures).plan(X)


def profiled(on: Any = GRID) -> Any:
    return sbp.compile(lambda x: jnp.sin(x).sum(), on, in_sbp=[S(0), B] if on is GRID else [S(0)]).profile(X)


def save(name: str, plan: Any, profile: Any) -> None:
    """Refused before anything is written."""
    plan.save(f"no/such/folder/{name}", profile=profile)


def no_such_signature() -> Any:
    plan = a_plan()
    rows = (("mul", "[S(5), B] [B, B]", "[B, B]"),)
    return dataclasses.replace(plan, choice=dataclasses.replace(plan.choice, rows=rows))


MESSAGES: Messages = {
    "a profile of another program": (
        lambda: save("plan.html", a_plan(), profiled(LINE)),
        ArgumentError,
        "Plan.save(profile=...)",
        "a profile of '<lambda>' on cpu(x=8), 1 collectives, {cost}",
        "one of 'double' on cpu(data=2 x model=4), 0 collectives, {cost}",
        "the measured times would stand beside estimates of another program",
        "plan.save('plan.html', profile=program.profile(*args)), both of the same arguments",
    ),
    "a profile in a file that is no page": (
        lambda: save("plan.json", a_plan(), profiled()),
        ArgumentError,
        "saving a plan to 'no/such/folder/plan.json'",
        "the suffix '.json' with a profile",
        ".html",
        "only a page shows measured beside estimated times",
        "plan.html, or the plan without profile=...",
    ),
    "no plan": (
        lambda: of(options=sbp.Options(plan=3)),
        ArgumentError,
        "Options(plan=...)",
        "3",
        "a Plan, or the .json file that one was saved to",
        "a int is none",
        "sbp.load_plan('plan.json')",
    ),
    "a plan for another placement": (
        lambda: of(options=sbp.Options(plan=a_plan(on=LINE))),
        ArgumentError,
        "Options(plan=...)",
        "a plan for cpu(x=8)",
        "a plan for cpu(data=2 x model=4)",
        "a signature has one entry per axis, and its splits fit the axis sizes",
        AGAIN,
    ),
    "a plan for another function": (
        lambda: of(options=sbp.Options(plan=a_plan(lambda z: z * 2))),
        ArgumentError,
        "Options(plan=...)",
        "a plan of '<lambda>' with no entry for x, an entry for z",
        "a plan with the same 1 arguments",
        "a plan is for one function and one tree of arguments",
        AGAIN,
    ),
    "a plan for other sizes": (
        lambda: of(jnp.sum, X[:3], options=sbp.Options(plan=a_plan(jnp.sum, in_sbp=([S(0), B],)))),
        ArgumentError,
        "a: float32[3, 8], Options(plan=...)",
        "[S(0), B]",
        "[B, B]",
        "the plan was made for other sizes: this one does not divide by the axis",
        AGAIN,
    ),
    "a plan of other ops": (
        lambda: of(options=sbp.Options(plan=a_plan(lambda x: jnp.sin(x)))),
        ArgumentError,
        "Options(plan=...)",
        "a plan of another program: its op 0 is sin, here mul at {line}",
        "a plan of this program",
        TAKEN,
        AGAIN,
    ),
    "a plan of more ops": (
        lambda: of(options=sbp.Options(plan=a_plan(lambda x: jnp.sin(x * 2)))),
        ArgumentError,
        "Options(plan=...)",
        "a plan of another program: of 2 ops, here are 1",
        "a plan of this program",
        TAKEN,
        AGAIN,
    ),
    "a plan of other operands": (
        lambda: of(options=sbp.Options(plan=a_plan(lambda x: x * x))),
        ArgumentError,
        "Options(plan=...)",
        "a plan of another program: of the same ops on other shapes, parameters or operands",
        "a plan of this program",
        TAKEN,
        AGAIN,
    ),
    "a plan that its program cannot have here": (
        lambda: of(options=sbp.Options(plan=no_such_signature())),
        ArgumentError,
        "Options(plan=...): mul at {line}",
        "mul: [S(5), B] [B, B] -> [B, B]",
        "one of the 9 signatures that mul has here",
        TAKEN,
        AGAIN,
    ),
    "a plan of a file that is not there": (
        lambda: of(options=sbp.Options(plan="no/plan.json")),
        ArgumentError,
        "loading a plan from 'no/plan.json'",
        "[Errno 2] No such file or directory: 'no/plan.json'",
        "JSON of format 'sbp-plan', version 4",
        "the file cannot be read as JSON",
        "plan.save('plan.json') writes such a file",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])
