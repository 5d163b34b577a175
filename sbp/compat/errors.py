"""The meaning of errors of JAX, XLA, gloo and TensorStore, which only their texts have."""

import re

import jax

EXHAUSTED = "RESOURCE_EXHAUSTED"
_FULL = ("No space left", EXHAUSTED, "File too large", "Disk quota")
_NO_DAMAGE = ("PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", EXHAUSTED, "ABORTED", "CANCELLED")
"""What TensorStore says where another try might succeed: the files may be intact."""
_STATUS = re.compile(
    r"(?:CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|ABORTED|INTERNAL|UNAVAILABLE|FAILED_PRECONDITION|DATA_LOSS): "
)
"""What the runtime's errors begin with."""
_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|Connection timed out|Broken pipe|Timed out waiting|Read error"
    r"|No route to host|Network is unreachable|Socket closed|remote process exited|^UNAVAILABLE\b",
    re.IGNORECASE,
)


def is_exhausted(error: BaseException) -> bool:
    """Whether a device, or XLA's compiler, ran out of memory."""
    return EXHAUSTED in str(error)


def is_full(error: BaseException) -> bool:
    """Whether a disk was full."""
    return any(word in str(error) for word in _FULL)


def is_deleted(error: BaseException) -> bool:
    """Whether an argument was donated or deleted."""
    return "deleted" in str(error) or "donated" in str(error)


def is_deadline(error: BaseException) -> bool:
    """Whether a wait has timed out."""
    return "DEADLINE_EXCEEDED" in str(error)


def is_damage(error: Exception) -> bool:
    """Whether orbax could not read files because they are damaged."""
    if isinstance(error, OSError) or any(word in str(error) for word in _NO_DAMAGE):
        return isinstance(error, FileNotFoundError)
    return isinstance(error, ValueError | KeyError | TypeError) or "DATA_LOSS" in str(error)


def is_of_runtime(error: BaseException) -> bool:
    """Whether the runtime has raised an error; while a program is called, it raises a ValueError.

    >>> is_of_runtime(ValueError("UNKNOWN: Gloo all-reduce failed")), is_of_runtime(ValueError("UNKNOWN"))
    (True, False)
    """
    if type(error) is ValueError:
        return _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError)


def has_lost_another(error: BaseException) -> bool:
    """Whether a process raises because another one is gone: then it is not the cause.

    >>> gone = "UNKNOWN: Gloo AllGather failed: [external/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
    >>> has_lost_another(jax.errors.JaxRuntimeError(gone)), has_lost_another(OSError(gone))
    (True, False)
    """
    return is_of_runtime(error) and _LOST.search(str(error)) is not None
