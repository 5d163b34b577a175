"""Executes the steps of a physical program on the shards of one device."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax import lax

from sbp.communication.exchange import Tally
from sbp.compat import core
from sbp.compat.untyped import PyTree, optimization_barrier
from sbp.passes.boxing.moves import Move
from sbp.passes.explain.collectives import scope_of_rows
from sbp.passes.physical.exchanges import keys_of
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, writes
from sbp.passes.program.control import CONTROL, Leaving, Region, ports
from sbp.passes.program.graph import Const, Operand
from sbp.passes.program.views import Said, context_of
from sbp.placement import Placement
from sbp.runtime.lower.collectives import FusedSend, apply_bucket, apply_move, dims_in_order
from sbp.runtime.lower.key_counts import ExchangeReport
from sbp.runtime.lower.local_kernels import LocalOp, run_bodies, send_keys
from sbp.signature import B, NdSbp, Partial

Env: TypeAlias = dict[Version, jax.Array]
"""The shards of a device."""
Shards: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Device:
    """Executes steps on one device's shards; each is marked with the user's line and its rows of the plan.

    Arguments:
      coords: its traced positions along the placement's axes.
      reports: collects the counts of ops, if somebody asks; inside a loop nobody can.
      in_order: values whose dims keep their order in memory where they are sent.
      marks: names of steps by their ids, which become names of instructions; a profile wants them.
      sent_results: what came of keys that are sent already: ops that send the same share it.
    """

    physical: Physical
    coords: Sequence[jax.Array]
    reports: list[ExchangeReport] | None = None
    in_order: frozenset[int] = frozenset()
    marks: Mapping[int, str] = field(default_factory=dict)
    sent_results: dict[Hashable, PyTree] = field(default_factory=dict)

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
            with self.mark(step):
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
        env[step.value, step.move.after] = _widened(
            self.move_tensor(x, step), env[step.value, step.move.before]
        )

    def move_tensor(self, x: jax.Array, step: Box) -> jax.Array:
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
        with self.mark(*boxes):
            moved = apply_bucket(sends, placement.shape, placement.axes)
        for b, x in zip(boxes, moved, strict=True):
            env[b.value, b.move.after] = _widened(x, env[b.value, b.move.before])
        return i + len(boxes)

    def mark(self, *steps: Step) -> AbstractContextManager[None]:
        """A context in which traced ops have the user's line and the rows of the plan."""
        source = steps[0].source if isinstance(steps[0], Box) else steps[0].node.source
        marks = "+".join(self.marks[id(s)] for s in steps if id(s) in self.marks)
        rows = scope_of_rows([row for s in steps for row in s.rows])
        return core.source_context(source.info, "/".join(filter(None, (scope_of_rows([marks]), rows))))

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
        with self.mark(first):
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
        with self.mark(*some):
            self.compute(some, env)
        return i + len(some)

    def compute(self, steps: Sequence[Compute], env: Env) -> None:
        """Runs an op on the shards, or some that send together."""
        counts: list[list[Tally]] = [[] for _ in steps]
        ops = [self.local_op(s, self.operands(s, env), c, []) for s, c in zip(steps, counts, strict=True)]
        self.sent_results.update(send_keys([op for op in ops if op.keys not in self.sent_results]))
        made = run_bodies([op.with_keys(self.sent_results) for op in ops])
        for step, results, tallies in zip(steps, made, counts, strict=True):
            env.update(zip(writes(step), results, strict=True))
            if self.reports is not None:
                self.reports.extend((step.node, x) for x in tallies)

    def operands(self, step: Compute, env: Env) -> list[jax.Array]:
        """The shards of an op's operands."""
        given = zip(step.node.inputs, step.strategy.operands, strict=True)
        return [self.read(x, nd, env) for x, nd in given]

    def local_op(
        self, step: Compute, operands: Sequence[Any], counts: list[Tally] | None, said: list[Said]
    ) -> LocalOp:
        """An op with its operands here.

        Arguments:
          counts, said: collect its counts, and the collectives that it runs.
        """
        graph, placement, node = self.physical.graph, self.physical.placement, step.node
        ctx = context_of(
            graph, node, step.strategy.signatures, placement.shape, self.coords, placement.axes, counts, said
        )
        dtypes = [graph.values[v].dtype for v in node.outputs]
        return LocalOp(node, ctx, operands, dtypes, keys_of(self.physical, step))

    def region(self, step: Border, env: Env) -> Region:
        """A loop or a branch with its inputs here."""
        wired = list(zip(ports(step.node), step.inner_signatures, strict=True))

        def body(k: int, entering: Mapping[int, jax.Array], leaving: Leaving) -> list[jax.Array]:
            inner = self.body_env(step, k, entering, env)
            replace(self, reports=None, sent_results={**self.sent_results}).run(step.bodies[k], inner)
            return [self.read(x, nd, inner) for x, nd in leaving]

        outer = {
            i: self.read(step.node.inputs[p.operand], p.outer(nd), env)
            for i, (p, nd) in enumerate(wired)
            if p.operand is not None
        }
        return Region(step.node, tuple(p for p, _ in wired), step.inner_signatures, outer, body)

    def body_env(self, step: Border, k: int, entering: Mapping[int, jax.Array], env: Env) -> Env:
        """The environment of a body.

        Arguments:
          k: which body.
          entering: tensors, by port.
          env: the environment outside.
        """
        wired = list(zip(ports(step.node), step.inner_signatures, strict=True))
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
