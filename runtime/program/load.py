"""Loads a program from a file: it is called like the one that was saved, and nothing is compiled."""

import inspect
import os
from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

from sbp.compat.forks import check_not_forked
from sbp.compat.untyped import Leaf
from sbp.errors import ExecutableError, Problem
from sbp.options import Options, checked_key
from sbp.passes.explain.internal_errors import public
from sbp.placement import Placement
from sbp.runtime.call.arguments import Abstract
from sbp.runtime.call.binding import Call
from sbp.runtime.compile.traced_call import TracedCall
from sbp.runtime.execute.compile_log import Shapes, log_activity
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.program.program import Program
from sbp.runtime.saved.file import AGAIN, check, devices_of, file_of, made_for, read
from sbp.runtime.saved.pack import unpack
from sbp.runtime.saved.save import SavedSignature
from sbp.signature import AUTO


class LoadedProgram(Program[Any, Any]):
    """A compiled program from `sbp.load_executable`: a `Program` for one signature of its arguments.

    It can be called, and has its plan and its shardings. The function itself is not in the file, so there is
    nothing to trace: `lower`, `source`, `trace` and `report` are refused.
    """

    def __init__(self, signature: SavedSignature, built: CompiledProgram | CompiledPipeline) -> None:
        super().__init__(_stub(signature), signature.placement, AUTO, AUTO, signature.parameters, Options())
        self.signature = signature
        call = signature.call
        settings = self._settings(), signature.placement.axis_types
        key = call.tree, call.values(), signature.avals, settings, self._mesh(())
        self._built.slot(key).built = built
        self._latest = call, built, signature.avals

    def _mesh(self, leaves: Sequence[Leaf]) -> Hashable:
        """Nothing: it is never traced."""
        return ()

    def _build(
        self,
        call: Call,
        avals: Sequence[Abstract],
        placement: Placement,
        concrete: bool,
        same: Sequence[object] = (),
    ) -> NoReturn:
        """Refused: there is no function to build."""
        assert self._latest is not None
        mine = Shapes(self._latest[1].traced.in_paths, self.signature.avals)
        raise ExecutableError(_other_call(self, Shapes(call.paths(self.fn), tuple(avals)).since(mine)))

    def _read(self, call: Call, avals: Sequence[Abstract]) -> TracedCall:
        raise ExecutableError(_no_function(self, "trace"))

    def lower(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there is no function to trace."""
        raise ExecutableError(_no_function(self, "lower"))

    def save_executable(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: copy the file that it was loaded from."""
        raise ExecutableError(_no_function(self, "save_executable"))


@public
def load_executable(path: str | os.PathLike[str], *, signing_key: bytes | None = None) -> LoadedProgram:
    """Loads a program that `Program.save_executable` has written; its results have the same bits.

    Such a file is code, like a shared library. It is refused if others than you and root can have written
    it, unless it is signed with a key. Nothing of it is unpickled before that, its checksum, its versions and
    its devices are checked.

    Arguments:
      path: the path that was given to `save_executable`; each process reads its own file.
      signing_key: the `Options(signing_key=...)` that it was compiled with. Then a file with the right
        signature is accepted whoever can write it, and any other file is refused.

    Raises:
      ExecutableError: for files that are damaged, that others can write, or that are for other versions or
        devices.
      ArgumentError: for a wrong key.
      ProcessError: if processes have files of different programs, and in a process that was forked after JAX
        was used.

    >>> import tempfile, jax.numpy as jnp
    >>> from sbp.placement import placement
    >>> from sbp.runtime.program.compile import compile
    >>> double = compile(lambda x: x * 2, placement("cpu", shape=(1,)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     double.save_executable(f"{folder}/double.sbpx", jnp.ones(2))
    ...     load_executable(f"{folder}/double.sbpx")(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    where = f"load_executable({os.fspath(path)!r})"
    check_not_forked(where)
    file = file_of(path)
    header, program = read(file, checked_key(signing_key, "load_executable(path, signing_key=...)"))
    devices = devices_of(header)
    check(file, header, made_for(devices))
    if (others := process_group()) is not None:
        others.agree(where, header["program"])
    with log_activity("loaded", file.name):
        signature, built = unpack(program, devices)
    return LoadedProgram(signature, built)


def _stub(signature: SavedSignature) -> Any:
    """Stands for the function: its name, and its parameters."""

    def function(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a loaded program has no function")

    function.__name__ = function.__qualname__ = signature.name
    if signature.signature is not None:
        kinds = {int(k): k for k in inspect._ParameterKind}
        parameters = [
            inspect.Parameter(name, kinds[kind], default=None if has_default else inspect.Parameter.empty)
            for name, kind, has_default in signature.signature
        ]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def _other_call(program: object, what: str) -> Problem:
    return Problem(
        "executable",
        f"{program}(...)",
        what,
        "arguments as those that it was compiled for",
        "it was loaded, so there is no function to be compiled for others",
        AGAIN,
    )


def _no_function(program: object, what: str) -> Problem:
    return Problem(
        "executable",
        f"{program}.{what}(...)",
        "a program that was loaded",
        "one that sbp.compile has made",
        "the file has the compiled program, and not the function",
        "the same of the program that was saved",
    )
