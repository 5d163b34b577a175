"""What an error of JAX's runtime says of the other processes: that one of them is gone."""

from __future__ import annotations

import re

import jax

from sbp.errors import SbpError

_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|Connection timed out|Broken pipe|Timed out waiting|Read error"
    r"|No route to host|Network is unreachable|Socket closed|remote process exited|^UNAVAILABLE\b",
    re.IGNORECASE,
)
_STATUS = re.compile(
    r"(?:CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|ABORTED|INTERNAL|UNAVAILABLE|FAILED_PRECONDITION|DATA_LOSS): "
)
"""What the runtime's errors begin with."""
_WHERE = re.compile(r"\[external/\S+\] ?")


def is_of_runtime(error: BaseException) -> bool:
    """Whether the runtime has raised an error: where a program is run while it is called, as a ValueError.

    >>> is_of_runtime(ValueError("UNKNOWN: Gloo all-reduce failed")), is_of_runtime(ValueError("UNKNOWN"))
    (True, False)
    """
    is_value = type(error) is ValueError and _STATUS.match(str(error)) is not None
    return is_value or isinstance(error, jax.errors.JaxRuntimeError)


def has_lost_another(error: BaseException) -> bool:
    """Whether a process raises since another one is gone: then it is not to blame.

    >>> gone = "UNKNOWN: Gloo AllGather failed: [external/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
    >>> has_lost_another(jax.errors.JaxRuntimeError(gone)), has_lost_another(OSError(gone))
    (True, False)
    """
    return is_of_runtime(error) and _LOST.search(str(error)) is not None


def in_one_line(error: BaseException) -> str:
    """An error as the last line of a log names it.

    >>> in_one_line(ValueError("of two lines:\\nthis one and that")), in_one_line(KeyboardInterrupt())
    ('ValueError: of two lines:', 'KeyboardInterrupt')
    """
    name, said = type(error).__name__, (str(error).splitlines() or [""])[0]
    if isinstance(error, SbpError) and error.problems:
        said = "; ".join((error.problems[0].where.splitlines() or [""])[:1] + [error.problems[0].got])
    return f"{name}: {said}" if said else name


def loss_text(error: BaseException) -> str:
    """What is said of it, in one line.

    >>> gone = "UNKNOWN: Gloo AllGather failed: [external/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
    >>> loss_text(jax.errors.JaxRuntimeError(gone))
    'has lost another process: UNKNOWN: Gloo AllGather failed: Connection closed by peer [10.0.0.2]:4'
    """
    said = str(error).splitlines() or [""]
    return f"has lost another process: {_WHERE.sub('', said[0])}"
