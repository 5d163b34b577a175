"""Lowers a physical program to one function per device, wrapped in `shard_map`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, TypeAlias, cast

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from sbp.compat import core
from sbp.compat.untyped import Leaf, PyTree, optimization_barrier, partition_spec
from sbp.layout import local_shape
from sbp.notation.resolve import to_partition_spec
from sbp.passes.physical.exchanges import ReadAhead
from sbp.passes.physical.program import Physical, Step, walk_steps
from sbp.passes.physical.sections import Section
from sbp.passes.program.graph import Source
from sbp.runtime.call.arguments import weaken
from sbp.runtime.lower.device import Device, Env, Shards
from sbp.runtime.lower.key_counts import ExchangeReport, KeyCounts
from sbp.runtime.lower.read_ahead import received_keys, sent_ahead
from sbp.signature import NdSbp

DeviceMesh: TypeAlias = Mesh | AbstractMesh
"""With devices, or without: to lower a program for devices that are not there."""
NO_MARKS: Mapping[int, str] = MappingProxyType({})


class JittedFunction(Protocol):
    """A jitted function, which JAX leaves untyped: flat arguments in, flat results out."""

    def __call__(self, *args: Leaf) -> Sequence[jax.Array]:
        """Runs it."""

    def trace(self, *args: Leaf) -> jax.stages.Traced:
        """Traces it for such arguments."""

    def lower(self, *args: Leaf) -> jax.stages.Lowered:
        """Lowers it for such arguments."""


@dataclass(frozen=True, slots=True)
class ProgramName:
    """The name of a compiled program, and the line of its ops that belong to no op of the user.

    Arguments:
      name: of the user's function.
      source: where it is defined.
    """

    name: str = "program"
    source: Source = field(default_factory=Source)

    def of(self, fn: Callable[..., Shards]) -> Callable[..., Shards]:
        """The function under this name."""

        def run(*args: jax.Array) -> Shards:
            with core.source_context(self.source.info):
                return fn(*args)

        run.__name__ = run.__qualname__ = self.name
        return run


def device_function(
    physical: Physical,
    counting: KeyCounts | None = None,
    sections: Sequence[Section] = (),
    marks: Mapping[int, str] = NO_MARKS,
    made: Callable[..., Device] | None = None,
    ahead: ReadAhead | None = None,
) -> Callable[..., Shards]:
    """The program of one device: local shards in, local shards out, in the order of the graph's inputs.

    Arguments:
      counting: takes the counts of exchanges, which then are one more result.
      sections: run one after the other; all at once if there are none.
      marks: names of steps, as of `Device`.
      made: makes the object that runs the steps, from the arguments of a `Device`; None for a `Device`.
      ahead: what it does of the next batch: then it takes, and gives, what came of keys (read_ahead.py).
    """
    graph, placement = physical.graph, physical.placement

    def run(*shards: jax.Array) -> Shards:
        reports: list[ExchangeReport] | None = None if counting is None else []
        coords = [lax.axis_index(name) for name in placement.axes]
        device = (made or Device)(physical, coords, reports, kept_in_order(physical), marks)
        env: Env = dict(zip(zip(graph.inputs, physical.inputs, strict=True), shards, strict=False))
        keys: Shards = ()
        if ahead is not None:
            sent, following = cast("tuple[PyTree, Shards]", shards[len(graph.inputs) :])
            device = replace(device, sent_results=received_keys(ahead, sent))
            plain = Device(physical, coords, None, device.in_order, marks)
            keys = (sent_ahead(plain, ahead, env, following),)
        device.begin(list(zip(graph.inputs, physical.inputs, strict=True)), env)
        for section in sections or [Section(physical.steps, ())]:
            device.run(section.steps, env)
            if section.barrier_versions:
                held = optimization_barrier(tuple(env[v] for v in section.barrier_versions))
                env.update(zip(section.barrier_versions, held, strict=True))
        leaving = list(zip(graph.outputs, physical.outputs, strict=True))
        outs = tuple(device.read(x, nd, env) for x, nd in leaving)
        counts = () if counting is None or reports is None else (counting.stack(reports),)
        return (*outs, *counts, *device.end(leaving, env), *keys)

    return run


def kept_in_order(physical: Physical) -> frozenset[int]:
    """Values whose dims must keep their order in memory before an all-to-all sends them.

    XLA:GPU wants the dim that is split outermost there, and gives that layout to everything that is computed
    element by element before: a residual stream through all layers, whose norms then are several kernels
    each. A copy of the one tensor is cheaper (2 % of a step of GPT with 12 layers). The result of a product
    may have any order.
    """
    if physical.placement.platform != "gpu":
        return frozenset()
    values = physical.graph.values
    nodes = (n for n in physical.graph.walk() if n.rule is not None and n.rule.pointwise)
    return frozenset(v for n in nodes for v in n.outputs if not core.is_key(values[v].dtype))


def rows_in(steps: Sequence[Step]) -> tuple[str, ...]:
    """The names of all rows of the plan that some steps send for, in order, bodies included."""
    return tuple(row for s, _ in walk_steps(steps) for row in s.rows)


def shardings(
    physical: Physical, mesh: DeviceMesh, counts: int = 0
) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """The shardings of arguments and results.

    Arguments:
      counts: how many more results there are, of which every device has one row.
    """
    graph, placement = physical.graph, physical.placement

    def named(shape: Sequence[int], nd: NdSbp) -> NamedSharding:
        return NamedSharding(mesh, to_partition_spec(nd, len(shape), placement))

    ins = [named(graph.values[v].shape, nd) for v, nd in zip(graph.inputs, physical.inputs, strict=True)]
    outs = [
        *(named(graph.operand(x).shape, nd) for x, nd in zip(graph.outputs, physical.outputs, strict=True)),
        *([NamedSharding(mesh, partition_spec(placement.axes))] * counts),
    ]
    return ins, outs


def lower(
    physical: Physical,
    mesh: DeviceMesh,
    donate: Sequence[int],
    counting: KeyCounts | None = None,
    title: ProgramName | None = None,
    weak: Sequence[bool] = (),
    options: Mapping[str, int] | None = None,
    sections: Sequence[Section] = (),
    marks: Mapping[int, str] = NO_MARKS,
    checks: Callable[..., Device] | None = None,
    ahead: ReadAhead | None = None,
) -> JittedFunction:
    """The jitted program over `mesh` (a real or an abstract one): flat arguments in, flat results out.

    Arguments:
      counting: takes the counts of exchanges, which then are one more result.
      title: its name; None for no name of the user's.
      weak: per result, whether it is weakly typed; none is by default.
      options: for XLA, by name.
      sections: run one after the other; all at once if there are none.
      marks: names of steps, as of `Device`.
      checks: makes a device that checks its results, and gives one more result; None for none.
      ahead: what it does of the next batch; it then takes two arguments more, and gives one more result.
    """
    more = (counting is not None) + (checks is not None) + (ahead is not None)
    ins, outs = shardings(physical, mesh, more)
    on_device, taken = device_function(physical, counting, sections, marks, checks, ahead), ins
    beside = [] if ahead is None else [outs[-1], [ins[i] for i in ahead.inputs]]
    if not any(math.prod(physical.graph.values[v].shape) for v in physical.graph.inputs):
        # XLA takes tensors without elements for constants, and refuses a shard_map that is given no other.
        on_device, taken = _without_inputs(on_device, physical), []
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(jax.tree.map(lambda s: s.spec, [*taken, *beside])),
        out_specs=tuple(s.spec for s in outs),
        check_vma=False,
    )
    weaker = {i for i, w in enumerate(weak) if w}

    def run(*args: jax.Array) -> Shards:
        found = mapped(*args[: len(taken)], *args[len(ins) :])
        return tuple(weaken(x) if i in weaker else x for i, x in enumerate(found))

    program = (title or ProgramName()).of(run)
    return jax.jit(
        program,
        donate_argnums=tuple(donate),
        in_shardings=(*ins, *beside),
        out_shardings=tuple(outs),
        compiler_options=dict(options) if options else None,
    )


def _without_inputs(on_device: Callable[..., Shards], physical: Physical) -> Callable[[], Shards]:
    """The program of one device whose inputs have no elements: it makes them itself."""
    graph, hierarchy = physical.graph, physical.placement.shape
    inputs = [(graph.values[v], nd) for v, nd in zip(graph.inputs, physical.inputs, strict=True)]

    def run() -> Shards:
        return on_device(*(core.zeros(local_shape(v.shape, nd, hierarchy), v.dtype) for v, nd in inputs))

    return run
