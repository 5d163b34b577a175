"""Faults of our own in words: in which pass, at which op and line of the user's, with which versions."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import jax

from sbp import compat
from sbp.errors import InternalError, Problem, SbpError
from sbp.passes.program.graph import Node


def raise_internal(name: str, error: Exception) -> NoReturn:
    """Raises what a pass has raised: as an error of ours, unless it is one, or comes from the user's code.

    Arguments:
      name: of the pass.

    Raises:
      InternalError: for what no pass should raise.
    """
    frames = list(_frames(error))
    file = frames[0].f_code.co_filename if frames else ""
    if isinstance(error, SbpError | MemoryError) or compat.is_user_file(file):
        raise error
    node = next(filter(None, map(_node, frames)), None)
    at = "" if node is None else f" at {node.op}, {node.source}"
    versions = f"jax {jax.__version__}, Python {platform.python_version()}, {platform.system()}"
    raise InternalError(
        Problem(
            kind="internal",
            where=f"pass {name!r}{at}",
            got=f"{type(error).__name__}: {error}",
            legal="",
            why="this is a fault of sbp, not of your program",
            fix=f"report it with these lines, the traceback above them and the versions: {versions}",
        )
    ) from error


def _frames(error: Exception) -> Iterator[FrameType]:
    """The frames that an error came through, the innermost first."""
    found, at = list[FrameType](), error.__traceback__
    while at is not None:
        found.append(at.tb_frame)
        at = at.tb_next
    return reversed(found)


def _node(frame: FrameType) -> Node | None:
    """The op that a function works on."""
    for name in ("node", "step", "n"):
        held = frame.f_locals.get(name)
        held = getattr(held, "node", held)
        if isinstance(held, Node):
            return held
    return None
