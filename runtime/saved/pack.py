"""What was built for one signature of a program as bytes, and back: the arrays and layouts, not the ops.

What runs is in XLA's programs; of the graphs the values stay, whose shapes say how arrays lie, and of the
plan what is shown of it. Devices go by their ids, compiled programs by their names.
"""

import copyreg
import io
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sbp.compat.cache import SerialProgram, load_program
from sbp.compat.core import is_key
from sbp.compat.untyped import JaxDevice
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Physical
from sbp.passes.pipeline.slots import Piece
from sbp.passes.pipeline.stages import Stages
from sbp.passes.program.graph import Graph, Node, Source
from sbp.rules.entry import Rule
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.execute.host_input_check import HostInputCheck
from sbp.runtime.lower.key_counts import KeyCounts
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.pipeline.shared_executables import Executables
from sbp.runtime.processes.addressable import array_of

LOCK = type(threading.RLock())
# Fields that only who plans has a use for, and what stands there instead.
LEFT_OUT: Mapping[type, Mapping[str, Any]] = {
    Physical: {"steps": (), "traffic": {}},
    Piece: {"steps": ()},
    Stages: {"requests": ()},
    Executables: {"cache": None, "by_text": {}, "keys": {}},
    CompiledProgram: {
        "request": None,
        "cache": None,
        "loaded": True,
        "settled_layouts": [],
        "alike": HostInputCheck(),
    },
    CompiledPipeline: {"cache": None, "has_run": False, "alike": HostInputCheck()},
    PlanData: {"replanner": None, "writer": None, "choice": None},
}


@dataclass(frozen=True)
class Programs:
    """The compiled programs of what is packed.

    Arguments:
      serial: each as bytes, by its name.
      names: of each object that runs one, by its `id`, the name and the ids of its devices.
    """

    serial: Mapping[str, SerialProgram]
    names: Mapping[int, tuple[str, tuple[int, ...]]]


def pack(what: object, programs: Programs) -> bytes:
    """Something with its compiled programs as bytes."""
    out = io.BytesIO()
    _Packer(out, programs).dump(what)
    return pickle.dumps((dict(programs.serial), out.getvalue()))


def unpack(data: bytes, devices: Sequence[JaxDevice]) -> Any:
    """What was packed: to be called for what one trusts, and that is whole.

    Arguments:
      devices: all that it knows by their ids.
    """
    serial, rest = pickle.loads(data)
    return _Unpacker(io.BytesIO(rest), serial, {d.id: d for d in devices}).load()


class _Packer(pickle.Pickler):
    def __init__(self, out: io.BytesIO, programs: Programs) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.programs = programs

    def persistent_id(self, x: object) -> Any:
        if isinstance(x, jax.Device):
            return "device", x.id
        name = self.programs.names.get(id(x))
        return None if name is None else ("program", *name)

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, Graph):
            return Graph, (x.values, x.inputs, (), (), x.outputs)
        if isinstance(x, Node | Rule):
            return _nothing, ()
        if isinstance(x, Source):
            return Source, (x.file, x.line, x.scope)
        if isinstance(x, jax.Array):
            return _array, _shards(x)
        if isinstance(x, LOCK):
            return threading.RLock, ()
        if isinstance(x, KeyCounts):  # it counts on, but nobody plans a room again
            return KeyCounts, (x.keys, False)
        for kind, fields in LEFT_OUT.items():
            if isinstance(x, kind):
                return copyreg.__newobj__, (type(x),), {**vars(x), **fields}  # type: ignore[attr-defined]
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, data: io.BytesIO, serial: Mapping[str, SerialProgram], devices: Mapping[int, JaxDevice]
    ) -> None:
        super().__init__(data)
        self.serial, self.devices = serial, devices
        self.known: dict[object, jax.stages.Compiled] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "device":
            return self.devices[pid[1]]
        if pid not in self.known:
            _, name, ids = pid
            self.known[pid] = load_program(self.serial[name], [self.devices[i] for i in ids])
        return self.known[pid]


def _nothing() -> None:
    """What stands for an op."""


def _shards(x: jax.Array) -> tuple[Any, ...]:
    """An array as its shards in this process; of keys, their words."""
    kind = None
    if is_key(x.dtype):
        kind, x = str(jax.random.key_impl(x)), jax.random.key_data(x)
    return x.shape, x.sharding, [(s.device, np.asarray(s.data)) for s in x.addressable_shards], x.dtype, kind


def _array(shape: Any, sharding: Any, shards: Any, dtype: Any, kind: str | None) -> jax.Array:
    """The array of such shards."""
    put: Callable[..., jax.Array] = jax.device_put
    x = array_of(shape, sharding, [put(s, d) for d, s in shards], dtype)
    return x if kind is None else jax.random.wrap_key_data(x, impl=kind)
