"""Contractions: matrix products and convolutions; the body of these is communication/convolution.py."""

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sbp.communication.convolution import conv_communication, conv_dims, conv_local, conv_windows
from sbp.communication.extents import Extent
from sbp.communication.halo import Window, halos_pay, slide
from sbp.communication.protocol import Context
from sbp.rules.elementwise import sums_pass
from sbp.rules.entry import Matmul, Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule
from sbp.signature import B, P, Split


def _dot_letters(op: Op) -> tuple[list[Letters], list[Letters], dict[str, str]]:
    """Letters of a `dot_general`: batch b*, contracted k*, free m* and n*."""
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    sides: list[list[str]] = []
    for side, shape in enumerate(op.shapes):
        contract, batch = (lc, lb) if side == 0 else (rc, rb)
        free = iter(range(len(shape)))
        names = []
        for d in range(len(shape)):
            if d in batch:
                names.append(f"b{list(batch).index(d)}")
            elif d in contract:
                names.append(f"k{list(contract).index(d)}")
            else:
                names.append(f"{'mn'[side]}{next(free)}")
        sides.append(names)
    out = [f"b{i}" for i in range(len(lb))] + [n for s in sides for n in s if n[0] in "mn"]
    # Truth values are added up by "or".
    kind = "max" if op.result_dtypes[0] == jnp.bool_ else "sum"
    return [tuple(s) for s in sides], [tuple(out)], {f"k{i}": kind for i in range(len(lc))}


def _linear(op: Op) -> tuple[int, ...]:
    """The sides in which a product is linear: integers added up in a wider type wrap too early."""
    out = op.result_dtypes[0]
    return tuple(i for i in (0, 1) if not jnp.issubdtype(out, jnp.integer) or sums_pass(op.dtypes[i], out))


