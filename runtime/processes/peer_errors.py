"""Errors of JAX's runtime that mean that another process is gone."""

from __future__ import annotations

import re

from sbp.errors import SbpError

_WHERE = re.compile(r"\[external/\S+\] ?")


def in_one_line(error: BaseException) -> str:
    r"""An error in one line, as the last line of a traceback.

    >>> in_one_line(ValueError("of two lines:\nthis one and that")), in_one_line(KeyboardInterrupt())
    ('ValueError: of two lines:', 'KeyboardInterrupt')
    """
    name, said = type(error).__name__, (str(error).splitlines() or [""])[0]
    if isinstance(error, SbpError) and error.problems:
        said = "; ".join((error.problems[0].where.splitlines() or [""])[:1] + [error.problems[0].got])
    return f"{name}: {said}" if said else name


def loss_text(error: BaseException) -> str:
    """The loss of another process, in one line.

    >>> import jax
    >>> gone = "UNKNOWN: Gloo AllGather failed: [external/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
    >>> loss_text(jax.errors.JaxRuntimeError(gone))
    'has lost another process: UNKNOWN: Gloo AllGather failed: Connection closed by peer [10.0.0.2]:4'
    """
    said = str(error).splitlines() or [""]
    return f"has lost another process: {_WHERE.sub('', said[0])}"
