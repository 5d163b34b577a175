"""Every message about options: each field of `sbp.Options` refuses what it cannot mean."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import S
from sbp.communication.wire import WIRE_TYPES
from sbp.errors import ArgumentError, SbpError
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.options import ExchangeOptions, PipelineOptions
from sbp.runtime.call.usage_errors import LEGAL
from tests.errors.messages import Messages, check_message, kinds
from tests.options import options_of

LINE = sbp.placement("cpu", shape=(8,))
TABLE, IDS = jax.ShapeDtypeStruct((64, 4), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)


def look_up(table: Any, ids: Any) -> Any:
    return table[ids]


def given(table: Any = TABLE, **options: Any) -> Any:
    """The plan of a lookup in a split table."""
    asked = options_of(hardware=options.pop("hardware", BYTES_ONLY), **options)
    return sbp.compile(look_up, LINE, in_sbp=([S(0)], [S(0)]), options=asked).plan(table, IDS)


def wide() -> Any:
    """A table of 64 bits."""
    with jax.enable_x64(True):
        return given(jax.ShapeDtypeStruct((64, 4), jnp.float64), dtype="bfloat16")


TYPES = "'bfloat16', 'float32', 'float64', or None for the table's own"
MESSAGES: Messages = {
    "rows as integers": (
        lambda: given(dtype="int8"),
        ArgumentError,
        "ExchangeOptions(dtype=...)",
        "'int8'",
        TYPES,
        "rows of a table are floating numbers, of which int8 would keep none",
        "dtype='bfloat16'",
    ),
    "rows that overflow": (
        lambda: given(dtype="float16"),
        ArgumentError,
        "ExchangeOptions(dtype=...)",
        "'float16'",
        TYPES,
        "float16 has numbers from -6.55e+04 to 6.55e+04: larger ones overflow",
        "dtype='bfloat16'",
    ),
    "rows of an unknown type": (
        lambda: given(dtype="bf16"),
        ArgumentError,
        "ExchangeOptions(dtype=...)",
        "'bf16'",
        TYPES,
        "rows of a table travel in it",
        "dtype='bfloat16'",
    ),
    "rows of 64 bits that overflow": (
        wide,
        ArgumentError,
        "ExchangeOptions(dtype='bfloat16'), a lookup at {line}",
        "rows of float64",
        "'float64', or None for the table's own",
        "float64 has larger exponents than bfloat16: its largest numbers would become infinite",
        "a table of float32, or leave the option out",
    ),
    "no room": (
        lambda: given(capacity=-1),
        ArgumentError,
        "ExchangeOptions(capacity=...)",
        "-1",
        "an integer of at least 1, or None to go by the batch",
        "it is how many keys a device can send to one owner of rows at a time",
        "capacity=512",
    ),
    "a time as text": (
        lambda: given(time_limit="a minute"),
        ArgumentError,
        "Options(time_limit=...)",
        "'a minute'",
        "a number of seconds from 0 on, or None for no limit",
        "it is when planning is cut off",
        "time_limit=60.0",
    ),
    "no effort": (
        lambda: given(effort=0),
        ArgumentError,
        "Options(effort=...)",
        "0",
        "a number above 0",
        "it is how much is searched, and 1.0 is the usual",
        "effort=2.0",
    ),
    "more than all that could be kept": (
        lambda: given(scan_kept=1.5),
        ArgumentError,
        "Options(scan_kept=...)",
        "1.5",
        "a number from 0 to 1",
        "it is the share of matrix products that scans over checkpointed layers keep",
        "scan_kept=1.0",
    ),
    "a cache by a text": (
        lambda: given(cache="off"),
        ArgumentError,
        "Options(cache=...)",
        "'off'",
        "True, False or a pathlib.Path",
        "it says whether plans and compiled programs are kept for the next process, and in which folder",
        "cache=Path('cache')",
    ),
    "a machine of two levels": (
        lambda: given(topology=(2, 8)),
        ArgumentError,
        "Options(topology=...)",
        "(2, 8)",
        "three integers of at least 1, or None for the machine that the chip is usually sold in",
        "it has NVLink domains, hosts in each, and devices in each host",
        "topology=(16, 1, 8)",
    ),
    "hardware as text": (
        lambda: given(hardware="h100"),
        ArgumentError,
        "Options(hardware=...)",
        "'h100'",
        "an sbp.hardware.Hardware, or None for the placement's kind",
        "it has the rates that the plan's times are estimated from",
        "sbp.placement('h100', ...) for a chip of the catalogue, or "
        "sbp.hardware.hardware_from('machine.toml')",
    ),
    "no flag": (
        lambda: given(count_keys="yes"),
        ArgumentError,
        "ExchangeOptions(count_keys=...)",
        "'yes'",
        "True or False",
        "it says whether something is done",
        "count_keys=True",
    ),
    "no flag, and not left open": (
        lambda: given(threads=2),
        ArgumentError,
        "PipelineOptions(threads=...)",
        "2",
        "True, False or None",
        "it says whether something is done; None leaves it to the compiler",
        "threads=True",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    call, error, *texts = MESSAGES[name]
    check_message(call, error, *texts)


# What is checked against the program, not by itself; a limit may also be a text with a unit.
ELSEWHERE: dict[str, Callable[[Any], Any]] = {
    "plan": lambda x: given(plan=x),
    "schedule": lambda x: given(schedule=x),
    "stages": lambda x: given(stages=x),
    "memory_limit": lambda x: None,
    "signing_key": lambda x: sbp.Options(signing_key=x),
}
NEVER: tuple[Any, ...] = ("nonsense", b"1", object(), [1], {}, -1, float("nan"), np.ones(2), 1j)


GROUPS: tuple[Any, ...] = (sbp.Options, ExchangeOptions, PipelineOptions)


@pytest.mark.parametrize(("group", "name"), [(g, f.name) for g in GROUPS for f in fields(g)])
def test_every_option_refuses_what_it_cannot_mean(group: Any, name: str) -> None:
    """A new field of `Options`, or of a group, is checked by its type, or has an entry of its own."""
    field = next(f for f in fields(group) if f.name == name)
    if name in ELSEWHERE:
        if name != "memory_limit":
            with pytest.raises(SbpError):
                ELSEWHERE[name]("nonsense")
        return
    assert name in LEGAL or field.type in LEGAL
    sbp.compile(look_up, LINE, options=options_of(**{name: field.default}))
    for wrong in NEVER:
        options = options_of(**{name: wrong})
        found = kinds(lambda options=options: sbp.compile(look_up, LINE, options=options))  # type: ignore[misc]
        assert found == [("argument", f"{group.__name__}({name}=...)")], wrong


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = sbp.Options(check="no", time_limit=True, exchange=ExchangeOptions(dtype="int8", capacity=0))  # type: ignore[arg-type]
    assert len(kinds(lambda: sbp.compile(look_up, LINE, options=wrong, static_argnums=7))) == 5


@pytest.mark.parametrize("capacity", [1, 7, np.int32(3), None])
@pytest.mark.parametrize("wire", [*WIRE_TYPES, jnp.bfloat16, np.float32, np.dtype("float32"), None])
def test_what_is_legal_is_taken(wire: Any, capacity: Any) -> None:
    options = sbp.Options(
        time_limit=5,
        effort=2,
        exchange=ExchangeOptions(dtype=wire, capacity=capacity),
        pipeline=PipelineOptions(threads=False),
    )
    sbp.compile(look_up, LINE, options=options)


def test_every_floating_type_keeps_large_rows_or_is_refused() -> None:
    """Whatever type JAX has: rows arrive rounded, or the type is refused."""
    large = np.float32(3e38) * np.sign(np.arange(64 * 4).reshape(64, 4) % 3 - 1).astype(np.float32)
    names = {str(jnp.dtype(x)) for x in vars(jnp).values() if isinstance(x, type(jnp.float32))}
    assert {"bfloat16", "float16", "int8", "bool", "float8_e8m0fnu"} <= names
    for name in sorted(names):
        options = sbp.Options(hardware=BYTES_ONLY, exchange=ExchangeOptions(dtype=name))
        try:
            program = sbp.compile(look_up, LINE, in_sbp=([S(0)], [S(0)]), options=options)
        except ArgumentError:
            continue
        assert name in WIRE_TYPES
        ids = np.arange(16, dtype=np.int32) * 3
        np.testing.assert_allclose(program(large, ids), large[ids], rtol=0.01)
