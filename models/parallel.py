"""From a model's table of signatures to the `in_sbp` of its train step.

A choice of parallelism gives each placement axis a use. A use says how the batch lies along that axis,
and how the weights do: whole, as the model's own table says, or cut wherever a dim divides. The
optimizer's state lies as the weights that it belongs to, or is cut by itself (ZeRO-1). That is all there
is to "data parallel", "tensor parallel", "2-D" and "ZeRO".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax
import optax

import sbp
from sbp import B, S
from sbp.signature import Signature

PyTree: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]


def whole(own: Signature, shape: Shape, devices: int) -> Signature:
    """Every device holds the weight."""
    return B


def as_table(own: Signature, shape: Shape, devices: int) -> Signature:
    """The weight lies as the model's table says."""
    return own


def where_it_divides(own: Signature, shape: Shape, devices: int) -> Signature:
    """The weight is split at its first dim that all devices divide; else every device holds it."""
    return next((S(dim) for dim, size in enumerate(shape) if size % devices == 0), B)


@dataclass(frozen=True, slots=True)
class Use:
    """What one placement axis is used for: how batch, weights and optimizer state lie along it."""

    batch: Signature
    weights: Callable[[Signature, Shape, int], Signature]
    state: Callable[[Signature, Shape, int], Signature]


DATA = Use(S(0), whole, whole)
TENSOR = Use(B, as_table, as_table)
ZERO_1 = Use(S(0), whole, where_it_divides)
ZERO_3 = Use(S(0), where_it_divides, where_it_divides)
SEQUENCE = Use(S(1), whole, whole)
BOTH = Use(S(0), as_table, as_table)

# One use per placement axis, outer to inner; the last one is repeated for further axes.
PARALLEL: dict[str, tuple[Use, ...]] = {
    "data": (DATA,),
    "tensor": (TENSOR,),
    "2d": (DATA, TENSOR),
    "zero1": (ZERO_1,),
    "zero": (ZERO_3,),
    "sequence": (SEQUENCE,),
    "classes": (BOTH,),
    "auto": (),
}


def signatures(
    choice: str,
    placement_shape: Sequence[int],
    table: PyTree,
    params: PyTree,
    optimizer: optax.GradientTransformation,
) -> PyTree:
    """The `in_sbp` of `step(params, opt_state, batch, key)`.

    Arguments:
      choice: a key of `PARALLEL`.
      placement_shape: the sizes of the placement's axes.
      table: the model's own 1-D signatures, a pytree prefix of `params`.
      params: the weights, or their `ShapeDtypeStruct`s.
      optimizer: whose state lies as the weights.

    Raises:
      ValueError: if the choice needs more placement axes than there are.
    """
    uses = PARALLEL[choice]
    if not uses:
        return (sbp.AUTO,) * 4
    axes = len(placement_shape)
    if len(uses) > axes:
        raise ValueError(
            f"--parallel {choice} uses {len(uses)} placement axes, but --placement has {axes}, "
            "that of stages not counted: try cpu:2x4, or cpu:2x2x2 with --stages 2"
        )
    uses += uses[-1:] * (axes - len(uses))
    devices = prod(placement_shape)
    # A signature of the table stands for a whole subtree; N-D signatures are lists, so they come last.
    full = jax.tree.map(lambda own, below: jax.tree.map(lambda _: own, below), table, params)
    weights = jax.tree.map(lambda own, x: [use.weights(own, x.shape, devices) for use in uses], full, params)
    states = jax.tree.map(lambda own, x: [use.state(own, x.shape, devices) for use in uses], full, params)
    whole_tensor = [B] * axes
    state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, signature: signature,
        jax.eval_shape(optimizer.init, params),
        states,
        transform_non_params=lambda _: whole_tensor,
    )
    return weights, state, [use.batch for use in uses], whole_tensor
