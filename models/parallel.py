"""From a model's table of signatures to the `in_sbp` of its train step.

A choice of parallelism gives each placement axis a use. A use says how the batch lies along that axis,
and how the weights do: whole, as the model's own table says, or cut wherever a dim divides. The
optimizer's state lies as the weights that it belongs to, or is cut by itself (ZeRO-1). That is all there
is to "data parallel", "tensor parallel", "2-D" and "ZeRO".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax
import optax

import sbp
from sbp import B, S
from sbp.signature import Signature, Split

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


def beside_the_table(own: Signature, shape: Shape, devices: int) -> Signature:
    """The weight is split at its largest dim that all devices divide and that the table leaves whole."""
    taken = own.dim if isinstance(own, Split) else None
    dims = [dim for dim, size in enumerate(shape) if dim != taken and size % devices == 0]
    return S(max(dims, key=lambda dim: shape[dim])) if dims else B


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
FSDP = Use(S(0), beside_the_table, beside_the_table)
SEQUENCE = Use(S(1), whole, whole)
BOTH = Use(S(0), as_table, as_table)

# One use per placement axis, outer to inner; the last one is repeated for further axes.
PARALLEL: dict[str, tuple[Use, ...]] = {
    "data": (DATA,),
    "tensor": (TENSOR,),
    "2d": (DATA, TENSOR),
    "fsdp": (FSDP, TENSOR),
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
    stacked: PyTree = 0,
) -> PyTree:
    """The `in_sbp` of `step(params, opt_state, batch, key)`.

    Arguments:
      choice: a key of `PARALLEL`.
      placement_shape: the sizes of the placement's axes.
      table: the model's own 1-D signatures, a pytree prefix of `params`.
      params: the weights, or their `ShapeDtypeStruct`s.
      optimizer: whose state lies as the weights.
      stacked: of how many leading dims a weight is a stack of equal ones, a pytree prefix of `params`. The
        table does not count them, and they stay whole: a loop over them takes one weight after the other.

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

    def spread(prefix: PyTree) -> PyTree:
        """What stands for a whole subtree, at each of its leaves."""
        return jax.tree.map(lambda own, below: jax.tree.map(lambda _: own, below), prefix, params)

    def lying(ways: Sequence[Callable[[Signature, Shape, int], Signature]]) -> PyTree:
        """One way per placement axis, at each weight; N-D signatures are lists, so they come last."""

        def of(own: Signature, leading: int, x: Any) -> list[Signature]:
            found = [way(own, x.shape[leading:], devices) for way in ways]
            return [S(s.dim + leading) if isinstance(s, Split) else s for s in found]

        return jax.tree.map(of, spread(table), spread(stacked), params)

    weights, states = lying([use.weights for use in uses]), lying([use.state for use in uses])
    whole_tensor = [B] * axes
    state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, signature: signature,
        jax.eval_shape(optimizer.init, params),
        states,
        transform_non_params=lambda _: whole_tensor,
    )
    return weights, state, [use.batch for use in uses], whole_tensor
