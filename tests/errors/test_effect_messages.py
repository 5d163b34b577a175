"""Every message about what a program does beside computing its results: where, got, legal, why, try."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.experimental.buffer_callback import buffer_callback

import sbp
from sbp.errors import AnnotationError, ArgumentError
from sbp.passes.program.effects import KNOWN, REFUSED
from sbp.passes.program.trace import trace
from tests.errors.messages import Messages, check_message

LINE = sbp.placement("cpu", shape=(8,))
X = np.ones((8, 8), np.float32)
REF = jax.new_ref(jnp.zeros(8))
LIKE = jax.ShapeDtypeStruct((8,), jnp.float32)
ONE_BUFFER = (
    "a ref is one buffer that is changed in place: here it would have to change on every device at once"
)
INSIDE = "refs made inside: jax.new_ref(...) in the function"
WRITE_BACK = "pass its value r[...] as an argument, return the new one, and write it back after the call"
PER_DEVICE = "it would run once per device, and not at all if its results are not used"


def of(fn: Any, *args: Any, on: Any = LINE) -> Any:
    return sbp.compile(fn, on).plan(*(args or (X,)))


def reads_a_ref(x: Any) -> Any:
    return x + REF[...]


def prints_in_order(x: Any) -> Any:
    jax.debug.print("{}", x, ordered=True)
    return x


def calls_in_order(x: Any) -> Any:
    jax.debug.callback(print, x, ordered=True)
    return x


def checks(x: Any) -> Any:
    checkify.check(x.sum() > 0, "negative")
    return x


def foreign(x: Any) -> Any:
    return jax.ffi.ffi_call("target", LIKE, has_side_effect=True)(x)


def buffers(x: Any) -> Any:
    return buffer_callback(lambda *_: None, LIKE, has_side_effect=True)(x)


def asks_the_host(x: Any) -> Any:
    return io_callback(lambda v: v, LIKE, x)


def speaks(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x


MESSAGES: Messages = {
    "a ref as an argument": (
        lambda: of(lambda r: r[...], REF),
        ArgumentError,
        "r: Ref{float32[8]}",
        "a ref that was made outside the function",
        INSIDE,
        ONE_BUFFER,
        WRITE_BACK,
    ),
    "a ref that the function closes over": (
        lambda: of(reads_a_ref),
        AnnotationError,
        "get at {line}: Ref{float32[8]}",
        "a ref that was made outside the function",
        INSIDE,
        ONE_BUFFER,
        WRITE_BACK,
    ),
    "a check that nobody handles": (
        lambda: of(checks),
        AnnotationError,
        "check at {line}",
        "a checkify.check outside of checkify.checkify",
        "checks under checkify.checkify",
        "the check would be dropped: jit refuses it too",
        "checkify.checkify(fn), whose error is a result like any other",
    ),
    "foreign code with side effects": (
        lambda: of(foreign),
        AnnotationError,
        "ffi_call at {line}",
        "a foreign call with side effects",
        "foreign calls that only compute: has_side_effect=False",
        PER_DEVICE,
        "has_side_effect=False, or the call outside the program",
    ),
    "a buffer callback with side effects": (
        lambda: of(buffers),
        AnnotationError,
        "buffer_callback at {line}",
        "a buffer callback with side effects",
        "buffer callbacks that only compute: has_side_effect=False",
        PER_DEVICE,
        "has_side_effect=False, or jax.debug.callback, which runs once",
    ),
    "a callback with results": (
        lambda: of(asks_the_host),
        AnnotationError,
        "io_callback at {line}",
        "a callback that changes the host's state and returns values",
        "jax.debug.callback (runs once), jax.pure_callback (runs on each device)",
        "it would run once per device, and each device would get an answer of its own",
        "call it outside the program, and pass its result as an argument",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    call, error, *texts = MESSAGES[name]
    check_message(call, error, *texts)


def test_an_effect_that_is_in_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KNOWN, "DebugEffect")
    check_message(
        lambda: of(speaks),
        AnnotationError,
        "debug_print at {line}",
        "an op with the effect DebugEffect",
        "ops that only compute, refs made inside the function, jax.debug.callback",
        "this effect is not known, so running it on several devices may be wrong",
        "the op outside the program; its results as arguments",
    )


def test_every_effect_of_the_tables_is_one_of_jax() -> None:
    """A name that JAX renames would be refused as unknown, and one that is refused would slip through."""
    fns = (prints_in_order, calls_in_order, checks, foreign, buffers, asks_the_host, speaks)
    seen = {type(e).__name__ for fn in fns for e in jax.make_jaxpr(fn)(X).effects}
    ordered = jax.make_jaxpr(lambda x: io_callback(lambda v: v, LIKE, x, ordered=True))(X).effects
    own = jax.make_jaxpr(lambda x: jax.freeze(jax.new_ref(x)))(X).effects
    seen |= {type(e).__name__ for e in (*ordered, *own)}
    assert seen == (set(KNOWN) | set(REFUSED)) - {"NoDCEEffect"}


def test_callbacks_in_order_run_on_one_device() -> None:
    seen: list[float] = []

    def step(x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0], ordered=True)
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 1] + 1, ordered=True)
        return x

    sbp.compile(step, sbp.placement("cpu", shape=(1,)))(X)
    jax.effects_barrier()
    assert seen == [1.0, 2.0]
    assert trace(step, (X,), {}).graph.nodes
