"""The train step of one stage as programs for the planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import sbp
from benchmarks.published.layout import Lying, VectorLying
from benchmarks.published.model import Decoder, Leaf, Stage, stacked
from benchmarks.published.rows import PublishedStep
from sbp import S
from sbp.hardware.catalogue import Hardware
from sbp.passes.face import Plan
from sbp.signature import NdSbp, Signature, Split

PyTree: TypeAlias = Any


@dataclass(frozen=True)
class StageProgram:
    """One stage of a row's model, with micro-batches, sums of gradients and AdamW.

    Arguments:
      row: the sizes and the layout.
      stage: which part of the model.
      lying: how its tensors lie.
      hardware: what is planned for.
      kept: names of the results in a layer that are kept for the backward pass.
    """

    row: PublishedStep
    stage: Stage
    lying: Lying
    hardware: Hardware
    kept: Collection[str]

    @cached_property
    def model(self) -> Decoder:
        """The model, with its weights and activations placed."""
        tables = self._blank.leaves(self.stage)
        leaves = {name: leaf for group in tables.values() for name, leaf in group.items()}

        def placed(name: str, w: jax.Array) -> jax.Array:
            if self.cut:
                # Gathered where it is used, and not before: a loop would else be handed the whole weight.
                w = sbp.annotate(w, self.lying.kept(leaves[name]))
            return sbp.annotate(w.astype(self._blank.computed), self.lying.used(leaves[name]))

        def stream(x: jax.Array) -> jax.Array:
            return sbp.annotate(x, self.lying.activations())

        return Decoder(self.row, self.kept, self.lying.groups, placed, stream)

    @property
    def cut(self) -> bool:
        """Whether weights are gathered anew for each use; else once per step."""
        return self.row.layout.fsdp > 1

    @cached_property
    def _blank(self) -> Decoder:
        return Decoder(self.row)

    def _lying(self, how: str) -> PyTree:
        """A signature for each weight, as the method of that name of `lying` has it."""

        def one(leaf: Leaf, layers: int) -> list[Signature]:
            nd: NdSbp = getattr(self.lying, how)(leaf)
            return [S(s.dim + 1) if layers and isinstance(s, Split) else s for s in nd]

        return stacked(self.row.in_loop, self.stage, self._blank.leaves(self.stage), one)

    # -- arguments

    @property
    def batch(self) -> int:
        """Sequences of a micro-batch on all devices of the stage."""
        return self.row.micro_batch * self.lying.ways.dp * self.lying.ways.fsdp

    def _ends(self) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """What enters a stage and what comes back to it, for a micro-batch, and how both lie."""
        b, s, d = self.batch, self.row.sequence, self.row.width
        tokens = jax.ShapeDtypeStruct((b, s), jnp.int32)
        stream = jax.ShapeDtypeStruct((b, s, d), self.model.computed)
        as_tokens, as_stream = list(self.lying.tokens()), list(self.lying.activations())
        x, x_lies = (tokens, as_tokens) if self.stage.first else (stream, as_stream)
        y, y_lies = (tokens, as_tokens) if self.stage.last else (stream, as_stream)
        return x, y, x_lies, y_lies

    # -- programs

    def passes_plan(self) -> Plan:
        """Of the forward and the backward pass of one micro-batch."""
        x, y, x_lies, y_lies = self._ends()
        weights = self._blank.shapes(self.stage, jnp.float32 if self.cut else self.model.computed)
        return self._plan(self._passes, (self._lying("kept"), x_lies, y_lies), (weights, x, y))

    def update_plan(self, expert: bool) -> Plan | None:
        """Of the end of a step: gradients added up over copies of the weights, AdamW, and new weights sent.

        All weights of a part of the model are one vector here, as frameworks send them in large buckets.

        Arguments:
          expert: whether of the weights of experts, which have fewer copies, or of all others.
        """
        size = self._blank.count(self.stage)[expert]
        if not size:
            return None
        lying = self.lying.vector(expert)
        part = lying.parts, -(-size // (lying.parts * lying.copies)) * lying.copies
        state, grads = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (part, (lying.copies, *part)))
        sent = self._blank.computed
        summed = jnp.float32 if self.row.wide_sums else sent
        update = partial(_update, lying=lying, summed=summed, sent=sent)
        rest = list(lying.at_rest)
        in_sbp = rest, rest, rest, list(lying.gradients)
        return self._plan(update, in_sbp, (state, state, state, grads), donated=(0, 1, 2))

    def _plan(
        self, fn: Callable[..., Any], in_sbp: PyTree, args: PyTree, donated: tuple[int, ...] = ()
    ) -> Plan:
        # Whether it fits was settled when it ran; a plan over the limit would be refused.
        hardware = replace(self.hardware, memory_bytes=math.inf)
        # Without a limit on time a plan does not depend on how busy the machine is.
        options = sbp.Options(hardware=hardware, check=False)
        program = sbp.compile(
            fn, self.lying.placement, in_sbp=in_sbp, donate_argnums=donated, options=options
        )
        plan: Plan = program.plan(*args)
        return plan

    def _passes(self, weights: PyTree, x: jax.Array, y: jax.Array) -> PyTree:
        """What leaves the stage in both directions, and of each gradient one number.

        A sum over micro-batches is made by the product that makes its summands, in place, and its traffic
        hides behind arithmetic; so micro-batches cost nothing but themselves.
        """
        run, last = self.model.run, self.stage.last

        def passed(weights: PyTree, x: jax.Array) -> jax.Array:
            return run(self.stage, weights, x, y if last else None)

        if self.stage.first:
            out, back = jax.vjp(lambda w: passed(w, x), weights)
            (grads,), dx = back(jnp.ones_like(out) if last else y), None
        else:
            out, back = jax.vjp(passed, weights, x)
            grads, dx = back(jnp.ones_like(out) if last else y)
        # No array can be a sum that waits for the end of the step: a number of it can be made of it.
        placed = jax.tree.map(sbp.annotate, grads, self._lying("gradient"))
        return out, dx, sum(map(_first, jax.tree.leaves(placed)))


def _first(x: jax.Array) -> jax.Array:
    """The first number."""
    return jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()).astype(jnp.float32)


def _update(
    w: jax.Array, m: jax.Array, v: jax.Array, grads: jax.Array, lying: VectorLying, summed: Any, sent: Any
) -> tuple[jax.Array, ...]:
    """AdamW (Loshchilov and Hutter, 2019) without the correction of the first steps, in float32.

    Arguments:
      w, m, v: weights, and means of gradients and of their squares, `parts n`.
      grads: of each copy of the weights, `copies parts n`.
      summed, sent: types in which gradients are added up over copies, and new weights sent.
    """
    # As NCCL adds up: `sum` would widen 16 bits first, and no partial sums of them could be sent.
    total = jax.lax.reduce_sum(grads.astype(summed), (0,))
    g = sbp.annotate(total, lying.at_rest).astype(jnp.float32)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    w = w - 3e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w)
    return w, m, v, sbp.annotate(w.astype(sent), lying.used)
