"""Writing what was compiled for one signature of a program."""

import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sbp.compat.cache import SerialProgram, serialise
from sbp.compat.forks import check_not_forked
from sbp.compat.untyped import JaxDevice, struct
from sbp.errors import ExecutableError, Problem
from sbp.placement import Placement
from sbp.runtime.cache.cache_folder import cache_context
from sbp.runtime.call.arguments import Abstract
from sbp.runtime.call.binding import Call, Parameters
from sbp.runtime.execute.compile_log import log_activity
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.pipeline.pipeline_executor import PipelineExecutor
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.pipeline.shared_executables import CALLBACK, Executable
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.saved.file import file_of, made_for, write
from sbp.runtime.saved.pack import Programs, pack

WHOLE = "whole"
"""The name of the only program of one placement."""


@dataclass(frozen=True)
class SavedSignature:
    """What a call must be like to be run by what was compiled.

    Arguments:
      name: of the function.
      signature: of the function, without its defaults' values.
      parameters: those of the function.
      placement: where it runs.
      call: one such call, without values.
      avals: of its leaves.
    """

    name: str
    signature: tuple[tuple[str, int, bool], ...] | None
    parameters: Parameters
    placement: Placement
    call: Call
    avals: tuple[Abstract, ...]


def signature_of(fn: Callable[..., Any]) -> tuple[tuple[str, int, bool], ...] | None:
    """The parameters of a function: name, kind, whether there is a default; None where it does not tell.

    >>> signature_of(lambda a, *, b=1: a)
    (('a', 1, False), ('b', 3, True))
    """
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    return tuple((p.name, int(p.kind), p.default is not p.empty) for p in found)


def save(
    path: str | os.PathLike[str],
    signature: SavedSignature,
    built: CompiledProgram | CompiledPipeline,
    key: bytes | None = None,
) -> None:
    """Writes what was built to a file, in each process its own.

    Arguments:
      key: to sign it with; None for a file of the user alone.

    Raises:
      ExecutableError: for programs that cannot be saved, and files that cannot be written.
    """
    check_not_forked(f"{signature.name}: save_executable(...)")
    file = file_of(path)
    header = made_for(list(signature.placement.mesh.devices.flat))
    with log_activity("saved", signature.name, f" to {file}"):
        what: CompiledProgram | CompiledPipeline = built
        if isinstance(built, CompiledPipeline):
            programs = _of_pipeline(built)
        else:
            what, programs = _of_whole(built)
        program = pack((signature, what), programs)
        header["program"] = _common(signature.name, hashlib.sha256(program).hexdigest())
        write(file, header, program, key)


def _common(name: str, digest: str) -> str:
    """One word for the program in all processes: whoever loads files of two programs is told."""
    others = process_group()
    return digest if others is None else str(others.gather(f"save {name}", digest)[0])


def _of_whole(built: CompiledProgram) -> tuple[CompiledProgram, Programs]:
    """What was built for one placement, with its program as JAX can save it: as `jit` holds it, it cannot."""
    _, ins, consts = built.executable
    physical = built.plan.physical
    assert physical is not None
    mesh = physical.placement.mesh
    structs = [*built.ends[0], *(struct(c.shape, c.dtype, sharding=c.sharding) for c in consts)]
    lowered = built.jit(mesh, built.key_counts, checked=True).lower(*structs)
    if CALLBACK in lowered.as_text():
        raise ExecutableError(_calls_host(built.plan.name))
    devices = list(mesh.devices.flat)
    with cache_context(built.cache) as cache:
        compiled = lowered.compile()
    ids = tuple(d.id for d in devices)
    serial = _must(serialise(compiled, devices, cache.last_found), built.plan.name)
    out = copy.copy(built)
    out.reads_ahead = False  # what is saved is the program without
    out.__dict__ |= {"executable": (compiled, ins, consts), "keys_ahead": None}
    return out, Programs({WHOLE: serial}, {id(compiled): (WHOLE, ids)})


def _of_pipeline(built: CompiledPipeline) -> Programs:
    """The programs of this process: those of its stages, and of its ways to the stages of others. Those that
    are alike have one."""
    built.closed_arrays  # noqa: B018  (the arrays that it closes over are a part of it)
    executor = built.executor
    names: dict[int, tuple[str, tuple[int, ...]]] = {}
    serial: dict[str, SerialProgram] = {}
    for program, devices in _used(executor):
        key = executor.executables.keys.get(id(program))
        if key is None:  # of another process
            continue
        compiled = executor.executables.by_text[key]
        if compiled.calls_host:
            raise ExecutableError(_calls_host(built.plan.name))
        serial[key] = _must(compiled.serial, built.plan.name)
        names[id(program)] = key, tuple(d.id for d in devices)
    return Programs(serial, names)


def _used(executor: PipelineExecutor) -> Iterator[tuple[Executable, list[JaxDevice]]]:
    """All programs of a pipeline, each with its devices."""
    for stage in executor.executors:
        devices = list(stage.slots.mesh.devices.flat)
        yield from ((run.run, devices) for run in stage.runnables.values())
    for transfer in executor.engine.transfers.values():
        yield from transfer.programs


def _must(serial: SerialProgram | None, name: str) -> SerialProgram:
    if serial is None:
        raise ExecutableError(_cannot(name))
    return serial


def _calls_host(name: str) -> Problem:
    return Problem(
        "executable",
        f"{name}: save_executable(...)",
        "a program that calls Python on the host: a callback, or jax.debug.print",
        "a program that does not call the host",
        "a function of this process cannot be saved with the program",
        "leave the callback out, or use Options(cache=...)",
    )


def _cannot(name: str) -> Problem:
    return Problem(
        "executable",
        f"{name}: save_executable(...)",
        "a program that XLA cannot save on this backend",
        "one that it can: on CPU and GPU, without a ref that is closed over",
        "JAX refused to serialise it",
        "Options(cache=...), with which the next process compiles only what is missing",
    )
