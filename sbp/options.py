"""Options of a compilation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sbp.errors import ArgumentError, Problem
from sbp.hardware import Hardware

UNITS: dict[str, float] = {
    "B": 1,
    **{f"{letter}B": 1000.0**power for letter, power in zip("kKMGTP", (1, 1, 2, 3, 4, 5), strict=True)},
    **{f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGTP", 1)},
}
"""Bytes of each unit in which a limit on memory may be written."""


def bytes_of(limit: float | str | None, where: str) -> float | None:
    """A limit on memory as a number of bytes; None stays None.

    Arguments:
      limit: bytes, or a text such as "80GB" or "79.5 GiB".
      where: the argument that it was given as, for the message.

    Raises:
      ArgumentError: for a text without a number and a unit, and for what is no amount of memory.

    >>> bytes_of("80GB", "limit"), bytes_of("1.5 KiB", "limit"), bytes_of(4096, "limit")
    (80000000000.0, 1536.0, 4096)
    """
    if limit is None:
        return None
    if isinstance(limit, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(\w+)\s*", limit, re.ASCII)
        if found is not None and found[2] in UNITS and float(found[1]) > 0:
            return float(found[1]) * UNITS[found[2]]
    elif not isinstance(limit, bool) and isinstance(limit, int | float) and limit > 0:
        return limit
    why = "it is an amount of memory per device" if not isinstance(limit, str) else "a text needs a unit"
    legal = "bytes, or a text such as '80GB' or '80GiB'"
    raise ArgumentError(Problem("argument", where, repr(limit), legal, why, _meant(limit)))


def _meant(limit: object) -> str:
    """What may have been meant by a limit that cannot be read."""
    number = re.match(r"\s*(\d+\.?\d*)\s*([kKmMgGtTpP]?)(i?)", limit) if isinstance(limit, str) else None
    if number is None or not float(number[1]):
        return "'80GB'"
    if not number[2]:
        return f"{number[1]} for bytes, or '{number[1]}GB'"
    return f"'{number[1]}{number[2].upper()}{number[3]}B'"


@dataclass(frozen=True, slots=True)
class Options:
    """What a compilation may be told beyond signatures.

    Arguments:
      memory_limit: memory per device that a plan may need, in bytes or as a text such as "80GB" or "80GiB";
        one over it is refused, its largest tensors named. Without it a plan over what the device has says
        so, and is refused only if arguments and results alone are over it.
      time_limit: seconds that the search for a plan may take; the best plan so far is used, with its gap.
      hardware: what to plan for instead of the placement's kind.
      plan: a `Plan` (or one that was loaded) whose signatures of arguments and results are taken where none
        is given.
      check: whether the contract between passes is checked; by default it is, for less than 2 % of planning.
      exchange_capacity: keys that a device can send to one owner of rows at a time, in lookups of tables that
        are split by rows; None to go by the first batch. Fuller buckets take more rounds.
      exchange_dtype: the floating type in which wider rows travel there, such as "bfloat16"; None for their
        own. Types with smaller exponents, in which rows could overflow, are refused.
      schedule: of a program with stages and micro-batches: a name ("gpipe", "1f1b", "interleaved", "zb-h1",
        "zb-v", "dualpipe-v", "forward"), "auto" for the fastest one found for the estimated times within the
        memory limit, or a `Schedule`, such as `Profile.best` finds for measured times; None for "1f1b".
      stages: into how many the planner cuts a program with micro-batches that marks none itself; a multiple
        of the size of the placement's first axis, along which they lie.
      strict_nonfinite: whether a sum is added up before anything is computed from it, so that infinities, NaN
        and signs come out as on one device whatever the data are; the plan says how many bytes that takes.
      threads: whether every placement of such a program is driven by a thread of its own; None to time both
        in the first steps where threads can help, and to go on with the faster one. Results are the same.
      count_keys: whether `Program.key_counts` says how many keys exchanges were given and have served.

    Raises:
      ArgumentError: for a limit on memory that cannot be read.

    >>> Options(memory_limit="80GB").memory_limit_bytes
    80000000000.0
    """

    memory_limit: float | str | None = None
    time_limit: float | None = None
    hardware: Hardware | None = None
    plan: Any = None
    check: bool | None = None
    exchange_capacity: int | None = None
    exchange_dtype: str | None = None
    count_keys: bool = False
    schedule: Any = None
    stages: int | None = None
    threads: bool | None = None
    strict_nonfinite: bool = False

    def __post_init__(self) -> None:
        bytes_of(self.memory_limit, "Options(memory_limit=...)")

    @property
    def memory_limit_bytes(self) -> float | None:
        """The limit on memory in bytes per device; None if there is none."""
        return bytes_of(self.memory_limit, "Options(memory_limit=...)")
