"""Faults of our own in words: in which pass or entry, at which op and line of the user's, and versions."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

import jax

from sbp.compat import core
from sbp.compat.mesh import meshless
from sbp.errors import InternalError, Problem, SbpError

if TYPE_CHECKING:
    from sbp.passes.program.graph import Node

P = ParamSpec("P")
R = TypeVar("R")


def public(fn: Callable[P, R]) -> Callable[P, R]:
    """A public entry: it runs under no mesh, and what it raises is an error of ours, or comes from the user's
    code."""
    return meshless(fn, partial(_raise, fn.__qualname__))


def under_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """A public entry that calls functions of the user's, and so stays under their mesh."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            _raise(fn.__qualname__, e)

    return run


def _raise(entry: str, error: Exception) -> NoReturn:
    """Raises what an entry has raised; a fault of ours knows the program that led to it."""
    try:
        raise_internal(entry, error)
    except InternalError as fault:
        if fault.program is None:
            frames = (*_frames(fault), *_frames(error))
            fault.program = next(filter(None, map(_program, frames)), None)
            fault.entry = "lower" if entry.endswith(".lower") else "plan"
        raise


def raise_internal(where: str, error: Exception) -> NoReturn:
    """Raises what a pass or an entry has raised: as an error of ours, unless it is one, or comes from the
    user's code, the system, or XLA.

    Arguments:
      where: the pass, or the entry.

    Raises:
      InternalError: for what neither should raise.
    """
    frames = list(_frames(error))
    if isinstance(error, SbpError | MemoryError | OSError | jax.errors.JaxRuntimeError) or _is_theirs(frames):
        raise error
    node = next(filter(None, map(_node, frames)), None)
    at = "" if node is None else f" at {node.op}, {node.source}"
    versions = f"jax {jax.__version__}, Python {platform.python_version()}, {platform.system()}"
    raise InternalError(
        Problem(
            kind="internal",
            where=f"{where}{at}",
            got=f"{type(error).__name__}: {error}",
            legal="",
            why="this is a fault of sbp, not of your program",
            fix="sbp.errors.reproduce('fault.py') writes a program that shows it, without data; report it "
            f"with these lines, the traceback above them and the versions: {versions}",
        )
    ) from error


def _is_theirs(frames: Iterable[FrameType]) -> bool:
    """Whether libraries aside the innermost frame is of the user's code."""
    for frame in frames:
        file = frame.f_code.co_filename
        if core.is_user_file(file) or core.is_own_file(file):
            return core.is_user_file(file)
    return False


def _frames(error: Exception) -> Iterator[FrameType]:
    """The frames that an error came through, the innermost first."""
    found, at = list[FrameType](), error.__traceback__
    while at is not None:
        found.append(at.tb_frame)
        at = at.tb_next
    return reversed(found)


def _program(frame: FrameType) -> Callable[[str, str], str] | None:
    """What writes the program that a function works on."""
    found: Callable[[str, str], str] | None = getattr(frame.f_locals.get("self"), "_reproduction", None)
    return found


def _node(frame: FrameType) -> Node | None:
    """The op that a function works on."""
    from sbp.passes.program.graph import Node  # loads all rules

    for name in ("node", "step", "n"):
        held = frame.f_locals.get(name)
        if isinstance(node := getattr(held, "node", held), Node):
            return node
    return None
