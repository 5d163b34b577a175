"""The calls of programs that a process has begun: whoever waits for it in vain can ask which.

A process that waits for another one to plan or to compile with it would wait for ever, if that one has gone
on to run what both have compiled before: it sits in a collective that never comes. But all processes call the
same programs in the same order. So who has begun more calls than the one that waits has begun another program
than that one is about to: that proves it, and no clock is needed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from sbp.compat_processes import Board
from sbp.errors import Problem

ASKED = "sbp/asked"


@dataclass
class Calls:
    """What this process has begun.

    Arguments:
      count: how often it has placed arguments of programs, by themselves or to run them.
      latest: the last one, in words: the program, and its arguments.
      answered: the last question that was answered.
    """

    count: int = 0
    latest: Callable[[], Sequence[str]] = tuple
    answered: bytes = b""

    def begins(self, latest: Callable[[], Sequence[str]]) -> None:
        """Notes a call."""
        self.latest, self.count = latest, self.count + 1

    def answer(self, board: Board, index: int) -> None:
        """Leaves the word of what was begun, where somebody has asked since."""
        with suppress(jax.errors.JaxRuntimeError):  # nobody has, or the service is gone
            asked = board.key_value_try_get_bytes(ASKED)
            if asked != self.answered:
                self.say(board, index)
                self.answered = asked

    def say(self, board: Board, index: int) -> None:
        """Leaves the word of what was begun."""
        said = json.dumps({"count": self.count, "latest": [*self.latest()]}).encode()
        with suppress(jax.errors.JaxRuntimeError):
            board.key_value_set_bytes(f"sbp/calls/{index}", said, allow_overwrite=True)


def ask(board: Board, index: int, turn: int) -> None:
    """Asks all processes which calls they have begun; their answers come within a second or so."""
    board.key_value_set_bytes(ASKED, f"{index}/{turn}".encode(), allow_overwrite=True)


def begun(board: Board, index: int) -> tuple[int, Sequence[str]]:
    """How many calls a process has begun, and the last one in words, as it has last said."""
    with suppress(jax.errors.JaxRuntimeError):
        said: dict[str, Any] = json.loads(board.key_value_try_get_bytes(f"sbp/calls/{index}"))
        return int(said["count"]), list(said["latest"])
    return 0, ()


@functools.lru_cache(maxsize=1)
def calls_of(board: Hashable) -> Calls:
    """One for as long as the processes are connected."""
    return Calls()


def gone_on(index: int, waits: Sequence[str], other: int, runs: Sequence[str]) -> Problem:
    """What is wrong where a process waits for one that runs something else.

    Arguments:
      index: of the process that waits, for what `waits` says.
      other: the one that runs.
    """
    return Problem(
        "process",
        f"process {index}, waiting for {', '.join(waits)}",
        f"process {other} has gone on with {', '.join(runs)}",
        "the same calls of the same programs in every process, in one order",
        f"process {index} has yet to compile this with the others, and process {other} runs another program",
        "batches of the same shape in every process: the last one of an epoch padded or dropped in all",
    )
