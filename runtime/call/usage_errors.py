"""Problems of methods of a program that are called too early, or in the wrong process.

The problems of options of a compilation that do not depend on the program.

Plans, schedules and stages are checked against the program, when it is built.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp.communication.wire import WIRE_TYPES
from sbp.compat.untyped import finfo
from sbp.errors import Problem
from sbp.hardware.catalogue import Hardware
from sbp.options import FOLLOW, IGNORE, ExchangeOptions, Options, PipelineOptions
from sbp.passes.plan.solve import Progress
from sbp.passes.request import Terms
from sbp.passes.rows.lookups import Transfer
from sbp.runtime.cache.plan_store import store_of
from sbp.runtime.processes.process_group import process_group


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


@dataclass(frozen=True, slots=True)
class LegalOption:
    """The legal values of an option.

    Arguments:
      words: for the user.
      test: whether a value is legal.
      why: the purpose of the option.
      fix: an example.
    """

    words: str
    test: Callable[[object], bool]
    why: str
    fix: str


def _flag(x: object) -> bool:
    return isinstance(x, bool | np.bool_)


def _count(x: object) -> bool:
    return isinstance(x, int | np.integer) and not _flag(x) and int(x) >= 1


def _seconds(x: object) -> bool:
    if not isinstance(x, int | float | np.integer | np.floating) or _flag(x):
        return False
    return not math.isnan(x) and float(x) >= 0


def _wire(x: object) -> bool:
    return _dtype_name(x) in WIRE_TYPES


# By name, else by the annotation of the field.
LEGAL: Mapping[object, LegalOption] = {
    bool: LegalOption("True or False", _flag, "it says whether something is done", "{name}=True"),
    bool | None: LegalOption(
        "True, False or None",
        lambda x: x is None or _flag(x),
        "it says whether something is done; None leaves it to the compiler",
        "{name}=True",
    ),
    "time_limit": LegalOption(
        "a number of seconds from 0 on, or None for no limit",
        lambda x: x is None or _seconds(x),
        "it is when planning is cut off",
        "time_limit=60.0",
    ),
    "effort": LegalOption(
        "a number above 0",
        lambda x: _seconds(x) and float(x) > 0.0,  # type: ignore[arg-type]
        "it is how much is searched, and 1.0 is the usual",
        "effort=2.0",
    ),
    "scan_kept": LegalOption(
        "a number from 0 to 1",
        lambda x: _seconds(x) and float(x) <= 1.0,  # type: ignore[arg-type]
        "it is the share of matrix products that scans over checkpointed layers keep",
        "scan_kept=1.0",
    ),
    "constraints": LegalOption(
        f"{FOLLOW!r} or {IGNORE!r}",
        lambda x: isinstance(x, str) and x in (FOLLOW, IGNORE),
        "it says what to do with JAX's own sharding constraints in a program",
        f"constraints={IGNORE!r}",
    ),
    "cache": LegalOption(
        "True, False or a pathlib.Path",
        lambda x: _flag(x) or isinstance(x, Path),
        "it says whether plans and compiled programs are kept for the next process, and in which folder",
        "cache=Path('cache')",
    ),
    ExchangeOptions: LegalOption(
        "an sbp.options.ExchangeOptions",
        lambda x: isinstance(x, ExchangeOptions),
        "it says how rows of split tables travel",
        "exchange=sbp.options.ExchangeOptions(capacity=512)",
    ),
    PipelineOptions: LegalOption(
        "an sbp.options.PipelineOptions",
        lambda x: isinstance(x, PipelineOptions),
        "it says how a program with stages runs",
        "pipeline=sbp.options.PipelineOptions(schedule='auto')",
    ),
    "hardware": LegalOption(
        "an sbp.hardware.Hardware, or None for the placement's kind",
        lambda x: x is None or isinstance(x, Hardware),
        "it has the rates that the plan's times are estimated from",
        "sbp.placement('h100', ...) for a chip of the catalogue, or "
        "sbp.hardware.hardware_from('machine.toml')",
    ),
    "topology": LegalOption(
        "three integers of at least 1, or None for the machine that the chip is usually sold in",
        lambda x: x is None or (isinstance(x, tuple | list) and len(x) == 3 and all(map(_count, x))),
        "it has NVLink domains, hosts in each, and devices in each host",
        "topology=(16, 1, 8)",
    ),
    "capacity": LegalOption(
        "an integer of at least 1, or None to go by the batch",
        lambda x: x is None or _count(x),
        "it is how many keys a device can send to one owner of rows at a time",
        "capacity=512",
    ),
    "dtype": LegalOption(
        ", ".join(map(repr, WIRE_TYPES)) + ", or None for the table's own",
        lambda x: x is None or _wire(x),
        "rows of a table travel in it",
        "dtype='bfloat16'",
    ),
}


def check_options(options: Options) -> Iterator[Problem]:
    """The problems of every option by itself, those of groups too."""
    yield from _check_group(options)
    for group in (options.exchange, options.pipeline):
        if isinstance(group, ExchangeOptions | PipelineOptions):  # else that is said already
            yield from _check_group(group)


def _check_group(group: Options | ExchangeOptions | PipelineOptions) -> Iterator[Problem]:
    for f in fields(group):
        legal = LEGAL.get(f.name) or LEGAL.get(f.type)
        value = getattr(group, f.name)
        if legal is not None and not legal.test(value):
            why = _why_not(value) if f.name == "dtype" else ""
            yield Problem(
                "argument",
                f"{type(group).__name__}({f.name}=...)",
                f"{value!r:.60}",
                legal.words,
                why or legal.why,
                legal.fix.format(name=f.name),
            )


def _dtype_name(x: Any) -> str:
    """The name of a dtype; "" if it is none."""
    if x is None:
        return ""
    try:
        return str(jnp.dtype(x).name)
    except TypeError:
        return ""


def _why_not(x: Any) -> str:
    """Why rows cannot be sent in a dtype; "" if they can."""
    name = _dtype_name(x)
    if not name:
        return ""
    if not jnp.issubdtype(jnp.dtype(x), jnp.floating):
        return f"rows of a table are floating numbers, of which {name} would keep none"
    info = finfo(jnp.dtype(x))
    return f"{name} has numbers from {float(info.min):.4g} to {float(info.max):.4g}: larger ones overflow"


def terms_of(options: Options, progress: Progress | None = None) -> Terms:
    """The options of every placement of a program; and the function that takes the progress of a search."""
    return Terms(
        effort=float(options.effort),
        time_limit_seconds=None if options.time_limit is None else float(options.time_limit),
        memory_limit_bytes=options.memory_limit_bytes,
        transfer=Transfer(options.exchange.capacity, options.exchange.dtype),
        strict_nonfinite=options.strict_nonfinite,
        check=options.check is not False,
        store=store_of(options),
        progress=progress,
        peers=process_group(),
    )
