"""Options of a compilation."""

import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from sbp.errors import ArgumentError, Problem
from sbp.hardware.catalogue import Hardware

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


LEAST_KEY_BYTES = 32
"""Of a key that signs: as many as its digest has."""


def checked_key(key: object, where: str) -> bytes | None:
    """A key that signs compiled programs, or None. No message shows it.

    Raises:
      ArgumentError: for what is no key of at least `LEAST_KEY_BYTES`.
    """
    if key is None or (isinstance(key, bytes) and len(key) >= LEAST_KEY_BYTES):
        return key
    got = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
    legal = f"at least {LEAST_KEY_BYTES} bytes that nobody can guess"
    why = "whoever knows it can sign code that others run"
    fix = f"secrets.token_bytes({LEAST_KEY_BYTES}), kept in a file that only those who share it can read"
    raise ArgumentError(Problem("argument", where, got, legal, why, fix))


def _meant(limit: object) -> str:
    """What may have been meant by a limit that cannot be read."""
    number = re.match(r"\s*(\d+\.?\d*)\s*([kKmMgGtTpP]?)(i?)", limit) if isinstance(limit, str) else None
    if number is None or not float(number[1]):
        return "'80GB'"
    if not number[2]:
        return f"{number[1]} for bytes, or '{number[1]}GB'"
    return f"'{number[1]}{number[2].upper()}{number[3]}B'"


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """How rows of tables that are split by rows are sent.

    Arguments:
      capacity: keys that a device can send to one owner of rows per round; more keys take more rounds. None:
        the first batch decides.
      dtype: the floating type that wider rows are sent in, such as "bfloat16"; None for their own type.
        Types with a smaller range of exponents are refused, because rows could overflow.
      count_keys: whether `Program.key_counts` counts the keys of exchanges.
      prefetch: whether a step sends the keys of the next batch while it computes. `Program.read_ahead` says
        which that is; `sbp.fit` does so by itself. Results are the same.
    """

    capacity: int | None = None
    dtype: str | None = None
    count_keys: bool = False
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a program with stages and micro-batches runs.

    Arguments:
      schedule: a name ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "forward"), "auto" for
        the fastest one found for the estimated times within the memory limit, or a `Schedule`, such as
        `Profile.best` finds for measured times; None for "1f1b".
      stages: the number of stages that the planner cuts a program with micro-batches into, if it has no
        `sbp.on`. A multiple of the size of the placement's first axis, along which the stages are placed.
      threads: whether every placement has a thread of its own. None: the first steps time both ways where
        threads can help, and the faster one is used. Results are the same.
    """

    schedule: Any = None
    stages: int | None = None
    threads: bool | None = None


FOLLOW, IGNORE = "follow", "ignore"
"""What is done with constraints in JAX's own words."""


@dataclass(frozen=True)
class Options:
    """Settings of a compilation beside signatures.

    Arguments:
      memory_limit: memory per device that a plan may need, in bytes or as a text such as "80GB" or "80GiB".
        None for the memory of the device. If the fastest plan needs more, the fastest plan that fits is
        searched for; if none is found, the error says the smallest peak found and what is largest there.
        `math.inf` gives the fastest plan of any size.
      time_limit: seconds after which planning is cut off, with the best plan found so far; the plan says so.
        None for never. What a machine plans in a time depends on how busy it is; `effort` does not.
      effort: how much is searched, 1.0 for the usual: seconds for most programs. With more the plan is the
        same or a faster one.
      hardware: what to plan for instead of the placement's kind, such as
        `sbp.hardware.hardware_from` reads it from a file.
      plan: a `Plan` of an earlier compilation, or the .json file that it was saved to. Its signatures are
        used without a search. If `in_sbp` or `out_sbp` ask for other signatures of some arguments or results,
        only its signatures of the other arguments and results are used, and the rest is searched for.
      check: whether the compiler checks the graph between its passes
        (`python -m benchmarks.planner --checks` prints what that costs).
      strict_nonfinite: whether a sum is added up before anything is computed from it. Then infinities, NaN
        and signs are those of one device for all data; the plan says how many bytes that costs.
      exchange: how rows of split tables are sent.
      pipeline: how a program with stages runs.
      scan_kept: the share (0 to 1, by bytes) of matrix products that a scan over checkpointed layers keeps
        for its backward pass instead of recomputing them, the first products first. More is faster and takes
        more memory; `sbp.search` tries several.
      cache: whether plans and compiled programs are kept for the next process, in your cache folder
        (~/.cache/sbp on Linux); or another folder, as a `pathlib.Path`. Compiled programs are code. If others
        than you and root can write the folder, they are not used without `signing_key`, and a warning
        says so.
      signing_key: at least 32 secret bytes to sign compiled programs with, those of the cache and of
        `Program.save_executable`. Then files with the right signature are used, and no others, whoever can
        write them. It is never printed. None: owners and modes of files decide.
      constraints: whether JAX's own constraints in the program (`with_sharding_constraint`, `jax.reshard` and
        `out_sharding=` on axes of the placement) count like `sbp.annotate` ("follow") or not ("ignore"). If
        they are ignored, the plan says what each would cost or save.
      debug_nans: whether NaN in a result is an error that names the first op that made one, and its line.
        Every call then waits for its results, and checks the result of every op.
      progress: whether a search that takes longer than a second shows its progress on a terminal.

    Raises:
      ArgumentError: for a memory limit that cannot be read, and for a wrong key.

    >>> Options(memory_limit="80GB").memory_limit_bytes
    80000000000.0
    """

    memory_limit: float | str | None = None
    time_limit: float | None = None
    hardware: Hardware | None = None
    plan: Any = None
    check: bool | None = None
    _: KW_ONLY
    strict_nonfinite: bool = False
    exchange: ExchangeOptions = ExchangeOptions()
    pipeline: PipelineOptions = PipelineOptions()
    topology: tuple[int, ...] | None = None
    cache: bool | Path = True
    progress: bool = True
    scan_kept: float = 0.0
    debug_nans: bool = False
    signing_key: bytes | None = field(default=None, repr=False)
    constraints: str = FOLLOW
    effort: float = 1.0

    def __post_init__(self) -> None:
        bytes_of(self.memory_limit, "Options(memory_limit=...)")
        checked_key(self.signing_key, "Options(signing_key=...)")

    @property
    def memory_limit_bytes(self) -> float | None:
        """The limit on memory in bytes per device; None if there is none."""
        return bytes_of(self.memory_limit, "Options(memory_limit=...)")