def _dot_local(ctx: Context, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    """Padding of a contracted dim must be zero on BOTH sides: zero times NaN is NaN."""
    (lc, rc), batch = ctx.params["dimension_numbers"]
    contracted = in_their_order(lc, rc)
    lhs, rhs = ctx.mask(lhs, ctx.operands[0], lc, 0), ctx.mask(rhs, ctx.operands[1], rc, 0)
    return ctx.bind(lhs, rhs, dimension_numbers=(contracted, batch))


def in_their_order(lc: Sequence[int], rc: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contracted dims, in the order in which they lie in both operands, if there is one.

    `jnp.einsum` names them by the alphabet. XLA takes that for how they shall lie: it turns both operands
    over, and a weight that is turned over in the forward pass is cast again in the backward pass. XLA:GPU
    makes one kernel of that cast and the weight's update, so that the backward pass waits for the sum of the
    weight's gradient, which then is neither hidden nor combined with others.

    >>> in_their_order((3, 2), (1, 0))
    ((2, 3), (0, 1))
    """
    left, right = zip(*sorted(zip(lc, rc, strict=True)), strict=True) if lc else ((), ())
    return (left, right) if list(right) == sorted(right) else (tuple(lc), tuple(rc))


def _is_exact(op: Op) -> bool:
    """Whether all bits of float32 are asked for: of both sides, or by an algorithm."""
    asked = op.params.get("precision")
    every = asked if isinstance(asked, tuple) else (asked,)
    return lax.Precision.HIGHEST in every or lax.DotAlgorithmPreset.F32_F32_F32 in every


def _dot_matmul(op: Op) -> Matmul:
    contract, batch = op.params["dimension_numbers"]
    k, b = (math.prod(op.shapes[0][d] for d in dims[0]) for dims in (contract, batch))
    taken = [{*contract[i], *batch[i]} for i in (0, 1)]
    m, n = (math.prod(s for d, s in enumerate(op.shapes[i]) if d not in taken[i]) for i in (0, 1))
    return Matmul(b, m, n, k, op.dtypes[:2], _is_exact(op))


@rule("dot_general", body=_dot_local, matmul=_dot_matmul)
def dot_general(op: Op) -> list[Row]:
    """Batch and free dims split; a contracted dim split on both sides leaves a sum; linear in each side."""
    operands, results, reduced = _dot_letters(op)
    return factors(op, operands, results, reduced=reduced, linear=_linear(op))


def _conv_matmul(op: Op) -> Matmul:
    """As implicit GEMM: positions of the output by taps, and taps by output features."""
    _, rs, os = conv_dims(op.params)
    taps: int = math.prod(op.shapes[1][d] for d in rs[1:])
    features = op.results[0][os[1]]
    return Matmul(
        1, math.prod(op.results[0]) // max(1, features), features, taps, op.dtypes[:2], _is_exact(op)
    )


def _spatial_rows(op: Op) -> Iterable[Row]:
    """Input and output split alike; or input and kernel, as in the gradient of a kernel, which leaves a sum.

    A kernel split so must divide: its padding would meet real rows of the input, and zero times NaN is NaN.
    """
    ls, rs, os = conv_dims(op.params)
    for i, window in enumerate(conv_windows(op.params)):
        a, k, o = ls[2 + i], rs[2 + i], os[2 + i]
        sizes = op.shapes[0][a], op.shapes[1][k], op.results[0][o]
        base, taps, out = (Extent(n, (0,), (op.group,)) for n in sizes)
        if min(sizes[0], sizes[2]) > 1 and _slide_pays(base, Extent(sizes[1], (), (op.group,)), out, window):
            # The zeros of a dilation meet a kernel that is infinite, or do not, as XLA has it for the shape.
            yield Row((Split(a), B), (Split(o),), finite_only=window.base_dilation > 1)
        divides = sizes[1] % op.group == 0 and sizes[2] > 0
        if (
            min(sizes[:2]) > 1
            and divides
            and _slide_pays(base, taps, Extent(sizes[2], (), (op.group,)), window)
        ):
            reason = f"dim {a} of operand 0 meets dim {k} of operand 1 here and is split over {{axes}}"
            yield Row((Split(a), Split(k)), (P,), reason=reason)


def _slide_pays(base: Extent, taps: Extent, out: Extent, window: Window) -> bool:
    """Whether a window can slide along a split dim, and its halo is worth it."""
    found = slide(base, taps, out, window)
    return found is not None and halos_pay([found.halo])


@rule(
    "conv_general_dilated",
    body=conv_local,
    matmul=_conv_matmul,
    communication=conv_communication,
    note="spatial dims with an exchange of halos",
)
def conv_general_dilated(op: Op) -> list[Row]:
    """Batch, input features (a sum), output features, whole groups of features, and spatial dims."""
    ls, rs, os = conv_dims(op.params)
    operands: list[list[str | None]] = [[None] * len(op.shapes[0]), [None] * len(op.shapes[1])]
    result: list[str | None] = [None] * len(op.results[0])
    groups, batches = op.params["feature_group_count"], op.params["batch_group_count"]
    if batches == 1:
        operands[0][ls[0]] = result[os[0]] = "n"
    if groups == 1:
        operands[0][ls[1]] = operands[1][rs[1]] = "c"
    if groups == 1 and batches == 1:
        operands[1][rs[0]] = result[os[1]] = "o"
    letters = [tuple(o) for o in operands]
    rows = factors(op, letters, [tuple(result)], reduced={"c": "sum"}, linear=_linear(op))
    if groups > 1 and (op.shapes[0][ls[1]] // op.shapes[1][rs[1]]) % op.group == 0:
        rows.append(Row((Split(int(ls[1])), Split(int(rs[0]))), (Split(int(os[1])),)))
    if batches > 1 and (op.shapes[0][ls[0]] // op.results[0][os[0]]) % op.group == 0:
        rows.append(Row((Split(int(ls[0])), Split(int(rs[0]))), (Split(int(os[1])),)))
    rows.extend(_spatial_rows(op))
    return rows


def _ragged_matmul(op: Op) -> Matmul:
    """Every row of the left side meets the matrix of its group."""
    *rows, k = op.shapes[0]
    return Matmul(1, math.prod(rows), op.results[0][-1], k, op.dtypes[:2], _is_exact(op))


def _ragged_letters(op: Op) -> tuple[Letters, Letters, Letters]:
    """Letters of both sides and the result; the ragged dim and the dim of groups are whole."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    left: list[str | None] = [f"m{d}" for d in range(len(op.shapes[0]))]
    right: list[str | None] = [f"n{d}" for d in range(len(op.shapes[1]))]
    for kind, pairs in (("k", zip(lc, rc, strict=True)), ("b", zip(lb, rb, strict=True))):
        for i, (d, e) in enumerate(pairs):
            left[d] = right[e] = None if d == ragged else f"{kind}{i}"
    left[ragged] = None
    for d in numbers.rhs_group_dimensions:
        right[d] = None
    used = (*rc, *rb, *numbers.rhs_group_dimensions)
    free = [
        *(left[d] for d in range(len(left)) if d not in (*lc, *lb)),
        *(right[d] for d in range(len(right)) if d not in used),
    ]
    by_group: list[str | None] = [None] if ragged in lc else []
    return tuple(left), tuple(right), (*by_group, *(left[d] for d in lb), *free)


def _ragged_local(ctx: Context, lhs: jax.Array, rhs: jax.Array, *sizes: jax.Array) -> list[jax.Array]:
    """Padding of a contracted dim must be zero on both sides."""
    (lc, rc), _ = ctx.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs, rhs = ctx.mask(lhs, ctx.operands[0], lc, 0), ctx.mask(rhs, ctx.operands[1], rc, 0)
    return ctx.bind(lhs, rhs, *sizes)


@rule("ragged_dot_general", body=_ragged_local, matmul=_ragged_matmul, note="ragged dims are whole")
def ragged_dot(op: Op) -> list[Row]:
    """Contracted, batch and free dims that are not ragged; linear in each side."""
    left, right, result = _ragged_letters(op)
    if len(op.shapes[2]) > 1:
        left, right, result = ((None,) * len(names) for names in (left, right, result))
    rest: list[Letters] = [(None,) * len(s) for s in op.shapes[2:]]
    reduced = {name: "sum" for name in left if name is not None and name[0] == "k"}
    return factors(op, [left, right, *rest], [result], reduced=reduced, linear=_linear(op))
