"""Every message about the arguments of `compile`, of a call and of its options: every row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import ArgumentError, DonationError, MemoryLimitError, PlacementError
from tests.errors.messages import Messages, check_message, kinds

GRID = sbp.placement("cpu", shape=(2, 4))
LINE = sbp.placement("cpu", shape=(8,))
CHIP = sbp.placement("h100", shape=(1,))
X = np.ones((8, 8), np.float32)
INT32 = "-2147483648..2147483647"
NO_PLACEMENT = (
    "an sbp.placement, or a jax.sharding.Mesh",
    "a placement says which devices a program, or a part of it, runs on",
)


def double(x: Any) -> Any:
    return x * 2


def of(fn: Any = double, *args: Any, on: Any = GRID, **options: Any) -> Any:
    """The plan of a function; most errors come before anything is compiled."""
    return sbp.compile(fn, on, **options).plan(*(args or (X,)))


def deleted() -> Any:
    gone = jnp.ones((8, 8)) + 1
    gone.delete()
    return gone


def added(a: Any, b: Any) -> Any:
    return sbp.compile(lambda a, b: a + b, GRID, donate_argnums=0)(a, b)


def gone_before_the_first_call() -> Any:
    held = jnp.ones(8) + 1
    program = sbp.compile(lambda x: x + held, GRID)
    program.plan(X)
    held.delete()
    return program(X)


MESSAGES: Messages = {
    "a leaf that JAX cannot take": (
        lambda: of(double, "text"),
        ArgumentError,
        "x",
        "'text'",
        "arrays, numbers, and pytrees of them",
        "JAX cannot take it: Argument 'text' of type <class 'str'> is not a valid JAX type",
        "make it a static argument (static_argnums), or leave it out",
    ),
    "integers that would be cut": (
        lambda: of(lambda p: p["ids"], {"ids": np.array([3, 2**40])}),
        ArgumentError,
        "p['ids']",
        "int64[2] with values 3..1099511627776",
        f"values in {INT32}, or JAX with 64-bit types",
        "with 64-bit types off, JAX would silently cut these integers to 32 bits",
        "jax.config.update('jax_enable_x64', True), or map the values to a smaller range first",
    ),
    "a shape where a value is needed": (
        lambda: sbp.compile(double, GRID)(jax.ShapeDtypeStruct((8, 8), np.float32)),
        ArgumentError,
        "x",
        "ShapeDtypeStruct float32[8, 8]",
        "an array",
        "a shape has no values to run with",
        "Program.plan(...) and Program.lower(...) take shapes",
    ),
    "a program inside a traced function": (
        lambda: jax.jit(sbp.compile(double, GRID))(X),
        ArgumentError,
        "x",
        "a value that is being traced: float32[8,8]",
        "arrays",
        "a Program is the outermost thing: it cannot be called inside jit, grad, vmap or another program",
        "compile the outer function instead, which calls the plain one: sbp.compile(jax.grad(fn), ...)",
    ),
    "a donated array passed again": (
        lambda: of(lambda p: p["w"], {"w": deleted()}),
        DonationError,
        "p['w']",
        "float32[8, 8] whose memory is gone: donated to an earlier call, or deleted",
        "an array that still exists",
        "donate_argnums gives the memory of an argument to the results",
        "use what that call returned: params, ... = step(params, ...); or leave donate_argnums out",
    ),
    "an array donated and used": (
        lambda: (lambda x: added(x, x))(jnp.ones(8)),
        DonationError,
        "b: float32[8]",
        "the same array as a",
        "an array of its own",
        "one of the two is donated, and its memory can be given away only once",
        "donate neither, or pass a copy: jnp.array(x, copy=True)",
    ),
    "an array in the memory of a donated one": (
        lambda: (lambda x: added(x, jax.device_put(x, x.sharding)))(jnp.ones(8)),
        DonationError,
        "b: float32[8]",
        "an array in the memory of a",
        "an array of its own",
        "one of the two is donated, and its memory can be given away only once",
        "donate neither, or pass a copy: jnp.array(x, copy=True)",
    ),
    "a closed-over array that is gone": (
        gone_before_the_first_call,
        DonationError,
        "const0: float32[8], which the function closes over",
        "an array whose memory is gone: donated or deleted since the function was traced",
        "an array that still exists at the first call",
        "the first call takes a copy of what the function closes over, which it keeps",
        "call the program before the array is donated, or pass the array as an argument",
    ),
    "a missing argument": (
        lambda: sbp.compile(lambda params, state, x, rate=0.1: x, GRID, in_sbp=(None, None, None)).plan(X, X),
        ArgumentError,
        "x",
        "nothing",
        "an argument",
        "<lambda>(params, state, x, rate=...): x has no default",
        "x=...",
    ),
    "an argument by an unknown keyword": (
        lambda: sbp.compile(lambda x, *, scale=1: x, GRID).plan(X, scael=2),
        ArgumentError,
        "<lambda>(scael=...)",
        "'scael'",
        "x, scale",
        "<lambda>(x, *, scale=...)",
        "did you mean scale=...?",
    ),
    "an argument twice": (
        lambda: sbp.compile(lambda x, y: x, GRID).plan(X, X, y=X),
        ArgumentError,
        "y",
        "an argument that is given twice",
        "one of them",
        "it stands at position 1 as well",
        "leave one of the two out",
    ),
    "too many arguments": (
        lambda: sbp.compile(double, GRID).plan(X, X),
        ArgumentError,
        "double(...)",
        "2 positional arguments",
        "at most 1",
        "double(x)",
        "leave the others out, or give them by keyword",
    ),
    "a name that does not exist": (
        lambda: sbp.compile(lambda x, count: x, GRID, static_argnames="cuont"),
        ArgumentError,
        "compile(..., static_argnames='cuont')",
        "'cuont'",
        "'x', 'count'",
        "<lambda> has no parameter of that name",
        "did you mean 'count'?",
    ),
    "static and donated, by name": (
        lambda: sbp.compile(lambda x, *, k: x, GRID, donate_argnames="k", static_argnames="k"),
        ArgumentError,
        "compile(..., static_argnames=..., donate_argnames=...)",
        "'k' in both",
        "each name in one of them",
        "a static argument is a Python value: it has no memory to donate",
        "leave 'k' out of donate_argnames",
    ),
    "a static argument that cannot be hashed": (
        lambda: sbp.compile(lambda x, n: x, GRID, static_argnums=1).plan(X, [3]),
        ArgumentError,
        "static argument 1",
        "[3]",
        "a value that can be hashed and compared",
        "a program is compiled once per value of its static arguments, and unhashable type: 'list'",
        "a tuple or a frozen dataclass instead of a list",
    ),
    "a position that does not exist": (
        lambda: sbp.compile(double, GRID, donate_argnums=1),
        ArgumentError,
        "compile(..., donate_argnums=1)",
        "position 1",
        "-1..0",
        "double takes 1 positional argument",
        "count positions from 0",
    ),
    "static and donated": (
        lambda: sbp.compile(double, GRID, donate_argnums=0, static_argnums=0),
        ArgumentError,
        "compile(..., static_argnums=..., donate_argnums=...)",
        "position 0 in both",
        "each position in one of them",
        "a static argument is a Python value: it has no memory to donate",
        "leave 0 out of donate_argnums",
    ),
    "no function": (
        lambda: sbp.compile(3, GRID),  # type: ignore[arg-type]
        ArgumentError,
        "compile(fn, ...)",
        "3",
        "a function",
        "the first argument is the single-device program",
        "sbp.compile(train_step, placement)",
    ),
    "no placement": (
        lambda: sbp.compile(double, "cpu"),  # type: ignore[arg-type]
        PlacementError,
        "compile(fn, placement)",
        "'cpu'",
        *NO_PLACEMENT,
        "sbp.placement('cpu', shape=(8,))",
    ),
    "a placement in the command line's form": (
        lambda: sbp.compile(double, "cpu:2x4"),  # type: ignore[arg-type]
        PlacementError,
        "compile(fn, placement)",
        "'cpu:2x4'",
        *NO_PLACEMENT,
        "sbp.placement('cpu', shape=(2, 4))",
    ),
    "a mesh without devices": (
        lambda: sbp.compile(double, GRID.abstract_mesh),  # type: ignore[arg-type]
        PlacementError,
        "compile(fn, placement)",
        repr(GRID.abstract_mesh)[:80],
        *NO_PLACEMENT,
        "sbp.placement('cpu', shape=(2, 4), axes=('data', 'model')): that mesh has no devices",
    ),
    "no options": (
        lambda: sbp.compile(double, GRID, options={"check": True}),  # type: ignore[arg-type]
        ArgumentError,
        "compile(..., options=...)",
        "{'check': True}",
        "sbp.Options(...)",
        "a dict is none",
        "sbp.Options(memory_limit=16e9)",
    ),
    "more ranks than devices": (
        lambda: sbp.compile(double, sbp.placement("cpu", shape=(64,)))(X),
        PlacementError,
        "cpu(x=64).mesh",
        "rank 63",
        "ranks below 8",
        "a rank is a position in jax.devices('cpu'), which has 8",
        "jax.config.update('jax_num_cpu_devices', 64) before any device is used",
    ),
    "a limit on memory without a unit": (
        lambda: sbp.Options(memory_limit="80"),
        ArgumentError,
        "Options(memory_limit=...)",
        "'80'",
        "bytes, or a text such as '80GB' or '80GiB'",
        "a text needs a unit",
        "80 for bytes, or '80GB'",
    ),
    "a limit on memory of no unit that is known": (
        lambda: sbp.Options(memory_limit="79.5gib"),
        ArgumentError,
        "Options(memory_limit=...)",
        "'79.5gib'",
        "bytes, or a text such as '80GB' or '80GiB'",
        "a text needs a unit",
        "'79.5GiB'",
    ),
    "a limit on memory below nothing": (
        lambda: sbp.Options(memory_limit=-1),
        ArgumentError,
        "Options(memory_limit=...)",
        "-1",
        "bytes, or a text such as '80GB' or '80GiB'",
        "it is an amount of memory per device",
        "'80GB'",
    ),
    "what can never fit": (
        lambda: of(double, jax.ShapeDtypeStruct((50_000, 400_000), np.float32), on=CHIP),
        MemoryLimitError,
        "double on h100(x=1)",
        "160 GB per device only for arguments and results",
        "at most 80.0 GB, which h100 has",
        "at rest: x [B] 80.0 GB, result [B] 80.0 GB",
        "donate_argnums for state that comes back; "
        "a placement with more devices, or a smaller batch; Options(memory_limit=...) if a device has more",
    ),
    "too little memory": (
        lambda: of(in_sbp=([B, B],), options=sbp.Options(memory_limit=300)),
        MemoryLimitError,
        "double on cpu(data=2 x model=4), Options(memory_limit=300)",
        "512 B per device only for arguments and results",
        "at most 300 B",
        "at rest: x [B, B] 256 B, result [B, B] 256 B",
        "donate_argnums for state that comes back; "
        "split tensors that are whole on every device: in_sbp for x; "
        "a placement with more devices, or a smaller batch; "
        "Options(memory_limit=math.inf) to see the fastest plan of any size",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])


def test_all_failures_of_one_call_come_together() -> None:
    three = sbp.compile(lambda a, b, c, d: a, GRID, in_sbp=([S(3), B], None, [S(0)], None))
    assert kinds(lambda: three.plan(X, "text", np.array([2**40]), deleted())) == [
        ("argument", "b"),
        ("argument", "c"),
        ("donation", "d"),
        ("signature", "a"),
    ]


def test_wrong_arguments_of_compile_come_together() -> None:
    call: Any = lambda: sbp.compile(3, "cpu", options=4)  # type: ignore[arg-type]  # noqa: E731
    assert kinds(call) == [
        ("argument", "compile(fn, ...)"),
        ("placement", "compile(fn, placement)"),
        ("argument", "compile(..., options=...)"),
    ]
