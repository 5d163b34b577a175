"""Options of a compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sbp.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Options:
    """What a compilation may be told beyond signatures.

    Arguments:
      memory_limit: bytes per device that a plan may need; one over it is refused, its largest tensors named.
      time_limit: seconds that the search for a plan may take; the best plan so far is used, with its gap.
      hardware: what to plan for instead of the placement's kind.
      plan: a `Plan` (or one that was loaded) whose signatures of arguments and results are taken where none
        is given.
      check: whether the contract between passes is checked.
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
    """

    memory_limit: float | None = None
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
