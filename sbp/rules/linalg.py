"""Fourier transforms, factorisations and solvers: one problem is whole, a batch of them splits."""

import math
from collections.abc import Callable
from dataclasses import replace

import jax

from sbp.communication.protocol import Context
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule

# The dims that one problem takes at the end of the first operand.
MATRIX = """
cholesky eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd tridiagonal
""".split()
VECTOR = ["lu_pivots_to_permutation"]


def _batched(op: Op, core: int) -> tuple[list[Letters], list[Letters]]:
    """Letters for the leading dims that all operands and results share."""
    batch = tuple(f"b{i}" for i in range(len(op.shapes[0]) - core))
    letters: list[Letters] = [batch + (None,) * (len(s) - len(batch)) for s in (*op.shapes, *op.results)]
    return letters[: len(op.shapes)], letters[len(op.shapes) :]


def _cubic(op: Op) -> float:
    """About n x n operations for every element of the largest operand, divided by its last dim."""
    return float(max(math.prod(s) * (s[-1] if s else 1) for s in op.shapes))


def _in_batches(core: int) -> Callable[[Op], list[Row]]:
    def rows(op: Op) -> list[Row]:
        """Batch dims."""
        return factors(op, *_batched(op, core))

    return rows


rule(*MATRIX, flops=_cubic, note="the matrices are whole")(_in_batches(2))
rule(*VECTOR, note="the pivots of one matrix are whole")(_in_batches(1))


def _fft_flops(op: Op) -> float:
    size: int = math.prod(op.params["fft_lengths"])
    return 5.0 * (max(size, 2) - 1).bit_length() * max(math.prod(s) for s in (*op.shapes, *op.results))


def _fft_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """One batch dim: of several, XLA on CPUs may lay out a gathered result as its own transform refuses."""
    batch = x.shape[: x.ndim - len(ctx.params["fft_lengths"])]
    (y,) = ctx.bind(x.reshape(math.prod(batch), *x.shape[len(batch) :]))
    return [y.reshape(*batch, *y.shape[1:])]


@rule("fft", body=_fft_local, flops=_fft_flops, note="transformed dims are whole")
def fft(op: Op) -> list[Row]:
    """The dims before the transformed ones; additive."""
    operands, results = _batched(op, len(op.params["fft_lengths"]))
    return factors(op, operands, results, additive=(0,))


@rule("triangular_solve", flops=_cubic, note="the matrices are whole")
def triangular_solve(op: Op) -> list[Row]:
    """Batch dims, and the right-hand sides one by one; linear in them.

    Whether a zero is multiplied or left out depends on how many right-hand sides there are.
    """
    (a, b), _ = _batched(op, 2)
    sides = b[:-2] + ((None, "n") if op.params["left_side"] else ("n", None))
    return [replace(r, finite_only=True) for r in factors(op, [a, sides], [sides], linear=(1,))]


@rule("tridiagonal_solve", note="the diagonals are whole")
def tridiagonal_solve(op: Op) -> list[Row]:
    """Batch dims, and the right-hand sides one by one; linear in them."""
    (lower, diagonal, upper, b), _ = _batched(op, 1)
    sides = (*b[:-1], "n")
    return factors(op, [lower, diagonal, upper, sides], [sides], linear=(3,))
