"""Lowers a physical program to one function per device, wrapped in `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, TypeAlias, cast

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from sbp.communication.exchange import Tally
from sbp.compat import core
from sbp.compat.untyped import Leaf, optimization_barrier, partition_spec
from sbp.layout import local_shape
from sbp.notation.resolve import to_partition_spec
from sbp.passes.boxing.moves import Move
from sbp.passes.explain.collectives import scope_of_rows
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, walk_steps, writes
from sbp.passes.physical.sections import Section
from sbp.passes.program.control import CONTROL, Leaving, Region, ports
from sbp.passes.program.graph import Const, Operand, Source
from sbp.passes.program.views import Said, context_of
from sbp.placement import Placement
from sbp.runtime.call.arguments import weaken
from sbp.runtime.lower.collectives import FusedSend, apply_bucket, apply_move, dims_in_order
from sbp.runtime.lower.key_counts import Counting, ExchangeReport
from sbp.runtime.lower.local_kernels import LocalOp, run_bodies
from sbp.signature import B, NdSbp, Partial

Env: TypeAlias = dict[Version, jax.Array]
"""The shards of a device."""
Shards: TypeAlias = tuple[jax.Array, ...]
DeviceMesh: TypeAlias = Mesh | AbstractMesh
"""With devices, or without: to lower a program for devices that are not there."""
NO_MARKS: Mapping[int, str] = MappingProxyType({})


class Jitted(Protocol):
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
            with core.marked(self.source.info):
                return fn(*args)

        run.__name__ = run.__qualname__ = self.name
        return run


def device_function(
    physical: Physical,
    counting: Counting | None = None,
    sections: Sequence[Section] = (),
    marks: Mapping[int, str] = NO_MARKS,
    made: Callable[..., Device] | None = None,
) -> Callable[..., Shards]:
    """The program of one device: local shards in, local shards out, in the order of the graph's inputs.

    Arguments:
      counting: takes the counts of exchanges, which then are one more result.
      sections: run one after the other; all at once if there are none.
      marks: names of steps, as of `Device`.
      made: makes the object that runs the steps, from the arguments of a `Device`; None for a `Device`.
    """
    graph, placement = physical.graph, physical.placement

    def run(*shards: jax.Array) -> Shards:
        reports: list[ExchangeReport] | None = None if counting is None else []
        coords = [lax.axis_index(name) for name in placement.axes]
        device = (made or Device)(physical, coords, reports, kept_in_order(physical), marks)
        env: Env = dict(zip(zip(graph.inputs, physical.inputs, strict=True), shards, strict=True))
        device.begin(list(zip(graph.inputs, physical.inputs, strict=True)), env)
        for section in sections or [Section(physical.steps, ())]:
            device.run(section.steps, env)
            if section.held:
                held = optimization_barrier(tuple(env[v] for v in section.held))
                env.update(zip(section.held, held, strict=True))
        leaving = list(zip(graph.outputs, physical.outputs, strict=True))
        outs = tuple(device.read(x, nd, env) for x, nd in leaving)
        counts = () if counting is None or reports is None else (counting.stacked(reports),)
        return (*outs, *counts, *device.end(leaving, env))

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


@dataclass(frozen=True)
class Device:
    """Executes steps on one device's shards; each is marked with the user's line and its rows of the plan.

    Arguments:
      coords: its traced positions along the placement's axes.
      reports: collects the counts of ops, if somebody asks; inside a loop nobody can.
      in_order: values whose dims keep their order in memory where they are sent.
      marks: names of steps by their ids, which become names of instructions; a profile wants them.
    """

    physical: Physical
    coords: Sequence[jax.Array]
    reports: list[ExchangeReport] | None = None
    in_order: frozenset[int] = frozenset()
    marks: Mapping[int, str] = field(default_factory=dict)

    def run(self, steps: Sequence[Step], env: Env) -> None:
        """Executes `steps`, and adds their versions to `env`."""
        i = 0
        while i < len(steps):
            step = steps[i]
            if isinstance(step, Compute) and step.node.barrier >= 0:
                i = self.barrier(steps, i, env)
                continue
            if isinstance(step, Box) and step.bucket >= 0:
                i = self.bucket(steps, i, env)
                continue
            if isinstance(step, Compute):
                i = self.ops(steps, i, env)
                continue
            with self.marked(step):
                if isinstance(step, Box):
                    self.move(step, env)
                else:
                    self.border(step, env)
            i += 1

    def begin(self, ins: Leaving, env: Env) -> None:
        """Called with the environment before the first step."""

    def end(self, outs: Leaving, env: Env) -> Shards:
        """Results besides those of the program; called with these."""
        return ()

    def border(self, step: Border, env: Env) -> None:
        """A loop or a branch."""
        outs = CONTROL[step.node.op].lower(self.region(step, env))
        env.update(zip(writes(step), outs, strict=True))

    def move(self, step: Box, env: Env) -> None:
        """One boxing move."""
        x = _as_sent(step, env)
        if step.after is not None:
            x, _ = optimization_barrier((x, env[step.after]))
        if step.move.kind == "all_to_all" and step.value in self.in_order:
            x = dims_in_order(x)
        env[step.value, step.move.after] = _widened(self.moved(x, step), env[step.value, step.move.before])

    def moved(self, x: jax.Array, step: Box) -> jax.Array:
        """The sent tensor after the move."""
        placement, shape = self.physical.placement, self.physical.graph.values[step.value].shape
        return apply_move(x, step.move, shape, placement.shape, placement.axes, self.coords, owned=step.owned)

    def bucket(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """All moves of one bucket as one; returns the position after them."""
        values, placement = self.physical.graph.values, self.physical.placement
        boxes: list[Box] = []
        for step in steps[i:]:
            if not isinstance(step, Box) or (boxes and step.bucket != boxes[0].bucket):
                break
            boxes.append(step)
        sends = [FusedSend(_as_sent(b, env), b.move, values[b.value].shape, b.owned) for b in boxes]
        with self.marked(*boxes):
            moved = apply_bucket(sends, placement.shape, placement.axes)
        for b, x in zip(boxes, moved, strict=True):
            env[b.value, b.move.after] = _widened(x, env[b.value, b.move.before])
        return i + len(boxes)

    def marked(self, *steps: Step) -> AbstractContextManager[None]:
        """A context in which traced ops have the user's line and the rows of the plan."""
        source = steps[0].source if isinstance(steps[0], Box) else steps[0].node.source
        marks = "+".join(self.marks[id(s)] for s in steps if id(s) in self.marks)
        rows = scope_of_rows([row for s in steps for row in s.rows])
        return core.marked(source.info, "/".join(filter(None, (scope_of_rows([marks]), rows))))

    def barrier(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """Lowers all ops of one barrier as one; returns the position after them."""
        group = []
        first = steps[i]
        assert isinstance(first, Compute)
        while i < len(steps):
            step = steps[i]
            if not isinstance(step, Compute) or step.node.barrier != first.node.barrier:
                break
            group.append(step)
            i += 1
        reads = [(s.node.inputs[0], s.strategy.operands[0]) for s in group]
        with self.marked(first):
            held = optimization_barrier(tuple(env[x, nd] for x, nd in reads if not isinstance(x, Const)))
        env.update(zip(((s.node.outputs[0], s.strategy.results[0]) for s in group), held, strict=True))
        return i

    def read(self, x: Operand, nd: NdSbp, env: Env) -> jax.Array:
        """A version of a value, or a scalar."""
        return _constant(x, nd, self.physical.placement, self.coords) if isinstance(x, Const) else env[x, nd]

    def ops(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """An op, or all of one bucket; returns the position after them."""
        some: list[Compute] = []
        for step in steps[i:]:
            if not isinstance(step, Compute) or (some and not 0 <= step.bucket == some[0].bucket):
                break
            some.append(step)
        with self.marked(*some):
            self.compute(some, env)
        return i + len(some)

    def compute(self, steps: Sequence[Compute], env: Env) -> None:
        """Runs an op on the shards, or some that send together."""
        counts: list[list[Tally]] = [[] for _ in steps]
        made = run_bodies([self.local_op(s, env, c, []) for s, c in zip(steps, counts, strict=True)])
        for step, results, tallies in zip(steps, made, counts, strict=True):
            env.update(zip(writes(step), results, strict=True))
            if self.reports is not None:
                self.reports.extend((step.node, x) for x in tallies)

    def local_op(self, step: Compute, env: Env, counts: list[Tally] | None, said: list[Said]) -> LocalOp:
        """An op with its operands here.

        Arguments:
          counts, said: collect its counts, and the collectives that it runs.
        """
        graph, placement, node = self.physical.graph, self.physical.placement, step.node
        operands = [self.read(x, nd, env) for x, nd in zip(node.inputs, step.strategy.operands, strict=True)]
        ctx = context_of(
            graph, node, step.strategy.lying, placement.shape, self.coords, placement.axes, counts, said
        )
        return LocalOp(node, ctx, operands, [graph.values[v].dtype for v in node.outputs])

    def region(self, step: Border, env: Env) -> Region:
        """A loop or a branch with its inputs here."""
        wired = list(zip(ports(step.node), step.inside, strict=True))

        def body(k: int, entering: Mapping[int, jax.Array], leaving: Leaving) -> list[jax.Array]:
            inner = self.entered(step, k, entering, env)
            replace(self, reports=None).run(step.bodies[k], inner)
            return [self.read(x, nd, inner) for x, nd in leaving]

        outer = {
            i: self.read(step.node.inputs[p.operand], p.outer(nd), env)
            for i, (p, nd) in enumerate(wired)
            if p.operand is not None
        }
        return Region(step.node, tuple(p for p, _ in wired), step.inside, outer, body)

    def entered(self, step: Border, k: int, entering: Mapping[int, jax.Array], env: Env) -> Env:
        """The environment of a body.

        Arguments:
          k: which body.
          entering: tensors, by port.
          env: the environment outside.
        """
        wired = list(zip(ports(step.node), step.inside, strict=True))
        inputs, inner = set(step.node.bodies[k].inputs), dict(env)
        for i, x in entering.items():
            port, nd = wired[i]
            inner.update({(v, nd): x for v in port.enters if v in inputs})
        return inner


def _as_sent(box: Box, env: Env) -> jax.Array:
    """A shard in the dtype in which it is sent."""
    x = env[box.value, box.move.before]
    return x if box.sent_as is None else lax.convert_element_type(x, box.sent_as)


def _widened(moved: jax.Array, before: jax.Array) -> jax.Array:
    """The result of a move in the dtype that it had before."""
    return moved if moved.dtype == before.dtype else lax.convert_element_type(moved, before.dtype)


def _constant(x: Const, nd: NdSbp, placement: Placement, coords: Sequence[jax.Array]) -> jax.Array:
    """A scalar of the program; as a sum, only the first device along the axis has it."""
    # An array of the host, so that it is a literal of the program.
    value = cast("jax.Array", np.asarray(x.value, x.dtype))
    for axis, s in enumerate(nd):
        if s == Partial("sum"):
            fill = Move("fill", (axis,), nd, nd, B, s)
            value = apply_move(value, fill, (), placement.shape, placement.axes, coords)
    return value


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
    outs = [named(graph.operand(x).shape, nd) for x, nd in zip(graph.outputs, physical.outputs, strict=True)]
    outs += [NamedSharding(mesh, partition_spec(placement.axes))] * counts
    return ins, outs


def lower(
    physical: Physical,
    mesh: DeviceMesh,
    donate: Sequence[int],
    counting: Counting | None = None,
    title: ProgramName | None = None,
    weak: Sequence[bool] = (),
    options: Mapping[str, int] | None = None,
    sections: Sequence[Section] = (),
    marks: Mapping[int, str] = NO_MARKS,
    checks: Callable[..., Device] | None = None,
) -> Jitted:
    """The jitted program over `mesh` (a real or an abstract one): flat arguments in, flat results out.

    Arguments:
      counting: takes the counts of exchanges, which then are one more result.
      title: its name; None for no name of the user's.
      weak: per result, whether it is weakly typed; none is by default.
      options: for XLA, by name.
      sections: run one after the other; all at once if there are none.
      marks: names of steps, as of `Device`.
      checks: makes a device that checks its results, and gives one more result; None for none.
    """
    ins, outs = shardings(physical, mesh, (counting is not None) + (checks is not None))
    on_device, taken = device_function(physical, counting, sections, marks, checks), ins
    if not any(math.prod(physical.graph.values[v].shape) for v in physical.graph.inputs):
        # XLA takes tensors without elements for constants, and refuses a shard_map that is given no other.
        on_device, taken = _without_inputs(on_device, physical), []
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(s.spec for s in taken),
        out_specs=tuple(s.spec for s in outs),
        check_vma=False,
    )
    weaker = {i for i, w in enumerate(weak) if w}

    def run(*args: jax.Array) -> Shards:
        return tuple(weaken(x) if i in weaker else x for i, x in enumerate(mapped(*args[: len(taken)])))

    program = (title or ProgramName()).of(run)
    return jax.jit(
        program,
        donate_argnums=tuple(donate),
        in_shardings=tuple(ins),
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
