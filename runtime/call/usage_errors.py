"""What is wrong with asking a program for what it cannot say, or not here."""

from __future__ import annotations

import jax

from sbp.errors import Problem


def for_one_process(program: object, what: str) -> Problem:
    """What is wrong with asking one of several processes for what takes all devices."""
    return Problem(
        "process",
        f"{program}.{what}(...)",
        f"{jax.process_count()} processes",
        "one process",
        "each process would see its own devices only",
        "the same program in one process, on as many devices of a smaller placement",
    )


def not_planned(program: object, what: str) -> Problem:
    """What is wrong with asking how arguments lie before a program knows what they are."""
    return Problem(
        "argument",
        f"{program}.{what}",
        "a program that has not been planned",
        "a program that was planned, placed or called",
        "the signatures of arguments depend on their shapes",
        f"program.plan(...) with shapes first, then program.{what}",
    )
