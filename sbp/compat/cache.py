"""JAX's persistent compilation cache, and compiled programs as bytes: internals of JAX."""

import contextlib
import io
import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import compilation_cache, compiler, config
from jax.experimental import serialize_executable as saving

from sbp.compat.untyped import JaxDevice, TreeDef


class CompiledFiles(Protocol):
    """A store of compiled programs for the next process."""

    def get(self, key: str) -> bytes | None:
        """The bytes of a key."""

    def put(self, key: str, value: bytes) -> None:
        """Stores the bytes of a key."""


@dataclass
class CacheRequests:
    """The requests of JAX to its cache during a compilation.

    Arguments:
      files: the store; None for none.
      hits: what was found, compressed as JAX has it.
      missed_keys: keys that were not found.
    """

    files: CompiledFiles | None
    hits: list[bytes] = field(default_factory=list)
    missed_keys: list[str] = field(default_factory=list)

    def get(self, key: str) -> bytes | None:
        """A request of JAX."""
        found = None if self.files is None else self.files.get(key)
        if found is None:
            self.missed_keys.append(key)
        else:
            self.hits.append(found)
        return found

    def put(self, key: str, value: bytes) -> None:
        """A program that JAX has compiled; of several processes, only the first one calls this."""
        if self.files is not None:
            self.files.put(key, value)

    def keep(self, compiled: jax.stages.Compiled) -> None:
        """Stores the program that was compiled last, inside the context: JAX stores only those of process 0.

        Others may have keys of their own (those of CPUs do), or a folder of their own.
        """
        executable: Any = compiled.runtime_executable()
        for key in self.missed_keys[-1:] if jax.process_index() else ():
            if self.files is not None and self.files.get(key) is None:
                put: Any = compilation_cache.put_executable_and_time
                put(key, key, executable, executable.local_devices()[0].client, 0)

    @property
    def last_found(self) -> bytes | None:
        """The program that was found last, as XLA has serialised it.

        XLA cannot serialise a loaded program again: on a CPU its functions are missing then (jaxlib 0.10 to
        0.12).
        """
        if not self.hits:
            return None
        plain: Any = compilation_cache.extract_executable_and_time(
            compilation_cache.decompress_executable(self.hits[-1])
        )
        return bytes(plain[0])

    def __str__(self) -> str:
        if self.files is None or not (self.hits or self.missed_keys):
            return ""
        return ", not in the cache" if self.missed_keys else ", found in the cache"


class ThreadCaches:
    """The object that JAX has as its cache while we compile; each thread has its own files behind it.

    JAX has one cache for all threads, and nobody may hold a lock while something is compiled, or run.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before: CompiledFiles | None = None
        self.own = threading.local()

    @property
    def files(self) -> CompiledFiles | None:
        """The files of this thread, else JAX's own."""
        return getattr(self.own, "files", self.before)

    def get(self, key: str) -> bytes | None:
        """A request of JAX."""
        return None if self.files is None else self.files.get(key)

    def put(self, key: str, value: bytes) -> None:
        """A program that JAX has compiled."""
        if self.files is not None:
            self.files.put(key, value)

    @contextlib.contextmanager
    def use(self, files: CompiledFiles) -> Iterator[None]:
        """A context in which this thread uses some files."""
        module: Any = compilation_cache
        with self.lock:
            if self.count == 0:
                self.before, module._cache = module._cache, self
            self.count += 1
        self.own.files = files
        try:
            yield
        finally:
            del self.own.files
            with self.lock:
                self.count -= 1
                if self.count == 0 and module._cache is self:
                    module._cache = self.before


_INSTALLED = ThreadCaches()


@contextlib.contextmanager
def watch_cache(files: CompiledFiles | None, path: str, keeps_own: bool = True) -> Iterator[CacheRequests]:
    """A context in which JAX stores compiled programs in some files, however quickly they compile.

    The user's own setting (`jax_compilation_cache_dir`) goes first, and `jax_enable_compilation_cache` is
    respected.

    Arguments:
      files: None to store nothing.
      path: of their folder, in which XLA:GPU also keeps its autotuning results.
      keeps_own: whether it does, and finds them there.
    """
    settings: Any = config
    module: Any = compilation_cache
    given = contextlib.ExitStack()
    if settings.compilation_cache_dir.value:
        module._initialize_cache()
        files = module._cache
    elif files is not None:
        given.enter_context(settings.compilation_cache_dir(path))
        given.enter_context(settings.persistent_cache_min_compile_time_secs(0.0))
        if not keeps_own:
            given.enter_context(settings.persistent_cache_enable_xla_caches("none"))
    found = CacheRequests(files)
    if files is None:
        yield found
        return
    with given, _INSTALLED.use(found):
        yield found


@dataclass(frozen=True)
class SerialProgram:
    """A compiled program as bytes.

    Arguments:
      data: JAX's pickle of it. It is code: load it only from a trusted place.
      in_tree, out_tree: of its arguments, and of its results.
      devices: ids of those that it was compiled for, in the order of the mesh.
    """

    data: bytes
    in_tree: TreeDef
    out_tree: TreeDef
    devices: tuple[int, ...]


def serialise(
    compiled: jax.stages.Compiled, devices: Sequence[JaxDevice], found: bytes | None = None
) -> SerialProgram | None:
    """A compiled program as bytes; None if the backend cannot save it.

    Arguments:
      devices: those that it was compiled for, in the order of the mesh.
      found: XLA's own bytes of it, if it was found in the cache.
    """
    pickler: Any = saving._JaxPjrtPickler  # type: ignore[attr-defined, unused-ignore]

    class Saving(pickler):  # type: ignore[misc, unused-ignore]
        def persistent_id(self, x: Any) -> Any:
            pid = super().persistent_id(x)
            return ("exec", found) if pid is not None and pid[0] == "exec" and found is not None else pid

    internals: Any = compiled
    unloaded = internals._executable._unloaded_executable
    if unloaded is None or internals._params.const_args:
        return None
    infos, in_tree = jax.tree.flatten(compiled.args_info)
    out = io.BytesIO()
    try:
        Saving(out).dump((unloaded, infos, internals._no_kwargs))
    except (ValueError, NotImplementedError, TypeError, pickle.PicklingError, jax.errors.JaxRuntimeError):
        return None
    return SerialProgram(out.getvalue(), in_tree, compiled.out_tree, tuple(d.id for d in devices))


def load_program(program: SerialProgram, devices: Sequence[JaxDevice]) -> jax.stages.Compiled:
    """A program from its bytes, on the devices that it was compiled for or on others, without compiling.

    Arguments:
      devices: in the order of the mesh.
    """
    moved = dict(zip(program.devices, devices, strict=True))
    unpickler: Any = saving._JaxPjrtUnpickler

    class Loading(unpickler):  # type: ignore[misc, unused-ignore]
        def persistent_load(self, pid: Any) -> Any:
            if pid[0] == "device":
                return moved[pid[1]]
            if pid[0] != "exec":
                return super().persistent_load(pid)
            ids = np.array([[d.id for d in devices]])
            options = compiler.get_compile_options(1, len(devices), device_assignment=ids)
            return self.backend.deserialize_executable(pid[1], self.execution_devices, options)

    unloaded, infos, no_kwargs = Loading(io.BytesIO(program.data), devices[0].client, list(devices)).load()
    args = program.in_tree.unflatten(infos)
    return jax.stages.Compiled(unloaded.load(), [], args, program.out_tree, no_kwargs=no_kwargs)
