"""Problems of methods of a program that are called too early, or in the wrong process."""

from __future__ import annotations

import jax

from sbp.errors import Problem


def for_one_process(program: object, what: str) -> Problem:
    """The problem of one process among several that calls a method which needs all devices."""
    return Problem(
        "process",
        f"{program}.{what}(...)",
        f"{jax.process_count()} processes",
        "one process",
        "each process would see its own devices only",
        "the same program in one process, on as many devices of a smaller placement",
    )


def not_planned(program: object, what: str) -> Problem:
    """The problem of asking for layouts before the program has seen any arguments."""
    return Problem(
        "argument",
        f"{program}.{what}",
        "a program that has not been planned",
        "a program that was planned, placed or called",
        "the signatures of arguments depend on their shapes",
        f"program.plan(...) with shapes first, then program.{what}",
    )
