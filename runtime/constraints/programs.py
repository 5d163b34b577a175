"""The steps of a plan on whole tensors, placed by constraints or by types: what `constrain` runs."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sbp.compat import core
from sbp.compat.untyped import partition_spec, reshard, with_sharding_constraint
from sbp.layout import at_rest
from sbp.notation.resolve import to_partition_spec
from sbp.passes.physical.program import Border, Box, Compute, Step, writes
from sbp.passes.program.control import Leaving, Region
from sbp.passes.program.graph import Const, Operand
from sbp.runtime.lower.device import Device, Env
from sbp.signature import B, NdSbp, Partial, has_partial

LINEAR = frozenset(
    "add add_any broadcast_in_dim convert_element_type copy div dot_general mul neg reduce_sum reshape slice "
    "squeeze sub transpose".split()
)
"""Ops that JAX has a rule for on sums that wait, or may have, and XLA one too (not so for `pad`)."""
SCATTERS = frozenset(["scatter-add", "sbp_add_rows"])
FACTORS = ("mul", "div", "dot_general")
"""Ops that take a sum that waits beside what is none."""


@dataclass(frozen=True)
class ConstrainedProgram(Device):
    """Executes the steps of a device on whole tensors: a move is a constraint, and an op is the op itself.

    Arguments:
      mesh: whose axes the constraints name.
    """

    mesh: Mesh = field(kw_only=True)

    def results(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        """What the program gives on whole tensors, closed-over ones included."""
        graph, physical = self.physical.graph, self.physical
        given = zip(graph.inputs, physical.inputs, inputs, strict=True)
        env: Env = {(v, nd): self.lay_out(x, nd) for v, nd, x in given}
        self.run(physical.steps, env)
        return tuple(self.read(x, nd, env) for x, nd in zip(graph.outputs, physical.outputs, strict=True))

    def lay_out(self, x: jax.Array, nd: NdSbp) -> jax.Array:
        """A tensor with a signature; as it is, where shards of it are still to be added up."""
        if has_partial(nd) or not x.ndim or core.is_key(x.dtype):
            return x
        named = NamedSharding(self.mesh, to_partition_spec(nd, x.ndim, self.physical.placement))
        return with_sharding_constraint(x, named)

    def read(self, x: Operand, nd: NdSbp, env: Env) -> jax.Array:
        """A version of a value, or a scalar."""
        return cast("jax.Array", np.asarray(x.value, x.dtype)) if isinstance(x, Const) else env[x, nd]

    def move_tensor(self, x: jax.Array, step: Box) -> jax.Array:
        """What is sent, after the move."""
        return self.lay_out(x, step.move.after)

    def bucket(self, steps: Sequence[Step], i: int, env: Env) -> int:
        """Moves of a bucket, each by itself; returns the position behind the first."""
        box = steps[i]
        assert isinstance(box, Box)
        with self.mark(box):
            self.move(box, env)
        return i + 1

    def compute(self, steps: Sequence[Compute], env: Env) -> None:
        """Runs ops on whole tensors."""
        for step in steps:
            self.compute_whole(step, env)

    def compute_whole(self, step: Compute, env: Env) -> None:
        """Runs one op on whole tensors."""
        node, strategy = step.node, step.strategy
        operands = [self.read(x, nd, env) for x, nd in zip(node.inputs, strategy.operands, strict=True)]
        results = core.bind(node.primitive, operands, dict(node.params))
        laid = [self.lay_out(x, nd) for x, nd in zip(results, strategy.results, strict=True)]
        env.update(zip(writes(step), laid, strict=True))


@dataclass(frozen=True)
class ExplicitProgram(ConstrainedProgram):
    """The same on explicit axes: types say how tensors lie.

    JAX has no type for what many ops make of split tensors, so that an op runs with automatic axes inside,
    and its results get their types from the plan. Where it takes or makes a sum that waits, it is JAX's own,
    if that has a rule for it; else the sum is added up first.
    """

    def lay_out(self, x: jax.Array, nd: NdSbp) -> jax.Array:
        """A tensor with the type that a signature is; a sum stays one, and is none by this."""
        if core.is_key(x.dtype):
            return x
        return reshard(x, self.type_of(x.shape, nd, unreduced=_spec(x).unreduced & self._partial(nd)))

    def type_of(self, shape: Sequence[int], nd: NdSbp, **partial: Any) -> NamedSharding:
        """A signature as a type; what does not divide has none, and is whole.

        Arguments:
          partial: `unreduced` axes, or `reduced` ones.
        """
        placement = self.physical.placement
        split = to_partition_spec(at_rest(shape, nd, placement.shape), len(shape), placement)
        given = {name: set(axes) for name, axes in partial.items() if axes}
        return NamedSharding(self.mesh.abstract_mesh, partition_spec(*split, **given))

    def _partial(self, nd: NdSbp) -> set[str]:
        """The axes along which a signature is a sum."""
        return {a for a, s in zip(self.physical.placement.axes, nd, strict=True) if s == Partial("sum")}

    def compute_whole(self, step: Compute, env: Env) -> None:
        """Runs one op on whole tensors."""
        node, strategy = step.node, step.strategy
        operands = [self.read(x, nd, env) for x, nd in zip(node.inputs, strategy.operands, strict=True)]
        run = self.scatter_op if node.op in SCATTERS else self.partial_op
        if node.op in LINEAR | SCATTERS and any(map(self._partial, (*strategy.operands, *strategy.results))):
            with contextlib.suppress(Exception):  # JAX refuses sums with one error or another
                self.keep(step, run(step, operands), env)
                return
        added = [self.add_up(x, nd) for x, nd in zip(operands, strategy.operands, strict=True)]
        self.keep(step, self.automatic(step, added), env)

    def keep(self, step: Compute, results: Sequence[jax.Array], env: Env) -> None:
        """Adds results to what is there."""
        laid = [self.lay_out(x, nd) for x, nd in zip(results, step.strategy.results, strict=True)]
        env.update(zip(writes(step), laid, strict=True))

    def add_up(self, x: jax.Array, nd: NdSbp) -> jax.Array:
        """An operand with its sum added up."""
        return (
            self.lay_out(x, tuple(B if isinstance(s, Partial) else s for s in nd)) if has_partial(nd) else x
        )

    def partial_op(self, step: Compute, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """An op of JAX on sums that wait, or that makes one."""
        node, strategy = step.node, step.strategy
        waits = {a for x in operands for a in _spec(x).unreduced}
        if waits:
            operands = [self.as_partial(x, nd) for x, nd in zip(operands, strategy.operands, strict=True)]
        params, partial = dict(node.params), self._partial(strategy.results[0])
        made = partial.intersection(a for x in operands for a in _axes(_spec(x)))
        if made:
            shape = self.physical.graph.values[node.outputs[0]].shape
            unreduced = made | (partial & waits)
            params["out_sharding"] = self.type_of(shape, strategy.results[0], unreduced=unreduced)
        given = list[Any]()
        for x, nd in zip(operands, strategy.operands, strict=True):
            # What a sum is multiplied by is the same for all of its shards, which its type has to say.
            factor = node.op in FACTORS and waits and not _spec(x).unreduced
            given.append(
                reshard(jax.numpy.asarray(x), self.type_of(np.shape(x), nd, reduced=waits)) if factor else x
            )
        return core.bind(node.primitive, given, params)

    def scatter_op(self, step: Compute, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Rows that are added to a table where they are, and are a sum.

        Only what adds up along an axis may leave automatic axes as a sum along it: JAX takes our word
        for it, and of all else each device's copy would count.
        """
        table, ids, rows = operands
        nd = step.strategy.results[0]
        split = set(_axes(_spec(ids))) & set(_axes(_spec(rows)))
        if not self._partial(nd) <= split:
            raise ValueError
        zeros = self.add_up(core.zeros(table.shape, table.dtype), nd)
        sums = self.automatic(step, [zeros, ids, rows], unreduced=self._partial(nd))
        return [self.as_partial(table, nd) + sums[0]]

    def automatic(
        self, step: Compute, operands: Sequence[jax.Array], unreduced: Collection[str] = ()
    ) -> Sequence[jax.Array]:
        """An op whose operands have the types of a plan, and its results too.

        Arguments:
          unreduced: axes along which the results are sums.
        """
        node, whole = step.node, [isinstance(x, np.ndarray | np.generic) for x in operands]
        given = [x for x, is_scalar in zip(operands, whole, strict=True) if not is_scalar]

        def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            rest = iter(arrays)
            every = [x if w else next(rest) for x, w in zip(operands, whole, strict=True)]
            return tuple(core.bind(node.primitive, every, dict(node.params)))

        made = zip(node.outputs, step.strategy.results, strict=True)
        shapes = ((self.physical.graph.values[v].shape, nd) for v, nd in made)
        outs = tuple(self.type_of(shape, nd, unreduced=unreduced) for shape, nd in shapes)
        return cast("Sequence[jax.Array]", jax.sharding.auto_axes(run, out_sharding=outs)(*given))

    def region(self, step: Border, env: Env) -> Region:
        """A loop or a branch: what is carried as a sum is one from the first trip on.

        A sum that enters and is not carried is added up: jax 0.10 takes it for what each device has.
        """
        region = super().region(step, {(v, nd): self.add_up(x, nd) for (v, nd), x in env.items()})

        def body(k: int, entering: Mapping[int, jax.Array], leaving: Leaving) -> list[jax.Array]:
            found = region.body(k, entering, leaving)
            return [self.as_partial(x, nd) for x, (_, nd) in zip(found, leaving, strict=True)]

        outer, inside = dict(region.outer), zip(region.ports, region.inner_signatures, strict=True)
        for i, (port, nd) in enumerate(inside):
            if port.operand is not None and port.result is not None:
                whole = self.read(step.node.inputs[port.operand], port.outer(nd), env)
                outer[i] = self.as_partial(whole, port.outer(nd))
        return replace(region, outer=outer, body=body)

    def as_partial(self, x: jax.Array, nd: NdSbp) -> jax.Array:
        """A tensor that is a sum where its signature is."""
        axes = self._partial(nd)
        return reshard(x, self.type_of(x.shape, nd, unreduced=axes)) if axes else x


def _spec(x: jax.Array) -> PartitionSpec:
    """Of the type of a tensor."""
    return cast("PartitionSpec", jax.typeof(x).sharding.spec)


def _axes(spec: PartitionSpec) -> Iterator[str]:
    """The axes that split something."""
    for entry in spec.partitions:
        yield from () if entry is None else (entry,) if isinstance(entry, str) else entry
