"""Internal errors: the pass or entry, the op and line of the user's, and versions, in words."""

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
    """Marks a public entry: it runs under no mesh, and raises only our errors and the user's."""
    return meshless(fn, partial(_raise, fn.__qualname__))


def under_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a public entry that calls the user's functions, and so stays under their mesh."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            _raise(fn.__qualname__, e)

    return run


def _raise(entry: str, error: Exception) -> NoReturn:
    """Raises the error of an entry; an internal error also gets the program that led to it."""
    try:
        raise_internal(entry, error)
    except InternalError as fault:
        if fault.program is None:
            fault.program = next(filter(None, map(_program, (*_frames(fault), *_frames(error)))), None)
            fault.entry = "lower" if entry.endswith(".lower") else "plan"
        raise


def raise_internal(where: str, error: Exception) -> NoReturn:
    """Raises an error as an internal one, unless it is ours, the user's, the system's or XLA's.

    Arguments:
      where: the pass, or the entry.

    Raises:
      InternalError: for an error that neither should raise.
    """
    frames = list(_frames(error))
    # A warning is raised where the user asks for that.
    known = SbpError | Warning | MemoryError | OSError | jax.errors.JaxRuntimeError
    if isinstance(error, known) or _is_theirs(frames):
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
    """Whether the innermost frame, libraries aside, is in the user's code."""
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
    """The function that writes the program of a frame as Python."""
    return getattr(frame.f_locals.get("self"), "_reproduction", None)


def _node(frame: FrameType) -> Node | None:
    """The op that the function of a frame works on."""
    from sbp.passes.program.graph import Node  # loads all rules

    for name in ("node", "step", "n"):
        held = frame.f_locals.get(name)
        if isinstance(node := getattr(held, "node", held), Node):
            return node
    return None
